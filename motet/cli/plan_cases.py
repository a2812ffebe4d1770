"""A plan and its variations: changes of the load or the workers, other planners, several loads."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from motet.cli.plan_inputs import Change, changed_objectives
from motet.policies.plan.bound import bound
from motet.policies.plan.fleet import CannotServe
from motet.policies.plan.rivals import RIVALS
from motet.shared.plan import Plan
from motet.twin.planning.check import Run
from motet.twin.planning.loads import Loads
from motet.twin.planning.planner import Goal, Made, Offer, Trial, bounding, breaking, make, pack_by, tried, without
from motet.twin.planning.study import attained, explained, written

STAIRS = tuple(round(0.25 * step, 2) for step in range(1, 13))
"""Multiples of the load at which the number of workers is drawn."""
MOST_WINDOWS = 48
FACTORS = (0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4)
"""Multiples of the load at which the attainment of the plan is drawn."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One variation of a plan. `reason`: why there is none."""

    label: str
    workers: int | None = None
    cost: float | None = None
    attained: float | None = None
    valid: bool | None = None
    limit: str = ""
    reason: str = ""


class Cases:
    """The plan of one question, and its variations. Without a trial nothing is simulated."""

    def __init__(
        self, loads: Loads, offers: list[Offer], goal: Goal, trial: Trial | None, run: Run, say: Callable[[str], None]
    ) -> None:
        self.loads, self.offers, self.goal, self.trial = loads, offers, goal, trial
        self._run, self._say = run, say
        self._made: Made | None = None

    def plan(self) -> tuple[Made, Plan]:
        """The plan, with its bound and the load at which it breaks. Raises CannotServe."""
        made = make(self.loads, self.offers, self.goal, self.trial, self._run, self._say)
        self._made = made
        self._say("computing the bound")
        breaks = None
        if self.trial is not None and made.valid:
            breaks = breaking(made.parts, self.offers, self.trial, self._run, self._say)
        return made, written(made, self.offers, self.goal, self.trial, bound=self._bound(made.loads), breaks=breaks)

    def _bound(self, loads: Loads) -> float | None:
        """The bound; with workers that may be gone, the others alone cost as much."""
        if self.goal.objective == "latency":
            return None
        kinds = bounding(self.offers, self.goal)
        return bound(loads.demand, kinds).value + self.goal.survive * min(kind.cost for kind in kinds)

    def explained(self, made: Made, adapter: str) -> list[str]:
        """See `study.explained`."""
        return explained(made, self.offers, adapter)

    def changed(self, made: Made, change: Change) -> Case:
        """What one change does to the plan."""
        self._say(change.label)
        if change.lose:
            return self._without(made, change)
        loads = self.loads.faster(change.rate)
        if change.slo is not None:
            loads = replace(loads, objectives=changed_objectives(loads.objectives, change.slo))
        offers = self.offers if change.worker is None else [change.worker]
        try:
            other = make(loads, offers, self.goal, self._one_seed, self._run, self._say)
        except CannotServe as error:
            return Case(label=change.label, reason=str(error))
        return _case(change.label, other)

    def _without(self, made: Made, change: Change) -> Case:
        if change.lose >= len(made.workers):
            return Case(label=change.label, reason=f"the plan has only {len(made.workers)} workers")
        try:
            left = without(made, change.lose)
        except CannotServe as error:
            return Case(label=change.label, reason=str(error))
        if self._one_seed is not None:
            left = replace(left, results=tuple(tried(left.parts, self.offers, self._one_seed, self._run)))
        return _case(change.label, left)

    @property
    def _one_seed(self) -> Trial | None:
        return None if self.trial is None else replace(self.trial, seeds=self.trial.seeds[:1])

    def rivals(self) -> list[Case]:
        """The plans of other planners for the same load, and what the twin finds of each."""
        found = []
        for name, packer in RIVALS.items():
            self._say(f"{name}: packing")
            try:
                made = pack_by(packer, self.loads, self.offers, self.goal)
            except CannotServe as error:
                found.append(Case(label=name, reason=str(error)))
                continue
            if self._one_seed is not None:
                made = replace(made, results=tuple(tried(made.parts, self.offers, self._one_seed, self._run)))
            found.append(_case(name, made))
        return found

    def staircase(self, *, rivals: bool) -> dict[str, list[tuple[float, float]]]:
        """(multiple of the load, workers) of the law's plans, of the bound, and if asked for of other planners, valid or not.

        Loads without a plan are left out.
        """
        plans, bounds = list[tuple[float, float]](), list[tuple[float, float]]()
        others: dict[str, list[tuple[float, float]]] = {name: [] for name in (RIVALS if rivals else ())}
        for factor in STAIRS:
            self._say(f"planning for {factor:g} x the load")
            loads = self.loads.faster(factor)
            try:
                made = make(loads, self.offers, self.goal, None, self._run)
            except CannotServe:
                continue
            least = self._bound(made.loads)
            for name, points in others.items():
                with contextlib.suppress(CannotServe):
                    points.append((factor, self._units(pack_by(RIVALS[name], loads, self.offers, self.goal))))
            plans.append((factor, self._units(made)))
            if least is not None:
                bounds.append((factor, least))
        return {"plan, by the law": plans, "bound": bounds, **others}

    def day(self) -> list[tuple[float, float]]:
        """(hour of a trace, workers by the law) of its windows, up to `MOST_WINDOWS` of them; empty without a trace."""
        if not self.loads.windows:
            return []
        parts = np.array_split(np.array(self.loads.windows), min(MOST_WINDOWS, len(self.loads.windows)))
        found, known = [], dict[float, float]()
        for place, part in enumerate(parts, start=1):
            factor = max(0.05, math.ceil(float(part.max()) * 20) / 20)
            if factor not in known:
                self._say(f"planning for {factor:g} x the load")
                known[factor] = self._units(make(self.loads.faster(factor), self.offers, self.goal, None, self._run))
            found.append((place / len(parts) * self.loads.span_s / 3600.0, known[factor]))
        return found

    def _units(self, made: Made) -> float:
        return made.cost if self.goal.objective == "cost" else float(len(made.workers))

    def attainment(self) -> list[tuple[float, float]]:
        """(multiple of the load, share of requests within their objectives) of the plan in the twin."""
        if self._made is None or self._one_seed is None:
            return []
        found = []
        for factor in FACTORS:
            self._say(f"simulating {factor:g} x the load")
            results = tried(self._made.parts, self.offers, self._one_seed, self._run, factor)
            found.append((factor, attained(results)))
        return found


def _case(label: str, made: Made) -> Case:
    worst = max(made.workers, key=lambda worker: worker.strain)
    return Case(
        label=label,
        workers=len(made.workers),
        cost=made.cost,
        attained=attained(made.results) if made.results else None,
        valid=made.valid if made.results else None,
        limit=worst.limit,
    )
