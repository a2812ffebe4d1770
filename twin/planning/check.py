"""Simulates the workers of a plan and says which keep their objectives.

Equal workers are simulated once. Each job is independent of the others, so the caller may run them in processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.twin.metrics import STARVED_BELOW
from motet.twin.planning.kinds import Kind, Outcome, Part
from motet.twin.planning.loads import Loads

ROUNDING = 1e-9
SPENT_MOST = 0.5
"""The most that a trial may spend of the requests that may miss: another hour has other bursts."""
SURE = 3.0
"""An adapter with few requests misses its objective only if so many standard deviations cannot explain its misses."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Workers of one kind that are simulated together with one seed."""

    kind: Kind
    parts: tuple[Part, ...]
    seed: int
    warm_s: float
    duration_s: float


def run(job: Job) -> list[Outcome]:
    """The outcome of each of a job's workers."""
    return job.kind.simulate(job.parts, seed=job.seed, warm_s=job.warm_s, duration_s=job.duration_s)


Run = Callable[[Sequence[Job]], Iterable[list[Outcome]]]
"""Runs jobs and yields their outcomes in the same order."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the twin found for one worker, over all seeds. Columns are [adapters].

    `spent_together`: `budget_spent` of all the workers that share their load with this one, which counts for each of them: who
    served a late request is chance. None for a worker by itself.
    """

    arrived: np.ndarray
    served: np.ndarray
    attained: np.ndarray
    required: np.ndarray  # share of each adapter's requests
    in_ttft: float
    in_tpot: float
    ttft_p99_ms: float
    tpot_p99_ms: float
    spent_together: float | None = None

    @property
    def share(self) -> float:
        """The share of the worker's requests that attained their objectives."""
        return float(self.attained.sum() / max(1, self.arrived.sum()))

    @property
    def served_share(self) -> float:
        return float(self.served.sum() / max(1, self.arrived.sum()))

    @property
    def budget_spent(self) -> float:
        """The requests that missed, over the number that may miss."""
        return budget_spent([self]) if self.spent_together is None else self.spent_together

    @property
    def starved(self) -> int:
        """Adapters of whose requests less than 90% were served."""
        return int((self.served < STARVED_BELOW * self.arrived).sum())

    @property
    def missing(self) -> np.ndarray:
        """Which adapters miss their objective by more than chance explains, [adapters]."""
        expected = self.arrived * (1.0 - self.required)
        spread = np.sqrt(np.maximum(expected * self.required, 0.0))
        return np.asarray(self.arrived - self.attained > expected + SURE * spread + 1.0)

    @property
    def valid(self) -> bool:
        """The worker keeps the objectives of all its requests, and each of its adapters does."""
        return self.budget_spent <= 1.0 + ROUNDING and not self.missing.any() and not self.starved

    @property
    def sure(self) -> bool:
        """The worker is valid, and would still be with twice as many misses."""
        return self.valid and self.budget_spent <= SPENT_MOST

    @property
    def missed(self) -> str:
        """What the worker misses most."""
        return "TTFT" if self.in_ttft <= self.in_tpot else "TPOT"


def check(
    kinds: Sequence[Kind],
    workers: Sequence[tuple[int, Part]],
    *,
    seeds: Sequence[int],
    warm_s: float,
    duration_s: float,
    run: Run,
) -> list[Result]:
    """Simulate (kind, part) of each worker with every seed. The results are in the order of the workers."""
    jobs: dict[object, Job] = {}
    where: list[list[tuple[object, int]]] = []  # of each worker: (job, place in it) by seed
    for kind, part in workers:
        if not kinds[kind].together:
            sent = replace(part, loads=part.loads.slim())
            keys = [(kind, part.setting, _key(part.loads), seed) for seed in seeds]
            for key, seed in zip(keys, seeds, strict=True):
                jobs.setdefault(key, Job(kind=kinds[kind], parts=(sent,), seed=seed, warm_s=warm_s, duration_s=duration_s))
            where.append([(key, 0) for key in keys])
        else:
            where.append([])
    together = sorted({kind for kind, _ in workers if kinds[kind].together})
    for kind in together:
        mine = [place for place, (other, _) in enumerate(workers) if other == kind]
        parts = tuple(workers[place][1] for place in mine)
        for seed in seeds:
            jobs[kind, seed] = Job(kind=kinds[kind], parts=parts, seed=seed, warm_s=warm_s, duration_s=duration_s)
            for at, place in enumerate(mine):
                where[place].append(((kind, seed), at))
    outcomes = dict(zip(jobs, run(list(jobs.values())), strict=True))
    results = [
        _merged([outcomes[key][at] for key, at in places], part.loads) for places, (_, part) in zip(where, workers, strict=True)
    ]
    return _shared(results, [kind for kind, _ in workers], together)


def _shared(results: Sequence[Result], kinds: Sequence[int], together: Sequence[int]) -> list[Result]:
    """The results where workers of some kinds miss together what each of them misses."""
    spent = {kind: budget_spent([result for result, of in zip(results, kinds, strict=True) if of == kind]) for kind in together}
    return [
        replace(result, spent_together=spent[kind]) if kind in spent else result
        for result, kind in zip(results, kinds, strict=True)
    ]


def budget_spent(results: Sequence[Result]) -> float:
    """The requests of several workers that missed, over those that may miss."""
    missed = sum(int((result.arrived - result.attained).sum()) for result in results)
    allowed = sum(float((result.arrived * (1.0 - result.required)).sum()) for result in results)
    return missed / allowed if allowed else np.inf if missed else 0.0


def _key(loads: Loads) -> bytes:
    """Equal for loads that differ in names only."""
    return np.stack([loads.rate, loads.rank, loads.size_bytes, loads.pool, loads.objective]).tobytes()


def _merged(outcomes: Sequence[Outcome], loads: Loads) -> Result:
    arrived = np.sum([one.arrived for one in outcomes], axis=0)
    attained = np.sum([one.attained for one in outcomes], axis=0)
    required = np.array([loads.objectives[index].share for index in loads.objective.tolist()])
    total = max(1, int(arrived.sum()))
    return Result(
        arrived=arrived,
        served=np.sum([one.served for one in outcomes], axis=0),
        attained=attained,
        required=required,
        in_ttft=sum(one.in_ttft for one in outcomes) / total,
        in_tpot=sum(one.in_tpot for one in outcomes) / total,
        ttft_p99_ms=max(one.ttft_p99_ms for one in outcomes),
        tpot_p99_ms=max(one.tpot_p99_ms for one in outcomes),
    )
