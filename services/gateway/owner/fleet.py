"""The gateway's copy of the workers' published state, used for metrics, readiness and lost requests."""

from __future__ import annotations

import asyncio

from motet.policies.cluster.lost_workers import LostWorkers
from motet.policies.cluster.worker_book import Holdings, WorkerBook
from motet.policies.owner.workers_seen import WorkersSeen
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.telemetry import logger
from motet.shared.wire.worker_state import WorkerNotice, WorkerState

log = logger("motet.gateway.fleet")


class Fleet:
    """All workers that report their state."""

    def __init__(self, bus: Bus, base_model: str) -> None:
        self._bus, self.base_model = bus, base_model
        self._seen = WorkersSeen(base_model)
        self._newcomer = asyncio.Event()
        self.lost = LostWorkers(base_model)

    async def start(self) -> None:
        """Start listening; the state is complete after one heartbeat."""
        await self._bus.subscribe(subjects.WORKER_NOTICES, WorkerNotice, self._on_notice)
        await self._bus.subscribe(subjects.WORKER_STATES, WorkerState, self._on_state)

    def _on_notice(self, notice: WorkerNotice) -> None:
        self.lost.on_notice(notice, now_s())
        if notice.event == "failed":
            log.warning("worker failed", extra={"worker": notice.worker_id, "reason": notice.reason})

    def _on_state(self, state: WorkerState) -> None:
        if heard := self._seen.hear(state, now_s()):
            self.lost.on_state(state.worker_id, state.incarnation)
            if heard == "new":
                self._newcomer.set()
                self._newcomer = asyncio.Event()

    def workers(self) -> WorkerBook:
        """The workers of this gateway's base model that reported recently."""
        for worker_id in self._seen.silent(now_s()):
            self.lose(worker_id)
        return self._seen.book

    def held(self, worker_id: str) -> Holdings:
        """The requests and adapters of a worker; empty for an unknown worker."""
        return self._seen.held(worker_id)

    async def newcomer(self) -> None:
        """Wait for a new worker."""
        await self._newcomer.wait()

    def lose(self, worker_id: str) -> None:
        """Remove a worker whose lease expired or that is silent."""
        if self._seen.book.forget(worker_id):
            self.lost.on_lost(worker_id, now_s())

    def coming(self) -> bool:
        """Whether no worker serves yet but one is loading its model, which takes minutes for a large model."""
        return not self.workers() and self.lost.loading(now_s())

    def why_none_serves(self) -> str:
        """Why no worker serves the base model, for operators: with the reasons that failed workers gave."""
        return "; ".join([f"no worker serves {self.base_model}", *self.lost.sentences(now_s())])

    def forgot(self, worker_id: str, request_id: str, epoch: int, since_s: float) -> bool:
        """Whether a snapshot taken after `since_s` shows that the worker does not have this request."""
        return self._seen.forgot(worker_id, request_id, epoch, since_s)

    def max_model_len(self, default: int) -> int:
        """The longest sequence that any worker accepts, in tokens; `default` without workers."""
        return max((known.limits.max_model_len for known in self.workers()), default=default)

    def prefix_schemes(self) -> list[tuple[int, bool]]:
        """As in `WorkersSeen`."""
        return self._seen.prefix_schemes()

    def tiers(self, digest: str) -> dict[str, str]:
        """Where an adapter version is resident: worker id -> fastest tier."""
        held = {known.worker_id: self.held(known.worker_id).adapters.get(digest) for known in self.workers()}
        return {worker_id: residency.tier for worker_id, residency in held.items() if residency is not None}
