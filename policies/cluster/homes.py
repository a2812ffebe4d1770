"""Decides which workers are the homes of each adapter: an ordered list, where its requests should find it loaded.

    copies    an adapter with more than COPY of a worker's mean load has several homes, each with an equal part of it
    keep      the homes that there are stay
    add       a copy without a home goes to the worker with the least load, the busiest first
    level     while the most and the least loaded worker are far apart, the first gives the second the adapter that comes
              nearest to half of the difference

Load is requests/s; only ratios matter. The first plan has no homes to keep: its bins go to the workers that have the fewest
bytes to load for them, all together (`match`, an assignment problem). So do the bins of a plan that was made elsewhere. A plan
made again moves little, and rates that differ by chance move nothing.

A home is no pin: a worker may have more homes than slots. Dispatch counts what it costs to send a request elsewhere
(`shared_cost`).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from math import ceil

import numpy as np

Homes = Mapping[str, tuple[str, ...]]
"""By worker id: the adapters that are at home there, in the order of the plan."""
NO_HOMES: Homes = {}
COPY = 0.8
"""Load of one home of an adapter, at most, as a share of a worker's mean load."""
APART = 1.15
"""Workers are level whose loads are within this factor of the mean."""
MOVES = 16
"""Moves for each worker that is far from the mean, at most."""
INCUMBENT = 1e-6
"""Weight of bytes that were at home elsewhere, beside bytes to load."""
UNFIT = 2.0**50
"""Bytes that an adapter counts as on a worker that cannot load it."""


def plan(
    load: Mapping[str, float],
    size_bytes: Mapping[str, int],
    held: Mapping[str, Container[str]],
    before: Homes = NO_HOMES,
) -> dict[str, tuple[str, ...]]:
    """The adapters at home on each worker, the busiest first.

    `load`: requests per second of each adapter; `size_bytes`: of each; `held`: the adapters that each worker has loaded, by
    worker id; `before`: the homes that there were, also of workers that are gone.
    """
    workers = sorted(held)
    names = sorted((one for one, rate in load.items() if rate > 0.0), key=lambda one: (-load[one], one))
    if not workers or not names:
        return {worker: () for worker in workers}
    bins = _Bins(load, workers)
    there = of_adapters({worker: before[worker] for worker in workers if worker in before})
    lacking = []
    for name in names:
        kept = there.get(name, ())[: bins.copies(name)]
        for worker in kept:
            bins.put(name, workers.index(worker))
        lacking += [name] * (bins.copies(name) - len(kept))
    for name in lacking:
        bins.put(name, bins.lightest(name))
    bins.level()
    found = [sorted(one, key=lambda name: (-load[name], name)) for one in bins.names]
    if not there:
        return match(found, size_bytes, held)
    return {worker: tuple(one) for worker, one in zip(workers, found, strict=True)}


class _Bins:
    """The adapters on each worker, and their loads."""

    def __init__(self, load: Mapping[str, float], workers: Sequence[str]) -> None:
        self._rate, self._mean = load, sum(load.values()) / len(workers)
        self.names: list[set[str]] = [set() for _ in workers]
        self.load = np.zeros(len(workers))

    def copies(self, name: str) -> int:
        """The number of homes that an adapter has."""
        return min(len(self.names), ceil(self._rate[name] / (COPY * self._mean)))

    def part(self, name: str) -> float:
        """The load of one home of an adapter."""
        return self._rate[name] / self.copies(name)

    def put(self, name: str, at: int) -> None:
        """An adapter gets a home."""
        self.names[at].add(name)
        self.load[at] += self.part(name)

    def lightest(self, name: str) -> int:
        """The worker with the least load that is no home of the adapter."""
        return min((at for at, there in enumerate(self.names) if name not in there), key=self.load.__getitem__)

    def level(self) -> None:
        """Move adapters from the most to the least loaded worker while these are far from the mean."""
        for _ in range(MOVES * len(self.names)):
            most, least = int(self.load.argmax()), int(self.load.argmin())
            if self.load[most] <= APART * self._mean and self.load[least] >= self._mean / APART:
                return
            gap = float(self.load[most] - self.load[least])
            fitting = [name for name in self.names[most] - self.names[least] if self.part(name) < gap]
            if not fitting:
                return
            name = min(fitting, key=lambda one: (abs(self.part(one) - 0.5 * gap), one))
            self.names[most].remove(name)
            self.load[most] -= self.part(name)
            self.put(name, least)


def match(
    bins: Sequence[Sequence[str]],
    size_bytes: Mapping[str, int],
    held: Mapping[str, Container[str]],
    before: Mapping[str, Collection[str]] = {},
    unfit: Mapping[str, Container[str]] = {},
) -> dict[str, tuple[str, ...]]:
    """The bin of each worker, such that together they load the fewest bytes; an empty one where there are more workers.

    `bins`: adapters that belong on one worker, at most as many bins as workers; `size_bytes`: of each adapter; `held`: the
    adapters that each worker has loaded, by worker id; `before`: the homes that each had; `unfit`: the adapters that each
    cannot load, as few of which get a home there as possible. Raises ValueError for more bins than workers.
    """
    workers = sorted(held)
    if len(bins) > len(workers):
        raise ValueError(f"{len(bins)} bins for {len(workers)} workers")
    missing = np.zeros((len(workers), len(bins)))
    for row, worker in enumerate(workers):
        there, at_home, never = held[worker], before.get(worker, ()), unfit.get(worker, ())
        for column, adapters in enumerate(bins):
            missing[row, column] = sum(
                size_bytes[one] * ((one not in there) + INCUMBENT * (one not in at_home)) + UNFIT * (one in never)
                for one in adapters
            )
    if (missing == missing[:1]).all():  # to every worker each bin costs the same
        return {worker: tuple(bins[row]) if row < len(bins) else () for row, worker in enumerate(workers)}
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(missing)
    chosen = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return {worker: tuple(bins[chosen[row]]) if row in chosen else () for row, worker in enumerate(workers)}


def of_adapters(homes: Homes) -> dict[str, tuple[str, ...]]:
    """The homes of each adapter: worker ids, the one that names it earliest first."""
    found: dict[str, list[tuple[int, str]]] = {}
    for worker, adapters in homes.items():
        for place, adapter in enumerate(adapters):
            found.setdefault(adapter, []).append((place, worker))
    return {adapter: tuple(worker for _, worker in sorted(places)) for adapter, places in found.items()}


def bytes_to_load(homes: Homes, size_bytes: Mapping[str, int], before: Mapping[str, Container[str]]) -> int:
    """Bytes of the adapters that get a home where they had none: what a plan moves."""
    return sum(size_bytes[one] for worker, adapters in homes.items() for one in adapters if one not in before.get(worker, ()))
