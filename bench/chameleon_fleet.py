"""The gain of foresight with several workers: none, each worker's own, or that of a scheduler that sees all requests.

A worker's foresight (`policies.worker.foresight`) sees only the requests that came to it. The scheduler here is an ideal one:
it sees every request, knows without delay what is on each device, and has as large a budget of unused copies per worker as the
worker itself. Every TICK_S it gives each worker whose link and queue are idle the likeliest adapter that is on no device; the
worker with the fewest requests comes first.
"""

from __future__ import annotations

import numpy as np

from bench.chameleon_parts import Case, Outcome, outcome, worker, workload
from motet.policies.worker.foresight import Foresight
from motet.twin.cluster import Cluster
from motet.twin.events import HEARTBEAT, PS_PER_S
from motet.twin.scheduler import SchedulerSpec
from motet.twin.worker import Worker
from motet.twin.workload import Workload

WORKERS = 4
TICK_S = 0.5


class SchedulersForesight:
    """Brings adapters to the workers of a cluster until its workload ends. Make this object before the cluster runs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._seen = [(one, Foresight()) for one in cluster.workers]
        self._there: dict[str, set[str]] = {one.worker_id: set() for one in cluster.workers}
        self._heard = 0  # requests so far
        self._tick()

    def _tick(self) -> None:
        cluster, events = self._cluster, self._cluster.events
        if events.now_s < cluster.workload.duration_s:
            events.at(events.now_ps + round(TICK_S * PS_PER_S), HEARTBEAT, self._tick)
        load = cluster.workload
        upto = int(np.searchsorted(load.arrival_s, events.now_s, side="right"))
        for index in range(self._heard, upto):
            digest = load.adapters[int(load.adapter[index])].digest
            for _, foresight in self._seen:
                foresight.asked(digest, float(load.arrival_s[index]))
        self._heard = upto
        for one, foresight in self._seen:
            there, before = _on_device(one), self._there[one.worker_id]
            for digest in there - before:
                foresight.came(digest)
            for digest in before - there:
                foresight.left(digest)
            self._there[one.worker_id] = there
        anywhere = set[str]().union(*self._there.values())
        for one, foresight in sorted(self._seen, key=lambda pair: len(pair[0].core)):
            if any(brief.phase != "running" for brief in one.view.requests.values()):
                continue
            found = foresight.next(events.now_s, lambda digest: digest not in anywhere)
            if found is not None:
                anywhere.add(found)
                one.bring(found, foresight.weaker(found, self._there[one.worker_id], events.now_s))


def _on_device(one: Worker) -> set[str]:
    return {digest for digest, held in one.view.adapters.items() if held.tier == "device"}


def measure_fleet(case: Case) -> Outcome:
    """Make one run on WORKERS workers. `case.rate` is the rate of all workers together."""
    load, cluster = _fleet(case)
    cluster.run()
    return outcome(load, cluster)


def measure_foreseeing_fleet(case: Case) -> Outcome:
    """Make one run like `measure_fleet`, with a scheduler that foresees."""
    load, cluster = _fleet(case)
    SchedulersForesight(cluster)
    cluster.run()
    return outcome(load, cluster)


def _fleet(case: Case) -> tuple[Workload, Cluster]:
    load = workload(case)
    return load, Cluster(load, [worker(case)] * WORKERS, SchedulerSpec(admission="room", rebalance="off"))
