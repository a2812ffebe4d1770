"""Separates reasoning and tool calls from the text that a model writes. Formats have vLLM's names.

    <think> ... </think>  text  <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    reasoning             content          one call

A text that only looks like a call stays content. A call is returned as a whole, when its JSON is complete; its arguments are
always the text of a JSON object (`arguments`). A text gives the same parts whole and in any pieces. vLLM is the reference for
what a call looks like in each format. Motet differs in these points, where vLLM loses text or answers differently in a stream:

    all           arguments that are no JSON object become one; calls with broken or too deeply nested JSON stay content
    hermes        </tool_call> inside a string does not end the call; arguments may be missing or be named "parameters"
    llama3_json   calls stand at the beginning or after the tag, not anywhere; text after them is content, not dropped
    mistral       arguments must be JSON; [TOOL_CALLS] inside a string begins no call; name[ARGS] alone is a call
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from motet.services.gateway.openai import arguments
from motet.services.gateway.openai.schemas import Call, ChatFinish, Delta, Finish, ToolCallDelta

THINK = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL_CALL = re.compile(r"([A-Za-z0-9_.-]+)(?:\[CALL_ID\][A-Za-z0-9]+)?(?:\[ARGS\]\s*|\s*(?=\{))")
_SEPARATORS = re.compile(r"[\s;,]*")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_ID_CHARACTERS = string.ascii_letters + string.digits


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
    short_ids: bool = False  # nine letters and digits: Mistral's chat templates refuse any other id

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
        self._calls = _FORMATS[parsing.tools](parsing)
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
        if not self._parsing.parallel:
            calls = calls[: 1 - self._index]
        self._index += len(calls)
        shown = parts.reasoning if self._parsing.shows_reasoning else ""
        return Parts(rest.content, shown, calls)

    def delta(self, text: str, *, last: bool = False) -> Delta:
        """`push` with the result as OpenAI's delta; empty when nothing is certain yet."""
        begin = self._index
        parts = self.push(text, last=last)
        calls = [ToolCallDelta(index=i, id=self.new_id(), function=call) for i, call in enumerate(parts.calls, begin)]
        return Delta(reasoning=parts.reasoning or UNSET, content=parts.content or UNSET, tool_calls=calls or UNSET)

    def finish(self, reason: Finish) -> ChatFinish:
        """OpenAI's finish reason."""
        return "tool_calls" if self.called and reason == "stop" else reason

    def new_id(self) -> str:
        """An id for a call."""
        if self._parsing.short_ids:
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

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


class _Text:
    """No calls: all is content."""

    def push(self, text: str, *, last: bool = False) -> Parts:
        return Parts(text)


class _Hermes:
    """Hermes and Qwen: each call between tags."""

    def __init__(self) -> None:
        self._held = ""
        self._trims = False  # no newline after a call
        self._begin()

    def _begin(self) -> None:
        self._searched = len(_TOOL_CALL[0])  # of the text held when it begins with a call
        self._quoted = False  # whether a JSON string is open there

    def push(self, text: str, *, last: bool = False) -> Parts:
        self._held += text
        start, end = _TOOL_CALL
        parts = Parts()
        while True:
            if self._trims:
                self._held = self._held.lstrip("\n")
                self._trims = not self._held
            if not self._held.startswith(start):
                before, begun, inside = self._held.partition(start)
                kept = 0 if begun or last else _overlap(before, start)
                parts.content += before[: len(before) - kept]
                self._held = before[len(before) - kept :] + begun + inside
                if not begun:
                    return parts
            close = self._close()
            if close is None and not last:
                return parts
            close, after = (len(self._held), len(self._held)) if close is None else (close, close + len(end))
            calls, rest = _read_calls(self._held[len(start) : close])
            if rest:
                calls = []
            parts.content += "" if calls else self._held[:after]
            parts.calls = parts.calls + calls
            self._held, self._trims = self._held[after:], bool(calls)
            self._begin()

    def _close(self) -> int | None:
        """Where the tag stands that ends the call; None while there is none. A tag inside a string belongs to the string."""
        end = _TOOL_CALL[1]
        begin = self._searched
        while (found := self._held.find(end, begin)) >= 0:
            self._quoted ^= _ESCAPE.sub("", self._held[self._searched : found]).count('"') % 2 == 1
            if not self._quoted:
                return found
            begin = self._searched = found + len(end)
        return None


