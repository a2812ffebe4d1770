"""Promise: openai-python calls tools and sees reasoning, streamed and whole, with any engine behind the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from motet.shared.bus import Bus
from motet.shared.wire.request import unpack_tokens
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, FakeScheduler, assigned, running_gateway, start_workers
from tests.services.gateway.support_tokenizers import CHAT_TEMPLATE, write_model_dir
from tests.support import eventually

USER: Any = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}}]
CALL = '<think>hm</think>so <tool_call>{"name": "weather", "arguments": {"city": "größer"}}</tool_call>'
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}" + CHAT_TEMPLATE.replace(
    "m['content'] | trim", "m['content'] or m['tool_calls'][0].function.arguments.city"
).replace("'assistant'] %}", "'assistant', 'tool'] %}")


@pytest.fixture
async def mesh(connect: Connect, bus: Bus, nats_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    workers = await start_workers(connect, "w1", "w2")
    scheduler = FakeScheduler(await connect("scheduler"), ["w1", "w2"])
    await scheduler.start()
    write_model_dir(tmp_path / "demo", chat_template=TEMPLATE)
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with running_gateway(nats_url, tmp_path, **parsers) as gateway:
        await eventually(lambda: not gateway.not_ready())
        yield Mesh(gateway, scheduler, workers, bus)


async def answered(mesh: Mesh, asking: Any, text: str, *, stream: bool = False) -> Any:
    """The answer to `asking` when the worker writes `text` and then ends it."""
    task = asyncio.ensure_future(asking)
    count = len(mesh.first.assigned) + 1
    request = await assigned(mesh.first, count)
    tokens = mesh.gateway.prompts.tokenizer.encode(text).ids
    for index, token in enumerate(tokens):
        await mesh.first.emit(request, index, [token])
    await mesh.first.emit(request, len(tokens), [1], "stop")
    answer = await task
    return [chunk async for chunk in answer] if stream else answer


async def test_a_whole_answer_has_the_calls_the_reasoning_and_the_rest(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    asking = client.chat.completions.create(model="demo", messages=USER, tools=TOOLS)
    [choice] = (await answered(mesh, asking, CALL)).choices
    assert (choice.finish_reason, choice.message.content, choice.message.reasoning) == ("tool_calls", "so ", "hm")
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "größer"}
    request = mesh.first.assigned[0]
    assert (request.needs, request.sampling.structured) == ({}, None)  # any engine serves it
    assert mesh.gateway.prompts.tokenizer.decode(unpack_tokens(request.prompt)).startswith("weather;")


async def test_a_streamed_answer_has_the_same_parts(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    asking = client.chat.completions.create(model="demo", messages=USER, tools=TOOLS, stream=True)
    chunks = await answered(mesh, asking, CALL, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "so "
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "hm"
    [call] = [call for delta in deltas for call in delta.tool_calls or []]
    assert (call.index, call.id[:5], call.function.name) == (0, "call_", "weather")
    assert json.loads(call.function.arguments) == {"city": "größer"}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]


async def test_the_clients_own_accumulation_of_a_stream_works(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    async def talk() -> Any:
        async with client.chat.completions.stream(model="demo", messages=USER, tools=TOOLS) as stream:
            return await stream.get_final_completion()

    answer = await answered(mesh, talk(), CALL)
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


async def test_a_required_and_a_named_call_are_constrained_to_the_tools_schema(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    asking = client.chat.completions.create(model="demo", messages=USER, tools=TOOLS, tool_choice="required")
    answer = await answered(mesh, asking, '[{"name": "weather", "parameters": {"city": "Rom"}}]')
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    assert answer.choices[0].message.content is None
    named: Any = {"type": "function", "function": {"name": "weather"}}
    asking = client.chat.completions.create(model="demo", messages=USER, tools=TOOLS, tool_choice=named)
    answer = await answered(mesh, asking, '{"city": "Rom"}')
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Rom"}'
    array, one = (request.sampling.structured for request in mesh.first.assigned)
    assert array is not None and json.loads(array.value)["items"]["anyOf"][0]["properties"]["parameters"] == PARAMETERS
    assert one is not None and json.loads(one.value) == PARAMETERS
    assert [request.needs for request in mesh.first.assigned] == [{"structured": "tool_choice"}] * 2


async def test_the_results_of_calls_go_back_to_the_model(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    history: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = await answered(mesh, client.chat.completions.create(model="demo", messages=history, tools=TOOLS), "sunny")
    assert answer.choices[0].message.content == "sunny"
    prompt = mesh.gateway.prompts.tokenizer.decode(unpack_tokens(mesh.first.assigned[0].prompt))
    assert "Rom" in prompt and "sunny" in prompt


async def test_without_tools_and_with_the_choice_none_the_text_stays_whole(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        asking = client.chat.completions.create(model="demo", messages=USER, extra_body={"separate_reasoning": False}, **more)
        answer = await answered(mesh, asking, CALL)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        (
            {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "messages[1].tool_calls",
        ),
    ],
)
async def test_a_wrong_choice_or_call_is_refused_by_name(
    mesh: Mesh, client: openai.AsyncOpenAI, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**({"model": "demo", "messages": USER} | more))
    assert refused.value.param == param


async def test_without_a_parser_tools_are_refused_and_forced_calls_are_not(
    connect: Connect, nats_url: str, bus: Bus, tmp_path: Path
) -> None:
    [worker] = await start_workers(connect, "w1")
    scheduler = FakeScheduler(await connect("scheduler"), ["w1"])
    await scheduler.start()
    write_model_dir(tmp_path / "demo", chat_template=TEMPLATE)
    async with running_gateway(nats_url, tmp_path) as gateway:
        await eventually(lambda: not gateway.not_ready())
        worker.speak = lambda _: gateway.prompts.tokenizer.encode('{"city": "Rom"}').ids
        url = f"http://127.0.0.1:{gateway.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
                await client.chat.completions.create(model="demo", messages=USER, tools=TOOLS)
            named: Any = {"type": "function", "function": {"name": "weather"}}
            answer = await client.chat.completions.create(model="demo", messages=USER, tools=TOOLS, tool_choice=named)
            assert answer.choices[0].message.tool_calls
