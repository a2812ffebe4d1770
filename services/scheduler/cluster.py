"""The scheduler's copy of the workers' live state, plus its own assignments that no state shows yet.

    WorkerSnapshot / WorkerDelta ──> incarnation? sequence? ──> ClusterState (pure, what policies read)
    own assignments ─────────────> in flight ────────────────┘
    lease lost, long silence ────> worker removed

Rules:
- A snapshot replaces everything. A delta applies only directly after the preceding message. After a gap the known requests stay
  until the next snapshot; facts that a delta states in full (memory, draining) are still updated.
- Only a snapshot introduces a worker or an incarnation. A new incarnation replaces the old one at once, whose late messages are
  ignored. The same holds for an incarnation whose lease was lost, unless its lease is held again.
- An assignment counts as load from the moment it is made, so that a burst between two states is spread. `policies.flights` says
  when it stops counting.
- Any message of a worker clears its marks (unresponsive, refusing).

Synchronous and without a clock: time comes in as `now_s`, always this process's own, so clocks need not agree.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from policies.cluster_state import ClusterState
from policies.flights import Flights
from services.scheduler.metrics import STATE_GAPS
from shared.messages import WorkerDelta, WorkerSnapshot, WorkerStatus
from shared.model import RequestBrief, WorkerLimits
from shared.telemetry import logger

log = logger("motet.scheduler.cluster")
GONE_MEMORY = 4096  # ended incarnations remembered, the oldest forgotten first


class _Worker(msgspec.Struct):
    """Facts on one worker besides its row in ClusterState."""

    incarnation: str
    limits: WorkerLimits
    seq: int
    in_sync: bool
    heard_s: float
    draining: bool = False
    adapter_bytes_free: int = 0


class Cluster:
    """All workers known to this scheduler. `lease_held(worker_id)` tells whether a lease is held now."""

    def __init__(self, *, stale_s: float, drop_s: float, in_flight_s: float, lease_held: Callable[[str], bool]) -> None:
        self.state = ClusterState()
        self._flights = Flights(self.state, in_flight_s)
        self._stale_s, self._drop_s = stale_s, drop_s
        self._lease_held = lease_held
        self._workers: dict[str, _Worker] = {}
        self._gone: dict[tuple[str, str], None] = {}  # (worker id, incarnation), in the order in which they ended

    # ---- what workers say

    def on_state(self, message: WorkerSnapshot | WorkerDelta, now_s: float) -> None:
        """Take in a snapshot or delta of a worker."""
        worker_id, incarnation = message.worker_id, message.incarnation
        if self._is_gone(worker_id, incarnation):
            return
        worker = self._workers.get(worker_id)
        if worker is not None and worker.incarnation != incarnation:
            log.info("worker restarted", extra={"worker": worker_id})
            self._remove(worker_id)
            worker = None
        if isinstance(message, WorkerSnapshot):
            self._on_snapshot(worker, message, now_s)
        elif worker is None:
            STATE_GAPS.inc()  # its first snapshot is still to come
        else:
            self._on_delta(worker, message, now_s)

    def _on_snapshot(self, worker: _Worker | None, message: WorkerSnapshot, now_s: float) -> None:
        worker_id = message.worker_id
        if worker is None:
            log.info("worker found", extra={"worker": worker_id, "base_model": message.limits.base_model})
            worker = self._workers[worker_id] = _Worker(
                message.incarnation, message.limits, message.seq, in_sync=True, heard_s=now_s
            )
        elif message.seq <= worker.seq:
            return  # an older one, late
        elif message.seq != worker.seq + 1 and worker.in_sync:
            STATE_GAPS.inc()
        worker.limits, worker.seq, worker.in_sync = message.limits, message.seq, True
        self.state.put_worker(worker_id, message.limits, message.perf)
        self.state.replace_adapters(worker_id, {r.digest: r.tier for r in message.adapters})
        self._heard(worker, message, now_s)
        self._flights.snapshot(worker_id, message.requests, now_s)

    def _on_delta(self, worker: _Worker, message: WorkerDelta, now_s: float) -> None:
        if message.seq <= worker.seq:
            return
        if message.seq != worker.seq + 1:
            if worker.in_sync:
                STATE_GAPS.inc()
            worker.in_sync = False
        worker.seq = message.seq
        self._heard(worker, message, now_s)
        if not worker.in_sync:
            return
        self._flights.delta(message.worker_id, message.changed, message.removed, now_s)
        for held in message.resident:
            self.state.put_adapter(message.worker_id, held.digest, held.tier)
        for digest in message.evicted:
            self.state.drop_adapter(message.worker_id, digest)
        if message.running_left is not None:
            self.state.set_running_left(message.worker_id, message.running_left)

    def _heard(self, worker: _Worker, message: WorkerSnapshot | WorkerDelta, now_s: float) -> None:
        worker.heard_s, worker.draining = now_s, message.draining
        worker.adapter_bytes_free = message.adapter_bytes_free
        self.state.heard(message.worker_id, now_s, kv_blocks_free=message.kv_blocks_free, draining=message.draining)

    # ---- who is away

    def lease_lost(self, worker_id: str) -> None:
        """The worker is dead or has stopped."""
        if worker_id in self._workers:
            log.info("worker lost", extra={"worker": worker_id})
            self._remove(worker_id)

    def expire(self, now_s: float) -> None:
        """Remove workers silent for `drop_s`, and assignments that no state ever showed. Call a few times a second."""
        for worker_id, worker in list(self._workers.items()):
            if now_s - worker.heard_s > self._drop_s:
                log.info("worker forgotten", extra={"worker": worker_id, "silent_s": round(now_s - worker.heard_s, 1)})
                del self._workers[worker_id]  # not `_remove`: the same incarnation may speak again
                self._drop(worker_id)
        self._flights.expire(now_s)

    def excuse_silence(self, now_s: float) -> None:
        """Restart every worker's silence now, after a time without a connection."""
        for worker_id, worker in self._workers.items():
            worker.heard_s = now_s
            self.state.set_heard(worker_id, now_s)

    def _remove(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id)
        self._drop(worker_id)
        self._gone[worker_id, worker.incarnation] = None
        if len(self._gone) > GONE_MEMORY:
            del self._gone[next(iter(self._gone))]

    def _drop(self, worker_id: str) -> None:
        self.state.drop_worker(worker_id)
        self._flights.forget(worker_id)

    def _is_gone(self, worker_id: str, incarnation: str) -> bool:
        if (worker_id, incarnation) not in self._gone:
            return False
        if worker_id in self._workers or not self._lease_held(worker_id):
            return True
        del self._gone[worker_id, incarnation]  # its lease lapsed for a moment, or a restart's lease came after its state
        return False

    # ---- what we promise workers

    def expect(self, worker_id: str, brief: RequestBrief, now_s: float) -> None:
        """Count a request as waiting on a worker, before it is assigned."""
        self._flights.expect(worker_id, brief, now_s)

    def accepted(self, worker_id: str, request_id: str, now_s: float) -> None:
        """The worker accepted the request: its state will show it soon."""
        self._flights.accepted(worker_id, request_id, now_s)

    def withdraw(self, worker_id: str, request_id: str) -> None:
        """The worker did not accept the request."""
        self._flights.withdraw(worker_id, request_id)

    def unresponsive(self, worker_id: str, now_s: float) -> None:
        """The worker did not answer: no requests until its next message."""
        if worker_id in self._workers:
            self.state.set_heard(worker_id, now_s - self._stale_s - 1.0)

    def refusing(self, worker_id: str) -> None:
        """The worker said that it has no room: no requests until its next message."""
        if worker_id in self._workers:
            self.state.set_refusing(worker_id)

    def unavailable(self, worker_id: str) -> None:
        """The worker said that it takes nothing new: no requests until its next message."""
        if worker_id in self._workers:
            self.state.set_draining(worker_id)

    # ---- for people and metrics

    def knows(self, worker_id: str) -> bool:
        """Whether this worker is known by a snapshot and was not removed."""
        return worker_id in self._workers

    def in_flight(self) -> int:
        """The number of assignments that no state shows yet."""
        return len(self._flights)

    def stale(self, now_s: float) -> int:
        """The number of workers that get no requests because they are silent."""
        return sum(self._is_stale(worker_id, now_s) for worker_id in self._workers)

    def status(self, now_s: float) -> list[WorkerStatus]:
        """Every worker, by id."""
        return [self._status(worker_id, worker, now_s) for worker_id, worker in sorted(self._workers.items())]

    def _is_stale(self, worker_id: str, now_s: float) -> bool:
        return bool(self.state.table["heard_s"][self.state.row(worker_id)] < now_s - self._stale_s)

    def _status(self, worker_id: str, worker: _Worker, now_s: float) -> WorkerStatus:
        row, table = self.state.row(worker_id), self.state.table
        tiers = list(self.state.adapters(worker_id).values())
        return WorkerStatus(
            worker_id=worker_id,
            incarnation=worker.incarnation,
            base_model=worker.limits.base_model,
            engine=worker.limits.engine,
            device=worker.limits.device,
            running=int(table["running"][row]),
            waiting=int(table["queued"][row]),
            in_flight=self._flights.count(worker_id),
            max_running=worker.limits.max_running,
            max_waiting=worker.limits.max_waiting,
            kv_blocks_free=int(table["kv_tokens_free"][row]) // worker.limits.block_size,
            kv_blocks_total=worker.limits.kv_blocks_total,
            adapter_bytes_free=worker.adapter_bytes_free,
            adapter_bytes_total=worker.limits.adapter_bytes_total,
            adapters_on_device=tiers.count("device"),
            adapters_on_host=tiers.count("host"),
            draining=worker.draining,
            stale=self._is_stale(worker_id, now_s),
            age_ms=round((now_s - worker.heard_s) * 1000),
        )
