"""Promise: tool calls and reasoning are found in any text, however it is cut; what only looks like a call stays content.

The arguments of a call are always the text of a JSON object, which Motet reads back.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.services.gateway.openai import answers, conversation
from motet.services.gateway.openai.nesting import DEPTH_MAX, too_deep
from motet.services.gateway.openai.output_parsers import Call, Parsing, Parts
from motet.shared.errors import BadRequest

PARSERS: list[Any] = ["hermes", "llama3_json", "mistral", "required", "named"]
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
    ({"tools": "named", "function": "weather"}, '{"city": "Ro', Parts('{"city": "Ro')),
    ({"tools": "named", "function": "rain"}, "null", Parts("", "", [RAIN])),
    # the end tag inside a string, and what only looks like one
    (
        {"tools": "hermes"},
        '<tool_call>{"name": "say", "arguments": {"t": "a \\"</tool_call>\\" b"}}</tool_call> c',
        Parts(" c", "", [Call("say", '{"t": "a \\"</tool_call>\\" b"}')]),
    ),
    ({"tools": "hermes"}, '<tool_call>{"name": "a"}</tool_call>', Parts("", "", [Call("a", "{}")])),
    ({"tools": "hermes"}, '<tool_call>{"name": "a"} oh</tool_call>', Parts('<tool_call>{"name": "a"} oh</tool_call>')),
    ({"tools": "hermes"}, '<tool_call>{"name": "a</tool_call> b', Parts('<tool_call>{"name": "a</tool_call> b')),
    ({"tools": "hermes"}, '<tool_call>{"name": ""}</tool_call>', Parts('<tool_call>{"name": ""}</tool_call>')),
    # JSON that is an answer, not a call; and text after calls
    ({"tools": "llama3_json"}, '{"name": "Bob"}', Parts('{"name": "Bob"}')),
    ({"tools": "llama3_json"}, '{"name": "rain", "parameters": null} so', Parts("so", "", [RAIN])),
    ({"tools": "mistral"}, '[TOOL_CALLS] [{"name": "rain", "arguments": {}}] so', Parts("so", "", [RAIN])),
    ({"tools": "mistral"}, "[TOOL_CALLS]rain[ARGS][TOOL_CALLS]rain[ARGS] null", Parts("", "", [RAIN, RAIN])),
    (
        {"tools": "mistral"},
        '[TOOL_CALLS]say{"t": "[TOOL_CALLS]rain{}"}',
        Parts("", "", [Call("say", '{"t": "[TOOL_CALLS]rain{}"}')]),
    ),
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


def written(tools: str, calls: list[tuple[str, str]]) -> str:
    """A model's text that has these calls: names, and arguments as JSON text."""
    objects = [f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls]
    match tools:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "llama3_json":
            return "; ".join(objects)
        case "mistral":
            return "[TOOL_CALLS][" + ", ".join(objects) + "]"
        case "mistral 11":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
        case "named":
            return calls[0][1]
        case _:
            return "[" + ", ".join(objects) + "]"


def parsing_of(tools: str) -> Parsing:
    known: Any = tools.split(" ")[0]
    return Parsing(tools=known, function="f" if tools == "named" else "")


@pytest.mark.parametrize("tools", [*PARSERS, "mistral 11"])
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("null", {}),
        ('""', {}),
        ('" "', {}),
        ("[]", {}),
        ("NaN", {}),
        ("-Infinity", {}),
        ('"null"', {}),
        ('"{}"', {}),
        ('"{\\"city\\": \\"Rom\\"}"', {"city": "Rom"}),
        ('"Rom"', {"value": "Rom"}),
        ("5", {"value": 5}),
        ("false", {"value": False}),
        ("[1, 2]", {"value": [1, 2]}),
        ('{"a": NaN, "b": [Infinity, 1e999, -1.5]}', {"a": None, "b": [None, None, -1.5]}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ('{"a": "\\ud83d\\ude00 \\ud83d"}', {"a": "\U0001f600 \ufffd"}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
    ],
)
def test_arguments_become_the_text_of_a_json_object(tools: str, arguments: str, wanted: dict[str, Any]) -> None:
    parser = parsing_of(tools).open()
    [call] = parser.push(written(tools, [("f", arguments)]), last=True).calls
    assert call.name == "f"
    assert read(call.arguments) == wanted


