"""Promise: tool calls and reasoning are found in any text, however it is cut; what only looks like a call stays content."""

from __future__ import annotations

import random
from typing import Any

import pytest

from motet.services.gateway.calls import Call, Parsing, Parts

SUN, RAIN = Call("weather", '{"city": "Rom"}'), Call("rain", "{}")
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
INSIDE: dict[str, Any] = {"reasoning": True, "begins_inside": True}
CASES: list[tuple[dict[str, Any], str, Parts]] = [
    ({"tools": "hermes"}, "hello < world", Parts("hello < world")),
    ({"tools": "hermes"}, f"so: {HERMES}", Parts("so: ", "", [SUN])),
    (
        {"tools": "hermes"},
        HERMES + '\n<tool_call>{"name": "rain", "arguments": {}}</tool_call>',
        Parts("", "", [SUN, RAIN]),
    ),
    ({"tools": "hermes"}, HERMES.removesuffix("\n</tool_call>"), Parts("", "", [SUN])),
    ({"tools": "hermes"}, "a <tool_call>{broken</tool_call> b", Parts("a <tool_call>{broken</tool_call> b")),
    ({"tools": "hermes"}, "a <tool_call>", Parts("a <tool_call>")),
    ({"tools": "hermes", "parallel": False}, HERMES + HERMES, Parts("", "", [SUN])),
    ({"tools": "llama3_json"}, '{"name": "weather", "parameters": {"city": "Rom"}}', Parts("", "", [SUN])),
    (
        {"tools": "llama3_json"},
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rom"}}; {"name": "rain", "parameters": {}}',
        Parts("", "", [SUN, RAIN]),
    ),
    ({"tools": "llama3_json"}, '{"a": 1}', Parts('{"a": 1}')),
    ({"tools": "llama3_json"}, 'the set {"a"}', Parts('the set {"a"}')),
    (
        {"tools": "mistral"},
        'so [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rom"}}]',
        Parts("so ", "", [SUN]),
    ),
    ({"tools": "mistral"}, '[TOOL_CALLS]weather[ARGS]{"city": "Rom"}[TOOL_CALLS]rain{}', Parts("", "", [SUN, RAIN])),
    ({"tools": "mistral"}, "[TOOL_CALLS] nothing", Parts("[TOOL_CALLS] nothing")),
    ({"tools": "required"}, '[{"name": "weather", "parameters": {"city": "Rom"}}]', Parts("", "", [SUN])),
    ({"tools": "required"}, '[{"name": "weat', Parts('[{"name": "weat')),
    ({"tools": "named", "function": "weather"}, '{"city": "Rom"}', Parts("", "", [SUN])),
    ({"reasoning": True}, "<think>why</think>\n\nso", Parts("so", "why")),
    ({"reasoning": True}, "\n<think>why", Parts("", "why")),
    ({"reasoning": True}, "a < b and <think>x</think>", Parts("a < b and <think>x</think>")),
    (INSIDE, "why</think>so", Parts("so", "why")),
    (INSIDE, "<think>why < 3</think>so", Parts("so", "why < 3")),
    (INSIDE, "cut sho", Parts("", "cut sho")),
    (INSIDE | {"constrained": True}, '{"a": 1}', Parts('{"a": 1}')),
    (INSIDE | {"constrained": True}, 'why</think>{"a": 1}', Parts('{"a": 1}', "why")),
    (INSIDE | {"shows_reasoning": False}, "why</think>so", Parts("so")),
    (INSIDE | {"tools": "hermes"}, f"why <tool_call></think>{HERMES}", Parts("", "why <tool_call>", [SUN])),
]


@pytest.mark.parametrize(("options", "text", "wanted"), CASES)
def test_a_text_gives_the_same_parts_whole_and_in_any_pieces(options: dict[str, Any], text: str, wanted: Parts) -> None:
    parsing = Parsing(**options)
    assert parsing.open().push(text, last=True) == wanted
    draw = random.Random(3)
    for _ in range(50):
        parser, parts, rest = parsing.open(), Parts(), text
        while rest:
            size = draw.randint(1, 4)
            parts.add(parser.push(rest[:size]))
            rest = rest[size:]
        parts.add(parser.push("", last=True))
        assert parts == wanted
        assert parser.called is bool(wanted.calls)
        assert parser.finish("length") == "length"
        assert parser.finish("stop") == ("tool_calls" if wanted.calls else "stop")


def test_text_that_cannot_be_a_call_is_not_held_back() -> None:
    for tools in ("hermes", "llama3_json", "mistral"):
        parser = Parsing(tools=tools).open()
        assert parser.push("hello ").content == "hello "
        assert parser.push("world").content == "world"
