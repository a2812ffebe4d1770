"""Makes a plan: the law packs, the twin simulates, workers that miss get tighter limits, again.

Law, packing and bound are pure (`policies.plan`). A plan counts only once every worker kept its objectives in the twin with
requests drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.policies.plan import fleet
from motet.policies.plan.bound import bound
from motet.policies.plan.capacity import Limits
from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import CannotServe, Packed, placed
from motet.policies.plan.loss import taken_over
from motet.policies.plan.packing import pack_onto
from motet.twin.planning.check import Result, Run, check
from motet.twin.planning.counts import Question, workers_for
from motet.twin.planning.kinds import Kind, Part
from motet.twin.planning.loads import Loads

Packer = Callable[[Demand, Sequence[fleet.Kind]], fleet.Packing]
SHARED = Limits(busy=1.0, z=0.0, latency=4.0)
"""What no worker can go beyond, whatever the others take over."""
DEALT = Limits(busy=1.2, z=0.0, latency=np.inf)
"""Limits with which adapters are dealt to workers that share the load of all: what is too much for one, others take over, and
how late requests are then, only the twin can say."""
ROUNDS = 6
MOST_LOAD = 1.5
"""Up to this multiple of the load it is looked where a plan breaks."""
LOAD_STEP = 0.02
LEAST_CUT, MOST_CUT = 0.8, 0.98
"""By how much one round lowers a limit, at most and at least."""
MORE_Z = 1.1


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A kind of worker, what one costs, and how many there can be at most (None: any number)."""

    kind: Kind
    cost: float = 1.0
    most: int | None = None


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a plan is made for.

    `objective`: fewest workers, least cost, or the lowest latencies with all workers there can be. `headroom`: the plan is made
    and checked for this much more load. `survive`: it still holds when any so many workers are gone.
    """

    objective: str = "workers"
    headroom: float = 0.0
    survive: int = 0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How a plan is tried in the twin: new requests for each seed, of which those after `warm_s` count."""

    seeds: tuple[int, ...] = (1, 2, 3)
    warm_s: float = 300.0
    duration_s: float = 2100.0


@dataclass(frozen=True, kw_only=True)
class Made:
    """A plan as it was made, with the simulated outcome of each worker (none if it was not tried)."""

    loads: Loads  # with the headroom
    workers: tuple[Packed, ...]
    offers: tuple[Offer, ...]
    kinds: tuple[fleet.Kind, ...]  # of the offers, with the limits that it was made with
    rounds: int
    results: tuple[Result, ...] = ()
    left: Made | None = None
    """What is left without the workers whose loss it survives, simulated as well."""

    @property
    def valid(self) -> bool:
        """Every worker keeps its objectives in the twin, and so does every one that is left after a loss."""
        whole = bool(self.results) and all(result.valid for result in self.results)
        return whole and (self.left is None or self.left.valid)

    @property
    def sure(self) -> bool:
        """It is valid with room for other bursts, and so is what is left after a loss."""
        return self.valid and all(result.sure for result in self.results) and (self.left is None or self.left.sure)

    @property
    def cost(self) -> float:
        """Of all workers."""
        return sum(self.offers[worker.kind].cost for worker in self.workers)

    @property
    def parts(self) -> list[tuple[int, Part]]:
        """(kind, part) of each worker."""
        return [(worker.kind, part_of(worker, self.loads)) for worker in self.workers]


def part_of(worker: Packed, loads: Loads) -> Part:
    """What a worker of a packing serves. Equal workers have equal columns, whatever the names."""
    rows = np.array(worker.rows)
    rate = loads.rate[rows] * np.array(worker.shares)
    order = np.lexsort((loads.objective[rows], loads.pool[rows], loads.size_bytes[rows], loads.rank[rows], rate))
    return Part(setting=worker.setting, loads=loads.take(rows[order], rate[order]))


