"""`Idempotency-Key`: the same request of the same tenant runs once on this gateway, however often it is sent.

    first                      runs to its end even if its client disconnects, since the client is likely to retry
    again, while it runs       waits for the same answer
    again, afterwards          gets the stored answer, with `idempotent-replayed: true`
    again, with another body   422: a key stands for one request
    streamed                   runs once; its tokens are not stored, so a repetition gets 409

Failures are not stored: the next request with the key runs. Answers are stored in this process for AGE_S, at most ANSWERS_MAX
of them and BYTES_MAX in all; the oldest are evicted first. Use a durable request for work that must run once across gateways
and restarts.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from starlette.requests import Request

from motet.shared.clock import now_s
from motet.shared.errors import BadRequest, Conflict

HEADER = "idempotency-key"
AGE_S = 24 * 3600.0
ANSWERS_MAX = 4096
BYTES_MAX = 64 << 20
_USABLE = re.compile(r"[\x20-\x7e]{1,255}")
_Name = tuple[str, str, str]  # tenant, path, key


class KeyReused(Conflict):
    """The key was used with another body."""

    status, code = 422, "idempotency_key_reused"


@dataclass(slots=True)
class _Kept:
    digest: bytes
    since_s: float
    running: asyncio.Task[bytes] | None = None  # None once there is an answer, and for a stream
    answer: bytes | None = None


class Once:
    """Requests with an Idempotency-Key that this gateway runs or has answered."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Name, _Kept] = OrderedDict()
        self._bytes = 0

    async def whole(
        self, request: Request, body: bytes, work: Callable[[], Coroutine[None, None, bytes]]
    ) -> tuple[bytes, bool]:
        """Returns (the answer, whether it is a repetition). Raises what `work` raises, BadRequest, Conflict or KeyReused."""
        name = _name(request)
        kept = self._find(name, body)
        if kept is not None:
            if kept.answer is not None:
                return kept.answer, True
            if kept.running is None:
                raise Conflict("the answer to this Idempotency-Key was streamed and cannot be repeated", param=HEADER)
            return await asyncio.shield(kept.running), True
        kept = self._keep(name, body)
        kept.running = running = asyncio.get_running_loop().create_task(work())
        running.add_done_callback(lambda task: self._done(name, kept, task))
        return await asyncio.shield(running), False

    def stream(self, request: Request, body: bytes) -> Callable[[], None]:
        """Start a streamed request; returns the function to call if it fails before it streams. Raises as `whole`."""
        name = _name(request)
        if self._find(name, body) is not None:
            raise Conflict("this Idempotency-Key was used before, and a streamed answer cannot be repeated", param=HEADER)
        kept = self._keep(name, body)
        return lambda: self._drop(name, kept)

    def _find(self, name: _Name, body: bytes) -> _Kept | None:
        kept = self._kept.get(name)
        if kept is not None and kept.running is None and now_s() - kept.since_s > AGE_S:
            self._drop(name, kept)
            kept = None
        if kept is not None and kept.digest != _digest(body):
            raise KeyReused("this Idempotency-Key was used with another request", param=HEADER)
        return kept

    def _keep(self, name: _Name, body: bytes) -> _Kept:
        kept = self._kept[name] = _Kept(_digest(body), now_s())
        self._bound()
        return kept

    def _done(self, name: _Name, kept: _Kept, task: asyncio.Task[bytes]) -> None:
        kept.running = None
        if task.cancelled() or task.exception() is not None:
            self._drop(name, kept)
            return
        kept.answer, kept.since_s = task.result(), now_s()
        self._bytes += len(kept.answer)
        self._bound()

    def _drop(self, name: _Name, kept: _Kept) -> None:
        if self._kept.get(name) is kept:
            del self._kept[name]
            self._bytes -= len(kept.answer or b"")

    def _bound(self) -> None:
        """Evict the oldest answers. Running requests stay; the gateway's limit on sequences bounds them."""
        ended = [(name, kept) for name, kept in self._kept.items() if kept.running is None] if self._over() else []
        for name, kept in ended:
            if not self._over():
                return
            self._drop(name, kept)

    def _over(self) -> bool:
        return len(self._kept) > ANSWERS_MAX or self._bytes > BYTES_MAX


def _name(request: Request) -> _Name:
    key = request.headers[HEADER]
    if not _USABLE.fullmatch(key):
        raise BadRequest("Idempotency-Key: 1 to 255 printable ASCII characters are expected", param=HEADER)
    return request.state.tenant, request.url.path, key


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
