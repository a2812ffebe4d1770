"""`Idempotency-Key`: the same request of the same tenant runs once on this gateway, however often it is sent.

    first                      runs to its end even if its client disconnects, since the client is likely to retry
    again, while it runs       waits for the same answer
    again, afterwards          gets the stored answer, with `idempotent-replayed: true`
    again, with another body   422: a key stands for one request
    streamed, or too large     runs once; the answer is not stored, so a repetition gets 409

Failures are not stored: the next request with the key runs. Answers are stored in this process for AGE_S, at most ANSWERS_MAX
of them and BYTES_MAX in all. Beyond that the oldest of the tenant that has most is evicted, so a tenant that has less than its
share loses nothing to others; and an answer of more than ANSWER_BYTES_MAX would cost its own tenant too many. Use a durable
request for work that must run once across gateways and restarts.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import Request

from motet.shared.clock import now_s
from motet.shared.errors import BadRequest, Conflict

HEADER = "idempotency-key"
AGE_S = 24 * 3600.0
ANSWERS_MAX = 4096
BYTES_MAX = 64 << 20
ANSWER_BYTES_MAX = 4 << 20
_USABLE = re.compile(r"[\x20-\x7e]{1,255}")
_Name = tuple[str, str, str]  # tenant, path, key
TOLD = "was streamed and cannot be repeated"
UNKEPT = f"has more than {ANSWER_BYTES_MAX >> 20} MiB and was not kept"


class Answered(NamedTuple):
    """A whole answer: its body, and the headers that say what made it."""

    body: bytes
    headers: dict[str, str]


class KeyReused(Conflict):
    """The key was used with another body."""

    status, code = 422, "idempotency_key_reused"


@dataclass(slots=True)
class _Kept:
    digest: bytes
    since_s: float
    running: asyncio.Task[Answered] | None = None  # None once there is an answer, and for a stream
    answer: Answered | None = None
    why_none: str = ""

    @property
    def bytes(self) -> int:
        """The size of the stored answer."""
        return len(self.answer.body) if self.answer is not None else 0


class _Tenant:
    """The requests of one tenant, the oldest first, and the bytes of their answers."""

    def __init__(self) -> None:
        self.running: dict[_Name, _Kept] = {}
        self.ended: OrderedDict[_Name, _Kept] = OrderedDict()
        self.bytes = 0


class Once:
    """Requests with an Idempotency-Key that this gateway runs or has answered."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._entries = self._bytes = 0  # of those that ended

    async def whole(
        self, request: Request, digest: bytes, work: Callable[[], Coroutine[None, None, Answered]]
    ) -> tuple[Answered, bool]:
        """Returns (the answer, whether it is a repetition). Raises what `work` raises, BadRequest, Conflict or KeyReused.

        `digest`: of the request's body.
        """
        name = _name(request)
        kept = self._find(name, digest)
        if kept is not None:
            if kept.answer is not None:
                return kept.answer, True
            if kept.running is None:
                raise Conflict(f"the answer to this Idempotency-Key {kept.why_none}", param=HEADER)
            return await asyncio.shield(kept.running), True
        kept = _Kept(digest, now_s())
        self._of(name).running[name] = kept
        kept.running = running = asyncio.get_running_loop().create_task(work())
        running.add_done_callback(lambda task: self._done(name, kept, task))
        return await asyncio.shield(running), False

    def stream(self, request: Request, digest: bytes) -> Callable[[], None]:
        """Start a streamed request; returns the function to call if it fails before it streams. Raises as `whole`."""
        name = _name(request)
        if self._find(name, digest) is not None:
            raise Conflict("this Idempotency-Key was used before, and a streamed answer cannot be repeated", param=HEADER)
        kept = _Kept(digest, now_s(), why_none=TOLD)
        self._keep(name, kept)
        return lambda: self._drop(name, kept)

    def _of(self, name: _Name) -> _Tenant:
        return self._tenants.setdefault(name[0], _Tenant())

    def _find(self, name: _Name, digest: bytes) -> _Kept | None:
        tenant = self._tenants.get(name[0])
        if tenant is None:
            return None
        kept = tenant.running.get(name) or tenant.ended.get(name)
        if kept is not None and kept.running is None and now_s() - kept.since_s > AGE_S:
            self._drop(name, kept)
            return None
        if kept is not None and kept.digest != digest:
            raise KeyReused("this Idempotency-Key was used with another request", param=HEADER)
        return kept

    def _done(self, name: _Name, kept: _Kept, task: asyncio.Task[Answered]) -> None:
        kept.running = None
        tenant = self._of(name)
        del tenant.running[name]
        if not task.cancelled() and task.exception() is None:
            answer = task.result()
            kept.since_s = now_s()
            kept.answer, kept.why_none = (None, UNKEPT) if len(answer.body) > ANSWER_BYTES_MAX else (answer, "")
            self._keep(name, kept)
        elif not tenant.running and not tenant.ended:
            del self._tenants[name[0]]

    def _keep(self, name: _Name, kept: _Kept) -> None:
        tenant, size = self._of(name), kept.bytes
        tenant.ended[name] = kept
        tenant.bytes += size
        self._entries, self._bytes = self._entries + 1, self._bytes + size
        while self._bytes > BYTES_MAX:
            self._evict(max(self._tenants.values(), key=lambda one: one.bytes))
        while self._entries > ANSWERS_MAX:
            self._evict(max(self._tenants.values(), key=lambda one: len(one.ended)))

    def _evict(self, tenant: _Tenant) -> None:
        self._drop(*next(iter(tenant.ended.items())))

    def _drop(self, name: _Name, kept: _Kept) -> None:
        tenant = self._tenants.get(name[0])
        if tenant is None or tenant.ended.get(name) is not kept:
            return
        size = kept.bytes
        del tenant.ended[name]
        tenant.bytes -= size
        self._entries, self._bytes = self._entries - 1, self._bytes - size
        if not tenant.running and not tenant.ended:
            del self._tenants[name[0]]


def _name(request: Request) -> _Name:
    key = request.headers[HEADER]
    if not _USABLE.fullmatch(key):
        raise BadRequest("Idempotency-Key: 1 to 255 printable ASCII characters are expected", param=HEADER)
    return request.state.tenant, request.url.path, key
