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

from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import Adapters, CannotServe, Rows, Worker
from motet.policies.plan.loads import Loads

AHEAD = 2
"""How far in the order adapters are looked at, relative to a guess of how many fit."""

SMALLER = 0.7
"""Where an adapter does not fit, those with this share of its rate are tried next."""


def zigzag(demand: Demand) -> Rows:
    """Rows by rank, descending, then by objective, then by rate in a zigzag."""
    groups = np.stack([-demand.rank, demand.tpot_slo_ms, demand.ttft_slo_ms])
    order = np.lexsort((-demand.rate, *groups[::-1]))
    edges = np.flatnonzero((np.diff(groups[:, order], axis=1) != 0).any(axis=0)) + 1
    return np.concatenate([_zigzag(part) for part in np.split(order, edges)])


def _zigzag(rows: Rows) -> Rows:
    mixed = np.empty_like(rows)
    half = (len(rows) + 1) // 2
    mixed[0::2] = rows[:half]
    mixed[1::2] = rows[half:][::-1]
    return mixed


def longest(enough: Callable[[int], bool], end: int, guess: int) -> int:
    """The largest length up to `end` that is enough, from a guess by doubling and bisection; 0 if 1 is not."""
    low, high = 0, end + 1  # low is enough, high is not
    length, step = min(max(guess, 1), end), 1
    while high - low > 1:
        if enough(length):
            low = length
            length = min(length + step, high - 1) if high > end else (low + high) // 2
        else:
            high = length
            length = max(length - step, low + 1) if low == 0 else (low + high) // 2
        step *= 2
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
    """The longest prefix of an order that a worker can serve, then what else fits of the adapters that follow.

    None if it cannot serve the first one.
    """
    while True:
        window = order[: AHEAD * guess + 8]
        loads = adapters.loads[kind].take(window)
        sums = Sums(loads)
        length = longest(partial(_enough, adapters, kind, sums), len(window), guess)
        if length < len(window) or len(window) == len(order):
            break
        guess = length
    if not length:
        return window[:0]
    chosen, load = list(range(length)), sums.first(length)
    rates, too_much = adapters.demand.rate[window], np.inf
    for at in (length + np.argsort(-rates[length:], kind="stable")).tolist():
        if rates[at] < too_much:
            more = load.with_each(loads.take([at]))
            if adapters.best(kind, more)[1] <= 1.0:
                chosen.append(at)
                load = more
            else:
                too_much = SMALLER * rates[at]
    return window[chosen]


def _enough(adapters: Adapters, kind: int, sums: Sums, count: int) -> bool:
    return adapters.best(kind, sums.first(count))[1] <= 1.0


class Sums:
    """Sums of the first of some sets."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads
        self._totals, self._curves, self._copies = (
            np.cumsum(values, axis=0) for values in (loads.totals, loads.curves, loads.copies)
        )
        self._extremes = np.maximum.accumulate(loads.extremes, axis=0)

    def first(self, count: int) -> Loads:
        """The union of the first `count` sets, which is at least 1."""
        at = slice(count - 1, count)
        return replace(
            self._loads, totals=self._totals[at], curves=self._curves[at], copies=self._copies[at], extremes=self._extremes[at]
        )
