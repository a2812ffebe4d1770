"""The processes of a simulated mesh: gateways, schedulers and workers with the live code's decisions.

client ─> Gateway (OwnerCore) ──Search──> SchedulerProcess (SchedulerCore) ──assign──> WorkerProcess (WorkerCore, BatchCore)
                ▲                                                                        │
                └─────────────────────────────────── frames ─────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.describe import brief_of
from motet.policies.cluster.dispatch import Decision
from motet.policies.owner.events import (
    Action,
    Answered,
    CancelAt,
    Event,
    Newcomer,
    Over,
    Parked,
    Pause,
    PauseOver,
    Refused,
    Submit,
    Tick,
    Told,
    Trouble,
    WorkerGone,
)
from motet.policies.owner.life import Owned
from motet.policies.owner.owner_core import OwnerCore
from motet.policies.owner.workers_seen import WorkersSeen
from motet.shared.model import AdapterRef, RequestBrief
from motet.shared.wire.worker_state import WorkerSnapshot
from motet.twin.events import MESSAGE, PS_PER_S
from motet.twin.metrics import Metrics
from motet.twin.network import HOP_MS, Network, Process
from motet.twin.run import AnyLive
from motet.twin.scheduler import Scheduler, SchedulerSpec
from motet.twin.worker import Worker
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Request

TICK_S = 0.1
LEASE_S = 2.5  # a lease that is not renewed for so long has expired
ASSIGN_S = 1.0  # a scheduler waits this long for a worker's answer
PARK_S = 300.0  # a new request waits this long for a worker that starts


@dataclass
class Counts:
    """What happened in a run."""

    resumed: int = 0
    moved: int = 0
    parked: int = 0
    ended: dict[str, int] = field(default_factory=dict)


class Item(msgspec.Struct):
    """New tokens of one request in a frame."""

    request_id: str
    epoch: int
    index: int
    tokens: list[int]
    finish: str | None = None
    logprobs: Any = None
    error: Any = None


def token_of(request: int, index: int) -> int:
    """The token of a request at this output index."""
    return (request * 1_000_003 + index * 7_919) % 50_000


class Kept(Owned):
    """A request that keeps what it gets."""

    __slots__ = ()

    def push_plain(self, new: list[int]) -> bool:
        self.tokens += new
        return True

    def push(self, new: list[int], item: Any, logprobs: Any) -> None:
        self.tokens += new
        self.finish = item.finish
        self.see_plain()

    def see_plain(self) -> None:
        self.plain = bool(self.tokens) and not self.early

    def begin_again(self) -> bool:
        return False

    def end(self, finish: Any) -> None:
        self.finish = finish

    def fail(self, error: Any) -> None:
        self.error = error


class Stream(Kept):
    """A simulated client's stream."""

    __slots__ = ("request",)

    def __init__(self, request: Request, now_s: float) -> None:
        super().__init__(request.request_id, request.output_tokens, constrained=False, now_s=now_s)
        self.request = request


class WorkerProcess(Process):
    """A simulated worker, and the gateway of each request."""

    def __init__(
        self,
        index: int,
        spec: WorkerSpec,
        network: Network,
        metrics: Metrics,
        adapters: Mapping[str, AdapterRef],
    ) -> None:
        super().__init__("worker", index)
        self._spec, self._network, self._metrics, self._adapters = spec, network, metrics, adapters
        self.begin()

    def begin(self) -> None:
        self.worker = Worker(
            self.index,
            self._spec,
            self._network.events,
            self._metrics,
            self._adapters,
            on_change=lambda worker: None,
            on_end=lambda worker, live: None,
            on_tokens=lambda worker, lives: self._speak(lives),
            incarnation=str(self.generation),
        )
        self.gateways: dict[str, Gateway] = {}

    def kill(self, now_s: float) -> None:
        super().kill(now_s)
        self.worker.kill()

    def lease_held(self, now_s: float) -> bool:
        """Whether its lease has not expired."""
        return self.down_s is None or now_s - self.down_s < LEASE_S

    def assign(self, gateway: Gateway, request: Request, brief: RequestBrief) -> bool:
        """A scheduler assigns a request. Returns whether the worker takes it."""
        taken = self.worker.assign(request, brief)
        if taken:
            self.gateways[request.request_id] = gateway
        return taken

    def hand_back(self) -> None:
        """It is leaving: every request ends with an error that lets its owner resume it."""
        error = Trouble("lost", "worker_lost", "it is leaving")
        for request_id, gateway in self.gateways.items():
            entry = self.worker.core.book.get(request_id)
            if entry is not None:
                produced = entry.payload.length - entry.payload.request.prompt_tokens
                self._frame(gateway, [Item(request_id, entry.brief.epoch, produced, [], "error", error=error)])

    def _speak(self, lives: Sequence[AnyLive]) -> None:
        frames: dict[int, tuple[Gateway, list[Item]]] = {}
        for live in lives:
            gateway = self.gateways.get(live.brief.request_id)
            if gateway is None:
                continue
            index = live.length - live.request.prompt_tokens - 1
            finish = "length" if live.length >= live.end_length else None
            item = Item(live.brief.request_id, live.brief.epoch, index, [token_of(live.request.index, index)], finish)
            frames.setdefault(gateway.index, (gateway, []))[1].append(item)
        for gateway, items in frames.values():
            self._frame(gateway, items)

    def _frame(self, gateway: Gateway, items: list[Item]) -> None:
        copies, late_s, network = 1, 0.0, self._network
        if self.lossy_ps > network.events.now_ps:
            drawn = network.random.random()
            copies = 0 if drawn < 0.08 else 2 if drawn < 0.16 else 1
            late_s = 0.2 * network.random.random() if drawn > 0.9 else 0.0
        for _ in range(copies):
            network.send(self, gateway, gateway.frame, self.worker.worker_id, items, late_s=late_s)


