"""Separates reasoning and tool calls from the text that a model writes. Formats have vLLM's names.

    <think> ... </think>  text  <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    reasoning             content          one call

A text that only looks like a call stays content. A call is returned as a whole, when its JSON is complete.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from typing import Any, Literal

import msgspec

ToolParser = Literal["", "hermes", "llama3_json", "mistral"]
ReasoningParser = Literal["", "deepseek_r1", "qwen3"]
THINK = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL_CALL = re.compile(r"\s*([A-Za-z0-9_.-]+)(?:\[CALL_ID\][A-Za-z0-9]+)?(?:\[ARGS\])?\s*(?=\{)")
_json = json.JSONDecoder()


class Call(msgspec.Struct, frozen=True):
    """A tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class Parts(msgspec.Struct):
    """Pieces of an answer's text by kind: content, reasoning and tool calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = []

    def add(self, other: Parts) -> None:
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls = self.calls + other.calls


class Parsing(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers of one request are parsed."""

    reasoning: bool = False
    begins_inside: bool = False  # the answer's first token is reasoning already
    constrained: bool = False  # by a grammar, which may begin at once or after the reasoning: only the closing tag tells
    shows_reasoning: bool = True
    tools: Literal["", "hermes", "llama3_json", "mistral", "required", "named"] = ""
    function: str = ""  # with "named"
    parallel: bool = True  # False: only the first call counts

    def open(self) -> AnswerParser:
        """A parser for one choice."""
        return AnswerParser(self)


class AnswerParser:
    """Parses the growing text of one choice."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing
        self._thinks = parsing.reasoning and parsing.begins_inside
        self._thought = not parsing.reasoning  # no more reasoning follows
        self._held = ""
        self._trims = False  # no newline between the reasoning and the content
        self._calls = _FORMATS[parsing.tools]()
        self._index = 0

    @property
    def called(self) -> bool:
        """Whether the text had a tool call so far."""
        return self._index > 0

    def push(self, text: str, *, last: bool = False) -> Parts:
        """Add `text`. Returns the new parts that later text cannot change; with `last`, all that remain."""
        parts = self._without_reasoning(text, last)
        rest = self._calls.push(parts.content, last=last)
        calls = rest.calls
        if self._parsing.tools == "named":  # also cut short: the client sees how far it came
            calls, rest.content = ([Call(self._parsing.function, rest.content)] if rest.content else []), ""
        if not self._parsing.parallel:
            calls = calls[: 1 - self._index]
        self._index += len(calls)
        shown = parts.reasoning if self._parsing.shows_reasoning else ""
        return Parts(rest.content, shown, calls)

    def delta(self, text: str, *, last: bool = False) -> dict[str, Any]:
        """`push` with the result as the fields of OpenAI's delta; empty when nothing is certain yet."""
        begin = self._index
        parts = self.push(text, last=last)
        body: dict[str, Any] = {"reasoning": parts.reasoning} if parts.reasoning else {}
        body |= {"content": parts.content} if parts.content else {}
        calls = [{"index": begin + i} | body_of(call) for i, call in enumerate(parts.calls)]
        return body | ({"tool_calls": calls} if calls else {})

    def finish(self, reason: str) -> str:
        """OpenAI's finish reason."""
        return "tool_calls" if self.called and reason == "stop" else reason

    def _without_reasoning(self, text: str, last: bool) -> Parts:
        parts = Parts()
        if self._thought:
            parts.content = text.lstrip("\n") if self._trims else text
            self._trims = self._trims and not parts.content
            return parts
        start, end = THINK
        self._held += text
        if not self._thinks:  # reasoning is the first thing, or there is none
            begun = self._held.lstrip()
            if not last and start.startswith(begun[: len(start)]) and len(begun) < len(start):
                return parts
            self._thinks, self._thought = begun.startswith(start), not begun.startswith(start)
            if self._thought:
                parts.content, self._held = self._held, ""
                return parts
        if self._held.lstrip().startswith(start):
            self._held = self._held.lstrip().removeprefix(start)
        reasoning, closed, rest = self._held.partition(end)
        if closed:
            self._thought, self._held = True, ""
            parts.reasoning, parts.content = reasoning, rest.lstrip("\n")
            self._trims = not parts.content
            return parts
        if self._parsing.constrained and self._parsing.begins_inside:
            parts.content, self._held = (self._held, "") if last else ("", self._held)
            return parts
        # a beginning of either tag waits; the first tag may still come where the prompt opened the reasoning
        kept = 0 if last else max(_overlap(self._held, end), len(self._held) if start.startswith(self._held) else 0)
        parts.reasoning, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return parts


