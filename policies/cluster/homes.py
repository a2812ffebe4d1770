"""Matches the bins of a plan to live workers: which worker is a home of which adapter.

A plan says which adapters belong on one worker (`policies.plan.packing`), not on which one. A bin goes to the worker that has
the fewest bytes to load for it, over all workers together (an assignment problem). Of matchings with as many bytes to load, the
one that leaves most bytes where the plan before had them counts. So a plan that is made again moves little.

A home is no pin: a worker may have more homes than slots. Dispatch counts what it costs to send a request elsewhere
(`shared_cost`).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence

import numpy as np

Homes = Mapping[str, tuple[str, ...]]
"""By worker id: the adapters that are at home there, in the order of the plan."""
INCUMBENT = 1e-6
"""Weight of bytes that were at home elsewhere, beside bytes to load."""


def match(
    bins: Sequence[Sequence[str]],
    size_bytes: Mapping[str, int],
    held: Mapping[str, Container[str]],
    before: Mapping[str, Collection[str]] = {},
) -> dict[str, tuple[str, ...]]:
    """The bin of each worker, such that together they load the fewest bytes; an empty one where there are more workers.

    `bins`: adapters that belong on one worker, at most as many bins as workers; `size_bytes`: of each adapter; `held`: the
    adapters that each worker has loaded, by worker id; `before`: the homes that each had. Raises ValueError for more bins than
    workers.
    """
    from scipy.optimize import linear_sum_assignment

    workers = sorted(held)
    if len(bins) > len(workers):
        raise ValueError(f"{len(bins)} bins for {len(workers)} workers")
    missing = np.zeros((len(workers), len(bins)))
    for row, worker in enumerate(workers):
        there, at_home = held[worker], before.get(worker, ())
        for column, adapters in enumerate(bins):
            missing[row, column] = sum(
                size_bytes[one] * ((one not in there) + INCUMBENT * (one not in at_home)) for one in adapters
            )
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
