"""The simulation: requests queue on GPUs, adapters load, batches run. Decisions come from a `System`.

Two kinds of worker:
- *one adapter* (as ROCK and its rivals have, on PEFT): the first waiting request's adapter is loaded while the GPU waits,
  then the request runs, with waiting requests for the same adapter up to `rows`. The next batch begins when all have ended.
- *mixed* (as Motet has, `policies.step.image_batch`): up to `rows` requests with any adapters run together, in the order of
  arrival among those whose adapter is there. The adapters of the next requests load beside the steps.

A step of requests R takes (base_s + sum of their row_s) / speed. Loads come from remote storage, beside each other; there is no
tier of host memory, because the measured loads that the paper reports have none. A GPU that gets a request for another
base model than its own loads that base model first, and drops the adapters that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from bench.rivals import EVICTIONS
from bench.rock_fleet.jobs import Job
from bench.rock_fleet.machines import Gpu, Loads
from motet.policies.memory.adapter_slots import AdapterSlots, Grant
from motet.policies.memory.eviction import Eviction

AHEAD = 2
"""A mixed worker loads the adapters of the next requests, up to so many batches, as `image_batch` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What all workers of a fleet are like. `launch`: the share of a mean step alone that does not grow with its requests."""

    mixed: bool
    rows: int
    launch: float


@dataclass(slots=True, eq=False)
class Node:
    """A GPU with its requests. `running`: steps left of each; they are as of `since_s`."""

    gpu: Gpu
    slots: AdapterSlots
    base: int
    base_from_s: float = 0.0  # when its base model is there
    waiting: list[Job] = field(default_factory=list)
    holding: set[Job] = field(default_factory=set)  # waiting requests whose adapter is kept for them
    running: dict[Job, float] = field(default_factory=dict)
    held_up: list[Job] = field(default_factory=list)  # the batch of a one-adapter worker that waits for its adapter
    loads: dict[str, int] = field(default_factory=dict)  # so far, by adapter
    since_s: float = 0.0
    version: int = 0

    @property
    def at(self) -> int:
        """Its index."""
        return self.gpu.at

    def cached(self) -> set[str]:
        """The adapters that are loaded or on the way."""
        return set(self.slots.digests())

    def jobs(self) -> Iterable[Job]:
        """All requests here."""
        return (*self.running, *self.held_up, *self.waiting)


class Fleet:
    """One run. Times are seconds from the first arrival on; `now_s` is the present."""

    def __init__(self, gpus: list[Gpu], jobs: list[Job], loads: Loads, system: System, worker: Worker) -> None:
        self.now_s, self.jobs, self.loads, self.worker, self.system = 0.0, jobs, loads, worker, system
        mean_step_s = float(np.mean([job.alone_s / job.steps for job in jobs]))
        self.base_s = worker.launch * mean_step_s
        self.mean_row_s = (1.0 - worker.launch) * mean_step_s
        self.nodes = [self._node(gpu) for gpu in gpus]
        self.end_s: dict[Job, float] = {}
        self.began_s: dict[Job, float] = {}
        self.hits: set[Job] = set()
        self.updates = 0
        self.ahead = 0  # of these, before a request
        self.late: dict[Job, float] = {}  # requests that caused a load, and its seconds
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def _node(self, gpu: Gpu) -> Node:
        eviction = self.system.eviction(self.loads)
        slots = AdapterSlots(4096, gpu.room_bytes, asynchronous=True, eviction=eviction)
        node = Node(gpu, slots, gpu.base)
        if self.system.looks_ahead:
            slots.waited = lambda: {job.adapter for job in node.waiting}
        return node

    # ---- events

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call it at that time."""
        self._order += 1
        heappush(self._events, (time_s, self._order, call, args))

    def every(self, period_s: float, call: Callable[[], None]) -> None:
        """Call it now and again after each period, until all requests have arrived."""

        def again() -> None:
            call()
            if self.now_s + period_s <= self.jobs[-1].arrival_s:
                self.at(self.now_s + period_s, again)

        self.at(self.now_s, again)

    def run(self) -> None:
        """Run until all requests have ended."""
        self.system.begin(self)
        for job in self.jobs:
            self.at(job.arrival_s, self._arrive, job)
        while self._events:
            self.now_s, _, call, args = heappop(self._events)
            call(*args)
        assert len(self.end_s) == len(self.jobs), "requests are lost"

    def _arrive(self, job: Job) -> None:
        self.system.arrived(job)
        self.put(job, self.system.dispatch.choose(job))

    def put(self, job: Job, node: Node) -> None:
        """A request goes to the end of a node's queue."""
        node.waiting.append(job)
        self.system.dispatch.queued(job, node)
        self._go_on(node)

    def take(self, job: Job, node: Node) -> None:
        """A waiting request leaves a node's queue, to go to another."""
        node.waiting.remove(job)
        self.system.dispatch.left(job, node)

    # ---- steps

    def step_s(self, node: Node) -> float:
        """The time of a step of the running requests."""
        rows = sum(job.alone_s / job.steps for job in node.running)
        return (self.base_s + (1.0 - self.worker.launch) * rows) / node.gpu.speed

    def work_s(self, job: Job) -> float:
        """The time of a request alone on a GPU of speed 1."""
        return job.steps * self.base_s + (1.0 - self.worker.launch) * job.alone_s

    def _advance(self, node: Node) -> None:
        """Bring the running requests up to now."""
        if node.running:
            steps = (self.now_s - node.since_s) / self.step_s(node)
            for job in node.running:
                node.running[job] -= steps
        node.since_s = self.now_s

    def _go_on(self, node: Node) -> None:
        """Begin what can begin, and expect the next end."""
        self._advance(node)
        (self._fill_mixed if self.worker.mixed else self._fill_alone)(node)
        node.version += 1
        if node.running:
            self.at(self.now_s + max(0.0, min(node.running.values())) * self.step_s(node), self._ends, node, node.version)

    def _ends(self, node: Node, version: int) -> None:
        if version != node.version:
            return
        self._advance(node)
        for job in [job for job, left in node.running.items() if left <= 1e-6]:
            del node.running[job]
            self.end_s[job] = self.now_s
            self.system.dispatch.ended(job, node)
            node.slots.eviction.now_s = self.now_s
            node.slots.release(job.adapter)
        self.trim(node)
        self._go_on(node)

    def _start(self, job: Job, node: Node) -> None:
        node.running[job] = float(job.steps)
        self.began_s[job] = self.now_s
        self.system.dispatch.began(job, node)

    def _fill_alone(self, node: Node) -> None:
        if node.held_up:
            self._begin_held_up(node)
        if node.running or node.held_up or not node.waiting:
            return
        first = node.waiting[0]
        batch = [job for job in node.waiting if job.adapter == first.adapter and job.kind == first.kind][: self.worker.rows]
        node.waiting = [job for job in node.waiting if job not in batch]
        node.held_up = batch
        self._change_base(node, first)
        for job in batch:
            self._acquire(job, node)
        self._begin_held_up(node)

    def _begin_held_up(self, node: Node) -> None:
        """Start the batch that waits for its adapter or for the base model, if both are there."""
        if not node.held_up or node.held_up[0].adapter in node.slots.loading or self.now_s < node.base_from_s:
            return
        for job in node.held_up:
            self._start(job, node)
        node.held_up = []

    def _change_base(self, node: Node, job: Job) -> None:
        """Load the request's base model if another is there."""
        if job.kind == node.base:
            return
        node.base, node.base_from_s = job.kind, self.now_s + self.loads.base_s
        self.at(node.base_from_s, self._go_on, node)
        for adapter in node.slots.digests():
            if not node.slots.users(adapter):
                node.slots.drop(adapter)
                self.system.dispatch.gone(adapter, node)

    def _fill_mixed(self, node: Node) -> None:
        for job in node.waiting[: AHEAD * self.worker.rows]:
            if job not in node.holding and self._acquire(job, node):
                node.holding.add(job)
        for job in list(node.waiting[: AHEAD * self.worker.rows]):
            if len(node.running) < self.worker.rows and job in node.holding and job.adapter not in node.slots.loading:
                node.waiting.remove(job)
                node.holding.remove(job)
                self._start(job, node)

    # ---- adapters

    def _acquire(self, job: Job, node: Node) -> bool:
        """Keep the request's adapter for it, and load it if it is not there. False without room."""
        node.slots.eviction.now_s = self.now_s
        grant = node.slots.acquire(job.adapter, job.size_bytes)
        if grant is None:
            return False
        seconds = self._loaded(job.adapter, node, grant)
        if grant.load:
            self.late[job] = seconds
        elif job.adapter not in node.slots.loading:
            self.hits.add(job)
        return True

    def bring(self, adapter: str, size_bytes: int, node: Node) -> bool:
        """Load an adapter ahead of any request, in place of idle ones. False without room, or if it is there."""
        if adapter in node.slots:
            return False
        node.slots.eviction.now_s = self.now_s
        grant = node.slots.prefetch(adapter, size_bytes)
        if grant is None:
            return False
        self._loaded(adapter, node, grant)
        self.ahead += 1
        return True

    def _loaded(self, adapter: str, node: Node, grant: Grant) -> float:
        """Carry out a grant: evictions, then the load. Returns its seconds."""
        for gone, _ in grant.evicted:
            self.system.dispatch.gone(gone, node)
        if not grant.load:
            return 0.0
        self.trim(node)
        self.system.dispatch.came(adapter, node)
        self.updates += 1
        nth = node.loads[adapter] = node.loads.get(adapter, 0) + 1
        seconds = self.system.load_s(self.loads, adapter, node.at, nth)
        if seconds > 0.0:
            self.at(self.now_s + seconds, self._arrived, adapter, node, nth)
        else:
            node.slots.arrived(adapter)
        return seconds

    def _arrived(self, adapter: str, node: Node, nth: int) -> None:
        if node.loads[adapter] != nth or adapter not in node.slots.loading:
            return  # it was evicted meanwhile
        node.slots.arrived(adapter)
        self._go_on(node)

    def trim(self, node: Node) -> None:
        """Evict what the eviction does not keep, and idle adapters above the system's limit on the memory."""
        gone = [adapter for adapter, _ in node.slots.unkept()]
        most = self.system.fullest * node.slots.bytes_total
        for adapter in list(node.slots.unwanted()):
            if node.slots.bytes_total - node.slots.bytes_free <= most:
                break
            if adapter not in node.slots.loading:
                node.slots.evict(adapter)
                gone.append(adapter)
        for adapter in gone:
            self.system.dispatch.gone(adapter, node)


