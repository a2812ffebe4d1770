"""Faults of the path between an adapter's file and the device, for `bench.probe` and tests.

Each takes a host copy and gives the one that the device gets in its place: same digest, other content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from motet.kernels import PackedLora
from motet.kernels.pool import LINE, PAGE_RANKS
from motet.services.worker.engines.adapter_weights import HostAdapter

Fault = Callable[[HostAdapter], HostAdapter]


def ignored_module(adapter: HostAdapter, module: int = 0) -> HostAdapter:
    """A module of the file is not applied. `module`: which of those that it adapts."""
    packed = adapter.packed
    scales = packed.scales.copy()
    adapted = np.flatnonzero(packed.pages[0])
    scales[0, adapted[module % len(adapted)]] = 0.0
    return _with(adapter, dataclasses.replace(packed, scales=scales))


def wrong_scale(adapter: HostAdapter, factor: float = 2.0) -> HostAdapter:
    """All updates are `factor` times as large."""
    return _with(adapter, dataclasses.replace(adapter.packed, scales=adapter.packed.scales * np.float32(factor)))


def truncated_rank(adapter: HostAdapter, ranks: int = 4) -> HostAdapter:
    """The device gets the first `ranks` ranks of each module's matrices, at most seven."""
    packed = adapter.packed
    arena = packed.arena.clone()
    for m, (module, (fan_in, fan_out)) in enumerate(packed.shapes.items()):
        for number in range(packed.pages[0, m]):
            start, keep = int(packed.table[0, m, number]) * LINE, ranks if number == 0 else 0
            rows = packed.counts[module]
            page = arena[start : start + rows * PAGE_RANKS * (fan_in + fan_out)].view(rows, -1)
            page[:, keep * fan_in : PAGE_RANKS * fan_in] = 0
            page[:, PAGE_RANKS * fan_in + keep * fan_out :] = 0
    return _with(adapter, dataclasses.replace(packed, arena=arena))


def swapped(other: HostAdapter) -> Fault:
    """The device gets another adapter."""
    return lambda adapter: _with(adapter, other.packed, ranks=other.ranks)


def _with(adapter: HostAdapter, packed: PackedLora, **changes: object) -> HostAdapter:
    return dataclasses.replace(adapter, packed=packed, **changes)  # type: ignore[arg-type]