@pytest.mark.parametrize("tools", [*PARSERS, "mistral 11"])
@pytest.mark.parametrize("depth", [DEPTH_MAX, 900, 100_000])
def test_arguments_that_are_nested_too_deeply_stay_content(tools: str, depth: int) -> None:
    text = written(tools, [("f", '{"a":' * depth + "0" + "}" * depth)])
    assert parsing_of(tools).open().push(text, last=True) == Parts(text)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (None, {}),
        ("", {}),
        ("null", {}),
        ("[]", {}),
        ('""', {}),
        ('"Rom"', {"value": "Rom"}),
        ('{"a": NaN}', {"a": None}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ('{"a": "\\ud800"}', {"a": "\ufffd"}),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_calls_of_other_servers_reach_the_chat_template_as_objects(arguments: Any, wanted: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = conversation.texts([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": wanted}


@pytest.mark.parametrize("arguments", ["{", "{} {}", "Rom", '{"a": ' + "[" * 65 + "]" * 65 + "}"])
def test_arguments_of_a_client_that_are_no_json_are_refused_by_name(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(BadRequest) as refused:
        conversation.texts([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert refused.value.param == "messages[0].tool_calls"


def test_the_ids_of_mistral_calls_are_those_that_its_chat_templates_take() -> None:
    for short, form in ((True, "[a-zA-Z0-9]{9}"), (False, "call_[0-9a-f]{24}")):
        parser = Parsing(tools="mistral", short_ids=short).open()
        message = msgspec.to_builtins(answers.message(parser, "[TOOL_CALLS]rain{}"))
        assert re.fullmatch(form, message["tool_calls"][0]["id"])


def read(arguments: str) -> Any:
    """The arguments as a strict JSON parser reads them."""
    orjson.dumps(arguments)  # text that UTF-8 can hold

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(arguments, parse_constant=refuse)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["</tool_call>", "<tool_call>", '"</tool_call>\\', "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "</think>", "};", "\\", '"']
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(st.from_regex(r"[a-zA-Z0-9_.-]{1,8}", fullmatch=True), VALUES), min_size=1, max_size=3)
FRAGMENTS = st.lists(
    TEXTS
    | st.sampled_from(
        [
            *("{", "}", "[", "]", ":", ",", "null", "NaN", "1e999", "\n", " ", "{}", "f{}", "\\ud800"),
            *('"name"', '"arguments"', '"parameters"', "[CALL_ID]x", "<tool_call", "</tool_"),
            *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": '),
        ]
    ),
    max_size=14,
).map("".join)


def in_pieces(parsing: Parsing, text: str, cuts: list[int]) -> Parts:
    """The parts of a text that comes in pieces of these sizes."""
    parser, parts, at = parsing.open(), Parts(), 0
    for size in cuts:
        parts.add(parser.push(text[at : at + size]))
        at += size
    parts.add(parser.push(text[at:], last=True))
    return parts


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PARSERS), FRAGMENTS, st.lists(st.integers(1, 9), max_size=40), st.booleans())
def test_any_text_gives_the_same_parts_in_any_pieces_and_motet_reads_its_calls_back(
    tools: Any, text: str, cuts: list[int], parallel: bool
) -> None:
    parsing = Parsing(tools=tools, function="f" if tools == "named" else "", parallel=parallel)
    whole = parsing.open().push(text, last=True)
    assert in_pieces(parsing, text, cuts) == whole
    for call in whole.calls:
        assert isinstance(read(call.arguments), dict)
    message = msgspec.json.decode(msgspec.json.encode(answers.message(parsing.open(), text)))
    if whole.calls:
        [again] = conversation.texts([message])
        assert [call["function"]["arguments"] for call in again["tool_calls"]] == [read(c.arguments) for c in whole.calls]
    else:
        assert whole.content == text


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*PARSERS, "mistral 11"]), CALLS, st.booleans(), st.lists(st.integers(1, 9), max_size=40))
def test_calls_that_a_model_writes_in_its_format_are_all_found(
    tools: str, calls: list[tuple[str, Any]], ascii_only: bool, cuts: list[int]
) -> None:
    calls = [("f", calls[0][1])] if tools == "named" else calls
    texts = [(name, json.dumps(value, ensure_ascii=ascii_only)) for name, value in calls]
    found = in_pieces(parsing_of(tools), written(tools, texts), cuts)
    assert [call.name for call in found.calls] == [name for name, _ in calls]
    assert found.content == ""
    for call, (_, value) in zip(found.calls, calls, strict=True):
        if isinstance(value, dict):
            assert read(call.arguments) == json.loads(json.dumps(value), parse_constant=lambda _: None)
            assert not too_deep(read(call.arguments))
