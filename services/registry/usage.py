"""Counts the requests on each adapter version, from the workers' states."""

from __future__ import annotations

import math
from collections.abc import Iterable

from motet.policies.cluster.worker_book import Known, Shelf, WorkerBook
from motet.shared.model import RequestBrief, WorkerLimits
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot, WorkerState

STALE_S = 5.0
IDLE_S = 60.0  # a gateway tries for half as long to find another worker for a request whose worker is gone
MAX_WORKERS = 4096
MAX_REQUESTS = 65_536  # per worker


class Usage:
    """Follows all workers. A worker silent for `STALE_S` runs nothing, but its requests may be moving to other workers.

    It reads its own `WorkerBook`: a `Shelf` keeps the requests, and versions without a request are remembered for `IDLE_S`.
    """

    def __init__(self) -> None:
        self._shelf = Shelf(MAX_REQUESTS)
        self._book = WorkerBook(self)
        self._left_s: dict[str, float] = {}  # digest -> when a request on it was last seen to leave a worker

    def apply(self, state: WorkerState, now_s: float) -> None:
        """Apply a snapshot or a delta."""
        if not isinstance(state, WorkerSnapshot):
            self._book.delta(state, now_s)
        elif state.worker_id in self._book or len(self._book) < MAX_WORKERS or self._forget_stale(now_s):
            self._book.snapshot(state, now_s)

    def requests(self, digest: str, now_s: float) -> int:
        """Requests queued or running on the version `digest`."""
        fresh = [known for known in self._book if now_s - known.heard_s <= STALE_S]
        return sum(used == digest for known in fresh for used in self._digests(known))

    def workers(self, now_s: float) -> dict[str, WorkerLimits]:
        """The workers that report, by id."""
        return {known.worker_id: known.limits for known in self._book if now_s - known.heard_s <= STALE_S}

    def idle(self, digest: str, now_s: float) -> bool:
        """Whether no worker has had a request on the version `digest` for `IDLE_S`, so that none will be resumed."""
        seen_s = [known.heard_s for known in self._book if digest in self._digests(known)]
        return now_s - max([*seen_s, self._left_s.get(digest, -math.inf)]) > IDLE_S

    # ---- the reader's methods

    def whole(self, known: Known, said: WorkerSnapshot, now_s: float) -> None:
        """The worker has these requests and no others."""
        self._leave(self._digests(known), now_s)
        self._shelf.whole(known, said, now_s)

    def change(self, known: Known, said: WorkerDelta, now_s: float) -> None:
        """Requests came and went."""
        requests = self._shelf.of(known.worker_id).requests
        self._leave(_digests(requests[gone] for gone in said.removed if gone in requests), now_s)
        self._shelf.change(known, said, now_s)

    def facts(self, known: Known, now_s: float) -> None:
        """Does nothing: usage depends on requests only."""

    def ended(self, known: Known) -> None:
        """The worker has gone. Its versions count as used until its last message."""
        self._leave(self._digests(known), known.heard_s)
        self._shelf.ended(known)

    def _digests(self, known: Known) -> list[str]:
        return _digests(self._shelf.of(known.worker_id).requests.values())

    def _leave(self, digests: Iterable[str], at_s: float) -> None:
        for digest in digests:
            self._left_s.pop(digest, None)
            self._left_s[digest] = at_s
        while self._left_s and at_s - self._left_s[oldest := next(iter(self._left_s))] > IDLE_S:
            del self._left_s[oldest]

    def _forget_stale(self, now_s: float) -> bool:
        stale = self._book.silent(now_s - STALE_S)
        return any([self._book.forget(known.worker_id) for known in stale])


def _digests(requests: Iterable[RequestBrief]) -> list[str]:
    """The adapter of each request that has one."""
    return [request.adapter_digest for request in requests if request.adapter_digest]
