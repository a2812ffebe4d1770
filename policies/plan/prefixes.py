"""Packing by prefixes: adapters in one order, each worker gets as many of the next ones as it can serve.

The order is that of the paper on adapter caching (section 7): by rank, the largest first, so that few workers need a large
S_max, then in a zigzag by rate, high, low, high, so that every prefix is a fair sample. The paper tests a prefix at fixed numbers
of adapters; here the longest one is found by doubling and bisection.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import Adapters, CannotServe, Rows
from motet.policies.plan.loads import Loads


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
    mixed[1::2] = rows[:half - 1 if len(rows) % 2 else half - 1 : -1] if len(rows) > 1 else rows[:0]
    return mixed


class Prefixes:
    """Sets of adjacent adapters in an order, from sums along it."""

    def __init__(self, adapters: Adapters, order: Rows) -> None:
        self._adapters = adapters
        self._extremes = [loads.extremes[order] for loads in adapters.loads]
        self._sums = [_sums(loads.take(order)) for loads in adapters.loads]

    def load(self, kind: int, start: int, stop: int) -> Loads:
        """The adapters at [start, stop) of the order."""
        sums = self._sums[kind]
        return Loads(
            totals=sums.totals[stop : stop + 1] - sums.totals[start : start + 1],
            curves=np.maximum(sums.curves[stop : stop + 1] - sums.curves[start : start + 1], 0.0),
            copies=sums.copies[stop : stop + 1] - sums.copies[start : start + 1],
            extremes=self._extremes[kind][start:stop].max(axis=0, keepdims=True),
            peakedness=sums.peakedness,
        )

    def longest(self, kind: int, start: int, guess: int) -> int:
        """How many adapters from `start` on one worker can serve."""
        end = len(self._adapters) - start
        return longest(lambda length: self._adapters.choose(kind, self.load(kind, start, start + length)).strain <= 1.0, end, guess)


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


def by_prefixes(adapters: Adapters) -> list[tuple[int, Rows]]:
    """(kind, rows) of each worker. Of several kinds each worker is of the one with the least cost per token served.

    Raises CannotServe where no kind may have more workers.
    """
    demand, kinds = adapters.demand, adapters.kinds
    order = zigzag(demand)
    prefixes = Prefixes(adapters, order)
    tokens = np.concatenate([[0.0], np.cumsum((demand.rate * demand.output_tokens)[order])])
    guesses, used, packed, start = [16] * len(kinds), [0] * len(kinds), list[tuple[int, Rows]](), 0
    while start < len(order):
        best: tuple[float, int, int] | None = None
        for at, kind in enumerate(kinds):
            if kind.most is not None and used[at] >= kind.most:
                continue
            guesses[at] = prefixes.longest(at, start, guesses[at])
            if guesses[at]:
                served = tokens[start + guesses[at]] - tokens[start]
                best = min(best or (np.inf, 0, 0), (kind.cost / served, at, guesses[at]))
        if best is None:
            raise CannotServe(
                f"{len(packed)} workers, the most allowed, serve {tokens[start] / tokens[-1]:.0%} of the load by this order"
            )
        _, at, length = best
        packed.append((at, order[start : start + length]))
        used[at] += 1
        start += length
    return packed


def _sums(loads: Loads) -> Loads:
    """Sums of the first sets: row k has those of k sets."""

    def along(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])

    return Loads(
        totals=along(loads.totals),
        curves=along(loads.curves),
        copies=along(loads.copies),
        extremes=loads.extremes,
        peakedness=loads.peakedness,
    )