def offered(offers: Sequence[Offer], goal: Goal) -> list[fleet.Kind]:
    """The kinds as packing takes them. Where the number of workers is the objective, each costs the same."""
    by_cost = goal.objective == "cost"
    return [
        fleet.Kind(name=one.kind.name, settings=one.kind.settings, cost=one.cost if by_cost else 1.0, most=one.most)
        for one in offers
    ]


def make(
    loads: Loads,
    offers: Sequence[Offer],
    goal: Goal,
    trial: Trial | None,
    run: Run,
    say: Callable[[str], None] = lambda _: None,
) -> Made:
    """The plan. Without a trial it is the law's alone. Raises CannotServe with the reason where there is none."""
    loads = loads.faster(1.0 + goal.headroom)
    kinds = offered(offers, goal)
    _check_ranks(loads, kinds)
    question = Question(
        together=frozenset(number for number, one in enumerate(offers) if one.kind.together),
        survive=goal.survive,
        spread=goal.objective == "latency",
    )
    made = None
    for round_ in range(1, ROUNDS + 1):
        say(f"round {round_}: packing {len(loads):,} adapters")
        try:
            workers = workers_for(loads.demand, kinds, question)
        except CannotServe:
            if made is None:
                raise
            return made  # tighter limits leave no plan
        made = Made(loads=loads, workers=workers, offers=tuple(offers), kinds=tuple(kinds), rounds=round_)
        if trial is None:
            return made
        say(f"round {round_}: simulating {len(workers)} workers")
        made = replace(made, results=tuple(tried(made.parts, offers, trial, run)))
        if goal.survive and made.sure:
            say(f"round {round_}: simulating {len(workers) - goal.survive} of {len(workers)} workers")
            left = without(made, goal.survive)
            made = replace(made, left=replace(left, results=tuple(tried(left.parts, offers, trial, run))))
        if made.sure:
            return fewer(made, offers, goal, trial, run, say)
        kinds = tightened(made if made.left is None else made.left, kinds)
    assert made is not None
    return made


def fewer(
    made: Made, offers: Sequence[Offer], goal: Goal, trial: Trial, run: Run, say: Callable[[str], None] = lambda _: None
) -> Made:
    """The plan with the fewest workers that the twin finds valid, by bisection, where workers share the load of all.

    The law's margins for chance are those of a worker by itself. Schedulers that send requests to whoever is free need less.
    """
    if len(offers) != 1 or not offers[0].kind.together or goal.survive or goal.objective == "latency":
        return made
    setting = made.workers[0].setting
    (kind,) = offered(offers, goal)
    only = replace(kind, settings=kind.settings.take(np.array([setting])), limits=DEALT)
    too_few = bound(made.loads.demand, bounding(offers, Goal())).least - 1
    while len(made.workers) - too_few > 1:
        count = (too_few + len(made.workers)) // 2
        try:
            packed = pack_onto(made.loads.demand, [only], [count]).workers
        except CannotServe:
            too_few = count
            continue
        workers = tuple(placed(made.loads.demand, made.kinds, 0, setting, worker.share_of) for worker in packed)
        say(f"simulating {count} workers")
        less = replace(made, workers=workers)
        less = replace(less, results=tuple(tried(less.parts, offers, trial, run)))
        made, too_few = (less, too_few) if less.sure else (made, count)
    return made


def bounding(offers: Sequence[Offer], goal: Goal) -> list[fleet.Kind]:
    """The kinds with the limits that no plan can go beyond: where workers share the load of all, without margins for chance."""
    return [
        replace(kind, limits=SHARED) if offer.kind.together else kind
        for kind, offer in zip(offered(offers, goal), offers, strict=True)
    ]


def _check_ranks(loads: Loads, kinds: Sequence[fleet.Kind]) -> None:
    """Raises CannotServe naming the adapter whose rank no worker takes."""
    largest = max(float(kind.settings.max_rank.max()) for kind in kinds)
    row = int(loads.rank.argmax())
    if loads.rank[row] > largest:
        raise CannotServe(
            f"the adapter {loads.names[row]} has rank {loads.rank[row]}; the largest that a worker takes is {largest:.0f}"
        )


