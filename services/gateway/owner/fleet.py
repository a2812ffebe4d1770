"""The gateway's copy of the workers' published state, used for metrics, readiness and lost requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from motet.policies.cluster.lost_workers import LostWorkers
from motet.policies.cluster.worker_book import Holdings, WorkerBook
from motet.policies.owner.workers_seen import WorkersSeen
from motet.shared import subjects
from motet.shared.base_layers import missing
from motet.shared.bus import Bus
from motet.shared.clock import now_s, unix_ms
from motet.shared.errors import MotetError
from motet.shared.model import Capability
from motet.shared.telemetry import logger
from motet.shared.wire.admin import ClusterStatus, StatusReply, StatusRequest
from motet.shared.wire.scale import OLD_MS, Reason, Sized
from motet.shared.wire.worker_state import WorkerNotice, WorkerState

log = logger("motet.gateway.fleet")
ASLEEP: frozenset[Reason] = frozenset({"idle", "asleep", "woken"})
ASK_S = 2.0


class Fleet:
    """All workers that report their state."""

    def __init__(self, bus: Bus, base_model: str) -> None:
        self._bus, self.base_model = bus, base_model
        self._seen = WorkersSeen(base_model)
        self._newcomer = asyncio.Event()
        self.lost = LostWorkers(base_model)
        self._sized: Sized | None = None  # the last decision on how many workers there should be
        self._sized_s = 0.0
        self._slept = False  # none has served since the last one left because nobody asked

    async def start(self) -> None:
        """Start listening; the state is complete after one heartbeat."""
        await self._bus.subscribe(subjects.WORKER_NOTICES, WorkerNotice, self._on_notice)
        await self._bus.subscribe(subjects.WORKER_STATES, WorkerState, self._on_state)
        await self._bus.subscribe(subjects.SCALE, Sized, self._on_sized)
        self._bus.spawn(self._ask_for_decision())

    async def _ask_for_decision(self) -> None:
        """Ask for the last one: until the next nobody here knows that a base model sleeps, and requests are refused."""
        with contextlib.suppress(MotetError):
            reply = await self._bus.request(subjects.SCHEDULER_STATUS, StatusRequest(scale=True), StatusReply, timeout_s=ASK_S)
            for decisions in reply.scale if isinstance(reply, ClusterStatus) and self._sized is None else []:
                if decisions and unix_ms() - decisions[-1].at_unix_ms < OLD_MS:
                    self._on_sized(decisions[-1])

    def _on_sized(self, sized: Sized) -> None:
        if sized.base_model == self.base_model:
            self._sized, self._sized_s = sized, now_s()

    def _on_notice(self, notice: WorkerNotice) -> None:
        self.lost.on_notice(notice, now_s())
        if notice.event == "failed":
            log.warning("worker failed", extra={"worker": notice.worker_id, "reason": notice.reason})

    def _on_state(self, state: WorkerState) -> None:
        if heard := self._seen.hear(state, now_s()):
            self.lost.on_state(state.worker_id, state.incarnation)
            if heard == "new":
                self._slept = False
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
        """Whether no worker serves, but one loads its model, which takes minutes for a large model, or is started on demand."""
        return not self.workers() and (self.lost.loading(now_s()) or self.asleep() or (self._slept and self._decided()))

    def _decided(self) -> bool:
        """Whether schedulers tell how many workers there should be, so that a word that requests wait brings one."""
        return self._sized is not None and now_s() - self._sized_s < OLD_MS / 1000

    def asleep(self) -> bool:
        """Whether there is no worker since nobody asked for so long: the next request has one started."""
        told = self._sized is not None and self._decided() and self._sized.decision.reason in ASLEEP
        asleep = told and not self.workers()
        self._slept = self._slept or asleep
        return asleep

    def usable(self) -> bool:
        """Whether requests can come: they are served, or wait for a worker of a base model that slept."""
        return bool(self.workers()) or self.asleep() or (self._slept and self.coming())

    @property
    def start_s(self) -> float:
        """How long a worker takes to start, as schedulers have measured it."""
        return self._sized.lead_s if self._sized is not None else 1.0

    def why_none_serves(self) -> str:
        """Why no worker serves the base model, for operators: with the reasons that failed workers gave."""
        return "; ".join([f"no worker serves {self.base_model}", *self.lost.sentences(now_s())])

    def forgot(self, worker_id: str, request_id: str, epoch: int, since_s: float) -> bool:
        """Whether a snapshot taken after `since_s` shows that the worker does not have this request."""
        return self._seen.forgot(worker_id, request_id, epoch, since_s)

    def any_can(self, capability: Capability) -> bool:
        """Whether a worker that takes requests has this capability."""
        return self._seen.any_can(capability)

    def max_model_len(self, default: int) -> int:
        """The longest sequence that any worker accepts, in tokens; `default` without workers."""
        return max((known.limits.max_model_len for known in self.workers()), default=default)

    def prefix_schemes(self) -> list[tuple[int, bool]]:
        """As in `WorkersSeen`."""
        return self._seen.prefix_schemes()

    def able(self, targets: Sequence[str], rank: int) -> list[str]:
        """The workers that can run an adapter of these layers (`AdapterVersion.targets`) and this rank."""
        limits = {known.worker_id: known.limits for known in self.workers()}
        return sorted(
            worker_id
            for worker_id, told in limits.items()
            if rank <= told.max_lora_rank and not missing(targets, told.lora_targets)
        )

    def tiers(self, digest: str) -> dict[str, str]:
        """Where an adapter version is resident: worker id -> fastest tier."""
        held = {known.worker_id: self.held(known.worker_id).adapters.get(digest) for known in self.workers()}
        return {worker_id: residency.tier for worker_id, residency in held.items() if residency is not None}
