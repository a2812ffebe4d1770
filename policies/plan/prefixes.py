"""Packing by prefixes: adapters in one order, each worker gets as many of the next ones as it can serve.

The order is that of the paper on adapter caching (section 7): by rank, the largest first, so that few workers need a large
S_max, then in a zigzag by rate, high, low, high, so that every prefix is a fair sample. The paper tests prefixes at fixed
numbers of adapters; here the longest one is found by doubling and bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.fleet import Adapters, CannotServe, Rows, Worker
from motet.policies.plan.loads import Loads

AHEAD = 2
"""How far in the order adapters are looked at, relative to a guess of how many fit."""

SMALLER = 0.7
"""Ratio of the rates of adapters that are tried in the rest of a worker's room."""
RATES = 10
"""How many of these are judged at once."""
PROBES = 6
"""How many lengths of prefixes are judged at once."""


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


def by_prefixes(adapters: Adapters, order: Rows, *, below: float = np.inf, needs: Floats | None = None) -> list[Worker]:
    """Workers for the adapters in an order. Of several kinds each worker is of the one with the least cost per token.

    `below`: the most that they may cost; `needs`: the cost that each adapter causes at least. Raises CannotServe as soon as the
    workers so far and the needs of the rest are more, and where no kind may have more workers.
    """
    tokens = adapters.tokens
    kinds, packed, left = adapters.kinds, list[Worker](), order
    guesses = [16] * len(kinds)
    while True:
        cost = sum(kinds[worker.kind].cost for worker in packed)
        if cost + (0.0 if needs is None else float(needs[left].sum())) > below:
            raise CannotServe(f"workers for {below:g} do not suffice in this order")
        if not len(left):
            return packed
        best: tuple[float, Worker] | None = None
        for at, kind in enumerate(kinds):
            if kind.most is not None and sum(worker.kind == at for worker in packed) >= kind.most:
                continue
            if (worker := fill(adapters, at, left, guesses[at])) is None:
                continue
            guesses[at] = len(worker.rows)
            cost = kind.cost / max(float(tokens[worker.rows].sum()), 1e-300)
            if best is None or cost < best[0]:
                best = cost, worker
        if best is None:
            served = 1.0 - float(tokens[left].sum() / tokens.sum())
            raise CannotServe(f"the {len(packed)} workers that are allowed serve {served:.0%} of the load")
        packed.append(best[1])
        left = left[~np.isin(left, best[1].rows)]


def fill(adapters: Adapters, kind: int, order: Rows, guess: int) -> Worker | None:
    """A worker with the longest prefix of an order that it can serve, then what else fits, the largest rates first.

    None if it cannot serve the first one.
    """
    while True:
        window = order[: AHEAD * guess + 8]
        prefixes = _Prefixes(adapters, kind, window)
        length = longest(prefixes.enough, len(window), guess)
        if length < len(window) or len(window) == len(order):
            break
        guess = length
    if not length:
        return None
    worker = prefixes.worker(length)
    _fill_up(adapters, worker, order[length:])
    if worker.rank < prefixes.rank:  # it was judged with settings for a larger one
        return adapters.worker(kind, worker.rows)
    return worker


def _fill_up(adapters: Adapters, worker: Worker, rows: Rows) -> None:
    """Add those of the rows that fit, without a larger rank: again and again the one with the largest rate that does."""
    rate, loads = adapters.demand.rate, adapters.loads[worker.kind]
    rows = rows[adapters.demand.rank[rows] <= worker.rank]
    rows = rows[np.argsort(-rate[rows], kind="stable")]
    most = np.inf
    while len(rows := rows[rate[rows] <= most]):
        places = np.searchsorted(-rate[rows], -rate[rows[0]] * SMALLER ** np.arange(RATES))
        tried = rows[np.unique(places[places < len(rows)])]
        settings, strains = adapters.best(worker.kind, worker.load.with_each(loads.take(tried)))
        fits = np.flatnonzero(strains <= 1.0)
        if not len(fits):
            most = float(rate[tried[-1]]) * SMALLER
            continue
        row, first = int(tried[fits[0]]), int(fits[0])
        worker.rows.append(row)
        worker.load = worker.load.with_each(loads.take([row]))
        worker.setting, worker.strain = int(settings[first]), float(strains[first])
        rows, most = rows[rows != row], float(rate[row])


class _Prefixes:
    """The first of some rows as workers of a kind, with what was found of those that were judged."""

    def __init__(self, adapters: Adapters, kind: int, rows: Rows) -> None:
        self._adapters, self._kind, self._rows = adapters, kind, rows
        self._sums = Sums(adapters.loads[kind].take(rows))
        self._judged: dict[int, tuple[int, float]] = {}  # by length: setting, strain
        self.rank = 0.0  # the largest of all judged

    def enough(self, lengths: Rows) -> NDArray[np.bool_]:
        """Whether a worker can serve so many."""
        loads = self._sums.first(lengths)
        settings, strains = self._adapters.best(self._kind, loads)
        self._judged |= dict(zip(lengths.tolist(), zip(settings.tolist(), strains.tolist(), strict=True), strict=True))
        self.rank = max(self.rank, float(loads.extreme("rank").max()))
        return strains <= 1.0

    def worker(self, length: int) -> Worker:
        """The worker with so many, which were judged."""
        return Worker(self._kind, self._rows[:length].tolist(), self._sums.first(np.array([length])), *self._judged[length])


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