def pack_by(packer: Packer, loads: Loads, offers: Sequence[Offer], goal: Goal) -> Made:
    """The plan of another planner, which is not tried. Raises CannotServe."""
    loads = loads.faster(1.0 + goal.headroom)
    kinds = offered(offers, goal)
    workers = tuple(packer(loads.demand, kinds).workers)
    if lacking := sum(worker.setting < 0 for worker in workers):
        raise CannotServe(f"{lacking} of {len(workers)} workers have no memory for so many adapter slots")
    return Made(loads=loads, workers=workers, offers=tuple(offers), kinds=tuple(kinds), rounds=1)


def tried(
    parts: Sequence[tuple[int, Part]], offers: Sequence[Offer], trial: Trial, run: Run, factor: float = 1.0
) -> list[Result]:
    """The outcome of each worker, given as (kind, part), at a multiple of its load."""
    return check(
        [one.kind for one in offers],
        [(kind, replace(part, loads=part.loads.faster(factor))) for kind, part in parts],
        seeds=trial.seeds,
        warm_s=trial.warm_s,
        duration_s=trial.duration_s,
        run=run,
    )


def tightened(made: Made, kinds: Sequence[fleet.Kind]) -> list[fleet.Kind]:
    """The kinds with lower limits where a worker missed: of latencies for TPOT, of the batch and the load for TTFT."""
    found = list(kinds)
    for worker, result in zip(made.workers, made.results, strict=True):
        if result.sure:
            continue
        limits = kinds[worker.kind].limits.at(worker.setting)
        if result.missed == "TPOT":
            slo_ms = min(
                made.loads.objectives[index].slo.tpot_slo_ms for index in made.loads.objective[list(worker.rows)].tolist()
            )
            cut = float(np.clip(slo_ms / result.tpot_p99_ms, LEAST_CUT, MOST_CUT))
            lower = Limits(busy=limits.busy, z=limits.z, latency=limits.latency * cut)
        else:
            lower = Limits(busy=min(limits.busy, worker.busy) * MOST_CUT, z=limits.z * MORE_Z, latency=limits.latency)
        found[worker.kind] = found[worker.kind].tightened(worker.setting, lower)
    return found


@dataclass(frozen=True, kw_only=True)
class Breaking:
    """Where a plan breaks: the largest multiple of the load that it keeps, and who misses what beyond it first."""

    holds_to: float
    worker: int | None
    missed: str


def breaking(
    parts: Sequence[tuple[int, Part]],
    offers: Sequence[Offer],
    trial: Trial,
    run: Run,
    say: Callable[[str], None] = lambda _: None,
) -> Breaking:
    """The multiple of the load, up to `MOST_LOAD`: in steps that double until a worker misses, then by bisection."""

    def first_to_miss(factor: float) -> tuple[int, str] | None:
        say(f"simulating {factor:.2f} x the load")
        results = tried(parts, offers, trial, run, factor)
        missing = [(result.share, place, result.missed) for place, result in enumerate(results) if not result.valid]
        return min(missing)[1:] if missing else None

    low, high = 1.0, 1.0 + LOAD_STEP
    while (broken := first_to_miss(high)) is None:
        if high == MOST_LOAD:
            return Breaking(holds_to=high, worker=None, missed="")
        low, high = high, min(high + 2.0 * (high - low), MOST_LOAD)
    while high - low > LOAD_STEP + 1e-9:
        middle = (low + high) / 2
        if (miss := first_to_miss(middle)) is None:
            low = middle
        else:
            high, broken = middle, miss
    return Breaking(holds_to=low, worker=broken[0], missed=broken[1])


def without(made: Made, lost: int) -> Made:
    """The plan when its `lost` most loaded workers are gone, and the others have taken over their adapters."""
    rates = [float(part.loads.rate.sum()) for _, part in made.parts]
    gone = set(np.argsort(rates)[-lost:].tolist()) if lost else set()
    left = taken_over(made.loads.demand, made.kinds, made.workers, gone)
    return replace(made, workers=tuple(left), results=(), left=None)
