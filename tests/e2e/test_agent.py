"""Promise: an agent written for OpenAI's API runs against the demo mesh: it calls tools and answers with their results."""

from __future__ import annotations

from typing import Any

import openai
import orjson
import pytest

from motet.examples.clients.openai_agent import answer
from motet.examples.demo import TOOL_CALLER
from motet.examples.demo.tool_tasks import REPLY, city_calls, run_tool
from tests.e2e.live import LiveStack


@pytest.fixture
def base_url(stack: LiveStack) -> str:
    return f"{stack.facts().urls[0]}/v1"


def test_the_agent_example_calls_tools_and_answers_with_their_results(base_url: str) -> None:
    calls: list[str] = []
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        assert answer(client, "What is the weather in Oslo?", say=calls.append) == f"{REPLY}It's always sunny in Oslo!"
    assert calls == ["  get_weather({'city': 'Oslo'}) -> It's always sunny in Oslo!"]


async def test_streamed_and_whole_calls_are_the_same(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        for exchange in city_calls():
            asked: Any = {
                "model": TOOL_CALLER,
                "messages": exchange.messages()[:1],
                "tools": exchange.declared(),
                "temperature": 0,
                "max_tokens": 200,
            }
            whole = await client.chat.completions.create(**asked)
            async with client.chat.completions.stream(**asked) as stream:
                streamed = await stream.get_final_completion()
            functions = []
            for choice in (whole.choices[0], streamed.choices[0]):
                assert choice.finish_reason == "tool_calls"
                [call] = choice.message.tool_calls or []
                functions.append((call.function.name, orjson.loads(call.function.arguments)))
            assert functions[0] == functions[1]
            assert run_tool(exchange, *functions[0]) == exchange.result
