"""Promise: a large answer is made, encoded and sent in parts, equals one that is encoded at once, and is bounded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.policies.tenant_shares import Part, TenantShares
from motet.services.gateway.owner import encoding
from motet.services.gateway.owner.encoding import Rows, encoded, encoded_at_once
from motet.shared.clock import now_s
from motet.shared.errors import AnswerTooLarge, Overloaded
from motet.shared.wire.stream import TokenLogprobs
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import assigned
from tests.support import eventually


class Told(msgspec.Struct):
    """An answer with a long array."""

    items: Collection[int]


VALUES = st.recursive(st.integers(0, 9) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=90), max_leaves=200)


def as_rows(value: Any) -> Any:
    """`value` with its outermost lists as `Rows`."""
    return Rows(len(value), lambda begin, end: value[begin:end]) if isinstance(value, list) else value


def budget(total: int = 1 << 30) -> Part:
    return Part(TenantShares(total), "acme")


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=5))
def test_what_is_encoded_in_parts_is_what_would_be_encoded_at_once(body: dict[str, Any]) -> None:
    held = budget()
    parts = asyncio.run(encoded({name: as_rows(value) for name, value in body.items()}, held))
    assert json.loads(b"".join(parts)) == body
    assert held.amount == sum(map(len, parts))


@given(st.lists(st.integers(0, 9), max_size=200))
def test_a_small_answer_is_encoded_at_once(items: list[int]) -> None:
    body = Told(items=as_rows(items))
    assert json.loads(encoded_at_once(body)) == {"items": items} and len(body.items) == len(items)
    with pytest.raises(TypeError):
        encoded_at_once(Told(items=object()))  # type: ignore[arg-type]


async def test_other_tasks_have_their_turn_while_an_answer_is_encoded() -> None:
    turns, began_s = 0, now_s()

    def slow(begin: int, end: int) -> list[int]:
        until_s = now_s() + 0.005
        while now_s() < until_s:
            pass
        return list(range(begin, end))

    working = asyncio.ensure_future(encoded({"data": Rows(20 * encoding.SLICE, slow)}, budget()))
    while not working.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 20 and now_s() - began_s > 0.1


async def test_an_answer_and_all_answers_of_a_tenant_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"data": Rows(1000, lambda begin, end: ["x" * 100] * (end - begin))}
    with pytest.raises(AnswerTooLarge, match="50000 bytes"):
        await encoded(body, budget(), 50_000)
    with pytest.raises(Overloaded, match="fewer tokens"):
        await encoded(body, budget(60_000))
    monkeypatch.setattr(encoding, "ANSWER_BYTES_MAX", 60_000)
    with pytest.raises(AnswerTooLarge, match="60000 bytes"):
        await encoded(body, budget())


@pytest.mark.parametrize("chat", [True, False])
async def test_many_choices_with_log_probabilities_come_whole_and_give_back_their_share(
    mesh: Mesh, http: aiohttp.ClientSession, chat: bool
) -> None:
    tokens, rivals = 150, 20
    asked: dict[str, Any] = {"n": 3, "max_tokens": tokens}
    asked |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": rivals} if chat else {}
    asked |= {} if chat else {"prompt": "x", "logprobs": rivals}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asking = asyncio.ensure_future(http.post(mesh.url + path, json=asked))
    for choice in range(3):
        request = await assigned(mesh.first, choice + 1)
        scores = [TokenLogprobs(-float(i), list(range(40, 40 + rivals)), [-1.0] * rivals) for i in range(tokens)]
        await mesh.first.emit(request, 0, [40 + i % 20 for i in range(tokens)], "length", logprobs=scores)
    async with await asking as answer:
        body = await answer.json()
        assert answer.status == 200 and int(answer.headers["content-length"]) > encoding.SEND_BYTES
    name = mesh.gateway.owner.detokenizer.token_text
    for choice in body["choices"]:
        told = choice["logprobs"]
        if chat:
            assert [one["logprob"] for one in told["content"]] == [-float(i) for i in range(tokens)]
            assert all(len(one["top_logprobs"]) == rivals for one in told["content"])
        else:
            assert told["tokens"] == [name(40 + i % 20) for i in range(tokens)]
            lengths = [len(token) for token in told["tokens"]]
            assert told["text_offset"] == [sum(lengths[:i]) for i in range(tokens)]
            assert told["token_logprobs"] == [-float(i) for i in range(tokens)] and len(told["top_logprobs"]) == tokens
    await eventually(lambda: mesh.gateway.owner.answers.used == 0)
