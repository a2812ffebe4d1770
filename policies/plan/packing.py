"""Packs adapters onto as few (or as cheap) workers as the law of a worker allows.

    split      an adapter that needs more than a worker becomes equal copies, each on a worker of its own
    pack       along an order of the adapters (`prefixes`): by the lower bound ("guided"), and by rank and rate ("bisect") if
               that costs less. `paper` has the paper's procedure
    empty      the lightest worker is emptied into the others, as long as one can be
    level      adapters move until all workers are strained alike

Every step is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from motet.policies.plan.bound import bound
from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import Adapters, CannotServe, Kind, Packing, Worker
from motet.policies.plan.guided import guided
from motet.policies.plan.level import emptied, level
from motet.policies.plan.prefixes import by_prefixes, zigzag
from motet.policies.plan.splitting import Copies, split

Procedure = Literal["best", "bisect", "guided"]


STEPS = 16
"""Moves that level a packing, besides one for each four workers."""
SMALL = 500
"""Adapters up to which packing is guided by the whole bound: a worker more or less is a large part there."""


def pack(demand: Demand, kinds: Sequence[Kind], *, procedure: Procedure = "best") -> Packing:
    """Workers that serve the demand within the limits of their kinds, at the least cost that the procedure finds.

    The demand has one row for each adapter: every `count` is 1. Raises CannotServe, and ValueError for other counts.
    """
    copies = _copies(demand, kinds)
    return packing(copies, _packed(copies.adapters, procedure))


def pack_onto(demand: Demand, kinds: Sequence[Kind], counts: Sequence[int]) -> Packing:
    """The demand on as many workers of each kind as given, strained as alike as possible: the objective "latency".

    From a packing on at most so many, further workers get half of the adapters of the most strained one. Raises as `pack`.
    """
    allowed = [replace(kind, most=count) for kind, count in zip(kinds, counts, strict=True)]
    copies = _copies(demand, allowed)
    adapters, workers = copies.adapters, _packed(copies.adapters, "best")
    for kind, count in enumerate(counts):
        for _ in range(count - sum(worker.kind == kind for worker in workers)):
            at = max(range(len(workers)), key=lambda at: (len(workers[at].rows) > 1, workers[at].strain))
            if len(rows := sorted(workers[at].rows, key=lambda row: (adapters.tokens[row], row))) > 1:
                workers[at] = adapters.worker(workers[at].kind, rows[::2])
                workers.append(adapters.worker(kind, rows[1::2]))
    level(adapters, workers, STEPS + 4 * len(workers))
    return packing(copies, workers)


def _packed(adapters: Adapters, procedure: Procedure) -> list[Worker]:
    guide = None if procedure == "bisect" else bound(adapters.demand, adapters.kinds, rough=len(adapters) > SMALL)
    orders = [guided(adapters.demand, guide)] if guide else []
    if procedure != "guided":
        orders.append(zigzag(adapters.demand))
    workers, failed, below = list[Worker](), list[CannotServe](), np.inf
    for order in orders:
        try:
            workers = _few(adapters, by_prefixes(adapters, order, below=below, needs=guide.needs if guide else None))
        except CannotServe as error:
            failed.append(error)
        else:
            below = _cost(adapters, workers) - _step(adapters.kinds)
    if not workers:
        raise failed[0]
    level(adapters, workers, STEPS + len(workers) // 4)
    return workers


def _few(adapters: Adapters, workers: list[Worker]) -> list[Worker]:
    while (fewer := emptied(adapters, workers)) is not None:
        workers = fewer
    return workers


def _step(kinds: Sequence[Kind]) -> float:
    """The least that one packing costs less than another."""
    costs = {kind.cost for kind in kinds}
    return (costs.pop() if len(costs) == 1 else 0.0) - 1e-9


def _copies(demand: Demand, kinds: Sequence[Kind]) -> Copies:
    if (demand.count != 1).any():
        raise ValueError("a packing needs one row for each adapter")
    return split(demand, kinds)


def _cost(adapters: Adapters, workers: Sequence[Worker]) -> float:
    return sum(adapters.kinds[worker.kind].cost for worker in workers)


def packing(copies: Copies, workers: Sequence[Worker]) -> Packing:
    """The workers with the rows and shares of the original demand, in the order of their first adapters."""
    adapters = copies.adapters
    found = []
    for one in adapters.packed(workers):
        rows = list(one.rows)
        found.append(replace(one, rows=tuple(copies.row[rows].tolist()), shares=tuple(copies.share[rows].tolist())))
    return Packing(workers=tuple(sorted(found, key=lambda one: (one.kind, one.rows))), cost=_cost(adapters, workers))
