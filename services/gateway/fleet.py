"""The gateway's copy of the workers' published state, used for metrics, readiness and lost requests."""

from __future__ import annotations

import asyncio
import contextlib

from nats.aio.subscription import Subscription

from services.gateway.absent import Absentees
from shared import subjects
from shared.bus import Bus
from shared.clock import now_s
from shared.messages import WorkerDelta, WorkerNotice, WorkerSnapshot, WorkerState
from shared.model import RequestBrief, Residency, WorkerLimits
from shared.telemetry import logger

log = logger("motet.gateway.fleet")

STALE_S = 10.0  # a worker that was not heard for this long is forgotten


class WorkerView:
    """One worker's last known state."""

    __slots__ = (
        "adapter_bytes_free",
        "draining",
        "heard_s",
        "kv_blocks_free",
        "limits",
        "requests",
        "residency",
        "seq",
        "snapshot_s",
    )

    def __init__(self, snapshot: WorkerSnapshot) -> None:
        self.limits: WorkerLimits = snapshot.limits
        self.seq = snapshot.seq
        self.kv_blocks_free, self.adapter_bytes_free = snapshot.kv_blocks_free, snapshot.adapter_bytes_free
        self.draining = snapshot.draining
        self.requests: dict[str, RequestBrief] = {brief.request_id: brief for brief in snapshot.requests}
        self.residency: dict[str, Residency] = {held.digest: held for held in snapshot.adapters}
        self.heard_s = self.snapshot_s = now_s()

    def apply(self, delta: WorkerDelta) -> None:
        """Apply a delta. After a gap in `seq` the state is outdated until the next snapshot."""
        self.heard_s = now_s()
        if delta.seq != self.seq + 1:
            return
        self.seq = delta.seq
        self.kv_blocks_free, self.adapter_bytes_free = delta.kv_blocks_free, delta.adapter_bytes_free
        self.draining = delta.draining
        for brief in delta.changed:
            self.requests[brief.request_id] = brief
        for request_id in delta.removed:
            self.requests.pop(request_id, None)
        for held in delta.resident:
            self.residency[held.digest] = held
        for digest in delta.evicted:
            self.residency.pop(digest, None)

    def on_device(self, digest: str) -> bool:
        """Whether an adapter version is on this worker's device."""
        held = self.residency.get(digest)
        return held is not None and held.tier == "device"


class Fleet:
    """All workers that report their state."""

    def __init__(self, bus: Bus, base_model: str) -> None:
        self._bus, self._base_model = bus, base_model
        self._workers: dict[str, WorkerView] = {}
        self._newcomer = asyncio.Event()
        self._inlet: Subscription | None = None
        self.absent = Absentees(base_model)

    async def start(self) -> None:
        """Start listening; the state is complete after one heartbeat."""
        await self._bus.subscribe(subjects.WORKER_NOTICES, WorkerNotice, self._on_notice)
        self._inlet = await self._bus.subscribe(subjects.WORKER_STATES, WorkerState, self._on_state)

    def _on_notice(self, notice: WorkerNotice) -> None:
        self.absent.on_notice(notice, now_s())
        if notice.event == "failed":
            log.warning("worker failed", extra={"worker": notice.worker_id, "reason": notice.reason})

    def _on_state(self, state: WorkerState) -> None:
        if isinstance(state, WorkerSnapshot):
            if state.limits.base_model == self._base_model:
                if state.worker_id not in self._workers:
                    self._newcomer.set()
                    self._newcomer = asyncio.Event()
                self.absent.on_state(state.worker_id, state.incarnation)
                self._workers[state.worker_id] = WorkerView(state)
        elif (known := self._workers.get(state.worker_id)) is not None:
            known.apply(state)

    def workers(self) -> dict[str, WorkerView]:
        """The workers of our base model that reported recently, by id."""
        oldest = now_s() - STALE_S
        for worker_id in [w for w, view in self._workers.items() if view.heard_s < oldest]:
            self.lose(worker_id)
        return self._workers

    async def newcomer(self, within_s: float) -> bool:
        """Wait for a new worker; returns whether one came."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._newcomer.wait()
                return True
        return False

    def lose(self, worker_id: str) -> None:
        """Remove a worker whose lease expired or that is silent."""
        if self._workers.pop(worker_id, None) is not None:
            self.absent.on_lost(worker_id, now_s())

    def nobody(self) -> str:
        """Why no worker serves the base model, for operators: with the last words of failed workers."""
        return "; ".join([f"no worker serves {self._base_model}", *self.absent.sentences(now_s())])

    def forgot(self, worker_id: str, request_id: str, epoch: int, since_s: float) -> bool:
        """Whether a snapshot taken after `since_s` shows that the worker does not have this request."""
        view = self._workers.get(worker_id)
        if view is None or view.snapshot_s < since_s:
            return False
        brief = view.requests.get(request_id)
        return brief is None or brief.epoch != epoch

    def max_model_len(self, default: int) -> int:
        """The longest sequence that any worker accepts, in tokens; `default` without workers."""
        return max((view.limits.max_model_len for view in self.workers().values()), default=default)

    def tiers(self, digest: str) -> dict[str, str]:
        """Where an adapter version is resident: worker id -> fastest tier."""
        return {w: view.residency[digest].tier for w, view in self.workers().items() if digest in view.residency}
