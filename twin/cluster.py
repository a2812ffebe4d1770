"""A simulation run: N workers, M schedulers and one workload.

    arrival ──submit_ms──> a scheduler decides ──assign_ms──> worker accepts ──> ... ──> last token ──stream_ms──> client
                                ▲          └── the next best, `attempts` times, when it refuses
                                └──state_ms── heartbeats every heartbeat_s, changes at most every delta_s

The scheduler of each request is drawn from the run's seed; all other randomness is in the workload and the policy. The same
arguments give the same history to the bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.describe import brief_of, picture_brief
from motet.policies.cluster.dispatch import Decision
from motet.policies.cluster.homes import NO_HOMES, Homes
from motet.policies.cluster.migration_plan import Plan
from motet.policies.cluster.rebalance import RebalanceConfig, Rebalancer, Rebalancing
from motet.policies.cluster.worker_book import DELTA_S, HEARTBEAT_S, Cadence
from motet.shared.model import RequestBrief
from motet.shared.wire.worker_state import WorkerState
from motet.twin.events import ARRIVAL, HEARTBEAT, MESSAGE, PS_PER_S, Events, to_ps
from motet.twin.metrics import Metrics, summary
from motet.twin.run import AnyLive
from motet.twin.scheduler import Scheduler, SchedulerSpec
from motet.twin.travel import Source
from motet.twin.worker import Worker
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Request, Workload

FIRST_PLACE_S = 30.0
"""Seconds to the first homes of adapters, at most, as live."""
NEW_OBJECTS = 100_000
"""New objects from one garbage collection to the next. Few are part of a reference cycle, so collecting often finds nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BusDelays:
    """Delays of messages, and intervals between reports. The intervals are those of live workers."""

    submit_ms: float = 0.0
    assign_ms: float = 0.0
    stream_ms: float = 0.0
    state_ms: float = 1.0
    heartbeat_s: float = HEARTBEAT_S
    delta_s: float = DELTA_S


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceSpec:
    """A rebalancer beside the first scheduler that moves requests between workers (`policies.cluster.rebalance`).

    `clock_s`: real seconds, to measure how long plans take; they take no virtual time.
    """

    config: RebalanceConfig = field(default_factory=RebalanceConfig)
    every_s: float = 0.25
    clock_s: Callable[[], float] = lambda: 0.0


@dataclass(slots=True)
class _Reporter:
    """The time of a worker's last report, and whether the next one is due."""

    worker: Worker
    last_ps: int = -PS_PER_S
    due: bool = False
    cadence: Cadence = field(default_factory=Cadence)


@dataclass(slots=True)
class _Attempt:
    """A request on its way from a scheduler to a worker, in one epoch."""

    request: Request
    scheduler: Scheduler
    ask: Ask
    epoch: int
    predicted_tokens: int
    before: AnyLive | None = None  # as another worker handed it over

    def brief(self) -> RequestBrief:
        """The request as this attempt describes it."""
        return _brief(self.request, self.predicted_tokens, self.epoch, self.before)


def _brief(request: Request, predicted_tokens: int, epoch: int = 0, before: AnyLive | None = None) -> RequestBrief:
    produced = before.length - request.prompt_tokens if before is not None else 0
    brief = brief_of(request, predicted_tokens=predicted_tokens, epoch=epoch, output_tokens=produced)
    return brief if request.image is None else picture_brief(brief, request.image, request.weighted)


