"""Promise: a constraint reaches a worker that supports it, or is refused; a lost worker never breaks it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from motet.services.gateway.openai import protocol
from motet.services.scheduler.config import SchedulerConfig
from motet.services.scheduler.service import SchedulerService
from motet.shared.bus import Bus
from motet.shared.errors import BadRequest, WorkerLost
from motet.shared.model import StructuredOutput
from motet.shared.wire.request import unpack_tokens
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, assigned, running_gateway, start_workers
from tests.support import eventually

Client = openai.AsyncOpenAI
USER: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


class Answer(pydantic.BaseModel):
    a: int


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutput(kind="json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
            StructuredOutput(kind="json", value=TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(kind="json", value=TEXT)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutput(kind="json", value=TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(kind="regex", value="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput(kind="choice", value='["a","b"]')),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"', "disable_any_whitespace": True}},
            StructuredOutput(kind="grammar", value='root ::= "a"', disable_any_whitespace=True),
        ),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(kind="json_object")),
        ({"structured_outputs": {"structural_tag": "{}"}}, StructuredOutput(kind="structural_tag", value="{}")),
        ({"regex": "a+"}, StructuredOutput(kind="regex", value="a+")),
        ({"ebnf": 'root ::= "a"'}, StructuredOutput(kind="grammar", value='root ::= "a"')),
        ({"json_schema": json.dumps(SCHEMA)}, StructuredOutput(kind="json", value=TEXT)),
    ],
)
async def test_every_clients_constraint_reaches_the_worker(
    mesh: Mesh, client: Client, body: dict[str, Any], wanted: StructuredOutput
) -> None:
    mesh.say("x")
    await client.chat.completions.create(model="demo", messages=USER, extra_body=body)
    await client.completions.create(model="demo", prompt="x", extra_body=body)
    for request in mesh.first.assigned:
        assert (request.sampling.structured, request.needs) == (wanted, {"structured": next(iter(body))})


async def test_a_plain_request_and_the_format_text_need_nothing(mesh: Mesh, client: Client) -> None:
    mesh.say("x")
    await client.chat.completions.create(model="demo", messages=USER)
    await client.chat.completions.create(model="demo", messages=USER, response_format={"type": "text"})
    assert [(request.sampling.structured, request.needs) for request in mesh.first.assigned] == [(None, {})] * 2


async def test_openai_python_parses_the_answer_into_its_own_type(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(client.chat.completions.parse(model="demo", messages=USER, response_format=Answer))
    request = await assigned(mesh.first)
    eos = 0  # hidden, as the token that ended the text
    await mesh.first.emit(request, 0, [*mesh.gateway.prompts.tokenizer.encode('{"a": 7}').ids, eos], "stop")
    assert (await asking).choices[0].message.parsed == Answer(a=7)
    assert request.sampling.structured is not None
    assert json.loads(request.sampling.structured.value)["properties"]["a"]["type"] == "integer"


async def test_where_no_worker_serves_it_the_client_learns_which_field_it_was(mesh: Mesh, client: Client) -> None:
    mesh.scheduler.refuse = BadRequest("regex: no worker of demo serves structured outputs", param="regex")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="demo", prompt="x", extra_body={"regex": "a+"})
    assert refused.value.param == "regex"


async def test_with_a_real_scheduler_a_mesh_without_such_an_engine_answers_400_until_one_comes(
    connect: Connect, bus: Bus, nats_url: str, tmp_path: Path
) -> None:
    [native] = await start_workers(connect, "native")
    native.speak = lambda _: [40]
    scheduler = SchedulerService(SchedulerConfig.of(nats_url=nats_url))
    await scheduler.start()
    async with running_gateway(nats_url, tmp_path) as gateway:
        await eventually(lambda: not gateway.not_ready())
        url = f"http://127.0.0.1:{gateway.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="no worker of demo serves structured outputs") as refused:
                await client.completions.create(model="demo", prompt="x", extra_body={"regex": "a+"})
            assert refused.value.param == "regex"
            [able] = await start_workers(connect, "able", engine="vllm", capabilities=("structured",))
            able.speak = lambda _: [40]
            await eventually(lambda: scheduler.cluster.knows("able"))
            for _ in range(5):
                await client.completions.create(model="demo", prompt="x", extra_body={"regex": "a+"})
            assert (len(able.assigned), len(native.assigned)) == (5, 0)
    await scheduler.stop()


def test_one_request_has_one_constraint() -> None:
    body = {"prompt": "x", "regex": "a", "response_format": {"type": "json_object"}}
    with pytest.raises(BadRequest, match="cannot both constrain") as refused:
        protocol.parse_completion(json.dumps(body).encode())
    assert refused.value.param == "regex"


def test_a_schema_is_bounded_in_size_and_depth() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    for schema in (deep, {"title": "x" * 70_000}):
        for body in ({"structured_outputs": {"json": schema}}, {"json_schema": json.dumps(schema)}):
            with pytest.raises(BadRequest) as refused:
                protocol.parse_completion(json.dumps({"prompt": "x"} | body).encode())
            assert (refused.value.param or "").split(".")[0] == next(iter(body))


async def test_a_whole_answer_whose_worker_is_lost_begins_again_on_another(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(client.completions.create(model="demo", prompt="x", extra_body={"regex": "[a-z ]+"}))
    request = await assigned(mesh.first)
    await mesh.first.emit(request, 0, mesh.gateway.prompts.tokenizer.encode("lost").ids)
    streams = mesh.gateway.owner._active  # private: a whole answer shows no token before its end
    await eventually(lambda: any(stream.tokens for stream in streams.values()))
    await mesh.first.emit(request, 99, [], "error", error=WorkerLost("gone").info())
    again = await assigned(mesh.second)
    assert (unpack_tokens(again.output), again.epoch) == ([], 1)  # the grammar begins with the output
    tokens = mesh.gateway.prompts.tokenizer.encode("hello world").ids
    await mesh.second.emit(again, 0, tokens, "stop")
    answer = await asking
    assert answer.choices[0].text in ("hello world", mesh.gateway.prompts.tokenizer.decode(tokens[:-1]))
    assert answer.usage is not None and answer.usage.completion_tokens == len(tokens)


async def test_a_stream_that_showed_nothing_begins_again_and_one_that_did_ends_with_the_reason(
    mesh: Mesh, client: Client
) -> None:
    tokens = mesh.gateway.prompts.tokenizer.encode("hello world").ids

    async def stream() -> Any:
        return await client.completions.create(model="demo", prompt="x", stream=True, extra_body={"regex": "[a-z ]+"})

    untold = await stream()
    request = await assigned(mesh.first)
    await mesh.first.emit(request, 0, [], "error", error=WorkerLost("gone").info())
    again = await assigned(mesh.second)
    await mesh.second.emit(again, 0, tokens, "length")
    assert "".join([chunk.choices[0].text async for chunk in untold]) == "hello world"
    told = await stream()
    request = await assigned(mesh.first, 2)
    await mesh.first.emit(request, 0, tokens)
    assert (await anext(told)).choices[0].text
    await mesh.first.emit(request, len(tokens), [], "error", error=WorkerLost("gone").info())
    with pytest.raises(openai.APIError, match="constrained to a grammar"):
        async for _ in told:
            pass
    assert len(mesh.second.assigned) == 1
