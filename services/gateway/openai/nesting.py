"""How deep JSON values of clients and models may be nested: deeper ones overflow the stack of a parser, template or encoder."""

from __future__ import annotations

import itertools
import re
from typing import Any

from motet.shared.errors import BadRequest

DEPTH_MAX = 64
TOO_DEEP = f"it is nested deeper than {DEPTH_MAX}"
LOOKED_AT = 20_000
"""Strings and brackets of a body that `deep_field` looks at: some milliseconds."""
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"(\s*:)?|[\[\]{}]', re.DOTALL)


def too_deep(value: Any) -> bool:
    """Whether a decoded JSON value has more than `DEPTH_MAX` levels; looked at level by level, so that no depth overflows."""
    depth, level = 0, [value]
    while level and depth <= DEPTH_MAX:
        depth += 1
        level = [
            inner for one in level if isinstance(one, dict | list) for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return depth > DEPTH_MAX


def check_depth(value: Any, param: str) -> None:
    """Raises BadRequest naming `param` for a value with more than `DEPTH_MAX` levels."""
    if too_deep(value):
        raise BadRequest(f"{param}: {TOO_DEEP}", param=param)


def deep_field(body: bytes) -> str | None:
    """The field of a JSON object's text that is nested too deeply for a decoder; None if it is not near the beginning."""
    depth, name = 0, b""
    for token in itertools.islice(_TOKENS.finditer(body), LOOKED_AT):
        if token[1] is not None:
            name = token[0] if depth == 1 else name
        elif token[0] in b"[{":
            depth += 1
        elif token[0] in b"]}":
            depth -= 1
        if depth > DEPTH_MAX:
            return name.rstrip(b": \t\r\n").strip(b'"').decode(errors="replace") or None
    return None
