"""Some hours of a day in the twin: simulated workers that start and stop as an autoscaler says, instead of the law."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.autoscale_parts import Day, Fleet, Law, Scaler, View, simulate
from motet.policies.plan.demand import Floats
from motet.policies.scale.base_sizer import LOOK_S
from motet.shared.model import Slo
from motet.twin.cluster import BusDelays, Cluster
from motet.twin.events import MESSAGE, PS_PER_S
from motet.twin.profile import TwinProfile
from motet.twin.scheduler import SchedulerSpec
from motet.twin.workload import Intensity, Lengths, Workload, arrivals, pick

SPARE_WORKERS = 24
"""That have not started; those that have left start again later."""


@dataclass(frozen=True, kw_only=True)
class Hours:
    """What happened in the twin, and by the law in the same time."""

    worker_hours: float
    attainment: float
    refused: float  # share of the requests
    law_worker_hours: float
    law_attainment: float


def requests(law: Law, rate: Floats, seed: int) -> Workload:
    """Poisson arrivals at rates [minutes], with lognormal lengths of the law's mean."""
    rng = np.random.default_rng(seed)
    at_s = arrivals(rng, Intensity(np.arange(len(rate) + 1, dtype=np.float64) * 60.0, rate))
    pool = Lengths.lognormal(np.random.default_rng(0), prompt_mean=law.tokens, output_mean=law.tokens)
    limit = law.worker[0].max_model_len
    prompts, outputs = pool.capped(limit // 2, limit).draw(rng, len(at_s))
    goal = law.objective
    return Workload(
        arrival_s=at_s,
        adapter=pick(rng, np.array([row.share for row in law.rows]), len(at_s)),
        prompt_tokens=prompts,
        output_tokens=outputs,
        ranks=np.array([row.rank for row in law.rows]),
        adapter_bytes=np.array([row.size_bytes for row in law.rows]),
        slos=(Slo(ttft_slo_ms=goal.ttft_slo_ms, tpot_slo_ms=goal.tpot_slo_ms),),
    )


class _Loop:
    """Looks every 15 s at a simulated cluster, and starts and stops its workers."""

    def __init__(self, cluster: Cluster, scaler: Scaler, ready: int, since_s: float, arrival_s: Floats) -> None:
        self._cluster, self._scaler, self._since_s, self._arrival_s = cluster, scaler, since_s, arrival_s
        self._away = deque(worker.worker_id for worker in cluster.workers)
        self._fleet = Fleet(ready=[self._away.popleft() for _ in range(ready)])
        self._ids: dict[str, str] = {name: name for name in self._fleet.ready}  # of what the fleet calls them
        self.paid_s = 0.0
        self._next()

    def _next(self) -> None:
        events = self._cluster.events
        events.at(events.now_ps + round(LOOK_S * PS_PER_S), MESSAGE, self._look)

    def _look(self) -> None:
        cluster, fleet, now_s = self._cluster, self._fleet, self._cluster.events.now_s
        self.paid_s += LOOK_S * (len(fleet.ready) + len(fleet.starting))
        fleet.begin(now_s)
        self._carry_out()
        came = np.searchsorted(self._arrival_s, (now_s - LOOK_S, now_s))
        state = cluster.schedulers[0].state
        rows = [state.row(self._ids[name]) for name in fleet.ready]
        desired, leaves = self._scaler.look(
            View(
                now_s=self._since_s + now_s,
                arrived=float(came[1] - came[0]),
                ready=tuple(fleet.ready),
                starting={name: self._since_s + began_s for name, began_s in fleet.starting.items()},
                queued=float(state.table["queued"][rows].sum()),
                running=float(state.table["running"][rows].sum()),
            )
        )
        fleet.follow(max(desired, 1), leaves, now_s)
        self._carry_out()
        if cluster.unfinished:
            self._next()

    def _carry_out(self) -> None:
        """Workers that are ready now come, those that were and are not leave."""
        ready = self._fleet.ready
        for name in [name for name in self._ids if name not in ready]:
            self._away.append(self._ids.pop(name))
            self._cluster.leave(self._away[-1])
        for name in ready:
            if name not in self._ids:
                self._ids[name] = self._away.popleft()
                self._cluster.come(self._ids[name])


def in_twin(
    law: Law, profile: TwinProfile, day: Day, make: Callable[[], Scaler], *, since: int, until: int, seed: int
) -> Hours:
    """Minutes `since` to `until` of a day. What comes before, the scaler sees by the law."""
    scaler = make()
    before = simulate(law, day, scaler, seed=seed, until=since)
    after = simulate(law, day, make(), seed=seed, since=since, until=until)
    work, ready = requests(law, day.rate[since:until], seed), int(before.ready[-1])
    cluster = Cluster(
        work, [profile.spec()] * (ready + SPARE_WORKERS), SchedulerSpec(), bus=BusDelays(), seed=seed, first=ready
    )
    loop = _Loop(cluster, scaler, ready, since * 60.0, work.arrival_s)
    cluster.run()
    seen = cluster.summary()
    return Hours(
        worker_hours=loop.paid_s / 3600.0,
        attainment=float(seen["slo_attainment"]),
        refused=seen["refused"] / len(work),
        law_worker_hours=after.worker_hours,
        law_attainment=after.attainment,
    )