def body_of(call: Call) -> dict[str, Any]:
    """The call as OpenAI shows it, with a new id."""
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class _Text:
    """No calls: all is content."""

    def push(self, text: str, *, last: bool = False) -> Parts:
        return Parts(text)


class _Hermes:
    """Hermes and Qwen: each call between tags."""

    def __init__(self) -> None:
        self._held = ""
        self._trims = False  # no newline after a call

    def push(self, text: str, *, last: bool = False) -> Parts:
        self._held += text
        start, end = _TOOL_CALL
        parts = Parts()
        while True:
            if self._trims:
                self._held = self._held.lstrip("\n")
                self._trims = not self._held
            before, begun, inside = self._held.partition(start)
            if not begun:
                kept = 0 if last else _overlap(self._held, start)
                parts.content += self._held[: len(self._held) - kept]
                self._held = self._held[len(self._held) - kept :]
                return parts
            body, ended, after = inside.partition(end)
            if not ended and not last:
                parts.content += before
                self._held = begun + inside
                return parts
            calls = _read_calls(body)
            parts.content += before if calls else before + begun + body + ended
            parts.calls = parts.calls + calls
            self._held, self._trims = after, bool(calls)


class _AtEnd:
    """Calls that begin at `marker` and reach to the end of the text. `opens`: also where the text begins like this."""

    def __init__(self, marker: str, opens: str, read: Callable[[str], list[Call]]) -> None:
        self._marker, self._opens, self._read = marker, opens, read
        self._held, self._inside, self._begun = "", False, False

    def push(self, text: str, *, last: bool = False) -> Parts:
        self._held += text
        parts = Parts()
        if not self._begun and self._held.strip():
            self._begun = True
            self._inside |= bool(self._opens) and self._held.lstrip().startswith(self._opens)
        if not self._inside and self._marker:
            before, found, _ = self._held.partition(self._marker)
            if found:
                parts.content, self._inside = before, True
                self._held = self._held[len(before) :]
        if self._inside and not last:
            return parts
        if self._inside:
            parts.calls = self._read(self._held.removeprefix(self._marker))
            parts.content += "" if parts.calls else self._held
            self._held = ""
            return parts
        kept = 0 if last else _overlap(self._held, self._marker)
        parts.content, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return parts


class _Whole(_AtEnd):
    """Everything to the end."""

    def __init__(self, read: Callable[[str], list[Call]]) -> None:
        super().__init__("", "", read)
        self._inside = True


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


def _read_calls(text: str) -> list[Call]:
    """JSON objects with a name and arguments, one after the other or in an array; nothing when the text is anything else."""
    calls: list[Call] = []
    text = text.strip()
    while text:
        try:
            value, at = _json.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict) or not isinstance(one.get("name"), str):
                return []
            arguments = one.get("arguments", one.get("parameters", {}))
            calls.append(
                Call(one["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
            )
        text = text[at:].lstrip(" \n;,")
    return calls


def _read_mistral(text: str) -> list[Call]:
    """An array of calls, or since tokenizer 11 `name{...}` or `name[ARGS]{...}` after each marker."""
    calls: list[Call] = []
    for part in filter(str.strip, text.split(_MISTRAL)):
        if not (named := _MISTRAL_CALL.match(part)):
            read = _read_calls(part)
        else:
            try:
                arguments, _ = _json.raw_decode(part[named.end() :])
            except (ValueError, RecursionError):
                return []
            read = [Call(named[1], json.dumps(arguments, ensure_ascii=False))]
        if not read:
            return []
        calls += read
    return calls


_FORMATS: dict[str, Callable[[], Any]] = {
    "": _Text,
    "named": lambda: _Whole(lambda _: []),
    "required": lambda: _Whole(_read_calls),
    "hermes": _Hermes,
    "llama3_json": lambda: _AtEnd(_PYTHON_TAG, "{", _read_calls),
    "mistral": lambda: _AtEnd(_MISTRAL, "", _read_mistral),
}