class SchedulerProcess(Process):
    """A simulated scheduler."""

    def __init__(self, index: int, spec: SchedulerSpec, network: Network, workers: Mapping[str, WorkerProcess]) -> None:
        super().__init__("scheduler", index)
        self.spec, self.network, self.workers = spec, network, workers
        self.begin()

    def begin(self) -> None:
        self.scheduler = Scheduler(self.spec)


class Search:
    """A scheduler's search for a worker that takes a request, for its gateway. `begin` is where the submission arrives."""

    def __init__(self, process: SchedulerProcess, gateway: Gateway, stream: Stream, asked: Submit, serial: int) -> None:
        self._process, self._gateway, self._stream, self._epoch = process, gateway, stream, asked.epoch
        self._submission = serial
        self._produced, self._to, self._avoid = len(stream.tokens), asked.to, tuple(stream.excluded)
        self._attempts = 0
        self._predicted_tokens = 0
        self._ask: Ask

    def begin(self) -> None:
        """Predict the request's length, and ask the first worker."""
        scheduler, request = self._process.scheduler, self._stream.request
        self._predicted_tokens = scheduler.predict(request, self._produced)
        self._ask = replace(scheduler.ask(request, self._brief(), self._now_s), avoid=self._avoid)
        self._next()

    @property
    def _now_s(self) -> float:
        return self._process.network.events.now_s

    def _brief(self) -> RequestBrief:
        return brief_of(
            self._stream.request,
            predicted_tokens=self._predicted_tokens,
            epoch=self._epoch,
            output_tokens=self._produced,
        )

    def _reply(self, event: Event) -> None:
        process = self._process
        if process.deaf_ps <= process.network.events.now_ps:
            process.network.send(process, self._gateway, self._gateway.answered, event, self._submission)

    def _next(self) -> None:
        scheduler, tried = self._process.scheduler, self._ask.tried
        named, self._to = self._to, ""
        if named and (decision := scheduler.core.named(self._ask, named, self._now_s)) is not None:
            self._assign(named, decision)
            return
        chosen = scheduler.decide(self._ask, self._now_s) if len(tried) < scheduler.spec.attempts else None
        if chosen is None or chosen.worker_id is None:
            full = chosen is not None and chosen.screening is not None and "full" in chosen.screening.rejected
            why: Any = "overloaded" if full and not tried else "unavailable"
            self._reply(Refused(self._stream, self._epoch, Trouble(why, why, why)))
            return
        self._assign(chosen.worker_id, chosen)

    def _assign(self, worker_id: str, decision: Decision) -> None:
        process, network = self._process, self._process.network
        worker = process.workers[worker_id]
        brief = process.scheduler.expect(worker_id, self._brief(), self._now_s, self._ask, decision)
        self._attempts += 1
        attempt, generation = self._attempts, process.generation

        def settled(how: str) -> None:
            if self._attempts == attempt and not process.dead and process.generation == generation:
                self._attempts += 1
                self._settled(worker, how)

        def take() -> None:
            taken = worker.assign(self._gateway, self._stream.request, replace(brief))
            network.send(worker, process, settled, "taken" if taken else "full")

        network.send(process, worker, take, nobody=lambda: settled("absent"))
        network.after(ASSIGN_S, settled, "silent")

    def _settled(self, worker: WorkerProcess, how: str) -> None:
        """A worker has answered, or has not."""
        scheduler, worker_id, request_id = self._process.scheduler, worker.worker.worker_id, self._stream.request_id
        if how == "taken":
            scheduler.flights.accepted(worker_id, request_id, self._now_s)
            self._reply(Answered(self._stream, self._epoch, worker_id))
            return
        scheduler.flights.withdraw(worker_id, request_id)
        if worker_id in scheduler.book:
            if how == "full":
                scheduler.state.set_refusing(worker_id)
            else:
                scheduler.state.set_heard(worker_id, self._now_s - scheduler.spec.stale_s - 1.0)
        if how == "silent":  # it may have it
            self._process.network.send(self._process, worker, lambda: worker.worker.cancel(request_id, self._epoch))
        self._ask = replace(self._ask, tried=(*self._ask.tried, worker_id))
        self._next()


