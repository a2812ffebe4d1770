"""A simulated mesh with gateways: requests live through lost messages and dying processes, under the virtual clock.

    client ─> Gateway (OwnerCore) ──submit──> Scheduler (SchedulerCore) ──assign──> Worker (WorkerCore, BatchCore)
                    ▲                                                                  │
                    └────────────────────────────── frames ────────────────────────────┘

The decisions are the live ones. What is simulated are processes and messages: a process may be dead, frozen (its messages wait)
or cut off (they are lost), and frames may be lost, repeated or late. Token j of a request is a function of the request and j,
as sampling noise is one of seed and position, so every answer can be judged. The same arguments give the same history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.describe import brief_of
from motet.policies.owner.events import (
    Action,
    Answered,
    CancelAt,
    Event,
    MoveAsked,
    Newcomer,
    Over,
    Pause,
    PauseOver,
    Refused,
    Submit,
    Submitted,
    Tick,
    Told,
    Trouble,
    WorkerGone,
)
from motet.policies.owner.life import Owned
from motet.policies.owner.owner_core import OwnerCore
from motet.policies.owner.workers_seen import WorkersSeen
from motet.shared.wire.worker_state import WorkerSnapshot
from motet.twin.events import ARRIVAL, HEARTBEAT, MESSAGE, PS_PER_S, Events, to_ps
from motet.twin.metrics import Metrics
from motet.twin.run import Live
from motet.twin.scheduler import Scheduler, SchedulerSpec
from motet.twin.worker import Worker
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Request, Workload

HEARTBEAT_S, TICK_S = 0.5, 0.1
LEASE_S = 2.5  # a lease that is not renewed for so long has expired
ABSENT_S, SILENT_S = 0.15, 0.85  # pings find a dead worker, and one that is frozen or cut off
HOP_MS = 0.3
ASSIGN_S = 1.0  # a scheduler waits this long for a worker's answer
Kind = Literal["worker", "scheduler", "gateway"]
What = Literal["kill", "leave", "freeze", "cut", "lossy", "deaf", "move"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at `at_s` to process `index`, for `lasts_s`.

    kill: it dies, and another one starts after `lasts_s`. leave: a worker hands back its requests first. freeze, cut: it stands
    still, or no message gets through. lossy: frames of a worker are lost, repeated and late. deaf: a scheduler's answers are
    lost. move: a scheduler moves the requests of all other workers to this one.
    """

    what: What
    kind: Kind
    index: int
    at_s: float
    lasts_s: float = 0.0


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


class Process:
    """A process as the network sees it. `generation` counts its starts."""

    def __init__(self, kind: Kind, index: int) -> None:
        self.kind, self.index = kind, index
        self.generation = 0
        self.dead, self.frozen_ps, self.cut_ps = False, 0, 0
        self.down_s: float | None = None  # since when it cannot renew a lease
        self.lossy_ps = self.deaf_ps = 0


class Stream(Owned):
    """A simulated client's stream."""

    __slots__ = ("request",)

    def __init__(self, request: Request, now_s: float) -> None:
        super().__init__(request.request_id, request.output_tokens, constrained=False, now_s=now_s)
        self.request = request

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


class Gateway(Process):
    """A simulated gateway; it is the `Mesh` of its core."""

    def __init__(self, index: int, mesh: Mesh, base_model: str) -> None:
        super().__init__("gateway", index)
        self._mesh, self._base_model = mesh, base_model
        self.core = OwnerCore(self, trouble=lambda error: error, lost=lambda reason: Trouble("lost", "worker_lost", reason))
        self.seen = WorkersSeen(base_model)
        self.awaited: dict[tuple[str, int], int] = {}  # submissions without an answer: how many there were before
        self.submits = 0

    # ---- what the core sees of the workers

    def serving(self) -> Sequence[str]:
        for worker_id in self.seen.silent(self._mesh.events.now_s):
            self.seen.book.forget(worker_id)
        return [known.worker_id for known in self.seen.book]

    def alive(self, worker_id: str) -> bool:
        return self._mesh.lease_held(worker_id)

    def coming(self) -> bool:
        return not self.serving() and any(worker.dead for worker in self._mesh.workers)

    def forgot(self, worker_id: str, request_id: str, epoch: int, since_s: float) -> bool:
        return self.seen.forgot(worker_id, request_id, epoch, since_s)

    # ---- messages

    def on(self, event: Event) -> None:
        """Pass an event to the core, and carry out what it wants."""
        self._mesh.perform(self, self.core.on(event, self._mesh.events.now_s))

    def frame(self, worker_id: str, items: list[Item]) -> None:
        self._mesh.perform(self, self.core.frame(worker_id, items, self._mesh.events.now_s))

    def hear(self, state: WorkerSnapshot) -> None:
        if self.seen.hear(state, self._mesh.events.now_s) == "new":
            self.on(Newcomer())

    def lose(self, worker_id: str) -> None:
        self.seen.book.forget(worker_id)
        self.on(WorkerGone(worker_id))