class Dispatch:
    """Chooses nodes. What happens on them is told to it."""

    fleet: Fleet

    def begin(self, fleet: Fleet) -> None:
        """A run begins."""
        self.fleet = fleet
        self.of_base = [[node for node in fleet.nodes if node.gpu.base == base] for base in range(3)]

    def choose(self, job: Job) -> Node:
        """The node of a request."""
        raise NotImplementedError

    def queued(self, job: Job, node: Node) -> None:
        """The request waits on the node."""

    def left(self, job: Job, node: Node) -> None:
        """The waiting request was taken away."""

    def began(self, job: Job, node: Node) -> None:
        """The request runs."""

    def ended(self, job: Job, node: Node) -> None:
        """The request has ended."""

    def came(self, adapter: str, node: Node) -> None:
        """The adapter is on the node, or on its way."""

    def gone(self, adapter: str, node: Node) -> None:
        """The adapter has left the node."""


class Follower:
    """Is told of requests as they come."""

    fleet: Fleet

    def begin(self, fleet: Fleet) -> None:
        """A run begins."""
        self.fleet = fleet

    def arrived(self, job: Job) -> None:
        """A request came."""


class Placement(Follower):
    """Loads adapters ahead of requests; this one none."""


@dataclass(kw_only=True)
class System:
    """One system. `watched`: the patterns of requests, where it uses them. `fullest`: share of the adapter memory above which
    idle adapters leave. `looks_ahead`: adapters that waiting requests need leave last. `free`: loads take no time."""

    dispatch: Dispatch
    placement: Placement = field(default_factory=Placement)
    watched: Follower | None = None
    memory: str = "lru"
    fullest: float = 1.0
    looks_ahead: bool = False
    free: bool = False

    def eviction(self, loads: Loads) -> Eviction:
        """The order in which a node evicts idle adapters."""
        return EVICTIONS.named(self.memory)(lambda adapter, size_bytes: loads.mean_s(adapter))

    def load_s(self, loads: Loads, adapter: str, node: int, nth: int) -> float:
        """The time of a load."""
        return 0.0 if self.free else loads.seconds(adapter, node, nth)

    def begin(self, fleet: Fleet) -> None:
        """A run begins."""
        if self.watched is not None:
            self.watched.begin(fleet)
        self.dispatch.begin(fleet)
        self.placement.begin(fleet)

    def arrived(self, job: Job) -> None:
        """A request came."""
        if self.watched is not None:
            self.watched.arrived(job)
        self.placement.arrived(job)
