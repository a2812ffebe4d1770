"""Promise: /v1/embeddings answers as OpenAI does, by workers that make embeddings, also after one of them was lost."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import aiohttp
import jsonschema
import numpy as np
import openai
import pytest

from motet.services.gateway.openai import embeddings
from motet.shared.errors import BadRequest, WorkerLost
from motet.shared.model import EmbeddingParams
from motet.shared.wire.request import GenerateRequest, unpack_tokens
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import assigned
from tests.support import eventually
from tests.support_worker import FakeWorker

Client = openai.AsyncOpenAI
NUMBERS = [0.5, -0.25, 0.125]


async def answer(worker: FakeWorker, request: GenerateRequest, numbers: list[float] = NUMBERS) -> None:
    await worker.emit(request, 0, [], "stop", embedding=np.array(numbers, "<f4").tobytes())


async def test_a_text_becomes_numbers_by_a_worker_that_makes_embeddings(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(
        client.embeddings.create(model="upper", input="hello", dimensions=3, encoding_format="float", user="me")
    )
    request = await assigned(mesh.first)
    assert (request.needs, request.embedding) == ({"embeddings": "model"}, EmbeddingParams(dimensions=3))
    assert request.adapter is not None and request.adapter.name == "upper"
    prompt = unpack_tokens(request.prompt)
    assert prompt == mesh.gateway.prompts.tokenizer.encode("hello").ids
    await answer(mesh.first, request)
    told = await asking
    assert (told.object, told.model, told.data[0].object, told.data[0].index) == ("list", "upper", "embedding", 0)
    assert told.data[0].embedding == NUMBERS
    assert (told.usage.prompt_tokens, told.usage.total_tokens) == (len(prompt), len(prompt))


async def test_openais_client_asks_for_base64_and_reads_it(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(client.embeddings.create(model="demo", input=[40, 41]))
    request = await assigned(mesh.first)
    assert unpack_tokens(request.prompt) == [40, 41]
    await answer(mesh.first, request)
    assert list((await asking).data[0].embedding) == NUMBERS


async def test_base64_is_the_bytes_of_the_numbers(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    body = {"input": "x", "encoding_format": "base64"}
    asking = asyncio.ensure_future(http.post(f"{mesh.url}/v1/embeddings", json=body))
    await answer(mesh.first, await assigned(mesh.first))
    told = await (await asking).json()
    assert np.frombuffer(base64.b64decode(told["data"][0]["embedding"]), "<f4").tolist() == NUMBERS


@pytest.mark.parametrize("inputs", [["a", "b", "c"], [[1, 2], [3], [4, 5, 6]]], ids=["texts", "tokens"])
async def test_several_inputs_keep_their_order(mesh: Mesh, client: Client, inputs: list[Any]) -> None:
    asking = asyncio.ensure_future(client.embeddings.create(model="demo", input=inputs, encoding_format="float"))
    await assigned(mesh.first, 3)
    for request in reversed(mesh.first.assigned):
        await answer(mesh.first, request, [float(request.request_id.rsplit("-", 1)[1])])
    told = await asking
    assert [(one.index, one.embedding) for one in told.data] == [(0, [0.0]), (1, [1.0]), (2, [2.0])]


async def test_few_inputs_of_a_long_list_are_in_the_mesh_at_a_time(
    mesh: Mesh, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.services.gateway.openai.embeddings.AT_ONCE", 2)
    asking = asyncio.ensure_future(client.embeddings.create(model="demo", input=["x"] * 5, encoding_format="float"))
    for number in range(5):
        request = await assigned(mesh.first, number + 1)
        assert mesh.gateway.owner.inflight <= 2
        await answer(mesh.first, request)
    assert len((await asking).data) == 5


async def test_inputs_wait_for_their_own_siblings_instead_of_a_429(mesh: Mesh, client: Client) -> None:
    mesh.scheduler.refuse_choice = 1
    asking = asyncio.ensure_future(client.embeddings.create(model="demo", input=["a", "b"], encoding_format="float"))
    await answer(mesh.first, await assigned(mesh.first))
    await eventually(lambda: len(mesh.scheduler.submitted) >= 3)  # the second one was tried again
    assert not asking.done()
    mesh.scheduler.refuse_choice = None
    await answer(mesh.first, await assigned(mesh.first, 2))
    assert len((await asking).data) == 2


async def test_a_request_whose_first_input_finds_no_room_is_a_429(mesh: Mesh, client: Client) -> None:
    mesh.scheduler.refuse_choice = 0
    with pytest.raises(openai.RateLimitError):
        await client.embeddings.create(model="demo", input=["a", "b"])
    assert len(mesh.scheduler.submitted) == 1 and not mesh.gateway.owner.inflight


async def test_an_embedding_of_a_lost_worker_is_made_by_another_one(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(client.embeddings.create(model="demo", input="hello", encoding_format="float"))
    request = await assigned(mesh.first)
    await mesh.first.emit(request, 0, [], "error", error=WorkerLost("gone").info())
    again = await assigned(mesh.second)
    assert (again.epoch, again.prompt, again.embedding) == (1, request.prompt, request.embedding)
    await answer(mesh.second, again)
    assert (await asking).data[0].embedding == NUMBERS


async def test_one_input_that_fails_fails_the_request_and_ends_the_others(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(client.embeddings.create(model="demo", input=["a", "b"], dimensions=2))
    await assigned(mesh.first, 2)
    refusal = BadRequest("this model's embeddings cannot be shortened", param="dimensions")
    await mesh.first.emit(mesh.first.assigned[0], 0, [], "error", error=refusal.info())
    with pytest.raises(openai.BadRequestError, match="cannot be shortened") as refused:
        await asking
    assert refused.value.param == "dimensions"
    await eventually(lambda: not mesh.gateway.owner.inflight)


async def test_without_a_worker_that_makes_embeddings_the_answer_is_a_400(mesh: Mesh, client: Client) -> None:
    mesh.scheduler.refuse = BadRequest("model: no worker of demo serves embeddings", param="model")
    with pytest.raises(openai.BadRequestError, match="serves embeddings") as refused:
        await client.embeddings.create(model="demo", input="hello")
    assert refused.value.param == "model"


async def test_an_input_may_fill_the_context_and_is_cut_where_that_is_asked(mesh: Mesh, client: Client) -> None:
    tokens = [index % 50 for index in range(300)]
    for body, kept in (
        ({"input": tokens[:256]}, tokens[:256]),
        ({"input": tokens, "truncate_prompt_tokens": -1}, tokens[:256]),
        ({"input": tokens, "truncate_prompt_tokens": 5}, tokens[:5]),
        ({"input": tokens, "truncate_prompt_tokens": 5, "truncation_side": "left"}, tokens[-5:]),
    ):
        count = len(mesh.first.assigned) + 1
        extra = {name: value for name, value in body.items() if name != "input"}
        asking = asyncio.ensure_future(client.embeddings.create(model="demo", input=body["input"], extra_body=extra))
        request = await assigned(mesh.first, count)
        assert unpack_tokens(request.prompt) == kept
        await answer(mesh.first, request)
        assert (await asking).usage.prompt_tokens == len(kept)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1 << 20]}, "input"),
        ({"input": [1] * 257}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"input": "x", "normalize": False}, "normalize"),
        ({"input": "x", "stream": True}, "stream"),
    ],
    ids=str,
)
async def test_what_cannot_be_served_is_refused_by_name(
    mesh: Mesh, http: aiohttp.ClientSession, body: dict[str, Any], param: str
) -> None:
    async with http.post(f"{mesh.url}/v1/embeddings", json=body) as refused:
        told = await refused.json()
        assert (refused.status, told["error"]["param"]) == (400, param), told
    assert not mesh.scheduler.submitted


async def test_an_unknown_model_is_not_found(mesh: Mesh, client: Client) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="nobody", input="x")


async def test_the_answer_is_what_the_description_says(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{mesh.url}/openapi.json") as described:
        document = await described.json()
    schema = {"$ref": "#/components/schemas/Embeddings", "components": document["components"]}
    for number, form in enumerate(("float", "base64")):
        asking = asyncio.ensure_future(
            http.post(f"{mesh.url}/v1/embeddings", json={"input": "x", "encoding_format": form, "model": None})
        )
        await answer(mesh.first, await assigned(mesh.first, number + 1))
        jsonschema.Draft202012Validator(schema).validate(await (await asking).json())


def test_what_the_schema_takes_the_parser_takes() -> None:
    assert embeddings.parse(b'{"input": [[1], [2, 3]], "priority": 1}').inputs() == [[1], [2, 3]]
