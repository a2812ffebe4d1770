"""How many requests run on each adapter version, as the workers tell it in their states."""

from __future__ import annotations

from collections.abc import Iterable

from shared.messages import WorkerDelta, WorkerSnapshot, WorkerState
from shared.model import RequestBrief

STALE_S = 5.0
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
    """Follows all workers. A worker that was silent for `STALE_S` counts for nothing: its requests are elsewhere by then."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def apply(self, state: WorkerState, now_s: float) -> None:
        """Take in a snapshot or a delta. A delta that does not continue what is known waits for the next snapshot."""
        if isinstance(state, WorkerSnapshot):
            if state.worker_id in self._workers or len(self._workers) < MAX_WORKERS or self._forget_stale(now_s):
                self._workers[state.worker_id] = _Worker(state, now_s)
            return
        self._apply_delta(state, now_s)

    def _apply_delta(self, delta: WorkerDelta, now_s: float) -> None:
        worker = self._workers.get(delta.worker_id)
        if worker is None or worker.incarnation != delta.incarnation or delta.seq != worker.seq + 1:
            return
        worker.seq, worker.heard_s = delta.seq, now_s
        worker.add(delta.changed)
        for request_id in delta.removed:
            worker.digests.pop(request_id, None)

    def requests(self, digest: str, now_s: float) -> int:
        """Requests queued or running on the version `digest`."""
        fresh = (worker for worker in self._workers.values() if now_s - worker.heard_s <= STALE_S)
        return sum(used == digest for worker in fresh for used in worker.digests.values())

    def _forget_stale(self, now_s: float) -> bool:
        stale = [name for name, worker in self._workers.items() if now_s - worker.heard_s > STALE_S]
        for name in stale:
            del self._workers[name]
        return bool(stale)
