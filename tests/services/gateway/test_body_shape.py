"""Promise: no body has so many values that reading it stalls a gateway, and no text is refused for the characters in it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.services.gateway.openai import body_shape
from motet.services.gateway.openai.body_shape import CONTAINERS_MAX, KEYS_MAX, SMALL_BYTES, TEXTS_MAX, VALUES_MAX
from motet.shared.errors import BadRequest
from tests.fuzz.bodies import filled

PADDING = " " * SMALL_BYTES


@pytest.mark.parametrize(
    ("many", "most", "what"),
    [
        ([[]], CONTAINERS_MAX, "lists and objects"),
        ([{"a": 1}], CONTAINERS_MAX, "lists and objects"),
        ({"a": 1}, KEYS_MAX, "keys"),
        (["a"], TEXTS_MAX, "texts"),
        ([7], VALUES_MAX, "values"),
    ],
    ids=["lists", "objects", "keys", "texts", "numbers"],
)
def test_a_body_with_one_value_too_many_is_refused_by_what_it_is(many: Any, most: int, what: str) -> None:
    def body(count: int) -> bytes:
        held = {f"k{i}": 1 for i in range(count)} if isinstance(many, dict) else many * count
        return (json.dumps({"messages": held}) + PADDING).encode()

    beside = {"lists and objects": 2, "keys": 1, "texts": 1, "values": 3}[what]
    body_shape.check(body(most - beside))
    with pytest.raises(BadRequest, match=what):
        body_shape.check(body(most + 1))


@pytest.mark.parametrize("unit", [",", "[", "{", ":", "1,2\\n", '\\"', "\\\\", '\\\\\\"', '[{\\"a\\": 1}]'])
def test_a_text_may_be_made_of_anything(unit: str) -> None:
    body = filled('{"prompt":"', unit, ' "}')
    msgspec.json.decode(body)
    body_shape.check(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.sampled_from('a,:[]{}"\\\n\u00e4')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a,:[]{}"\\'), max_size=4), inner),
    max_leaves=40,
)


@given(JSON)
def test_what_is_counted_is_what_is_there(value: Any) -> None:
    def count(one: Any) -> tuple[int, int, int]:
        """(containers, keys, texts)"""
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        sums = [sum(column) for column in zip((0, 0, 0), *map(count, inner), strict=True)]
        keys = len(one) if isinstance(one, dict) else 0
        return sums[0] + isinstance(one, dict | list), sums[1] + keys, sums[2] + keys + isinstance(one, str)

    outside = body_shape._outside_texts(json.dumps(value).encode())  # private: `check` says only what is too much
    assert outside[:3] == count(value)


def test_what_is_no_json_is_left_to_the_parser() -> None:
    for broken in (b'"' * (4 << 20), b"\\" * (4 << 20), b"\xff" * (4 << 20), b"x" * (4 << 20)):
        try:
            body_shape.check(broken)
        except BadRequest as error:
            assert "texts" in error.message