class _AtEnd:
    """Calls that begin at `marker` and reach to the end of the text. `opens`: also where the text begins like this."""

    def __init__(self, marker: str, opens: str, read: Read) -> None:
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
            parts.calls, rest = self._read(self._held.removeprefix(self._marker))
            parts.content += rest if parts.calls else self._held
            self._held = ""
            return parts
        kept = 0 if last else _overlap(self._held, self._marker)
        parts.content, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return parts


class _Whole(_AtEnd):
    """Everything to the end."""

    def __init__(self, read: Read) -> None:
        super().__init__("", "", read)
        self._inside = True


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


def _read_calls(text: str, *, bare: bool = False) -> tuple[list[Call], str]:
    """The calls that the text begins with, JSON objects one after the other or in an array, and the text after them.

    `bare`: nothing else marks them as calls, so an object without arguments is none.
    """
    calls: list[Call] = []
    at = _skip(text, 0)
    while at < len(text):
        try:
            value, end = arguments.decode(text, at)
        except ValueError:
            break
        read = [_call(one, bare) for one in (value if isinstance(value, list) else [value])]
        if not read or None in read:
            break
        calls += filter(None, read)
        at = _skip(text, end)
    return calls, text[at:]


def _call(value: Any, bare: bool) -> Call | None:
    """The call that a JSON value is; None for any other value."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name or (bare and value.keys().isdisjoint(("arguments", "parameters"))):
        return None
    return Call(name, arguments.text_of(value.get("arguments", value.get("parameters"))))


def _read_mistral(text: str) -> tuple[list[Call], str]:
    """An array of calls, or since tokenizer 11 `name{...}` or `name[ARGS]{...}`, each after a marker but the first."""
    calls: list[Call] = []
    rest = at = _skip(text, 0)
    while at < len(text):
        if not (named := _MISTRAL_CALL.match(text, at)):
            read, left = _read_calls(text[at:])
            end = len(text) - len(left)
        else:
            try:
                none = named.end() == len(text) or text.startswith(_MISTRAL, named.end())
                value, end = (None, named.end()) if none else arguments.decode(text, named.end())
            except ValueError:
                break
            read = [Call(named[1], arguments.text_of(value))]
        if not read:
            break
        calls += read
        rest = at = _skip(text, end)
        if not text.startswith(_MISTRAL, at):
            break
        at = _skip(text, at + len(_MISTRAL))
    return calls, text[rest:]


def _read_named(name: str, text: str) -> tuple[list[Call], str]:
    """The arguments of a call whose function the client named."""
    try:
        value, end = arguments.decode(text, _skip(text, 0))
    except ValueError:
        return [], text
    return [Call(name, arguments.text_of(value))], text[_skip(text, end) :]


def _skip(text: str, at: int) -> int:
    """Where the text goes on after what may stand between calls."""
    found = _SEPARATORS.match(text, at)
    return found.end() if found else at


Read = Callable[[str], tuple[list[Call], str]]
_FORMATS: dict[str, Callable[[Parsing], Any]] = {
    "": lambda _: _Text(),
    "named": lambda parsing: _Whole(partial(_read_named, parsing.function)),
    "required": lambda _: _Whole(_read_calls),
    "hermes": lambda _: _Hermes(),
    "llama3_json": lambda _: _AtEnd(_PYTHON_TAG, "{", partial(_read_calls, bare=True)),
    "mistral": lambda _: _AtEnd(_MISTRAL, "", _read_mistral),
}
