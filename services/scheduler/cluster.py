"""The scheduler's copy of the workers' live state, plus its own assignments that no state shows yet.

    WorkerSnapshot / WorkerDelta ──> WorkerBook ──> ClusterView ──> ClusterState (pure, what policies read)
    own assignments ─────────────────────────────> Flights ───────┘
    lease lost, long silence ──────> worker removed

- Everything comes in as an event (`events`), so that a decision log can be replayed.
- `policies.cluster.worker_book` decides which messages count, `policies.cluster.cluster_view` what they mean.
- An assignment counts as load from the moment it is made, so that a burst between two states is spread.
  `policies.cluster.flights` says when it stops counting.
- Any message of a worker clears its marks (`events.Marked`).

Synchronous and without a clock: events carry the time, always this process's own, so clocks need not agree.
"""

from __future__ import annotations

from motet.policies.cluster.cluster_view import ClusterView
from motet.policies.cluster.worker_book import Known, WorkerBook
from motet.services.scheduler.events import (
    Assigning,
    AtHome,
    ClusterEvent,
    Heard,
    LeaseLost,
    Mark,
    Marked,
    NotTaken,
    Taken,
    Tick,
)
from motet.services.scheduler.metrics import STATE_GAPS
from motet.shared.telemetry import logger
from motet.shared.wire.admin import WorkerStatus
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot

log = logger("motet.scheduler.cluster")


class WatchedCluster:
    """All workers known to this scheduler."""

    def __init__(self, *, stale_s: float, drop_s: float, in_flight_s: float) -> None:
        view = ClusterView(in_flight_s)
        self.state, self._flights = view.state, view.flights
        self._lease_held = False  # by the worker whose message is being taken in
        self._book = WorkerBook(view, lambda _: self._lease_held)
        self._stale_s, self._drop_s = stale_s, drop_s

    def on(self, event: ClusterEvent) -> None:
        """Apply an event; `events` says what each event means."""
        match event:
            case Heard():
                self._lease_held = event.lease_held
                self._hear(event.message, event.now_s)
            case Assigning():
                self._flights.expect(event.worker_id, event.brief, event.now_s, event.prefix_keys)
            case Taken():
                self._flights.accepted(event.worker_id, event.request_id, event.now_s)
            case NotTaken():
                self._flights.withdraw(event.worker_id, event.request_id)
            case Marked():
                if event.worker_id in self._book:
                    self._mark(event.worker_id, event.mark, event.now_s)
            case AtHome():
                self.state.put_homes(event.worker_id, event.digests)
            case LeaseLost():
                if self._book.lose(event.worker_id):
                    log.info("worker lost", extra={"worker": event.worker_id})
            case Tick():
                if not event.connected:
                    self._excuse_silence(event.now_s)
                self._expire(event.now_s)

    def _hear(self, message: WorkerSnapshot | WorkerDelta, now_s: float) -> None:
        book, worker_id = self._book, message.worker_id
        before, gaps = book.get(worker_id), book.gaps
        if isinstance(message, WorkerSnapshot):
            book.snapshot(message, now_s)
        elif book.delta(message, now_s):
            return  # it continues what is known
        if book.gaps != gaps:
            STATE_GAPS.inc()
        known = book.get(worker_id)
        if known is not before:
            if before is not None:
                log.info("worker restarted", extra={"worker": worker_id})
            if known is not None:
                log.info("worker found", extra={"worker": worker_id, "base_model": known.limits.base_model})

    def _mark(self, worker_id: str, mark: Mark, now_s: float) -> None:
        match mark:
            case "silent":
                self.state.set_heard(worker_id, now_s - self._stale_s - 1.0)
            case "full":
                self.state.set_refusing(worker_id)
            case "leaving":
                self.state.set_draining(worker_id)

    def _excuse_silence(self, now_s: float) -> None:
        """Restart every worker's silence now."""
        self._book.excuse_silence(now_s)
        for known in self._book:
            self.state.set_heard(known.worker_id, now_s)

    def _expire(self, now_s: float) -> None:
        """Remove workers silent for `drop_s`, and assignments that no state ever showed."""
        for known in self._book.silent(now_s - self._drop_s):
            log.info("worker forgotten", extra={"worker": known.worker_id, "silent_s": round(now_s - known.heard_s, 1)})
            self._book.forget(known.worker_id)
        self._flights.expire(now_s)

    # ---- for people and metrics

    def knows(self, worker_id: str) -> bool:
        """Whether this worker is known by a snapshot and was not removed."""
        return worker_id in self._book

    def serving(self, now_s: float) -> list[Known]:
        """The workers that get requests."""
        return [known for known in self._book if not known.draining and not self._is_stale(known.worker_id, now_s)]

    def leaving(self, base_model: str) -> list[str]:
        """The workers of a base model that take no new requests because they are going to stop."""
        return [known.worker_id for known in self._book if known.draining and known.limits.base_model == base_model]

    def unlisted(self) -> list[str]:
        """The workers that report cached KV blocks, of which some message is missing."""
        return [known.worker_id for known in self._book if known.limits.prefix_cache and not known.listed]

    def in_flight(self) -> int:
        """The number of assignments that no state shows yet."""
        return len(self._flights)

    def stale(self, now_s: float) -> int:
        """The number of workers that get no requests because they are silent."""
        return sum(self._is_stale(known.worker_id, now_s) for known in self._book)

    def status(self, now_s: float) -> list[WorkerStatus]:
        """Every worker, by id."""
        return [self._status(known, now_s) for known in sorted(self._book, key=lambda known: known.worker_id)]

    def _is_stale(self, worker_id: str, now_s: float) -> bool:
        return bool(self.state.table["heard_s"][self.state.row(worker_id)] < now_s - self._stale_s)

    def _status(self, worker: Known, now_s: float) -> WorkerStatus:
        worker_id = worker.worker_id
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
            kv_blocks_total=worker.limits.kv_blocks_most,
            adapter_bytes_free=worker.adapter_bytes_free,
            adapter_bytes_total=worker.limits.adapter_bytes_most,
            adapters_on_device=tiers.count("device"),
            adapters_on_host=tiers.count("host"),
            draining=worker.draining,
            stale=self._is_stale(worker_id, now_s),
            age_ms=round((now_s - worker.heard_s) * 1000),
            capabilities=worker.limits.capabilities,
            quantization=worker.limits.quantization,
            kv_cache_dtype=worker.limits.kv_cache_dtype,
            merged=worker.merged,
            merged_share=worker.merged_share,
            mechanisms=dict(worker.mechanisms),
            kernels=worker.limits.kernels,
            kernels_note=worker.limits.kernels_note,
        )
