"""Decides how many workers each base model should have (`policies.scale`), and tells it; it starts and stops nothing itself.

    FleetDemand, workers ─> Seen ─> BaseSizer: forecast, law, decision ─> Sized to all schedulers ─> /v1/scale
                             └> decision log

The scheduler that plans (`planner`) looks every `LOOK_S`. A look is made in a thread, since a packing takes some hundred
milliseconds. All schedulers keep the last decisions, so each can answer for them, and the next planner goes on with them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from motet.policies.cluster.lost_workers import HOPED_FOR, LostWorkers
from motet.policies.cluster.worker_book import Known
from motet.policies.scale.base_sizer import LONG_AGO_S, LOOK_S, BaseSizer, Seen
from motet.policies.scale.fleet_demand import BaseRates, FleetDemand
from motet.policies.scale.need import Asked, Objective, Packed, typical
from motet.policies.scale.sizing import SizingConfig
from motet.policies.scale.starts import Starts
from motet.services.scheduler import metrics
from motet.services.scheduler.cluster import WatchedCluster
from motet.services.scheduler.decision_log import DecisionLog, Looked
from motet.services.scheduler.planner import Planner
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s, unix_ms
from motet.shared.errors import MotetError
from motet.shared.telemetry import logger
from motet.shared.wire.admin import ClusterStatus, StatusReply, StatusRequest
from motet.shared.wire.scale import OLD_MS, Decision, Sized, Wake
from motet.shared.wire.worker_state import WorkerNotice

log = logger("motet.scheduler.sizer")
STARTS_S = 1.0
ASK_S = 1.0
ASLEEP = frozenset({"idle", "asleep"})
WOKEN_S = 15.0  # so long the word that requests wait holds
KEPT = 200  # decisions of a base model
BASES_MAX = 64
NO_LAW = "a formula for workers that make embeddings"
NOTHING = BaseRates(requests_s=0.0, refused_s=0.0, prompt_tokens_s=0.0, output_tokens_s=0.0, adapters={})


@dataclass(slots=True)
class _Base:
    """What is known of one base model between two looks."""

    sizer: BaseSizer
    lost: LostWorkers
    starts: Starts = field(default_factory=Starts)
    serving: frozenset[str] = frozenset()  # at the last look
    waiting: dict[str, tuple[float, int]] = field(default_factory=dict)  # gateway: when it said that so many requests wait

    def woken(self, now_s: float) -> int:
        """Requests that wait at gateways for a first worker."""
        self.waiting = {gateway: told for gateway, told in self.waiting.items() if now_s - told[0] < WOKEN_S}
        return sum(count for _, count in self.waiting.values())


class FleetSizer:
    """Sizes all base models of a mesh, and keeps the decisions of whichever scheduler plans."""

    def __init__(
        self,
        bus: Bus,
        cluster: WatchedCluster,
        demand: FleetDemand,
        planner: Planner,
        *,
        scheduler_id: str,
        sizing: tuple[SizingConfig, Objective],
        decision_log: DecisionLog | None = None,
    ) -> None:
        self._bus, self._cluster, self._demand, self._planner = bus, cluster, demand, planner
        self._id, self._sizing, self._decision_log = scheduler_id, sizing, decision_log
        self._bases: dict[str, _Base] = {}
        self.decisions: dict[str, deque[Sized]] = {}
        self._woken = asyncio.Event()

    async def start(self) -> None:
        """Follow notices of workers, and the decisions of all schedulers."""
        await self._bus.subscribe(subjects.WORKER_NOTICES, WorkerNotice, self._on_notice)
        await self._bus.subscribe(subjects.SCALE, Sized, self._on_sized)
        await self._bus.subscribe(subjects.WAKE, Wake, self._on_wake)
        await self._ask_for_decisions()

    async def _ask_for_decisions(self) -> None:
        """Take over the last decisions of another scheduler: without them a new one starts a worker for a base that sleeps."""
        with contextlib.suppress(MotetError):
            reply = await self._bus.request(subjects.SCHEDULER_STATUS, StatusRequest(scale=True), StatusReply, timeout_s=ASK_S)
            for decisions in reply.scale if isinstance(reply, ClusterStatus) else []:
                if decisions and unix_ms() - decisions[-1].at_unix_ms < OLD_MS:
                    for sized in decisions:
                        self._on_sized(sized)

    def _on_notice(self, notice: WorkerNotice) -> None:
        base, now = self._base(notice.base_model), now_s()
        base.lost.on_notice(notice, now)
        if notice.event == "starting":
            base.starts.begun(notice.worker_id, now)
        else:
            base.starts.ended(notice.worker_id)

    def _on_wake(self, wake: Wake) -> None:
        """Looked at once, until somebody has decided that there should be a worker."""
        if wake.base_model not in self._bases and len(self._bases) >= BASES_MAX:
            return
        base, now = self._base(wake.base_model), now_s()
        decided = self.decisions.get(wake.base_model)
        if not decided or not decided[-1].decision.desired:
            self._woken.set()
        base.waiting[wake.gateway_id] = (now, wake.waiting)

    def _on_sized(self, sized: Sized) -> None:
        if sized.base_model in self.decisions or len(self.decisions) < BASES_MAX:
            self.decisions.setdefault(sized.base_model, deque(maxlen=KEPT)).append(sized)
        decision = sized.decision
        for name in ("desired", "current", "starting", "needed"):
            metrics.SCALE.labels(sized.base_model, name).set(getattr(decision, name))

    def _base(self, name: str) -> _Base:
        if name not in self._bases:
            config, objective = self._sizing
            self._bases[name] = _Base(BaseSizer(config, Packed(objective)), LostWorkers(name))
        return self._bases[name]

    async def run(self) -> None:
        """Look every `LOOK_S`, and for workers that have started every `STARTS_S`. Never returns."""
        looked_s = now_s()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), min(STARTS_S, LOOK_S))
            self._watch_starts()
            if now_s() - looked_s < LOOK_S and not self._woken.is_set():
                continue
            looked_s = now_s()
            self._woken.clear()
            try:
                for sized in await self.look():
                    await self._bus.publish(subjects.SCALE, sized)
            except MotetError as error:
                log.warning("nobody was told how many workers there should be", extra={"error": error.message})

    def _watch_starts(self) -> None:
        now = now_s()
        serving = self._cluster.serving(now)
        for known in serving:
            self._base(known.limits.base_model).lost.on_state(known.worker_id, known.incarnation)
        for base in self._bases.values():
            base.starts.look(now, {known.worker_id for known in serving})

    async def look(self) -> list[Sized]:
        """What all base models need now; decides nothing while another scheduler plans, but keeps the forecasts going."""
        now = now_s()
        rates, serving, missing = self._demand.rates(now), self._cluster.serving(now), self._demand.missing(now)
        found = []
        for name in {*rates, *self._bases, *(known.limits.base_model for known in serving)}:
            base, asked = self._base(name), rates.get(name, NOTHING)
            mine = [known for known in serving if known.limits.base_model == name]
            if (sized := await self._size(name, base, asked, mine, missing)) is not None:
                found.append(sized)
        return found

    async def _size(
        self, name: str, base: _Base, asked: BaseRates, serving: list[Known], silent: Collection[str]
    ) -> Sized | None:
        seen = self._seen(name, base, asked, serving, silent)
        ahead, decision = await asyncio.to_thread(base.sizer.look, seen)
        if self._decision_log is not None:
            self._decision_log.write(Looked(base_model=name, seen=seen, decision=decision))
        if decision is None:
            return None
        self._log(name, decision)
        return Sized(
            base_model=name,
            scheduler_id=self._id,
            at_unix_ms=unix_ms(),
            decision=decision,
            requests_s=round(asked.requests_s, 3),
            forecast_requests_s=round(ahead.upper.requests_s, 3),
            lead_s=round(seen.lead_s, 1),
        )

    def _absent(self, base: _Base, serving: list[Known], leaving: Collection[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Workers that start, and those that vanished, each with the time; long ago for one that starts again and again."""
        now, here = now_s(), frozenset(known.worker_id for known in serving)
        for known in serving:
            base.lost.on_state(known.worker_id, known.incarnation)
        for gone in base.serving - here - set(leaving):
            base.lost.on_lost(gone, now)
        base.serving = here
        starting, lost = dict[str, float](), dict[str, float]()
        for one in base.lost.all(now):
            found = starting if one.state == "loading" else lost
            found[one.worker_id] = one.at_s if one.starts <= HOPED_FOR else LONG_AGO_S
        return starting, lost

    def _seen(self, name: str, base: _Base, asked: BaseRates, serving: list[Known], silent: Collection[str]) -> Seen:
        now, state = now_s(), self._cluster.state
        leaving = self._cluster.leaving(name)
        starting, lost = self._absent(base, serving, leaving)
        decided = self.decisions.get(name)
        missing = [f"the reports of {name}" for name in silent]
        if any("embeddings" in known.limits.capabilities for known in serving):
            missing.append(NO_LAW)
        rows = [state.row(known.worker_id) for known in serving]
        return Seen(
            now_s=now,
            counted=self._demand.counted(name),
            asked=Asked.of(asked),
            worker=typical([state.terms(known.worker_id) for known in serving]) if serving else None,
            ready={known.worker_id: float(known.limits.adapter_bytes_most - known.adapter_bytes_free) for known in serving},
            starting=starting,
            leaving=leaving,
            lost=lost,
            told=decided[-1].decision.desired if decided else 0,
            slept=decided[-1].decision.reason in ASLEEP if decided else False,
            queued=float(state.table["queued"][rows].sum()),
            parked=base.woken(now),
            missing=missing,
            lead_s=base.starts.lead_s,
            decides=self._planner.mine,
        )

    def _log(self, name: str, decision: Decision) -> None:
        before = self.decisions.get(name)
        if before and before[-1].decision.desired == decision.desired:
            return
        shown = {"base_model": name, "desired": decision.desired, "current": decision.current, "reason": decision.reason}
        log.info("workers that there should be", extra=shown | {"limit": decision.limit, "needed": decision.needed})
