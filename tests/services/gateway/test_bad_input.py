"""Bad input gets a 4xx that names the field and the reason, and disturbs no other request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from motet.services.gateway.edge import http as gateway_http
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import assigned, running_gateway
from tests.support import eventually

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "hello"}


async def post(http: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(url, data=data, headers={"content-type": "application/json"} | headers) as answer:
        return answer.status, (await answer.json())["error"]


BAD_CHAT_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", "many"),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 1e30),
    ("max_tokens", 10**12),
    ("max_tokens", 4096),
    ("max_completion_tokens", 257),
    ("temperature", -0.1),
    ("temperature", 3),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("min_p", 2),
    ("n", 0),
    ("n", 100_000),
    ("presence_penalty", 9),
    ("frequency_penalty", -9),
    ("repetition_penalty", 0),
    ("repetition_penalty", 5e-324),
    ("seed", 2**70),
    ("seed", "x"),
    ("min_tokens", 300),
    ("logit_bias", {"5": 1000}),
    ("logit_bias", {"five": 1}),
    ("logit_bias", {"99999": 1}),
    ("logit_bias", {"²": 1}),
    ("stop", ""),
    ("stop", ["a"] * 17),
    ("stop", ["x" * 2000]),
    ("stop_token_ids", [-1]),
    ("top_logprobs", 5),
    ("top_logprobs", 21),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("messages", []),
    ("messages", "hello"),
    ("model", 7),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "function", "function": {"name": "two words"}}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),  # the template does not read them
    ("tool_choice", "required"),
    ("tool_choice", "perhaps"),
    ("response_format", {"type": "json"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "text", "json_schema": {"name": "x", "schema": {}}}),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "json": {}}),
    ("structured_outputs", {"json": "no JSON"}),
    ("regex", "x" * 70_000),
    ("json_schema", "[1]"),
    ("json_schema", "{"),
    ("functions", [{}]),
    ("audio", {"voice": "x"}),
    ("modalities", ["audio"]),
    ("chat_template", "{{ 1 }}"),
    ("guided_json", {"type": "object"}),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
]
BAD_MESSAGES: list[tuple[Any, str]] = [
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
    ({"messages": [7]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ({"messages": None}, "messages"),
]
BAD_COMPLETION_FIELDS: list[tuple[str, Any]] = [
    ("prompt", []),
    ("prompt", ""),
    ("prompt", 7),
    ("prompt", [["a"]]),
    ("prompt", ["a", 1]),
    ("prompt", [-1]),
    ("prompt", [512]),
    ("prompt", [[1], []]),
    ("prompt", [True]),
    ("prompt", ["a"] * 500),
    ("suffix", "x"),
    ("best_of", 3),
    ("logprobs", 21),
    ("logprobs", True),
]
NO_JSON = [b"", b"{", b"[]", b"null", b'{"messages": "\xff"}', b'{"model": "\\ud800"}', b'{"x":' + b"[" * 100_000, b"\x00"]
BAD_OBJECTIVES = [
    ("x-slo-class", "royal"),
    ("x-slo-ttft-ms", "soon"),
    ("x-slo-ttft-ms", "-1"),
    ("x-slo-tpot-ms", "nan"),
    ("x-slo-tpot-ms", "1e99"),
    ("x-slo-e2e-ms", "0"),
]


async def test_every_bad_chat_field_is_named(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    for field, value in BAD_CHAT_FIELDS:
        status, error = await post(http, f"{mesh.url}/v1/chat/completions", CHAT | {field: value})
        assert (status, error["type"]) == (400, "invalid_request_error"), (field, value, error)
        assert error["param"].split("[")[0].split(".")[0] == field, (field, value, error)
        assert error["message"]
    assert not mesh.first.assigned


async def test_every_bad_message_is_named(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    for body, param in BAD_MESSAGES:
        status, error = await post(http, f"{mesh.url}/v1/chat/completions", CHAT | body)
        assert (status, error["param"]) == (400, param), (body, error)


async def test_every_bad_completion_field_is_named(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    for field, value in BAD_COMPLETION_FIELDS:
        status, error = await post(http, f"{mesh.url}/v1/completions", TEXT | {field: value})
        assert (status, error["param"]) == (400, field), (field, value, error)
    status, error = await post(http, f"{mesh.url}/v1/completions", TEXT | {"echo": True, "logprobs": 1, "stream": True})
    assert (status, error["param"]) == (400, "echo")


def nested(depth: int) -> str:
    """The text of an array of `depth` levels."""
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [65, 300, 900, 3000, 200_000])
async def test_values_that_are_nested_too_deeply_are_refused_by_name(
    mesh: Mesh, http: aiohttp.ClientSession, depth: int
) -> None:
    called = (
        '{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": %s}}]}'
    )
    tool = '[{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]'
    deep, user = nested(depth), '{"role": "user", "content": "x"}'
    bodies = {
        "messages[1].tool_calls": f'"messages": [{user}, {called % json.dumps(deep)}]',
        "messages[1].tool_calls ": f'"messages": [{user}, {called % deep}]',
        "messages[0].content": f'"messages": [{{"role": "user", "content": {deep}}}]',
        "messages[0].note": f'"messages": [{{"role": "user", "content": "x", "note": {deep}}}]',
        "tools[0].function.parameters": f'"messages": [{user}], "tools": {tool % deep}',
        "chat_template_kwargs": f'"messages": [{user}], "chat_template_kwargs": {{"a": {deep}}}',
        "documents": f'"messages": [{user}], "documents": [{{"a": {deep}}}]',
    }
    for wanted, inner in bodies.items():
        for body in (f"{{{inner}}}", f'{{{inner}, "stream": true}}'):
            status, error = await post(http, f"{mesh.url}/v1/chat/completions", body.encode())
            assert status == 400 and "nested deeper than 64" in error["message"], (wanted, error)
            field = wanted.strip()
            assert error["param"] in (field, field.split("[")[0]), (wanted, error)
    status, error = await post(http, f"{mesh.url}/tokenize", f"{{{bodies['messages[0].note']}}}".encode())
    assert status == 400 and error["param"] in ("messages[0].note", "messages")
    mesh.say("hi")
    async with http.post(f"{mesh.url}/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 200  # nobody else notices


async def test_what_is_no_json_object_is_a_400(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    for body in NO_JSON:
        for path in ("/v1/chat/completions", "/v1/completions"):
            status, error = await post(http, mesh.url + path, body)
            assert (status, error["type"]) == (400, "invalid_request_error"), (path, body[:40], error)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/adapters", "/tokenize"):
        status, error = await post(http, mesh.url + path, b"{")
        assert (status, error["type"]) == (400, "invalid_request_error"), (path, error)


async def test_an_unknown_model_is_a_404_in_both_spellings(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    for name in ("nobody", "demo:nobody", "other:upper"):
        status, error = await post(http, f"{mesh.url}/v1/chat/completions", CHAT | {"model": name})
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_a_prompt_longer_than_the_context_names_both_numbers(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    status, error = await post(http, f"{mesh.url}/v1/completions", TEXT | {"prompt": [5] * 300})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "256" in error["message"]
    assert "300" in error["message"]
    status, error = await post(http, f"{mesh.url}/v1/completions", TEXT | {"prompt": [5] * 250, "max_tokens": 7})
    assert (status, error["param"]) == (400, "max_tokens")
    assert "250" in error["message"]


async def test_what_exceeds_the_context_is_said_in_openais_words(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    user = [{"role": "user", "content": "a b " * 300}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", TEXT | {"prompt": [5] * 300}),
        ("/v1/completions", TEXT | {"prompt": "a b " * 300}),
        ("/v1/completions", TEXT | {"prompt": "a b " * 100_000}),
        ("/v1/completions", TEXT | {"prompt": [5] * 250, "max_tokens": 7}),
        ("/v1/chat/completions", CHAT | {"messages": user}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 256}),
    ]
    for path, body in asked:
        for stream in (False, True):
            status, error = await post(http, mesh.url + path, body | {"stream": stream})
            assert (status, error["code"]) == (400, "context_length_exceeded"), error
            assert error["message"].startswith("This model's maximum context length is 256 tokens. However, you"), error
    assert error["message"].endswith("completion). Please reduce the length of the messages or max_tokens.")


async def test_a_bad_objective_names_its_header(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    for name, value in BAD_OBJECTIVES:
        status, error = await post(http, f"{mesh.url}/v1/completions", TEXT, **{name: value})
        assert status == 400, (name, value, error)
        assert error["param"] == name


async def test_a_bad_query_parameter_is_named(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    for path, name in (("/v1/status?plan=maybe", "plan"), ("/v1/status?plan=", "plan"), ("/v1/audit?limit=0", "limit")):
        async with http.get(f"{mesh.url}{path}") as answer:
            error = (await answer.json())["error"]
        assert answer.status == 400 and name in f"{error['param']} {error['message']}", path


async def test_an_oversized_body_is_refused_before_it_is_read(mesh: Mesh) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 99999999\r\n\r\n{"
    )
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert b" 413 " in head
    assert b"connection: close" in head.lower()
    writer.close()


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/completions", "application/json"), ("/v1/adapters", "multipart/form-data; boundary=x")]
)
async def test_a_client_that_sends_all_of_an_oversized_body_before_it_reads_sees_the_answer(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, path: str, kind: str
) -> None:
    config = mesh.gateway.config
    small = msgspec.structs.replace(config.requests, max_upload_bytes=4 << 20)
    monkeypatch.setattr(mesh.gateway, "config", msgspec.structs.replace(config, requests=small))
    body_bytes = 40 << 20

    def talk() -> bytes:
        with socket.create_connection(("127.0.0.1", mesh.gateway.port), timeout=30) as client:
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {body_bytes}\r\n\r\n"
            client.sendall(head.encode())
            client.sendall(b" " * body_bytes)
            answer = b""
            while data := client.recv(65_536):
                answer += data
            return answer

    answer = await asyncio.to_thread(talk)
    assert b" 413 " in answer and b"connection: close" in answer.lower() and b'"request_too_large"' in answer


async def test_what_is_read_of_a_refused_body_is_bounded_in_seconds_and_bytes(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_http, "DISCARD_S", 0.2)
    for sent_bytes in (1, 12 << 20):
        monkeypatch.setattr(gateway_http, "DISCARD_BYTES", 8 << 20)
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.gateway.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 99999999999\r\n\r\n"
        )
        with contextlib.suppress(ConnectionError):  # reset while it sends, or closed while it waits
            writer.write(b" " * sent_bytes)
            await asyncio.wait_for(writer.drain(), 5)
            await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def test_an_oversized_body_of_unknown_length_is_refused_on_the_way(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while sent < 100 << 20:
            sent += 1 << 16
            yield b" " * (1 << 16)

    status = 0
    try:
        headers = {"content-type": "application/json"}
        async with http.post(f"{mesh.url}/v1/completions", data=endless(), headers=headers) as answer:
            status = answer.status
    except aiohttp.ClientConnectionError:
        pass  # the connection was closed while we were still sending
    assert status in (0, 413)
    assert sent < 50 << 20


async def test_unknown_paths_and_methods_answer_in_the_same_shape(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{mesh.url}/v1/nothing") as answer:
        assert answer.status == 404
        assert "message" in (await answer.json())["error"]
    async with http.get(f"{mesh.url}/v1/chat/completions") as answer:
        assert answer.status == 405
        assert "message" in (await answer.json())["error"]


async def test_errors_are_the_classes_that_openai_clients_know(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="demo", prompt="x", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="nobody", prompt="x", stream=True)
    assert missing.value.code == "model_not_found"


async def test_no_bad_request_reaches_a_worker_or_disturbs_a_good_one(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    good = asyncio.ensure_future(http.post(f"{mesh.url}/v1/completions", json=TEXT))
    request = await assigned(mesh.first)
    bad = [CHAT | {"temperature": -1}, TEXT, {"x": 1}, CHAT | {"model": "nobody"}, CHAT | {"messages": [{}]}]
    for body in bad:
        assert (await post(http, f"{mesh.url}/v1/chat/completions", body))[0] in (400, 404)
    await mesh.first.emit(request, 0, mesh.gateway.prompts.tokenizer.encode("fine").ids, "length")
    answer = await (await good).json()
    assert answer["choices"][0]["text"] == "fine"
    assert len(mesh.first.assigned) == 1


async def test_with_a_key_file_only_its_keys_are_let_in_each_as_its_tenant(
    mesh: Mesh, http: aiohttp.ClientSession, nats_url: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# people\nsecret-a acme\n\nsecret-b  bolt\n")
    mesh.say("x")
    async with running_gateway(nats_url, tmp_path, instance_id="g2", api_keys_file=str(keys)) as gateway:
        url = f"http://127.0.0.1:{gateway.port}"
        await eventually(lambda: not gateway.not_ready())
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret-a"}):
            for path in ("/v1/completions", "/v1/load_lora_adapter"):
                status, error = await post(http, url + path, TEXT, **headers)
                assert (status, error["code"]) == (401, "invalid_api_key")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret-b", max_retries=0) as client:
            await client.completions.create(model="demo", prompt="x")
        with pytest.raises(openai.AuthenticationError):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="nope", max_retries=0) as client:
                await client.models.list()
        async with http.get(f"{url}/health") as answer:
            assert answer.status == 200
    assert mesh.first.assigned[0].tenant == "bolt"
