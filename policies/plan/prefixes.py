"""Packing by prefixes: adapters in one order, each worker gets as many of the next ones as it can serve.

The order is that of the paper on adapter caching (section 7): by rank, the largest first, so that few workers need a large
S_max, then in a zigzag by rate, high, low, high, so that every prefix is a fair sample. The paper tests prefixes at fixed
numbers of adapters; here the longest one is found by doubling and bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import Adapters, CannotServe, Rows, Worker
from motet.policies.plan.loads import Loads

AHEAD = 2
"""How far in the order adapters are looked at, relative to a guess of how many fit."""

SMALLER = 0.7
"""Ratio of the rates of adapters that are tried in the rest of a worker's room."""
PROBES = 6
"""How many possibilities are judged at once."""


def zigzag(demand: Demand) -> Rows:
    """Rows by rank, descending, then by objective, then by rate in a zigzag."""
    groups = np.stack([-demand.rank, demand.tpot_slo_ms, demand.ttft_slo_ms])
    order = np.lexsort((-demand.rate, *groups[::-1]))
    sorted_groups = groups[:, order]
    edges = np.flatnonzero((sorted_groups[:, 1:] != sorted_groups[:, :-1]).any(axis=0)) + 1
    return np.concatenate([_zigzag(part) for part in np.split(order, edges)])


def _zigzag(rows: Rows) -> Rows:
    mixed = np.empty_like(rows)
    half = (len(rows) + 1) // 2
    mixed[0::2] = rows[:half]
    mixed[1::2] = rows[half:][::-1]
    return mixed


def longest(enough: Callable[[Rows], NDArray[np.bool_]], end: int, guess: int) -> int:
    """The largest length up to `end` that is enough, from a guess on; 0 if 1 is not.

    `enough` judges several lengths at once, and whatever is longer than one that is not enough is not either.
    """
    low, high = 0, end + 1  # low is enough, high is not
    lengths = guess + np.array([-4, -1, 0, 1, 2, 6])
    while high - low > 1:
        lengths = np.unique(np.clip(lengths, low + 1, high - 1))
        failed = np.flatnonzero(~enough(lengths))
        if len(failed):
            high = int(lengths[failed[0]])
        low = int(lengths[lengths < high].max(initial=low))
        lengths = np.linspace(low, high, PROBES + 2).round().astype(np.intp)
    return low


def by_prefixes(adapters: Adapters, order: Rows) -> list[Worker]:
    """Workers for the adapters in an order. Of several kinds each worker is of the one with the least cost per token.

    Raises CannotServe where no kind may have more workers.
    """
    tokens = adapters.tokens
    kinds, packed, left = adapters.kinds, list[Worker](), order
    guesses = [16] * len(kinds)
    while len(left):
        best: tuple[float, int, Rows] | None = None
        for at, kind in enumerate(kinds):
            if kind.most is not None and sum(worker.kind == at for worker in packed) >= kind.most:
                continue
            rows = fill(adapters, at, left, guesses[at])
            if not len(rows):
                continue
            guesses[at] = len(rows)
            cost = kind.cost / max(float(tokens[rows].sum()), 1e-300)
            if best is None or cost < best[0]:
                best = cost, at, rows
        if best is None:
            served = 1.0 - float(tokens[left].sum() / tokens.sum())
            raise CannotServe(f"the {len(packed)} workers that are allowed serve {served:.0%} of the load")
        packed.append(adapters.worker(best[1], best[2].tolist()))
        left = left[~np.isin(left, best[2])]
    return packed


def fill(adapters: Adapters, kind: int, order: Rows, guess: int) -> Rows:
    """The longest prefix of an order that a worker can serve, then what else fits, the largest rates first.

    None if it cannot serve the first one.
    """
    while True:
        window = order[: AHEAD * guess + 8]
        sums = Sums(adapters.loads[kind].take(window))
        length = longest(partial(_enough, adapters, kind, sums), len(window), guess)
        if length < len(window) or len(window) == len(order):
            break
        guess = length
    if not length:
        return order[:0]
    return np.concatenate([order[:length], _more(adapters, kind, sums.first(np.array([length])), order[length:])])


def _more(adapters: Adapters, kind: int, load: Loads, rows: Rows) -> Rows:
    """Which of the rows fit beside a load, without a larger rank: again and again the one with the largest rate that does."""
    rate = adapters.demand.rate
    rows = rows[adapters.demand.rank[rows] <= load.extreme("rank")[0]]
    rows = rows[np.argsort(-rate[rows], kind="stable")]
    chosen, most = list[int](), np.inf
    while len(rows := rows[rate[rows] <= most]):
        places = np.searchsorted(-rate[rows], -rate[rows[0]] * SMALLER ** np.arange(PROBES))
        tried = rows[np.unique(places[places < len(rows)])]
        fits = np.flatnonzero(adapters.least_strains(kind, load.with_each(adapters.loads[kind].take(tried))) <= 1.0)
        if not len(fits):
            most = float(rate[tried[-1]]) * SMALLER
            continue
        row = int(tried[fits[0]])
        chosen.append(row)
        load = load.with_each(adapters.loads[kind].take([row]))
        rows, most = rows[rows != row], float(rate[row])
    return np.array(chosen, dtype=np.intp)


def _enough(adapters: Adapters, kind: int, sums: Sums, counts: Rows) -> NDArray[np.bool_]:
    return adapters.least_strains(kind, sums.first(counts)) <= 1.0


class Sums:
    """Sums of the first of some sets."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads
        self._totals, self._curves, self._copies = (
            np.cumsum(values, axis=0) for values in (loads.totals, loads.curves, loads.copies)
        )
        self._extremes = np.maximum.accumulate(loads.extremes, axis=0)

    def first(self, counts: Rows) -> Loads:
        """The unions of the first so many sets, which are at least 1."""
        at = counts - 1
        return replace(
            self._loads, totals=self._totals[at], curves=self._curves[at], copies=self._copies[at], extremes=self._extremes[at]
        )
