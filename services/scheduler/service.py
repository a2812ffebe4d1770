"""The scheduler: takes a request, chooses a worker, assigns it, and answers which worker has it.

    submit ─> predict (at most predict_ms) ─> decide (policies.cluster.dispatch)   ─> assign ─> Assigned
                                                   ^                            │
                                                   └── next best, `attempts` ───┘ refused, absent or silent

Several schedulers may run side by side. Each keeps its own copy of the workers' state and answers the submits that it gets
from the queue group. It learns of the others' assignments from the workers' states.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path

import msgspec
from msgspec.structs import replace

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.describe import brief_of, first_and_more, picture_brief, predicted
from motet.policies.cluster.dispatch import Decision, seconds_until_room
from motet.policies.cluster.scheduler_core import SchedulerCore
from motet.policies.lengths.quantiles import LengthQuantiles
from motet.policies.scale.fleet_demand import REPORT_S, FleetDemand, Tally
from motet.services.scheduler import metrics
from motet.services.scheduler.config import SchedulerConfig
from motet.services.scheduler.decision_log import DecisionLog, Setup
from motet.services.scheduler.events import Assigning, ClusterEvent, Heard, LeaseLost, Marked, NotTaken, Taken, Tick
from motet.services.scheduler.placer import Placer
from motet.services.scheduler.planner import Planner
from motet.services.scheduler.rebalancer import Rebalancer
from motet.services.scheduler.refusal import RETRY_S, refusal, too_late
from motet.services.scheduler.sizer import FleetSizer
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.config import ConfigError
from motet.shared.errors import DeadlineExceeded, MotetError, Overloaded, Unavailable, from_info
from motet.shared.leases import LeaseWatch
from motet.shared.model import AdapterRef, RequestBrief
from motet.shared.service import BusService, run
from motet.shared.telemetry import logger
from motet.shared.wire.admin import ClusterStatus, DemandStatus, StatusRequest
from motet.shared.wire.demand import DemandReport
from motet.shared.wire.prediction import Outcome, Prediction, PredictReply, PredictRequest
from motet.shared.wire.refusal import Refused
from motet.shared.wire.request import Assigned, AssignReply, Cancel, Control, GenerateRequest, ListPrefixes
from motet.shared.wire.worker_state import WorkerState

log = logger("motet.scheduler")
TICK_S = 0.25
SETTLE_S = 2.0  # at start: time to receive a message of every worker that holds a lease
ADAPTERS = 4096  # length histograms kept for when the predictor does not answer


class SchedulerService(BusService):
    """One scheduler (`shared.service.Service`).

    It is ready also without workers, and then refuses requests with that reason (see motet_scheduler_workers).
    """

    name = "scheduler"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._config = config
        self.id = config.process.identity("scheduler")
        self._leases: LeaseWatch | None = None
        self.lengths = LengthQuantiles(ADAPTERS)
        self._log: DecisionLog | None = None
        setup = Setup(options=config.options, drop_s=config.drop_s, sizing=config.sizing)
        if config.decision_log:
            self._log = _open_log(config.decision_log, setup)
        self.cluster = setup.cluster()
        self._core = SchedulerCore(config.options, self.cluster.state)
        self.demand, self._tally = FleetDemand(), Tally(now_s())
        self.planner: Planner | None = None
        self.rebalancer: Rebalancer | None = None
        self.sizer: FleetSizer | None = None
        self.placer: Placer | None = None

    # ---- life

    async def start(self) -> None:
        """Subscribe to the workers' states, wait for those of live workers, then accept requests."""
        self._bus = bus = await Bus.connect(self._config.bus, self.id, inbox=self.name)
        await bus.subscribe(subjects.WORKER_STATES, WorkerState, self._on_state)
        await bus.subscribe(subjects.OUTCOME, Outcome, self._on_outcome)
        await bus.subscribe(subjects.DEMAND, DemandReport, self._on_demand)
        watching = bus.spawn(self._watch_leases())
        bus.spawn(self._tick())
        bus.spawn(self._tell_demand())
        await self._settle(watching)
        identity = f"{self.id}-{secrets.token_hex(8)}"
        self.planner = planner = Planner(bus, identity)
        self.rebalancer = Rebalancer(
            bus,
            self.cluster,
            self.lengths.mean_tokens,
            planner=planner,
            stale_s=self._config.stale_s,
            policy=self._core.rebalancer(),
        )
        if self._core.options.placement:
            self.placer = self._make_placer(bus, planner, identity)
            await self.placer.start()
            bus.spawn(self.placer.run())
        if self._core.options.rebalance != "off":
            bus.spawn(self.rebalancer.run())
        if (sizing := self._config.sizing) is not None:
            self.sizer = FleetSizer(
                bus, self.cluster, self.demand, planner, scheduler_id=self.id, sizing=sizing, decision_log=self._log
            )
            await self.sizer.start()
            bus.spawn(self.sizer.run())
        if self._core.options.rebalance != "off" or self.placer is not None or self.sizer is not None:
            bus.spawn(planner.run())
        await bus.serve("submit", subjects.SUBMIT, GenerateRequest, self.submit, queue=self.name)
        await bus.serve("status", subjects.SCHEDULER_STATUS, StatusRequest, self._status, queue=self.name)

    def _make_placer(self, bus: Bus, planner: Planner, identity: str) -> Placer:
        return Placer(
            bus,
            self.cluster,
            self._core.placing,
            planner,
            identity=identity,
            every_s=self._core.options.place_s,
            on_homes=self._on,
        )

    async def _settle(self, watching: asyncio.Task[None]) -> None:
        """Wait for the live workers' states: without them this scheduler would refuse requests that others could place."""
        deadline = now_s() + SETTLE_S
        while now_s() < deadline:
            if watching.done() and self._leases is not None and all(map(self.cluster.knows, self._leases.ids())):
                return
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        if self.planner is not None:
            with contextlib.suppress(MotetError):
                await self.planner.stop()
        with contextlib.suppress(MotetError):
            await self._report_demand(leaving=True)
        await super().stop()
        if self._log is not None:
            self._log.close()

    async def _watch_leases(self) -> None:
        """Follow leases, which show losses at once. Before the registry has made their bucket, only silence shows them."""
        bus = self._connected()
        leases = LeaseWatch(bus, "worker", lambda worker_id: self._on(LeaseLost(worker_id)))
        while True:
            try:
                await leases.start()
                self._leases = leases
                return
            except Unavailable as error:
                log.warning("no leases yet", extra={"error": error.message})

    async def _tick(self) -> None:
        bus = self._connected()
        while True:
            now = now_s()
            self._on(Tick(now, bus.connected))
            stale = self.cluster.stale(now)
            metrics.WORKERS.labels("stale").set(stale)
            metrics.WORKERS.labels("live").set(len(self.cluster.state) - stale)
            metrics.IN_FLIGHT.set(self.cluster.in_flight())
            metrics.PREFIX_BLOCKS.set(len(self.cluster.state.prefixes))
            for worker_id in self.cluster.unlisted():
                await self._control(worker_id, ListPrefixes())
            await asyncio.sleep(TICK_S)

    # ---- messages

    def _on(self, event: ClusterEvent) -> None:
        """Every change of the cluster's state is made here."""
        if self._log is not None:
            self._log.write(event)
        self.cluster.on(event)

    def _on_state(self, message: WorkerState) -> None:
        held = self._leases is not None and self._leases.alive(message.worker_id)
        self._on(Heard(message, now_s(), held))

    def _on_outcome(self, outcome: Outcome) -> None:
        self.lengths.observe(outcome.adapter_digest, outcome.output_tokens)

    def _on_demand(self, report: DemandReport) -> None:
        self.demand.hear(report, now_s())

    async def _tell_demand(self) -> None:
        """Tell all schedulers, this one too, what it was asked for. A report that is lost is demand that nobody sees."""
        while True:
            await asyncio.sleep(REPORT_S)
            with contextlib.suppress(Unavailable):  # told with the next report
                await self._report_demand()

    async def _report_demand(self, *, leaving: bool = False) -> None:
        bus = self._connected()
        if bus.connected:
            await bus.publish(subjects.DEMAND, self._tally.report(self.id, now_s(), leaving=leaving))

    def _demand_status(self) -> list[DemandStatus]:
        now = now_s()
        missing = self.demand.missing(now)
        return [
            DemandStatus(
                base_model=name,
                requests_s=round(rates.requests_s, 3),
                refused_s=round(rates.refused_s, 3),
                prompt_tokens_s=round(rates.prompt_tokens_s, 1),
                output_tokens_s=round(rates.output_tokens_s, 1),
                adapters=sum(digest != "" for digest in rates.adapters),
                missing=missing,
            )
            for name, rates in self.demand.rates(now).items()
        ]

    async def _status(self, asked: StatusRequest) -> ClusterStatus:
        plans = await self.rebalancer.dry_run() if asked.plan and self.rebalancer is not None else []
        moves = self.rebalancer.mechanism if self.rebalancer is not None and self._core.options.rebalance != "off" else None
        return ClusterStatus(
            scheduler_id=self.id,
            workers=self.cluster.status(now_s()),
            plans=plans,
            rebalance=moves,
            demand=self._demand_status(),
            scale=[list(sized) for sized in self.sizer.decisions.values()] if asked.scale and self.sizer is not None else [],
        )

    # ---- a request

    async def submit(self, request: GenerateRequest) -> Assigned:
        """Place a request. Raises the error for its sender: Unavailable, Overloaded, or a worker's final refusal."""
        began = now_s()
        try:
            if request.image is not None:
                predicted_tokens = request.image.steps_run + 1  # known: its steps, and the picture
            else:
                predicted_tokens = await self._predict(request)
            assigned = await self._place(request, predicted_tokens)
        except MotetError as error:
            metrics.DECISIONS.labels(error.code).inc()
            if isinstance(error, Overloaded | Unavailable):
                self._count(request, predicted_tokens, refused=True)
            raise
        self._count(request, predicted_tokens)
        metrics.DECISIONS.labels("assigned").inc()
        metrics.SUBMIT_S.observe(now_s() - began)
        return assigned

    def _count(self, request: GenerateRequest, predicted_tokens: int, *, refused: bool = False) -> None:
        if not request.epoch:  # else it was counted before its loss, its move or its refusal
            self._tally.asked(
                request.base_model,
                request.request_id,
                [one.ref for one in request.weighted],
                prompt_tokens=request.prompt_tokens,
                output_tokens=predicted_tokens,
                refused=refused,
            )

    async def _predict(self, request: GenerateRequest) -> int:
        """Expected output tokens over all epochs: the predictor's if it answers in time, else this scheduler's estimate."""
        digest = request.adapter.digest if request.adapter is not None else ""
        max_tokens = max(1, request.sampling.max_tokens)
        ask = PredictRequest(
            adapter_digest=digest,
            prompt_tokens=request.prompt_tokens,
            max_tokens=max_tokens,
            min_tokens=max_tokens if request.sampling.ignore_eos else request.sampling.min_tokens,
            features=request.features,
            prompt_text=request.prompt_text,
        )
        tokens = None
        try:
            reply = await self._connected().request(
                subjects.PREDICT, ask, PredictReply, timeout_s=self._config.predict_ms / 1000.0
            )
            if isinstance(reply, Prediction):
                tokens = reply.p50_tokens
            else:
                metrics.PREDICTION_MISSES.labels("failed").inc()
        except DeadlineExceeded:
            metrics.PREDICTION_MISSES.labels("late").inc()
        except Unavailable:
            metrics.PREDICTION_MISSES.labels("absent").inc()
        except msgspec.MsgspecError:
            metrics.PREDICTION_MISSES.labels("failed").inc()
        if tokens is None:
            tokens = self.lengths.expected_tokens(digest, max_tokens)
        return predicted(tokens, most=max_tokens, produced=request.output_tokens)

    async def _place(self, asked: GenerateRequest, predicted_tokens: int) -> Assigned:
        request = replace(
            asked, predicted_tokens=predicted_tokens, features=b"", prompt_text="", prefix_keys=(), repeated=0, move_to=""
        )
        brief = brief_of(request, predicted_tokens=predicted_tokens, epoch=request.epoch, output_tokens=request.output_tokens)
        adapter = request.adapter
        more: tuple[AdapterRef, ...] = ()
        if request.image is not None:
            brief = picture_brief(brief, request.image, request.weighted)
            adapter, more = first_and_more(request.weighted)
        failures: dict[str, MotetError] = {}
        ask = self._core.ask(
            brief,
            now_s(),
            base_model=request.base_model,
            adapter=adapter,
            more=more,
            e2e_slo_ms=request.slo.e2e_slo_ms,
            prefix_keys=asked.prefix_keys,
            needs=request.needs,
            avoid=request.exclude_workers,
            repeated=asked.repeated,
            has_kv=request.kv is not None,
        )
        if asked.move_to and (named := self._core.named(ask, asked.move_to, now_s())) is not None:
            error = await self._assign(asked.move_to, request, brief, ask, named)
            if error is None:
                return Assigned(worker_id=asked.move_to, predicted_tokens=predicted_tokens)
            failures[asked.move_to] = error
        for _ in range(self._config.attempts):
            if failures:
                ask = replace(ask, tried=tuple(failures))
            decision = self._decide(ask)
            if decision.worker_id is None:
                if decision.screening is None:
                    raise too_late(ask, decision.late_s)
                if failures:
                    break
                room_in_s = seconds_until_room(self.cluster.state, ask, now_s(), stale_s=self._config.stale_s)
                raise refusal(ask, decision.screening, room_in_s)
            error = await self._assign(decision.worker_id, request, brief, ask, decision)
            if error is None:
                if decision.breaks_slo:
                    metrics.SLO_BREAKS.inc()
                return Assigned(worker_id=decision.worker_id, predicted_tokens=predicted_tokens)
            if _final(error):
                raise error
            failures[decision.worker_id] = error
        raise _all_failed(failures)

    def _decide(self, ask: Ask) -> Decision:
        began = now_s()
        avg_resp_len = self.lengths.mean_tokens()
        decision = self._core.decide(ask, began, avg_resp_len)
        metrics.DECISION_S.observe(now_s() - began)
        if self._log is not None:
            self._log.decided(ask, began, avg_resp_len, decision)
        metrics.CANDIDATES.observe(decision.candidates)
        return decision

    async def _assign(
        self, worker_id: str, request: GenerateRequest, brief: RequestBrief, ask: Ask, decision: Decision
    ) -> MotetError | None:
        """Assign the request to the worker; returns None if accepted, else the error. Never raises a MotetError."""
        bus = self._connected()
        brief = replace(brief, cached_tokens=decision.cached_tokens)
        request = replace(request, cached_tokens=decision.cached_tokens, kv=request.kv or decision.kv)
        if decision.kv is not None:
            metrics.PREFIX_FETCHES.inc()
        self._on(Assigning(worker_id, brief, now_s(), ask.prefix_keys))
        taken = False
        try:
            reply = await bus.request(subjects.assign(worker_id), request, AssignReply, timeout_s=self._config.assign_s)
            if not isinstance(reply, Refused):
                taken = True
                self._on(Taken(worker_id, request.request_id, now_s()))
                return None
            error = from_info(reply.error)
            if isinstance(error, Overloaded):
                self._on(Marked(worker_id, "full", now_s()))
            elif isinstance(error, Unavailable):
                self._on(Marked(worker_id, "leaving", now_s()))
            metrics.ASSIGN_FAILURES.labels(error.code).inc()
        except Unavailable as absent:
            error = absent
            self._on(Marked(worker_id, "silent", now_s()))
            metrics.ASSIGN_FAILURES.labels("absent").inc()
        except (DeadlineExceeded, msgspec.MsgspecError) as silence:
            error = silence if isinstance(silence, MotetError) else MotetError(f"{worker_id} sent an invalid answer: {silence}")
            self._on(Marked(worker_id, "silent", now_s()))
            metrics.ASSIGN_FAILURES.labels("silent").inc()
            await self._cancel(worker_id, request)
        finally:
            if not taken:
                self._on(NotTaken(worker_id, request.request_id))
        log.warning("not taken", extra={"request_id": request.request_id, "worker": worker_id, "error": error.message})
        return error

    async def _cancel(self, worker_id: str, request: GenerateRequest) -> None:
        """Cancel at a worker whose answer may just be late, so that the request does not run in two places."""
        await self._control(worker_id, Cancel(request_id=request.request_id, epoch=request.epoch))

    async def _control(self, worker_id: str, message: Control) -> None:
        try:
            await self._connected().publish(subjects.control(worker_id), message)
        except Unavailable as error:
            log.warning("message lost", extra={"worker": worker_id, "kind": type(message).__name__, "error": error.message})

    def _connected(self) -> Bus:
        assert self._bus is not None, "start() comes first"
        return self._bus


def _open_log(path: str, setup: Setup) -> DecisionLog:
    try:
        return DecisionLog(Path(path), setup)
    except OSError as error:
        raise ConfigError(f"--decision-log: {error.strerror}: {path}") from None


def _final(error: MotetError) -> bool:
    """Whether another worker would refuse it too: the error is in the request."""
    return error.status < 500 and not isinstance(error, Overloaded)


def _all_failed(failures: dict[str, MotetError]) -> MotetError:
    """The error when no worker accepted: 429 if all were full, else 503 with every reason."""
    if all(isinstance(error, Overloaded) for error in failures.values()):
        retry_s = min((e.retry_after_s for e in failures.values() if e.retry_after_s is not None), default=RETRY_S)
        return Overloaded(f"{len(failures)} workers are full", retry_after_s=retry_s)
    reasons = "; ".join(f"{worker_id}: {error.message}" for worker_id, error in failures.items())
    return Unavailable(f"no worker took the request ({reasons})", retry_after_s=RETRY_S)


def main(config: SchedulerConfig) -> int:
    """Run a scheduler until it is told to stop; returns the exit status."""
    return run(SchedulerService(config), config)
