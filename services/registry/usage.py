"""Counts the requests on each adapter version, from the workers' states."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shared.messages import WorkerDelta, WorkerSnapshot, WorkerState
from shared.model import RequestBrief

STALE_S = 5.0
IDLE_S = 60.0  # a gateway tries for half as long to find another worker for a request whose worker is gone
MAX_WORKERS = 4096
MAX_REQUESTS = 65_536  # per worker


class _Worker:
    __slots__ = ("digests", "heard_s", "incarnation", "seq")

    def __init__(self, snapshot: WorkerSnapshot, now_s: float) -> None:
        self.incarnation, self.seq, self.heard_s = snapshot.incarnation, snapshot.seq, now_s
        self.digests: dict[str, str] = {}  # request id -> adapter digest
        self.add(snapshot.requests)

    def add(self, requests: Iterable[RequestBrief]) -> None:
        for request in requests:
            if request.adapter_digest and len(self.digests) < MAX_REQUESTS:
                self.digests[request.request_id] = request.adapter_digest


class Usage:
    """Follows all workers. A worker silent for `STALE_S` runs nothing, but its requests may be moving to other workers."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._left_s: dict[str, float] = {}  # digest -> when a request on it was last seen to leave a worker

    def apply(self, state: WorkerState, now_s: float) -> None:
        """Apply a snapshot or a delta. A delta after a gap is ignored until the next snapshot."""
        if isinstance(state, WorkerSnapshot):
            if state.worker_id in self._workers or len(self._workers) < MAX_WORKERS or self._forget_stale(now_s):
                before = self._workers.get(state.worker_id)
                worker = self._workers[state.worker_id] = _Worker(state, now_s)
                if before is not None:
                    same = before.incarnation == worker.incarnation
                    self._leave(set(before.digests.values()), now_s if same else before.heard_s, now_s)
            return
        self._apply_delta(state, now_s)

    def _apply_delta(self, delta: WorkerDelta, now_s: float) -> None:
        worker = self._workers.get(delta.worker_id)
        if worker is None or worker.incarnation != delta.incarnation or delta.seq != worker.seq + 1:
            return
        worker.seq, worker.heard_s = delta.seq, now_s
        worker.add(delta.changed)
        self._leave({worker.digests.pop(request_id, "") for request_id in delta.removed}, now_s, now_s)

    def requests(self, digest: str, now_s: float) -> int:
        """Requests queued or running on the version `digest`."""
        fresh = (worker for worker in self._workers.values() if now_s - worker.heard_s <= STALE_S)
        return sum(used == digest for worker in fresh for used in worker.digests.values())

    def idle(self, digest: str, now_s: float) -> bool:
        """Whether no worker has had a request on the version `digest` for `IDLE_S`, so that none will be resumed."""
        seen_s = [worker.heard_s for worker in self._workers.values() if digest in worker.digests.values()]
        return now_s - max([*seen_s, self._left_s.get(digest, -math.inf)]) > IDLE_S

    def _leave(self, digests: set[str], at_s: float, now_s: float) -> None:
        for digest in digests - {""}:
            self._left_s.pop(digest, None)
            self._left_s[digest] = at_s
        while self._left_s and now_s - self._left_s[oldest := next(iter(self._left_s))] > IDLE_S:
            del self._left_s[oldest]

    def _forget_stale(self, now_s: float) -> bool:
        stale = [name for name, worker in self._workers.items() if now_s - worker.heard_s > STALE_S]
        for name in stale:
            worker = self._workers.pop(name)
            self._leave(set(worker.digests.values()), worker.heard_s, now_s)
        return bool(stale)
