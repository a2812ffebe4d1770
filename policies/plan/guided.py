"""Packing along the points of the lower bound: the adapters that it puts on the same workers come one after another."""

from __future__ import annotations

import numpy as np

from motet.policies.plan.bound import Bound
from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.fleet import Rows


def guided(demand: Demand, bound: Bound) -> Rows:
    """Rows of the demand in the order in which workers are filled.

    Each class is dealt to the points by their shares. Points come by their largest rank and then by the rate of their
    adapters, so that a worker at the end of a point gets similar adapters of the next. In a point the classes are mixed evenly.
    """
    shares = np.array([point.shares for point in bound.points])
    point = np.empty(len(demand), dtype=np.intp)
    place = np.empty(len(demand))
    for one in range(shares.shape[1]):
        members = np.flatnonzero(bound.nearest == one)
        members = members[np.lexsort((members, -demand.rate[members]))]
        counts = rounded(shares[:, one], len(members))
        dealt = np.repeat(np.arange(len(counts)), counts)
        point[members] = dealt[_spread(counts)]
    for one in range(len(shares)):
        here = np.flatnonzero(point == one)
        for group in np.unique(bound.nearest[here]):
            members = here[bound.nearest[here] == group]
            place[members] = (np.arange(len(members)) + 0.5) / len(members)
    ranks = np.array([demand.rank[point == one].max(initial=0.0) for one in range(len(shares))])
    rates = np.array([demand.rate[point == one].sum() / max(1, (point == one).sum()) for one in range(len(shares))])
    return np.lexsort((np.arange(len(demand)), place, -rates[point], -ranks[point]))


def rounded(shares: Floats, count: int) -> Rows:
    """Whole numbers that add up to `count`, in proportion to `shares`, by largest remainders."""
    total = float(shares.sum())
    exact = shares / total * count if total > 0 else np.full(len(shares), count / len(shares))
    whole = np.floor(exact + 1e-9).astype(np.intp)
    whole[np.argsort(-(exact - whole), kind="stable")[: count - int(whole.sum())]] += 1
    return whole


def _spread(counts: Rows) -> Rows:
    """Places of the members of each part, such that each part's are spread evenly among all."""
    at = np.concatenate([(np.arange(count) + 0.5) / count for count in counts.tolist() if count] or [np.empty(0)])
    return np.argsort(at, kind="stable")