class Cluster:
    """A simulated cluster: build it, `run` it, read `metrics` or `summary`.

    Without a scheduler, one worker gets every request at once, with the output length that `predict` returns: by default the
    true one. `balance`: a rebalancer moves requests, also if the
    scheduler does not ask for one. `preload`: adapters on the device at the start, by worker id. `first`: only so many of the
    workers are there at the start; the others wait for `come`.
    """

    def __init__(
        self,
        workload: Workload,
        workers: Sequence[WorkerSpec],
        scheduler: SchedulerSpec | None,
        *,
        bus: BusDelays = BusDelays(),
        seed: int = 0,
        predict: Callable[[Request], int] | None = None,
        balance: BalanceSpec | None = None,
        preload: Mapping[str, Iterable[str]] | None = None,
        first: int | None = None,
    ) -> None:
        if scheduler is None and len(workers) != 1:
            raise ValueError(f"{len(workers)} workers need a scheduler")
        for spec in workers:
            _check_adapters(workload, spec)
        self.workload, self.events = workload, Events()
        self.metrics = Metrics(len(workload), to_ps(bus.stream_ms))
        self._predict = predict or _true_length
        on_change = self._on_change if scheduler is not None else _nobody_listens
        adapters = {adapter.digest: adapter for adapter in workload.adapters}
        self.workers = [
            Worker(i, spec, self.events, self.metrics, adapters, on_change=on_change, on_end=self._on_end)
            for i, spec in enumerate(workers)
        ]
        self._by_id = {worker.worker_id: worker for worker in self.workers}
        for worker_id, digests in (preload or {}).items():
            self._by_id[worker_id].preload(digests)
        copies = scheduler.copies if scheduler is not None else 1
        self.schedulers = [Scheduler(scheduler) for _ in range(copies)] if scheduler is not None else []
        self._turn = np.random.default_rng(seed).integers(copies, size=len(workload), dtype=np.int16).tolist()
        self._reporters = [_Reporter(worker) for worker in self.workers]
        self._submit_ps, self._assign_ps, self._state_ps = map(to_ps, (bus.submit_ms, bus.assign_ms, bus.state_ms))
        self._heartbeat_ps, self._delta_ps = round(bus.heartbeat_s * PS_PER_S), round(bus.delta_s * PS_PER_S)
        self.unfinished = len(workload)  # requests without an end
        self._homes: Homes = NO_HOMES
        self.plans: list[tuple[float, Plan]] = []
        """What the rebalancer decided, and the real seconds that each plan took."""
        self._there: set[str] = set()  # workers that schedulers know
        if scheduler is not None:
            for worker in self.workers[:first]:
                self.come(worker.worker_id)
            self._begin_balancing(scheduler, balance)
        self._coming = iter(workload)
        self._next_arrival()

    def come(self, worker_id: str) -> None:
        """A worker begins to serve: it tells the schedulers of itself, and from then on of changes."""
        worker, now_ps = self._by_id[worker_id], self.events.now_ps
        self._there.add(worker_id)
        first = worker.snapshot()
        for one in self.schedulers:
            one.hear(first, self.events.now_s)
        # spread over the interval: workers do not start at the same instant
        begin_ps = now_ps + self._heartbeat_ps * worker.index // len(self.workers)
        self.events.at(begin_ps, HEARTBEAT, self._heartbeat, self._reporters[worker.index])

    def leave(self, worker_id: str) -> None:
        """A worker is given no more requests, and ends those that it has. It may come again a heartbeat later."""
        self._there.remove(worker_id)
        for one in self.schedulers:
            one.book.forget(worker_id)

    def _begin_balancing(self, scheduler: SchedulerSpec, balance: BalanceSpec | None) -> None:
        if scheduler.placement:
            self.events.at(round(min(FIRST_PLACE_S, scheduler.place_s) * PS_PER_S), MESSAGE, self._place_adapters)
        if balance is not None:
            self._rebalancer: Rebalancing = Rebalancer(balance.config)
        elif scheduler.rebalance != "off":
            self._rebalancer, balance = self.schedulers[0].core.rebalancer(), BalanceSpec()
        if balance is not None:
            self.events.at(round(balance.every_s * PS_PER_S), MESSAGE, self._look, balance)

    def run(self, until_s: float | None = None, *, progress: Callable[[float], None] | None = None) -> None:
        """Simulate until every request has ended, or until `until_s`. Calls `progress(now_s)` from time to time."""
        events, every = self.events, PS_PER_S
        until_ps = None if until_s is None else round(until_s * PS_PER_S)
        thresholds = gc.get_threshold()
        freezes = until_s is None and not gc.get_freeze_count()  # `unfreeze` would undo what the caller has frozen
        if freezes:
            gc.freeze()  # the collector need not look at the workload and its adapters again and again
        gc.set_threshold(NEW_OBJECTS, *thresholds[1:])
        try:
            while self.unfinished and (until_ps is None or events.now_ps < until_ps):
                if not len(events):
                    raise RuntimeError(f"{self.unfinished} requests are waiting for nothing")
                ahead = events.now_ps + every
                events.run(ahead if until_ps is None else min(ahead, until_ps))
                if progress is not None:
                    progress(events.now_s)
        finally:
            gc.set_threshold(*thresholds)
            if freezes:
                gc.unfreeze()

    def summary(self) -> dict[str, Any]:
        """The figures of the run so far, or up to the last token."""
        ended = int(self.metrics.end_ps.max(initial=0))
        end_s = (self.events.now_ps if self.unfinished else ended) / PS_PER_S
        busy_s = sum(worker.engine.busy_ps for worker in self.workers) / PS_PER_S
        return summary(self.workload, self.metrics, end_s=end_s, busy_s=busy_s, workers=len(self.workers))

    # ---- a request

    def _next_arrival(self) -> None:
        request = next(self._coming, None)
        if request is not None:
            self.events.at(request.arrival_ps + self._submit_ps, ARRIVAL, self._arrive, request)

    def _arrive(self, request: Request) -> None:
        self._next_arrival()
        if not self.schedulers:
            if self.workers[0].assign(request, _brief(request, self._predict(request))):
                self.metrics.worker[request.index] = 0
            else:
                self._refuse(request)
            return
        self._place(self._attempt(request))

    def _attempt(self, request: Request, before: AnyLive | None = None, *, has_kv: bool = False) -> _Attempt:
        """A request comes to its scheduler, for the first time or after `before`."""
        scheduler, now_s = self.schedulers[self._turn[request.index]], self.events.now_s
        produced = before.length - request.prompt_tokens if before is not None else 0
        epoch = before.brief.epoch + 1 if before is not None else 0
        predicted_tokens = scheduler.predict(request, produced)
        ask = scheduler.ask(request, _brief(request, predicted_tokens, epoch, before), now_s, has_kv=has_kv)
        return _Attempt(request, scheduler, ask, epoch, predicted_tokens, before)

    def _place(self, attempt: _Attempt) -> None:
        scheduler, decision = attempt.scheduler, None
        if len(attempt.ask.tried) < scheduler.spec.attempts:
            decision = scheduler.decide(attempt.ask, self.events.now_s)
        if decision is None or decision.worker_id is None:
            self._refuse(attempt.request)
            return
        self._send(attempt, decision.worker_id, decision)

    def _send(self, attempt: _Attempt, chosen: str, decision: Decision, source: Source | None = None) -> None:
        brief = attempt.scheduler.expect(chosen, attempt.brief(), self.events.now_s, attempt.ask, decision)
        if (kv := decision.kv) is not None:
            source = Source(self._by_id[kv.worker_id].travels, kv.from_tokens, kv.to_tokens)
        if self._assign_ps:
            self.events.at(self.events.now_ps + self._assign_ps, ARRIVAL, self._assign, attempt, chosen, brief, source)
        else:
            self._assign(attempt, chosen, brief, source)

    def _assign(self, attempt: _Attempt, worker_id: str, brief: RequestBrief, source: Source | None) -> None:
        request, scheduler = attempt.request, attempt.scheduler
        worker = self._by_id[worker_id]
        if worker.assign(request, replace(brief), attempt.before, source=source):
            self.metrics.worker[request.index] = worker.index
            scheduler.flights.accepted(worker_id, request.request_id, self.events.now_s)
            return
        self.metrics.retries += 1
        scheduler.flights.withdraw(worker_id, request.request_id)
        scheduler.state.set_refusing(worker_id)
        attempt.ask = replace(attempt.ask, tried=(*attempt.ask.tried, worker_id))
        self._place(attempt)

    def move(self, request_id: str, to: str, *, fetch: bool = False) -> None:
        """Hand a request from its worker to another one. Ignored when no worker has it, or the other one has it already.

        `fetch`: its KV blocks move with it, where workers have a prefix cache.
        """
        index = int(request_id)
        worker = self.workers[self.metrics.worker[index]]
        if self.metrics.worker[index] >= 0 and worker.worker_id != to:
            fetch = fetch and worker.spec.options.prefix_cache
            worker.give(request_id, lambda live: self._handed(live, to, fetch))

    def _handed(self, live: AnyLive, to: str, fetch: bool) -> None:
        self.metrics.moves += 1
        attempt = self._attempt(live.request, live, has_kv=fetch)
        named = attempt.scheduler.core.named(attempt.ask, to, self.events.now_s)
        if named is not None:
            self._send(attempt, to, named, Source() if fetch else None)
        else:
            self._place(attempt)

    def _look(self, balance: BalanceSpec) -> None:
        """The rebalancer of the first scheduler checks the cluster, moves requests, and schedules its next check."""
        self._find_moves(balance)
        if self.unfinished:
            self.events.at(self.events.now_ps + round(balance.every_s * PS_PER_S), MESSAGE, self._look, balance)

    def _place_adapters(self) -> None:
        """The first scheduler says which adapters are at home on each worker. All schedulers and the workers hear it."""
        scheduler, now_s = self.schedulers[0], self.events.now_s
        looks = scheduler.core.placing.look(scheduler.book, scheduler.state, now_s, self._homes)
        self._homes = {worker: digests for look in looks for worker, digests in look.place().items()}
        for worker_id, digests in self._homes.items():
            for one in self.schedulers:
                one.state.put_homes(worker_id, digests)
            self._by_id[worker_id].pin((), homes=digests)
        if self.unfinished:
            self.events.at(self.events.now_ps + round(scheduler.spec.place_s * PS_PER_S), MESSAGE, self._place_adapters)

    def _find_moves(self, balance: BalanceSpec) -> None:
        scheduler, now_s = self.schedulers[0], self.events.now_s
        questions = self._rebalancer.questions(
            scheduler.state, now_s, stale_s=scheduler.spec.stale_s, avg_resp_len=scheduler.mean_tokens()
        )
        for question in questions:
            began_s = balance.clock_s()
            plan = question.answer(self._rebalancer.config.plan)
            self.plans.append((balance.clock_s() - began_s, plan))
            self._rebalancer.moved([plan], now_s)
            for moved in plan.moves:
                fetch = self._rebalancer.travels(scheduler.state, moved.request_id, moved.source, moved.to)
                self.move(moved.request_id, moved.to, fetch=fetch)

    def _refuse(self, request: Request) -> None:
        self.metrics.refused[request.index] = True
        self.unfinished -= 1

    def _on_end(self, worker: Worker, live: AnyLive) -> None:
        self.unfinished -= 1
        for scheduler in self.schedulers:
            scheduler.observe(live.request)

    # ---- what schedulers hear

    def _on_change(self, worker: Worker) -> None:
        reporter = self._reporters[worker.index]
        if not reporter.due:
            reporter.due = True
            at_ps = max(self.events.now_ps, reporter.last_ps + self._delta_ps)
            self.events.at(at_ps, MESSAGE, self._delta, reporter)

    def _delta(self, reporter: _Reporter) -> None:
        if reporter.due:  # else a heartbeat has told it meanwhile
            self._tell(reporter, reporter.worker.delta())

    def _heartbeat(self, reporter: _Reporter) -> None:
        worker = reporter.worker
        if worker.worker_id not in self._there:
            return
        whole = reporter.cadence.whole(len(worker.core))
        self._tell(reporter, worker.snapshot(lists_prefixes=False) if whole else worker.delta())
        if self.unfinished:
            self.events.at(self.events.now_ps + self._heartbeat_ps, HEARTBEAT, self._heartbeat, reporter)

    def _tell(self, reporter: _Reporter, word: WorkerState) -> None:
        reporter.due, reporter.last_ps = False, self.events.now_ps
        self.events.at(self.events.now_ps + self._state_ps, MESSAGE, self._hear, word)

    def _hear(self, word: WorkerState) -> None:
        now_s = self.events.now_s
        for scheduler in self.schedulers if word.worker_id in self._there else ():
            scheduler.hear(word, now_s)


def _check_adapters(workload: Workload, spec: WorkerSpec) -> None:
    largest = int(workload.adapter_bytes.max(initial=0))
    host_bytes = spec.storage.host_bytes
    for name, room in (("device", spec.limits.adapter_bytes_total), ("host", host_bytes)):
        if room is not None and largest > room:
            raise ValueError(f"an adapter of {largest} bytes does not fit in the {room} bytes of {name} memory for adapters")


def _true_length(request: Request) -> int:
    return request.output_tokens


def _nobody_listens(worker: Worker) -> None:
    worker.view.told()
