"""Promise: /v1/images/generations answers as OpenAI does, each picture a request of its own with its seed and its adapters."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import openai
import pytest

from motet.shared.bus import Bus
from motet.shared.clip_tokenizer import PART_TOKENS
from motet.shared.errors import BadRequest, WorkerLost
from motet.shared.model import SLO_MAX_MS
from motet.shared.wire.request import unpack_tokens
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, assigned, cancelled
from tests.services.gateway.support_pictures import NATIVE_PX, drawing_mesh, image_of, paint
from tests.support import eventually

Client = openai.AsyncOpenAI
PROMPT = "a red circle on sky"


@pytest.fixture
async def mesh(connect: Connect, bus: Bus, nats_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    async with drawing_mesh(connect, bus, nats_url, tmp_path) as mesh:
        yield mesh


async def ask(http: aiohttp.ClientSession, mesh: Mesh, **body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(f"{mesh.url}/v1/images/generations", json={"prompt": PROMPT} | body) as answer:
        return answer.status, await answer.json()


async def test_openais_client_gets_a_picture_of_the_bases_own_size(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(
        client.images.generate(model="demo", prompt=PROMPT, n=1, size="auto", quality="auto", user="me", extra_body={"seed": 7})
    )
    request = await assigned(mesh.first)
    asked = image_of(request)
    assert (asked.width, asked.height, asked.steps, asked.guidance) == (NATIVE_PX, NATIVE_PX, 30, 7.5)
    assert (asked.sampler, asked.kind, asked.format, asked.index) == ("euler", "text", "png", 0)
    assert (request.needs, request.sampling.max_tokens, request.images) == ({"draws": "model"}, 32, [])
    await paint(mesh.first, request)
    told = await asking
    assert told.data is not None and told.usage is not None
    assert base64.b64decode(told.data[0].b64_json or "") == b"picture 7"
    assert (told.output_format, told.size, told.background) == ("png", f"{NATIVE_PX}x{NATIVE_PX}", "opaque")
    assert (told.usage.input_tokens, told.usage.output_tokens, told.usage.total_tokens) == (5, 30, 35)


async def test_prompts_are_whole_parts_and_both_have_as_many(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    asking = asyncio.ensure_future(ask(http, mesh, prompt="circle " * 76, negative_prompt="blue"))
    request = await assigned(mesh.first)
    prompt, negative = unpack_tokens(request.prompt), unpack_tokens(image_of(request).negative)
    assert len(prompt) == len(negative) == 2 * PART_TOKENS
    tokenizer = mesh.gateway.prompts.tokenizer
    start, end = (tokenizer.token_to_id(token) for token in ("<|startoftext|>", "<|endoftext|>"))
    assert prompt[0] == prompt[PART_TOKENS] == start and prompt[PART_TOKENS - 1] == end
    assert negative[PART_TOKENS:] == [start] + [end] * (PART_TOKENS - 1)
    assert (image_of(request).prompt_2, image_of(request).negative_2) == (b"", b"")
    await paint(mesh.first, request)
    _, told = await asking
    assert told["usage"]["input_tokens_details"] == {"text_tokens": 77, "image_tokens": 0}


async def test_several_pictures_are_several_requests_with_consecutive_seeds(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(client.images.generate(prompt=PROMPT, n=3, size="64x32", extra_body={"seed": 41}))
    await assigned(mesh.first, 3)
    assert sorted((r.sampling.seed, image_of(r).index) for r in mesh.first.assigned) == [(41, 0), (42, 1), (43, 2)]
    for request in reversed(mesh.first.assigned):
        await paint(mesh.first, request)
    told = await asking
    assert [base64.b64decode(one.b64_json or "") for one in told.data or []] == [b"picture 41", b"picture 42", b"picture 43"]
    assert [one.seed for one in told.data or []] == [41, 42, 43]  # type: ignore[attr-defined]
    assert told.usage is not None and told.usage.output_tokens == 3 * 30


async def test_without_a_seed_one_is_drawn_and_told(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    seen = set()
    for count in (1, 2):
        asking = asyncio.ensure_future(ask(http, mesh))
        request = await assigned(mesh.first, count)
        await paint(mesh.first, request)
        _, told = await asking
        assert told["data"][0]["seed"] == request.sampling.seed
        seen.add(request.sampling.seed)
    assert len(seen) == 2


async def test_parameters_reach_the_worker(mesh: Mesh, client: Client) -> None:
    more = {
        "num_inference_steps": 4,
        "guidance_scale": 2.5,
        "sampler": "dpmpp_2m",
        "adapters": [{"name": "frame", "weight": -0.5}, {"name": "demo:sepia"}],
    }
    asking = asyncio.ensure_future(
        client.images.generate(prompt=PROMPT, output_format="webp", output_compression=60, extra_body=more)
    )
    request = await assigned(mesh.first)
    asked = image_of(request)
    assert (asked.steps, asked.guidance, asked.sampler, asked.format, asked.quality) == (4, 2.5, "dpmpp_2m", "webp", 60)
    assert request.adapter is None
    assert [(one.ref.name, one.weight) for one in request.adapters] == [("frame", -0.5), ("sepia", 1.0)]
    await paint(mesh.first, request)
    assert (await asking).output_format == "webp"


async def test_an_adapter_named_by_model_is_one_of_weight_one(mesh: Mesh, client: Client) -> None:
    for number, (more, single, several) in enumerate(
        (
            ({}, "sepia", []),
            ({"adapters": [{"name": "frame", "weight": 0.8}]}, None, [("sepia", 1.0), ("frame", 0.8)]),
            ({"adapters": [{"name": "frame", "weight": 0}]}, "sepia", []),
        ),
        1,
    ):
        asking = asyncio.ensure_future(client.images.with_raw_response.generate(model="sepia", prompt=PROMPT, extra_body=more))
        request = await assigned(mesh.first, number)
        assert (request.adapter.name if request.adapter else None) == single
        assert [(one.ref.name, one.weight) for one in request.adapters] == several
        await paint(mesh.first, request)
        made = (await asking).headers["x-motet-adapter"]
        assert made == "sepia@1:digest-of-sepia" + (",frame@1:digest-of-frame*0.8" if several else "")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": None}, "prompt", ""),
        ({"prompt": ""}, "prompt", ""),
        ({"prompt": "circle " * 226}, "prompt", "226 tokens, at most 225"),
        ({"negative_prompt": "circle " * 226}, "negative_prompt", "226 tokens"),
        ({"prompt": "a <lora:sepia:0.8>"}, "prompt", "adapters"),
        ({"negative_prompt": "x", "guidance_scale": 1}, "negative_prompt", "guidance_scale"),
        ({"n": 11}, "n", ""),
        ({"size": "30x32"}, "size", "nearest size is 32x32"),
        ({"size": "2048x2048"}, "size", "nearest size is 1024x1024"),
        ({"size": "wide"}, "size", "WIDTHxHEIGHT"),
        ({"num_inference_steps": 101}, "num_inference_steps", "at most 100"),
        ({"num_inference_steps": 1_000_000}, "num_inference_steps", ""),
        ({"guidance_scale": 51}, "guidance_scale", ""),
        ({"seed": -1}, "seed", ""),
        ({"sampler": "plms"}, "sampler", ""),
        ({"output_format": "gif"}, "output_format", ""),
        ({"output_compression": 50}, "output_compression", "jpeg or webp"),
        ({"partial_images": 1}, "partial_images", "stream"),
        ({"stream": True, "partial_images": 4}, "partial_images", ""),
        ({"stream": True, "response_format": "url"}, "response_format", "b64_json"),
        ({"adapters": [{"name": "sepia", "weight": 4.5}]}, "adapters[0].weight", ""),
        ({"adapters": [{"name": "sepia"}, {"name": "demo:sepia"}]}, "adapters[1].name", "twice"),
        ({"adapters": [{"name": "demo"}]}, "adapters[0].name", "base model"),
        ({"adapters": [{"name": "sepia", "scale": 1}]}, "adapters[0].scale", "no such field"),
        ({"adapters": [{"name": f"a{i}"} for i in range(9)]}, "adapters", ""),
        ({"background": "transparent"}, "background", "opaque"),
        ({"controlnet": {"image": "x"}}, "controlnet", "not served"),
        ({"ip_adapter": "x"}, "ip_adapter", "not served"),
        ({"input_fidelity": "high"}, "input_fidelity", "no such field"),
        ({"strength": 0.5}, "strength", "/v1/images/edits"),
        ({"widht": 5}, "widht", "no such field"),
    ],
    ids=str,
)
async def test_what_cannot_be_drawn_is_refused_by_name(
    mesh: Mesh, http: aiohttp.ClientSession, body: dict[str, Any], param: str, words: str
) -> None:
    status, told = await ask(http, mesh, **body)
    assert (status, told["error"]["param"]) == (400, param), told
    assert words in told["error"]["message"]
    assert not mesh.scheduler.submitted


async def test_an_unknown_adapter_is_not_found_and_a_near_name_is_told(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    status, told = await ask(http, mesh, adapters=[{"name": "sepi"}])
    assert (status, told["error"]["param"]) == (404, "adapters[0].name")
    assert "Did you mean `sepia`?" in told["error"]["message"]


async def test_a_picture_whose_worker_was_lost_is_continued_by_another_one(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(client.images.generate(prompt=PROMPT, extra_body={"num_inference_steps": 4, "seed": 1}))
    request = await assigned(mesh.first)
    for step in range(2):
        await mesh.first.emit(request, step, [step])
    await mesh.first.emit(request, 2, [], "error", error=WorkerLost("gone").info())
    again = await assigned(mesh.second)
    assert (again.epoch, unpack_tokens(again.output), again.prompt) == (1, [0, 1], request.prompt)
    assert (image_of(again).steps, again.sampling.seed) == (4, 1)
    await paint(mesh.second, again, begun=2)
    told = await asking
    assert base64.b64decode((told.data or [])[0].b64_json or "") == b"picture 1"


async def test_one_picture_that_fails_fails_the_request_and_ends_the_others(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(client.images.generate(prompt=PROMPT, n=2))
    await assigned(mesh.first, 2)
    bad, other = mesh.first.assigned
    await mesh.first.emit(bad, 0, [], "error", error=BadRequest("size: too large here", param="size").info())
    with pytest.raises(openai.BadRequestError, match="too large here"):
        await asking
    await cancelled(mesh.first, other.request_id)
    await eventually(lambda: not mesh.gateway.owner.inflight)


async def test_a_client_that_leaves_cancels_its_picture(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    asking = asyncio.ensure_future(ask(http, mesh))
    request = await assigned(mesh.first)
    asking.cancel()
    await cancelled(mesh.first, request.request_id)
    await eventually(lambda: not mesh.gateway.owner.inflight)


async def test_texts_are_not_asked_of_a_base_that_draws(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    bodies = {
        "v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "v1/completions": {"prompt": "x"},
        "v1/embeddings": {"input": "x"},
        "tokenize": {"prompt": "x"},
        "detokenize": {"tokens": [1]},
    }
    for path, body in bodies.items():
        async with http.post(f"{mesh.url}/{path}", json=body) as answer:
            told = await answer.json()
        assert (answer.status, told["error"]["param"]) == (400, "model"), path
        assert "this model draws images" in told["error"]["message"]
    assert not mesh.scheduler.submitted


async def test_variations_say_what_to_use(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    form = aiohttp.FormData()
    form.add_field("image", b"x", filename="a.png")
    async with http.post(f"{mesh.url}/v1/images/variations", data=form) as answer:
        assert answer.status == 404
        assert "/v1/images/edits" in (await answer.json())["error"]["message"]


async def test_the_answer_is_what_the_description_says(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{mesh.url}/openapi.json") as described:
        document = await described.json()
    schema = {"$ref": "#/components/schemas/DrawnImages", "components": document["components"]}
    for number, form in enumerate(("b64_json", "url"), 1):
        asking = asyncio.ensure_future(ask(http, mesh, response_format=form))
        await paint(mesh.first, await assigned(mesh.first, number))
        status, told = await asking
        assert status == 200
        jsonschema.Draft202012Validator(schema).validate(told)


async def test_steps_have_objectives_only_where_a_client_gives_them(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    given: list[dict[str, str]] = [{}, {"x-slo-tpot-ms": "90", "x-slo-e2e-ms": "7000"}, {"x-slo-class": "interactive"}]
    told = []
    for number, headers in enumerate(given):
        asking = asyncio.ensure_future(
            http.post(f"{mesh.url}/v1/images/generations", json={"prompt": PROMPT, "n": 1}, headers=headers)
        )
        await assigned(mesh.first, number + 1)
        slo = mesh.first.assigned[-1].slo
        told.append((slo.slo_class, slo.ttft_slo_ms, slo.tpot_slo_ms, slo.e2e_slo_ms))
        await paint(mesh.first, mesh.first.assigned[-1])
        (await asking).release()
    timeout_ms = mesh.gateway.config.requests.request_timeout_s * 1000
    assert told == [
        ("standard", SLO_MAX_MS, SLO_MAX_MS, timeout_ms),
        ("standard", SLO_MAX_MS, 90.0, 7000.0),
        ("interactive", 500.0, 50.0, timeout_ms),
    ]
