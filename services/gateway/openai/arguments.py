"""The arguments of tool calls. OpenAI's API shows the text of a JSON object; models and other servers also write other things.

    written                       shown                     reason
    {"a": NaN}, {"a": 1e999}      {"a": null}               JSON has neither NaN nor Infinity
    null, NaN, "", [], nothing    {}                        a call without arguments
    "{\\"a\\": 1}"                  {"a": 1}                  encoded twice
    "Rome", 5, [1, 2]             {"value": "Rome"}, ...    kept, so that the tool refuses it by its own rules

What `text_of` returns every JSON parser reads, and `object_of` reads it back from a client.
"""

from __future__ import annotations

import json
import math
from typing import Any

from motet.services.gateway.openai.nesting import TOO_DEEP, too_deep

OTHER = "value"
"""Key of arguments that are no object."""


def decode(text: str, at: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at `at`, and where it ends. Raises ValueError, also for one that is nested too deeply.

    Strings may have line breaks in them, as models write them; halves of characters become U+FFFD, as no tokenizer takes them.
    """
    try:
        value, end = _json.raw_decode(text, at)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if too_deep(value):
        raise ValueError(TOO_DEEP)
    if "\\u" in text[at:end]:
        whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        value = json.loads(whole)
    return value, end


def read(text: str) -> Any:
    """The JSON value that the whole text is, None for an empty text. Raises ValueError."""
    text = text.strip()
    value, end = decode(text) if text else (None, 0)
    if end < len(text):
        raise ValueError(f"there is more after character {end}")
    return value


def object_of(value: Any) -> dict[str, Any]:
    """The object that a JSON value stands for."""
    if isinstance(value, str):
        try:
            inner = read(value)
        except ValueError:
            inner = value
        value = inner if inner in (None, "", []) or isinstance(inner, dict) else value
    if isinstance(value, dict):
        return value
    return {} if value in (None, "", []) else {OTHER: value}


def text_of(value: Any) -> str:
    """The text of the object that a JSON value stands for."""
    return json.dumps(object_of(value), ensure_ascii=False)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


_json = json.JSONDecoder(strict=False, parse_constant=lambda _: None, parse_float=_finite)