class SchedulerProcess(Process):
    """A simulated scheduler."""

    def __init__(self, index: int, spec: SchedulerSpec) -> None:
        super().__init__("scheduler", index)
        self.spec = spec
        self.scheduler = Scheduler(spec)

    def restart(self) -> None:
        self.scheduler = Scheduler(self.spec)


class WorkerProcess(Process):
    """A simulated worker, and the gateway of each request."""

    def __init__(self, index: int, start: Callable[[WorkerProcess], Worker]) -> None:
        super().__init__("worker", index)
        self._start = start
        self.restart()

    def restart(self) -> None:
        self.worker = self._start(self)
        self.gateways: dict[str, Gateway] = {}


@dataclass(slots=True)
class _Search:
    """A scheduler's search for a worker."""

    scheduler: SchedulerProcess
    gateway: Gateway
    stream: Stream
    epoch: int
    produced: int
    predicted_tokens: int
    ask: Ask
    to: str
    reply: Callable[[Event], None]
    serial: int = 0


@dataclass
class Counts:
    """What happened in a run."""

    resumed: int = 0
    moved: int = 0
    strays: int = 0
    frames_lost: int = 0
    ended: dict[str, int] = field(default_factory=dict)


class Mesh:
    """Workers, schedulers and gateways, their messages, and the faults that come over them."""

    def __init__(
        self,
        workload: Workload,
        workers: Sequence[WorkerSpec],
        scheduler: SchedulerSpec,
        *,
        gateways: int = 2,
        faults: Sequence[Fault] = (),
        seed: int = 0,
    ) -> None:
        self.events, self.random, self.counts = Events(), np.random.default_rng(seed), Counts()
        self._metrics = Metrics(len(workload))
        self._adapters = {adapter.digest: adapter for adapter in workload.adapters}
        self._specs = workers
        base_model = workers[0].limits.base_model
        self.workers = [WorkerProcess(index, self._started) for index in range(len(workers))]
        self.schedulers = [SchedulerProcess(index, scheduler) for index in range(scheduler.copies)]
        self.gateways = [Gateway(index, self, base_model) for index in range(gateways)]
        self.streams: list[Stream] = []
        self.open = len(workload)
        for number, worker in enumerate(self.workers):
            self._heartbeat(worker, HEARTBEAT_S * (1 + number / len(workers)))
        for gateway in self.gateways:
            self._tick(gateway)
        for fault in faults:
            self._at(fault.at_s, self._strike, fault)
        for request in workload:
            self.events.at(request.arrival_ps, ARRIVAL, self._arrive, request)

    def run(self, until_s: float) -> None:
        """Run until every request has ended, or until `until_s`."""
        while self.open and self.events.now_s < until_s:
            self.events.run(self.events.now_ps + PS_PER_S // 4)

    def check(self) -> None:
        """Assert that the ledgers of owners and workers add up."""
        for gateway in self.gateways:
            gateway.core.check()
        for process in self.workers:
            process.worker.core.check()
            process.worker.engine.batches.check()

    # ---- the network

    def _at(self, at_s: float, then: Callable[..., None], *args: Any) -> None:
        self.events.at(max(self.events.now_ps, round(at_s * PS_PER_S)), MESSAGE, then, *args)

    def send(
        self,
        source: Process,
        to: Process,
        then: Callable[..., None],
        *args: Any,
        late_s: float = 0.0,
        nobody: Callable[[], None] | None = None,
    ) -> None:
        """Call `then(*args)` at the other process, if the message gets there. `nobody`: at the sender, if that is dead."""
        events = self.events
        if source.dead or source.cut_ps > events.now_ps:
            return
        leaves_ps = max(events.now_ps, source.frozen_ps) + to_ps(HOP_MS) + round(late_s * PS_PER_S)
        events.at(leaves_ps, MESSAGE, self._deliver, to, to.generation, then, args, nobody)

    def _deliver(
        self, to: Process, generation: int, then: Callable[..., None], args: Any, nobody: Callable[[], None] | None
    ) -> None:
        if to.dead or to.generation != generation:
            if nobody is not None:
                nobody()
        elif to.frozen_ps > self.events.now_ps:
            self.events.at(to.frozen_ps, MESSAGE, self._deliver, to, generation, then, args, nobody)
        elif to.cut_ps <= self.events.now_ps:
            then(*args)

    def lease_held(self, worker_id: str) -> bool:
        """Whether a worker's lease has not expired."""
        down_s = self._process(worker_id).down_s
        return down_s is None or self.events.now_s - down_s < LEASE_S

    def _process(self, worker_id: str) -> WorkerProcess:
        return next(process for process in self.workers if process.worker.worker_id == worker_id)

    # ---- clients and gateways

    def _arrive(self, request: Request) -> None:
        gateway = self.gateways[request.index % len(self.gateways)]
        stream = Stream(request, self.events.now_s)
        self.streams.append(stream)
        gateway.on(Submitted(stream))

    def _tick(self, gateway: Gateway) -> None:
        now_ps = self.events.now_ps
        if gateway.frozen_ps <= now_ps:
            gateway.on(Tick(gateway.cut_ps <= now_ps))
        self.events.at(now_ps + round(TICK_S * PS_PER_S), MESSAGE, self._tick, gateway)

    def perform(self, gateway: Gateway, actions: Sequence[Action]) -> None:
        """Carry out what a gateway's core wants."""
        for action in actions:
            match action:
                case Submit():
                    self._submit(gateway, action)
                case Pause(owned, serial, pause_s):
                    self._at(self.events.now_s + pause_s, gateway.on, PauseOver(owned, serial))
                case CancelAt(worker_id, request_id, epoch, _):
                    process = self._process(worker_id)
                    self.send(gateway, process, lambda p=process, r=request_id, e=epoch: p.worker.cancel(r, e))
                case Over(owned, _):
                    self.open -= 1
                    how = "refused" if owned.error is not None and not owned.opened else owned.finish or "error"
                    self.counts.ended[how] = self.counts.ended.get(how, 0) + 1
                case Told(what):
                    self.counts.resumed += what == "resumed"
                    self.counts.moved += what == "moved"
                    self.counts.strays += what == "stray"

    def _submit(self, gateway: Gateway, asked: Submit) -> None:
        stream, epoch = asked.owned, asked.epoch
        assert isinstance(stream, Stream)
        gateway.submits += 1
        serial = gateway.awaited[stream.request_id, epoch] = gateway.submits

        def answer(event: Event) -> None:
            if gateway.awaited.get((stream.request_id, epoch)) == serial:
                del gateway.awaited[stream.request_id, epoch]
                gateway.on(event)

        def refused(why: Any, code: str) -> None:
            answer(Refused(stream, epoch, Trouble(why, code, code)))

        self._at(self.events.now_s + asked.timeout_s, refused, "late", "deadline_exceeded")
        ready = [one for one in self.schedulers if not one.dead]
        if not ready:
            self._at(self.events.now_s + HOP_MS / 1000, refused, "unavailable", "unavailable")
            return
        scheduler = ready[int(self.random.integers(len(ready)))]
        args = (scheduler, gateway, stream, epoch, len(stream.tokens), asked.to, tuple(stream.excluded), answer)
        self.send(gateway, scheduler, self._search, *args, nobody=lambda: refused("unavailable", "unavailable"))

    # ---- schedulers

    def _search(
        self,
        process: SchedulerProcess,
        gateway: Gateway,
        stream: Stream,
        epoch: int,
        produced: int,
        to: str,
        avoid: tuple[str, ...],
        answer: Callable[[Event], None],
    ) -> None:
        scheduler, request, now_s = process.scheduler, stream.request, self.events.now_s
        predicted = scheduler.predict(request, produced)
        brief = brief_of(request, predicted_tokens=predicted, epoch=epoch, output_tokens=produced)
        ask = replace(scheduler.ask(request, brief, now_s), avoid=avoid)

        def reply(event: Event) -> None:
            if process.deaf_ps <= self.events.now_ps:
                self.send(process, gateway, answer, event)

        self._next(_Search(process, gateway, stream, epoch, produced, predicted, ask, to, reply))

    def _next(self, search: _Search) -> None:
        scheduler, now_s = search.scheduler.scheduler, self.events.now_s
        named, search.to = search.to, ""
        if named and scheduler.core.may_take(search.ask, named, now_s):
            self._assign(search, named)
            return
        tried = search.ask.tried
        chosen = scheduler.decide(search.ask, now_s).worker_id if len(tried) < scheduler.spec.attempts else None
        if chosen is None:
            why: Any = "unavailable" if tried or not len(scheduler.state) else "overloaded"
            search.reply(Refused(search.stream, search.epoch, Trouble(why, why, why)))
            return
        self._assign(search, chosen)

    def _assign(self, search: _Search, worker_id: str) -> None:
        process, worker = search.scheduler, self._process(worker_id)
        brief = brief_of(
            search.stream.request,
            predicted_tokens=search.predicted_tokens,
            epoch=search.epoch,
            output_tokens=search.produced,
        )
        process.scheduler.expect(worker_id, brief, self.events.now_s)
        search.serial += 1
        serial, generation = search.serial, process.generation

        def settled(how: str) -> None:
            if search.serial != serial or process.dead or process.generation != generation:
                return
            search.serial += 1
            scheduler, now_s = process.scheduler, self.events.now_s
            if how == "taken":
                scheduler.flights.accepted(worker_id, search.stream.request_id, now_s)
                search.reply(Answered(search.stream, search.epoch, worker_id))
                return
            scheduler.flights.withdraw(worker_id, search.stream.request_id)
            if worker_id in scheduler.book:
                if how == "full":
                    scheduler.state.set_refusing(worker_id)
                else:
                    scheduler.state.set_heard(worker_id, now_s - scheduler.spec.stale_s - 1.0)
            if how == "silent":  # it may have it
                self.send(process, worker, lambda: worker.worker.cancel(search.stream.request_id, search.epoch))
            search.ask = replace(search.ask, tried=(*search.ask.tried, worker_id))
            self._next(search)

        def take() -> None:
            taken = worker.worker.assign(search.stream.request, msgspec.structs.replace(brief))
            if taken:
                worker.gateways[search.stream.request_id] = search.gateway
            self.send(worker, process, settled, "taken" if taken else "full")

        self.send(process, worker, take, nobody=lambda: settled("absent"))
        self._at(self.events.now_s + ASSIGN_S, settled, "silent")

    # ---- workers

    def _started(self, process: WorkerProcess) -> Worker:
        return Worker(
            process.index,
            self._specs[process.index],
            self.events,
            self._metrics,
            self._adapters,
            on_change=lambda worker: None,
            on_end=lambda worker, live: None,
            on_tokens=lambda worker, lives: self._speak(process, lives),
            incarnation=str(process.generation),
        )

    def _speak(self, process: WorkerProcess, lives: Sequence[Live]) -> None:
        frames: dict[int, list[Item]] = {}
        for live in lives:
            gateway = process.gateways.get(live.brief.request_id)
            if gateway is None:
                continue
            index = live.length - live.request.prompt_tokens - 1
            finish = "length" if live.length >= live.end_length else None
            item = Item(live.brief.request_id, live.brief.epoch, index, [token_of(live.request.index, index)], finish)
            frames.setdefault(gateway.index, []).append(item)
        for index, items in frames.items():
            self._frame(process, self.gateways[index], items)

    def _frame(self, process: WorkerProcess, gateway: Gateway, items: list[Item]) -> None:
        copies, late_s = 1, 0.0
        if process.lossy_ps > self.events.now_ps:
            drawn = self.random.random()
            copies = 0 if drawn < 0.08 else 2 if drawn < 0.16 else 1
            late_s = 0.2 * self.random.random() if drawn > 0.9 else 0.0
            self.counts.frames_lost += not copies
        for _ in range(copies):
            self.send(process, gateway, gateway.frame, process.worker.worker_id, items, late_s=late_s)

    def _heartbeat(self, process: WorkerProcess, first_s: float = HEARTBEAT_S) -> None:
        if not process.dead:
            state = process.worker.snapshot()
            for scheduler in self.schedulers:
                self.send(process, scheduler, scheduler.scheduler.hear, state, self.events.now_s)
            for gateway in self.gateways:
                self.send(process, gateway, gateway.hear, state)
        self.events.at(self.events.now_ps + round(first_s * PS_PER_S), HEARTBEAT, self._heartbeat, process)

    # ---- faults

    def _strike(self, fault: Fault) -> None:
        processes: dict[Kind, Sequence[Process]] = {
            "worker": self.workers,
            "scheduler": self.schedulers,
            "gateway": self.gateways,
        }
        process = processes[fault.kind][fault.index]
        until_ps = self.events.now_ps + round(fault.lasts_s * PS_PER_S)
        if process.dead:
            return
        match fault.what:
            case "lossy":
                process.lossy_ps = until_ps
            case "deaf":
                process.deaf_ps = until_ps
            case "move":
                assert isinstance(process, WorkerProcess)
                self._move_to(process)
            case "freeze" | "cut":
                if fault.what == "freeze":
                    process.frozen_ps = until_ps
                else:
                    process.cut_ps = until_ps
                process.down_s = self.events.now_s
                self._at(self.events.now_s + fault.lasts_s, self._back, process, process.generation)
                self._at(self.events.now_s + SILENT_S, self._told_lost, process, process.generation)
            case "kill" | "leave":
                if fault.what == "leave" and isinstance(process, WorkerProcess):
                    self._hand_back(process)
                self._kill(process)
                self._at(self.events.now_s + fault.lasts_s, self._restart, process)
                self._at(self.events.now_s + ABSENT_S, self._told_lost, process, process.generation)

    def _kill(self, process: Process) -> None:
        process.dead, process.down_s = True, self.events.now_s
        if isinstance(process, WorkerProcess):
            process.worker.kill()

    def _restart(self, process: Process) -> None:
        process.generation += 1
        process.dead, process.down_s, process.frozen_ps, process.cut_ps = False, None, 0, 0
        if isinstance(process, WorkerProcess | SchedulerProcess):
            process.restart()

    def _back(self, process: Process, generation: int) -> None:
        if (
            process.generation == generation
            and not process.dead
            and max(process.frozen_ps, process.cut_ps) <= self.events.now_ps
        ):
            process.down_s = None

    def _told_lost(self, process: Process, generation: int) -> None:
        """Pings of the gateways find that a worker does not answer; schedulers see its lease expire."""
        if isinstance(process, WorkerProcess) and process.generation == generation and process.down_s is not None:
            worker_id = process.worker.worker_id
            for gateway in self.gateways:
                if not gateway.dead and gateway.cut_ps <= self.events.now_ps:
                    self._deliver(gateway, gateway.generation, gateway.lose, (worker_id,), None)

    def _hand_back(self, process: WorkerProcess) -> None:
        error = Trouble("lost", "worker_lost", "it is leaving")
        for request_id, gateway in process.gateways.items():
            entry = process.worker.core.book.get(request_id)
            if entry is not None:
                produced = entry.payload.length - entry.payload.request.prompt_tokens
                item = Item(request_id, entry.brief.epoch, produced, [], "error", error=error)
                self._frame(process, gateway, [item])

    def _move_to(self, process: WorkerProcess) -> None:
        to = process.worker.worker_id
        for gateway in self.gateways:
            for owned in list(gateway.core.active.values()):
                if self.random.random() < 0.5:
                    gateway.on(MoveAsked(owned.request_id, owned.epoch, to))
