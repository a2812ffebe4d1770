"""How deep JSON values of clients and models may be nested: deeper ones overflow the stack of a parser, template or encoder."""

from __future__ import annotations

from typing import Any

from motet.shared.errors import BadRequest

DEPTH_MAX = 64


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
        raise BadRequest(f"{param}: it is nested deeper than {DEPTH_MAX}", param=param)
