"""Placements to compare with: rendezvous hashing and minimum-cost flow, as NVIDIA Dynamo's LoRA controller is described.

Both give an adapter replicas in proportion to its load, and neither balances load beyond that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np

from motet.policies.cluster.homes import Homes
from motet.policies.cluster.worker_table import hash_of


def replicas(load: Mapping[str, float], workers: int) -> dict[str, int]:
    """Homes of each adapter: its share of the load, in workers, rounded up."""
    whole = sum(load.values())
    return {name: min(workers, ceil(rate / whole * workers)) for name, rate in load.items() if rate > 0.0}


def rendezvous(load: Mapping[str, float], workers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The workers with the highest hashes of (adapter, worker) are the homes of an adapter (highest random weight)."""
    found: dict[str, list[str]] = {worker: [] for worker in workers}
    for name, count in replicas(load, len(workers)).items():
        for worker in sorted(workers, key=lambda one: hash_of(f"{name} {one}"), reverse=True)[:count]:
            found[worker].append(name)
    return {worker: tuple(names) for worker, names in found.items()}


def min_cost_flow(
    load: Mapping[str, float], size_bytes: Mapping[str, int], workers: Sequence[str], before: Homes
) -> dict[str, tuple[str, ...]]:
    """The homes that move the fewest bytes where every worker has as many as any other: the flow of least cost from adapters,
    one unit for each replica, to workers."""
    from scipy.optimize import linear_sum_assignment

    counts = replicas(load, len(workers))
    units = [name for name, count in counts.items() for _ in range(count)]
    places = [worker for worker in workers for _ in range(ceil(len(units) / len(workers)))]
    there = {worker: frozenset(before.get(worker, ())) for worker in workers}
    bytes_moved = {
        name: np.array([float(size_bytes[name]) * (name not in there[worker]) for worker in places]) for name in counts
    }
    rows, columns = linear_sum_assignment(np.array([bytes_moved[name] for name in units]))
    found: dict[str, dict[str, None]] = {worker: {} for worker in workers}
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        found[places[column]][units[row]] = None
    return {worker: tuple(names) for worker, names in found.items()}