class Gateway(Process):
    """A simulated gateway; it is the `Mesh` of its core."""

    def __init__(
        self,
        index: int,
        base_model: str,
        network: Network,
        schedulers: Sequence[SchedulerProcess],
        workers: Mapping[str, WorkerProcess],
        counts: Counts,
    ) -> None:
        super().__init__("gateway", index)
        self._network, self._schedulers, self._workers, self._counts = network, schedulers, workers, counts
        self.core = OwnerCore(
            self, trouble=lambda error: error, lost=lambda reason: Trouble("lost", "worker_lost", reason), park_s=PARK_S
        )
        self.seen = WorkersSeen(base_model)
        self._awaited: dict[tuple[str, int], int] = {}  # submissions without an answer: how many there were before
        self._submits = 0

    # ---- what the core sees of the workers

    def serving(self) -> Sequence[str]:
        for worker_id in self.seen.silent(self._network.events.now_s):
            self.seen.book.forget(worker_id)
        return [known.worker_id for known in self.seen.book]

    def alive(self, worker_id: str) -> bool:
        return self._workers[worker_id].lease_held(self._network.events.now_s)

    def coming(self) -> bool:
        return not self.serving() and any(worker.dead for worker in self._workers.values())

    def resumes_structured(self) -> bool:
        return self.seen.any_can("resumes_structured")

    def forgot(self, worker_id: str, request_id: str, epoch: int, since_s: float) -> bool:
        return self.seen.forgot(worker_id, request_id, epoch, since_s)

    # ---- messages

    def on(self, event: Event) -> None:
        """Pass an event to the core, and carry out what it wants."""
        self._perform(self.core.on(event, self._network.events.now_s))

    def frame(self, worker_id: str, items: list[Item]) -> None:
        self._perform(self.core.frame(worker_id, items, self._network.events.now_s))

    def hear(self, state: WorkerSnapshot) -> None:
        if self.seen.hear(state, self._network.events.now_s) == "new":
            self.on(Newcomer())

    def lose(self, worker_id: str) -> None:
        self.seen.book.forget(worker_id)
        self.on(WorkerGone(worker_id))

    def tick(self) -> None:
        """Time passes for the core, from now on."""
        now_ps = self._network.events.now_ps
        if self.frozen_ps <= now_ps:
            self.on(Tick(self.cut_ps <= now_ps))
        self._network.events.at(now_ps + round(TICK_S * PS_PER_S), MESSAGE, self.tick)

    def answered(self, event: Answered | Refused, serial: int) -> None:
        """The answer to a submission, unless it has another one already."""
        key = event.owned.request_id, event.epoch
        if self._awaited.get(key) == serial:
            del self._awaited[key]
            self.on(event)

    def _perform(self, actions: Sequence[Action]) -> None:
        """Carry out what the core wants."""
        for action in actions:
            match action:
                case Submit():
                    self._submit(action)
                case Pause(owned, serial, pause_s):
                    self._network.after(pause_s, self.on, PauseOver(owned, serial))
                case CancelAt(worker_id, request_id, epoch, _):
                    process = self._workers[worker_id]
                    self._network.send(self, process, lambda p=process, r=request_id, e=epoch: p.worker.cancel(r, e))
                case Over(owned, _):
                    how = "refused" if owned.error is not None and not owned.opened else owned.finish or "error"
                    self._counts.ended[how] = self._counts.ended.get(how, 0) + 1
                case Parked():
                    self._counts.parked += 1
                case Told(what):
                    self._counts.resumed += what == "resumed"
                    self._counts.moved += what == "moved"

    def _submit(self, asked: Submit) -> None:
        stream, epoch, network = asked.owned, asked.epoch, self._network
        assert isinstance(stream, Stream)
        self._submits += 1
        serial = self._awaited[stream.request_id, epoch] = self._submits

        def refused(why: Any, code: str) -> None:
            self.answered(Refused(stream, epoch, Trouble(why, code, code)), serial)

        network.after(asked.timeout_s, refused, "late", "deadline_exceeded")
        ready = [one for one in self._schedulers if not one.dead]
        if not ready:
            network.after(HOP_MS / 1000, refused, "unavailable", "unavailable")
            return
        scheduler = ready[int(network.random.integers(len(ready)))]
        search = Search(scheduler, self, stream, asked, serial)
        network.send(self, scheduler, search.begin, nobody=lambda: refused("unavailable", "unavailable"))
