"""One run of a system on a part of the trace, and what it gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.rock_fleet.fleet import Fleet, System, Worker
from bench.rock_fleet.jobs import Asked, arrange
from bench.rock_fleet.machines import Loads, fleet

WARM = 0.1
"""The first requests' share that is not counted."""
REQUESTS_OF_TABLE_3 = 61
"""The paper's updates have no unit. Its round robin loads for each request and counts 61, so they are loads per 61 requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all systems of a comparison have in common.

    `earlier`, `asked`: requests before, and those of the run. `load`: the work that arrives over what all GPUs can do.
    `room_mb`: for adapters, on the smallest GPU.
    """

    earlier: Sequence[Asked]
    asked: Sequence[Asked]
    loads: Loads
    load: float
    room_mb: float
    worker: Worker
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Means over the seeds. Times are seconds from a request's arrival to its end."""

    mean_s: float
    p99_s: float
    hit_rate: float  # requests whose adapter was there when their turn came
    updates: float  # loads per 61 requests
    ahead: float  # of these, before a request
    update_s: float  # of a load that a request caused
    per_kind_s: tuple[float, ...]  # mean of each task type


def measure(make: Callable[[], System], setting: Setting) -> Outcome:
    """Run a system with each seed."""
    runs = [_run(make(), setting, seed) for seed in setting.seeds]
    columns = [np.mean(column, axis=0) for column in zip(*runs, strict=True)]
    mean_s, p99_s, hit_rate, updates, ahead, update_s = map(float, columns[:6])
    return Outcome(
        mean_s=mean_s, p99_s=p99_s, hit_rate=hit_rate, updates=updates, ahead=ahead, update_s=update_s,
        per_kind_s=tuple(map(float, columns[6])),
    )  # fmt: skip


def _run(system: System, setting: Setting, seed: int) -> tuple[float, float, float, float, float, float, list[float]]:
    gpus = fleet(setting.earlier, setting.room_mb)
    work_s = float(np.mean([one.alone_s for one in setting.asked]))
    jobs = arrange(setting.asked, setting.load * sum(gpu.speed for gpu in gpus) / work_s, seed)
    one = Fleet(gpus, jobs, setting.loads, system, setting.worker)
    one.run()
    counted = jobs[round(WARM * len(jobs)) :]
    times = np.array([one.end_s[job] - job.arrival_s for job in counted])
    kinds = np.array([job.kind for job in counted])
    each = REQUESTS_OF_TABLE_3 / len(jobs)
    return (
        float(times.mean()),
        float(np.quantile(times, 0.99)),
        float(np.mean([job in one.hits for job in counted])),
        one.updates * each,
        one.ahead * each,
        float(np.mean([seconds for seconds in one.late.values()] or [0.0])),
        [float(times[kinds == kind].mean()) if (kinds == kind).any() else 0.0 for kind in range(3)],
    )
