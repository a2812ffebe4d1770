"""Encodes whole answers in parts, so that a large one neither stalls the event loop nor is built twice.

An answer of 64 choices with 20 log-probabilities per token has millions of small objects: seconds of encoding, and gigabytes
if they are all there at once. `Rows` stand in a body for long arrays whose items are made when they are encoded.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motet.policies.tenant_shares import Part
from motet.shared.clock import now_s
from motet.shared.errors import AnswerTooLarge, Overloaded

T = TypeVar("T")
ANSWERS_BYTES_MAX = 256 << 20  # of all answers that are being made or sent
ANSWER_BYTES_MAX = 128 << 20
SLICE = 64  # items that are made and encoded at once: some milliseconds with 20 log-probabilities each
SEND_BYTES = 64 << 10  # small parts are sent together
BUSY_S = 0.002  # then other tasks have their turn
LESS = "ask for fewer tokens, choices or log-probabilities"
_MARK = secrets.token_hex(16)  # no client can guess it, so it is in no text
_encoder = msgspec.json.Encoder(enc_hook=list)
_QUOTED = msgspec.json.encode(_MARK)


class Rows(Collection[T]):
    """An array of `count` items. `make(begin, end)` is called once for each slice, in order, while the array is encoded."""

    def __init__(self, count: int, make: Callable[[int, int], list[T]]) -> None:
        self._count, self._make = count, make

    def slices(self) -> Iterator[list[T]]:
        """The items, at most `SLICE` at a time."""
        for begin in range(0, self._count, SLICE):
            yield self._make(begin, min(begin + SLICE, self._count))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for items in self.slices():
            yield from items

    def __contains__(self, item: object) -> bool:
        return any(one == item for one in self)


class Breath:
    """Gives other tasks their turn after every `BUSY_S` of work."""

    def __init__(self) -> None:
        self._since_s = now_s()

    async def take(self) -> None:
        """To be awaited between two pieces of work."""
        if now_s() - self._since_s > BUSY_S:
            await asyncio.sleep(0)
            self._since_s = now_s()


def hold(held: Part, size: int) -> None:
    """Count `size` more bytes of an answer. Raises AnswerTooLarge, or Overloaded when the tenant's others have its share."""
    if held.amount + size > ANSWER_BYTES_MAX:
        raise AnswerTooLarge(f"the answer has more than {ANSWER_BYTES_MAX} bytes; {LESS}")
    if not held.take(size):
        raise Overloaded(f"this tenant's other answers have not been sent yet; {LESS}", retry_after_s=1.0)


def encoded_at_once(body: msgspec.Struct) -> bytes:
    """The JSON of a small body; its `Rows` become lists."""
    return _encoder.encode(body)


async def encoded(body: msgspec.Struct | dict[str, Any], held: Part, bytes_max: int = ANSWER_BYTES_MAX) -> list[bytes]:
    """The JSON of `body` in parts. Raises AnswerTooLarge as soon as they have more than `bytes_max`, and as `hold`."""
    waiting: list[Rows[Any]] = []
    size = 0

    def add(part: bytes) -> None:
        nonlocal size
        size += len(part)
        if size > bytes_max:
            raise AnswerTooLarge(f"the answer has more than the {bytes_max} bytes that it may have; {LESS}")
        hold(held, len(part))
        parts.append(part)

    def mark(value: Any) -> str:
        if not isinstance(value, Rows):
            raise TypeError(type(value).__name__)
        waiting.append(value)
        return _MARK

    between = msgspec.json.encode(body, enc_hook=mark).split(_QUOTED)
    parts, breath = list[bytes](), Breath()
    add(between[0])
    for rows, after in zip(waiting, between[1:], strict=True):
        add(b"[")
        comma = b""
        for items in rows.slices():
            if items:
                add(comma + msgspec.json.encode(items)[1:-1])
                comma = b","
            await breath.take()
        add(b"]" + after)
    return parts


class PartsResponse(Response):
    """A JSON answer that is sent part by part, as the client reads."""

    def __init__(self, parts: list[bytes], headers: dict[str, str]) -> None:
        super().__init__(None, headers=headers, media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, parts)))
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        waiting, size = list[bytes](), 0
        for part in self._parts:
            for at in range(0, len(part), SEND_BYTES):
                waiting.append(part[at : at + SEND_BYTES])
                size += len(waiting[-1])
                if size > SEND_BYTES:
                    await send({"type": "http.response.body", "body": b"".join(waiting), "more_body": True})
                    waiting, size = [], 0
        await send({"type": "http.response.body", "body": b"".join(waiting), "more_body": False})
