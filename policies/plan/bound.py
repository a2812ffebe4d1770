"""A lower bound on the workers (or their cost) that a demand needs by the law of a worker: a linear program.

A worker that serves some adapters has a number B of running requests, n adapters among them and A adapters in all. These are
divided into cells. In a cell everything is replaced by the best that it can be, so that what a worker can serve becomes linear
in the amount x_c of each class of adapters, with T the least time of a step in the cell and B its largest batch that leaves
seats for chance:

    sum_c x_c (l_c O_c T_c + t u_c)        <= B + t n_0  its requests fit in its batch; t: what one more adapter than the least
                                                         number n_0 of the cell adds to the steps
    sum_c x_c l_c O_c T_c(B_most)          <= b B_most   busy, with the adapters in use at the largest batch
    sum_c x_c (u_c + z u_c (1 - u_c) / n)  <= slots      u_c = 1 - exp(-l_c O_c T); the root is replaced by a chord
    sum_c x_c u_c <= n,   sum_c x_c <= A

The program chooses how many workers g_p are in each cell and which share y_cp of each class they serve, at the least cost:

    min sum_p cost_p g_p    sum_p y_cp = 1    row_p . y_p <= g_p for each row of a cell

Only cells that can lower the cost are in the program: those for which no weights of its rows prove the contrary. Where the
solution uses a wide cell, it is divided. The value rises with each division, and every value is a bound.

A class is a rank, a size, lengths, objectives and a rate of a grid. An adapter between two rates of the grid counts as a share
of each: the sum of rates is kept, and slots in use are concave in the rate, so it is not more than the adapter needs. Relaxed
besides: steps wait for the copies that a tangent of the curve of misses proves (only where slots are scarce), not for all;
waits for a seat or a slot and the variation of prompts are left out of the latencies; adapters of different lengths have the
least context, and each the steps of a worker with its lengths alone, so the bound is low where lengths differ much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan.bound_cells import NEVER, ROWS, Cells, States, first, joined
from motet.policies.plan.capacity import judge
from motet.policies.plan.classes import Classes, classes
from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.fleet import Kind, Rows

TOLERANCE = 1e-3
"""A cell that saves a smaller share of its cost is not worth adding; the value is lowered by what it might save."""
CELLS = 16_000
"""No more cells are divided beyond this number."""
ALONE, PASSES, DIVIDED = 8, 4, 128
"""Divisions of the best cells for single classes at the start; in each round, and how many cells in each of these."""
STEPS, PULL = 40, 1.5
"""Attempts to find weights of a cell's rows that prove that it does not lower the cost, and how far the first goes."""
ADDED, EACH = 24, 3
"""Cells that a round adds to the program, in all and of one setting."""
KEPT = 64
"""The most cells that the linear program keeps. Beyond them, it drops cells that its solution does not use."""
LEFT_OVER = 1e5
"""Price of a class that is not served, in workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    """When the search ends: after so many rounds, or where the solution is within `near` of the bound, or within `close` where
    both mean the same number of workers."""

    rounds: int
    near: float
    close: float

    def enough(self, bound: float, solution: float) -> bool:
        """Whether a bound is near enough to the solution."""
        return solution < self.near * bound or (solution < self.close * bound and np.ceil(solution) == np.ceil(bound))


WHOLE = _Effort(rounds=25, near=1.001, close=1.01)
ROUGH = _Effort(rounds=15, near=1.005, close=1.02)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The least that any packing needs. `points`: the workers that the program chose."""

    value: float  # cost
    points: tuple[Point, ...]
    nearest: Rows  # the class of each adapter
    needs: Floats  # the cost that each adapter causes at least, [adapters]. Any of them need at least their sum

    @property
    def least(self) -> int:
        """The value rounded up: the workers that no packing can be below, where each costs 1."""
        return math.ceil(self.value - 1e-6)

    @property
    def workers(self) -> float:
        """Workers of the solution, not whole. The solution costs a little more than `value`."""
        return sum(point.workers for point in self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Workers in one cell: a setting of a kind, how many, and the share of each class that they serve."""

    kind: int
    setting: int
    workers: float
    shares: Floats  # [classes]


@dataclass(slots=True)
class _Found:
    """A solution with the active cells, and the duals: what an adapter of each class is worth, what each kind costs."""

    value: float
    workers: Floats  # [cells]
    served: Floats  # shares, [cells, classes]
    worth: Floats  # [classes]
    cost: Floats  # [kinds], and the price of the limit on their number

    def points(self, cells: Cells) -> tuple[Point, ...]:
        return tuple(
            Point(
                kind=int(cells.kind[at]),
                setting=int(cells.setting[at]),
                workers=float(self.workers[at]),
                shares=self.served[at],
            )
            for at in np.flatnonzero(self.workers > 1e-9)
        )


def bound(demand: Demand, kinds: Sequence[Kind], *, rough: bool = False) -> Bound:
    """The least cost of workers that serve a demand by the law. inf where no number of the allowed workers can.

    `rough`: in less time, for the points; the value is lower.
    """
    classed = classes(demand)
    of = classed.demand
    cheapest = min(range(len(kinds)), key=lambda at: kinds[at].cost)
    said = judge(of, kinds[cheapest].settings, kinds[cheapest].limits)
    if said.strain.min() <= 1.0 and kinds[cheapest].most != 0:
        point = Point(kind=cheapest, setting=said.best, workers=1.0, shares=np.ones(len(of)))
        needs = np.zeros(len(demand))  # that one worker is needed does not depend on the adapters
        return Bound(value=kinds[cheapest].cost, points=(point,), nearest=classed.nearest, needs=needs)
    return _Program(of, kinds).solve(classed, ROUGH if rough else WHOLE)


class _Program:
    """The program and its cells; `rows` [cells, ROWS, classes]: a worker serves x where row . x <= 1 for each row."""

    def __init__(self, of: Demand, kinds: Sequence[Kind]) -> None:
        self.of, self.kinds = of, kinds
        self.states = [States(of, kind) for kind in kinds]
        self.cells = joined([first(of, at, kind) for at, kind in enumerate(kinds)])
        self.rows = self._rows(self.cells)
        self.weights = np.full((len(self.cells), ROWS), 1.0 / ROWS)
        self.active = np.zeros(len(self.cells), dtype=bool)
        self.used = self.active.copy()
        self._keep(self.rows[:, 0].min(axis=1) < NEVER)
        best = self._alone()
        self.active[best] = True

    def _alone(self) -> Rows:
        """The best cells for each class by itself, divided until they are fine."""
        cost = np.array([kind.cost for kind in self.kinds])
        for last in (False,) * ALONE + (True,):
            best = np.unique((self.rows.max(axis=1) * cost[self.cells.kind][:, None]).argmin(axis=0))
            wide = best[self.cells.wide()[best]]
            if last or not len(wide):
                break
            self._divide(wide)
        return best

    def _rows(self, cells: Cells) -> Floats:
        rows = np.empty((len(cells), ROWS, len(self.of)))
        for at, states in enumerate(self.states):
            chosen = np.flatnonzero(cells.kind == at)
            if len(chosen):
                rows[chosen] = states.rows(cells.take(chosen))
        return rows

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self.cells, self.rows = self.cells.take(np.flatnonzero(kept)), self.rows[kept]
        self.weights, self.active, self.used = self.weights[kept], self.active[kept], self.used[kept]

    def solve(self, classed: Classes, effort: _Effort) -> Bound:
        """Add fine cells that lower the cost, and divide wide ones that may, until there are none."""
        found, value = self._master(), min(kind.cost for kind in self.kinds)
        worth = np.zeros(len(self.of))
        for _ in range(effort.rounds):
            self.used = found.workers > 0
            cost, rough = found.cost, np.flatnonzero(self.cells.wide() & (found.workers > 0))
            self._divide(rough)
            able = self._able(found.worth, cost)
            if (proved := found.value / max(1.0, float(able.max()))) > value:
                value, worth = proved, found.worth * (proved / found.value)
            better = np.flatnonzero(able > 1.0 + TOLERANCE)
            if not len(rough) and (not len(better) or effort.enough(value, found.value)):
                break
            if self.active.sum() > KEPT:
                self.active &= self.used
            self.active[self._diverse(better, able)] = True
            found = self._master()
        allowed = sum(np.inf if kind.most is None else kind.cost * kind.most for kind in self.kinds)
        return Bound(
            value=value if value <= allowed else np.inf,
            points=found.points(self.cells),
            nearest=classed.nearest,
            needs=classed.of_adapters(worth),
        )

    def _diverse(self, better: Rows, able: Floats) -> Rows:
        """The best cells, at most a few of each setting."""
        ordered = better[np.argsort(-able[better], kind="stable")]
        key = self.cells.kind[ordered] * len(self.cells) + self.cells.setting[ordered]
        alike = np.argsort(key, kind="stable")  # by setting, the best first
        begins = np.r_[True, key[alike][1:] != key[alike][:-1]]
        place = np.arange(len(alike)) - np.maximum.accumulate(np.where(begins, np.arange(len(alike)), 0))
        return ordered[np.sort(alike[place < EACH])[:ADDED]]

    def _able(self, worth: Floats, cost: Floats) -> Floats:
        """The worth of what a worker of each cell can serve at most, over its cost. Of wide cells the best are divided."""
        able = np.empty(0)
        for left in reversed(range(PASSES)):
            fresh = np.arange(len(able), len(self.cells))
            costs = cost[self.cells.kind[fresh]]
            able = np.concatenate([able, self._worth(worth, costs, fresh) / costs])
            able[self.active] = 0.0
            best = max(1.0 + TOLERANCE, 0.5 + 0.5 * float(able.max()))
            wide = np.flatnonzero((able > best) & self.cells.wide())
            if not (len(wide) and left) or len(self.cells) > CELLS:
                break
            wide = np.sort(wide[np.argsort(-able[wide], kind="stable")[:DIVIDED]])
            able = np.delete(able, wide)
            self._divide(wide)
        return able

    def _divide(self, wide: Rows) -> None:
        """Put the parts of some cells in their place, at the end."""
        parts, parents = self.cells.take(wide).divided()
        rows = self._rows(parts)
        kept = np.ones(len(self.cells), dtype=bool)
        kept[wide] = False
        self.cells = joined([self.cells, parts])
        self.rows = np.concatenate([self.rows, rows])
        self.weights = np.concatenate([self.weights, self.weights[wide[parents]]])
        self.active = np.concatenate([self.active, np.zeros(len(parts), dtype=bool)])
        self.used = np.concatenate([self.used, np.zeros(len(parts), dtype=bool)])
        self._keep(np.concatenate([kept, rows[:, 0].min(axis=1) < NEVER]))

    def _worth(self, worth: Floats, enough: Floats, cells: Rows) -> Floats:
        """At least the worth of what a worker of each of some cells can serve, by weights of its rows.

        Weights are improved only while they prove more than `enough`: the row that the best class needs gets more.
        """
        best, places = np.full(len(cells), np.inf), np.arange(len(cells))
        rows, weights = self.rows[cells], self.weights[cells]
        enough = enough * (1.0 + TOLERANCE)
        for step in range(STEPS):
            each = worth / np.matmul(weights[:, None, :], rows)[:, 0]
            top = each.argmax(axis=1)
            value = each[np.arange(len(places)), top]
            better = np.flatnonzero(value < best[places])
            best[places[better]] = value[better]
            self.weights[cells[places[better]]] = weights[better]
            left = np.flatnonzero(best[places] > enough[places])
            if not len(left):
                break
            places, rows, weights = places[left], rows[left], weights[left]
            pull = rows[np.arange(len(left)), :, top[left]]
            pull = pull / np.maximum(pull.max(axis=1, keepdims=True), 1e-300)
            weights = weights * np.exp(pull * (PULL / np.sqrt(1.0 + step)))
            weights /= weights.sum(axis=1, keepdims=True)
        return best

    def _master(self) -> _Found:
        """The program with the active cells. Classes that they cannot serve are left over at a high price."""
        from scipy.optimize import linprog
        from scipy.sparse import coo_array

        cells = np.flatnonzero(self.active)
        count, classes = self.of.count, len(self.of)
        rows = self.rows[cells]
        able = rows[:, 0] < NEVER  # [cells, classes]
        cell, one = np.nonzero(able)
        shares = len(cell)
        use = rows[cell, :, one] * count[one][:, None]  # [shares, ROWS]
        at, row = np.nonzero(use > 0)
        limit = len(cells) * ROWS
        kinds = [k for k, kind in enumerate(self.kinds) if kind.most is not None]
        of_kind = [np.flatnonzero(self.cells.kind[cells] == k) for k in kinds]
        parts = [
            (use[at, row], cell[at] * ROWS + row, at),
            (np.full(limit, -1.0), np.arange(limit), shares + np.repeat(np.arange(len(cells)), ROWS)),
            *((np.ones(len(g)), np.full(len(g), limit + i), shares + g) for i, g in enumerate(of_kind)),
        ]
        values, which, variable = (np.concatenate(column) for column in zip(*parts, strict=True))
        variables = shares + len(cells) + classes
        prices = np.array([kind.cost for kind in self.kinds])
        solved = linprog(
            np.concatenate([np.zeros(shares), prices[self.cells.kind[cells]], np.full(classes, LEFT_OVER * prices.max())]),
            A_ub=coo_array((values, (which, variable)), shape=(limit + len(kinds), variables)).tocsr(),
            b_ub=np.concatenate([np.zeros(limit), [float(self.kinds[k].most or 0) for k in kinds]]),
            A_eq=coo_array(
                (np.ones(shares + classes), (np.concatenate([one, np.arange(classes)]), _served(shares, len(cells), classes))),
                shape=(classes, variables),
            ).tocsr(),
            b_eq=np.ones(classes),
            method="highs",
        )
        if solved.x is None:
            raise ArithmeticError(f"the bound's program was not solved: {solved.message}")
        workers = np.zeros(len(self.cells))
        workers[cells] = solved.x[shares : shares + len(cells)]
        served = np.zeros((len(self.cells), classes))
        served[cells[cell], one] = solved.x[:shares]
        prices[kinds] -= solved.ineqlin.marginals[limit:]
        return _Found(float(solved.fun), workers, served, solved.eqlin.marginals / count, prices)


def _served(shares: int, cells: int, classes: int) -> Rows:
    return np.concatenate([np.arange(shares), shares + cells + np.arange(classes)])
