"""A simulated mesh with gateways: requests live through lost messages and dying processes, under the virtual clock.

The decisions are the live ones (`twin.processes`). What is simulated are processes and messages (`twin.network`): a process may
be dead, frozen or cut off, and frames may be lost, repeated or late. Token j of a request is a function of the request and j,
as sampling noise is one of seed and position, so every answer can be judged. The same arguments give the same history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from motet.policies.owner.events import MoveAsked, Submitted
from motet.twin.events import ARRIVAL, HEARTBEAT, PS_PER_S
from motet.twin.metrics import Metrics
from motet.twin.network import Kind, Network, Process
from motet.twin.processes import Counts, Gateway, SchedulerProcess, Stream, WorkerProcess
from motet.twin.scheduler import SchedulerSpec
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Request, Workload

HEARTBEAT_S = 0.5
ABSENT_S, SILENT_S = 0.15, 0.85  # pings find a dead worker, and one that is frozen or cut off
What = Literal["kill", "leave", "sleep", "freeze", "cut", "lossy", "deaf", "move"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at `at_s` to process `index`, for `lasts_s`.

    kill: it dies, and another one starts after `lasts_s`. leave: a worker hands back its requests first. sleep: all workers
    leave; this one starts again first, the others after twice the time. freeze, cut: it stands still, or no message gets
    through. lossy: frames of a worker are lost, repeated and late. deaf: a scheduler's answers are lost. move: a scheduler
    moves the requests of all other workers to this one.
    """

    what: What
    kind: Kind
    index: int
    at_s: float
    lasts_s: float = 0.0


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
        self.counts = counts = Counts()
        self._network = network = Network(seed)
        self.events, self._random = network.events, network.random
        metrics = Metrics(len(workload))
        adapters = {adapter.digest: adapter for adapter in workload.adapters}
        self._workers = [WorkerProcess(i, spec, network, metrics, adapters) for i, spec in enumerate(workers)]
        by_id = {process.worker.worker_id: process for process in self._workers}
        self._schedulers = [SchedulerProcess(i, scheduler, network, by_id) for i in range(scheduler.copies)]
        base_model = workers[0].limits.base_model
        self._gateways = [Gateway(i, base_model, network, self._schedulers, by_id, counts) for i in range(gateways)]
        self.streams: list[Stream] = []
        self._requests = len(workload)
        for number, worker in enumerate(self._workers):
            self._heartbeat(worker, HEARTBEAT_S * (1 + number / len(workers)))
        for gateway in self._gateways:
            gateway.tick()
        for fault in faults:
            network.at(fault.at_s, self._strike, fault)
        for request in workload:
            self.events.at(request.arrival_ps, ARRIVAL, self._arrive, request)

    def run(self, until_s: float) -> None:
        """Run until every request has ended, or until `until_s`."""
        while sum(self.counts.ended.values()) < self._requests and self.events.now_s < until_s:
            self.events.run(self.events.now_ps + PS_PER_S // 4)

    def check(self) -> None:
        """Assert that the ledgers of owners and workers add up."""
        for gateway in self._gateways:
            gateway.core.check()
        for process in self._workers:
            process.worker.core.check()
            process.worker.engine.batches.check()

    def _arrive(self, request: Request) -> None:
        gateway = self._gateways[request.index % len(self._gateways)]
        stream = Stream(request, self.events.now_s)
        self.streams.append(stream)
        gateway.on(Submitted(stream))

    def _heartbeat(self, process: WorkerProcess, next_s: float = HEARTBEAT_S) -> None:
        if not process.dead:
            state = process.worker.snapshot()
            for scheduler in self._schedulers:
                self._network.send(process, scheduler, scheduler.scheduler.hear, state, self.events.now_s)
            for gateway in self._gateways:
                self._network.send(process, gateway, gateway.hear, state)
        self.events.at(self.events.now_ps + round(next_s * PS_PER_S), HEARTBEAT, self._heartbeat, process)

    # ---- faults

    def _strike(self, fault: Fault) -> None:
        processes: dict[Kind, Sequence[Process]] = {
            "worker": self._workers,
            "scheduler": self._schedulers,
            "gateway": self._gateways,
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
                self._network.after(fault.lasts_s, self._back, process, process.generation)
                self._network.after(SILENT_S, self._told_lost, process, process.generation)
            case "kill" | "leave":
                self._end(process, fault.lasts_s, leaves=fault.what == "leave")
            case "sleep":
                for other in processes[fault.kind]:
                    if not other.dead:
                        self._end(other, fault.lasts_s * (1 if other is process else 2), leaves=True)

    def _end(self, process: Process, lasts_s: float, *, leaves: bool) -> None:
        """A process dies, after it has handed back its requests if it `leaves`, and starts again."""
        if leaves and isinstance(process, WorkerProcess):
            process.hand_back()
        process.kill(self.events.now_s)
        self._network.after(lasts_s, process.restart)
        self._network.after(ABSENT_S, self._told_lost, process, process.generation)

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
            for gateway in self._gateways:
                if not gateway.dead and gateway.cut_ps <= self.events.now_ps:
                    self._network.tell(gateway, gateway.lose, worker_id)

    def _move_to(self, process: WorkerProcess) -> None:
        to = process.worker.worker_id
        for gateway in self._gateways:
            for owned in list(gateway.core.active.values()):
                if self._random.random() < 0.5:
                    gateway.on(MoveAsked(owned.request_id, owned.epoch, to))
