"""What the extra fields of vLLM, SGLang and LoRAX do, over real HTTP."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from motet.shared.wire.request import unpack_tokens
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import assigned, put_adapter
from tests.support import eventually

TEXT = "hello world"


async def ask(http: aiohttp.ClientSession, mesh: Mesh, path: str = "completions", **body: Any) -> tuple[int, dict[str, Any]]:
    base = {"messages": [{"role": "user", "content": "hello"}]} if path.startswith("chat") else {"prompt": "hello"}
    async with http.post(f"{mesh.url}/v1/{path}", json=base | body) as answer:
        return answer.status, await answer.json()


async def test_lora_path_and_adapter_id_name_the_adapter(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say(TEXT)
    await put_adapter(mesh.bus, "lower")
    await eventually(lambda: mesh.gateway.adapters.resolve("lower"))
    for field in ("lora_path", "adapter_id"):
        for model in ({}, {"model": "demo"}, {"model": "upper"}):
            status, body = await ask(http, mesh, **model, **{field: "upper"})
            assert (status, body["model"]) == (200, "upper")
            assert mesh.first.assigned[-1].adapter is not None
            assert mesh.first.assigned[-1].adapter.name == "upper"
        status, body = await ask(http, mesh, **{field: "nobody"})
        assert (status, body["error"]["param"]) == (404, field)
        status, body = await ask(http, mesh, model="lower", **{field: "upper"})
        assert (status, body["error"]["param"]) == (400, field)


async def test_a_prompt_is_truncated_on_the_side_that_is_asked_for(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say(TEXT)
    tokens = list(range(5, 105))
    for more, kept in (
        ({"truncate_prompt_tokens": 10}, tokens[-10:]),
        ({"truncate_prompt_tokens": 10, "truncation_side": "right"}, tokens[:10]),
        ({"truncate_prompt_tokens": 1000}, tokens),
    ):
        assert (await ask(http, mesh, prompt=tokens, **more))[0] == 200
        assert unpack_tokens(mesh.first.assigned[-1].prompt) == kept
    long = [7] * 5 + [5] * 400
    assert (await ask(http, mesh, prompt=long, max_tokens=6, truncate_prompt_tokens=-1))[0] == 200
    assert unpack_tokens(mesh.first.assigned[-1].prompt) == [5] * 250
    assert (await ask(http, mesh, prompt="word " * 5000, truncate_prompt_tokens=9))[0] == 200
    assert len(unpack_tokens(mesh.first.assigned[-1].prompt)) == 9
    assert (await ask(http, mesh, "chat/completions", truncate_prompt_tokens=3))[0] == 200
    assert len(unpack_tokens(mesh.first.assigned[-1].prompt)) == 3


async def test_token_ids_come_with_the_answer_when_asked_for(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say(TEXT)
    spoken = mesh.gateway.prompts.tokenizer.encode(TEXT).ids
    for path in ("completions", "chat/completions"):
        _, body = await ask(http, mesh, path, return_token_ids=True)
        prompt = unpack_tokens(mesh.first.assigned[-1].prompt)
        [choice] = body["choices"]
        assert choice["token_ids"] == spoken
        assert (choice if path == "completions" else body)["prompt_token_ids"] == prompt
        async with http.post(
            f"{mesh.url}/v1/{path}",
            json={"prompt": "hello"} | {"stream": True, "return_token_ids": True}
            if path == "completions"
            else {"messages": [{"role": "user", "content": "hello"}], "stream": True, "return_token_ids": True},
        ) as answer:
            lines = (await answer.text()).split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        told = [chunk["choices"][0].get("token_ids", []) for chunk in chunks]
        assert [token for tokens in told for token in tokens] == spoken
        first = chunks[0]["choices"][0] if path == "completions" else chunks[0]
        assert first["prompt_token_ids"] == prompt
        _, body = await ask(http, mesh, path)
        assert "token_ids" not in json.dumps(body)


async def test_a_choice_that_ends_at_a_stop_token_tells_that_token_too(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    asking = http.post(
        f"{mesh.url}/v1/completions", json={"prompt": "x", "stream": True, "return_token_ids": True, "stop_token_ids": [9]}
    )
    import asyncio

    answer_task = asyncio.ensure_future(asking)  # type: ignore[arg-type]
    request = await assigned(mesh.first)
    await mesh.first.emit(request, 0, [40])
    await mesh.first.emit(request, 1, [41, 9], "stop", stop_token=9)
    async with await answer_task as answer:
        lines = [line.removeprefix("data: ") for line in (await answer.text()).split("\n\n") if line and "[DONE]" not in line]
    assert [t for line in lines for t in json.loads(line)["choices"][0].get("token_ids", [])] == [40, 41, 9]


async def test_aliases_of_sglang_and_lorax_do_what_their_names_say(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say(TEXT)
    assert (await ask(http, mesh, ignore_eos_token=True))[0] == 200
    assert mesh.first.assigned[-1].sampling.ignore_eos
    _, body = await ask(http, mesh, stop="wor", no_stop_trim=True)
    assert body["choices"][0]["text"] == "hello wor"


async def test_fields_for_the_chat_template_are_refused_where_it_does_not_read_them(
    mesh: Mesh, http: aiohttp.ClientSession, monkeypatch: Any
) -> None:
    mesh.say(TEXT)
    for field, value in (("reasoning_effort", "high"), ("documents", [{"title": "a", "text": "b"}])):
        status, body = await ask(http, mesh, "chat/completions", **{field: value})
        assert (status, body["error"]["param"]) == (400, field)
        assert "template" in body["error"]["message"]
    assert (await ask(http, mesh, "chat/completions", reasoning_effort="none", documents=[]))[0] == 200
    given: list[dict[str, Any]] = []
    template = mesh.gateway.prompts.templates.chosen()
    monkeypatch.setattr(template, "reads", frozenset({"documents", "reasoning_effort"}))
    render = template.render

    def seen(messages: Any, **more: Any) -> str:
        given.append(more["variables"])
        return render(messages, **more)

    monkeypatch.setattr(template, "render", seen)
    assert (await ask(http, mesh, "chat/completions", reasoning_effort="low", documents=[{"text": "b"}]))[0] == 200
    assert given == [{"documents": [{"text": "b"}], "reasoning_effort": "low", "enable_thinking": True}]


async def test_the_request_id_of_the_body_or_the_header_names_the_answer(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.say(TEXT)
    for field in ("request_id", "rid"):
        assert (await ask(http, mesh, **{field: "mine"}))[1]["id"] == "cmpl-mine"
    url = f"{mesh.url}/v1/completions"
    async with http.post(url, json={"prompt": "x", "request_id": "mine"}, headers={"x-request-id": "header-1"}) as answer:
        assert answer.headers["x-request-id"] == "header-1"
        assert (await answer.json())["id"] == "cmpl-header-1"
    assert len({request.request_id for request in mesh.first.assigned}) == 3, "the mesh has ids of its own"


async def test_the_header_the_answer_and_the_logs_agree_on_a_request_s_id(
    mesh: Mesh, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    mesh.say(TEXT)
    caplog.set_level("INFO", logger="motet")
    url = f"{mesh.url}/v1/completions"
    async with http.post(url, json={"prompt": "x"}) as answer:
        assert (await answer.json())["id"] == f"cmpl-{answer.headers['x-request-id']}"
        assert mesh.first.assigned[-1].request_id == f"cmpl-{answer.headers['x-request-id']}-0"
    async with http.post(url, json={"prompt": "x"}, headers={"x-request-id": "mine"}) as answer:
        assert (await answer.json())["id"] == "cmpl-mine"
    [named] = [record for record in caplog.records if record.message == "named"]
    assert named.client_id == "mine" and mesh.first.assigned[-1].request_id == f"{named.request_id}-0"
