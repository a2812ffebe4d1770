"""The link over which adapters are copied to the device: its state and its measured rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from motet.kernels.pool import LoraPool, PackedLora

FIRST_GUESS_BYTES_PER_S = 4e9
"""Assumed rate until the first copy is measured, without emulation."""
FORGET_BYTES = 64 << 20
"""Time constant of the measured rate: copies this long ago have weight 1/e."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """The link's present state."""

    bytes_queued: int  # of all loads, still to come
    bytes_copied: int  # ever
    busy_s: float  # ever: while there was something to copy
    bytes_per_s: float  # as measured, of late
    core_share: float = 0.0  # of a core that copying takes while something is copied, of late


class LinkMeter:
    """Measures rate and cost of copying, with exponential forgetting, since other work may begin to use the same memory.

    `pace` is the emulated rate in bytes per second, 0 for none.
    """

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._rate = pace or FIRST_GUESS_BYTES_PER_S
        self._share = 0.0 if pace else 1.0
        self._seen = (0, 0, 0)

    def state(self, queued: int, copied: int, busy_ns: int, copying_ns: int) -> LinkState:
        """The present state. `busy_ns`: time with something to copy; `copying_ns`: the part of it in which a core copied."""
        fresh, busy, copying = (now - then for now, then in zip((copied, busy_ns, copying_ns), self._seen, strict=True))
        if fresh and busy:
            weight = 1 - math.exp(-fresh / FORGET_BYTES)
            self._rate = 1 / ((1 - weight) / self._rate + weight * busy / 1e9 / fresh)
            self._share += weight * (copying / busy - self._share)
            self._seen = copied, busy_ns, copying_ns
        rate = min(self._rate, self._pace) if self._pace else self._rate
        return LinkState(queued, copied, busy_ns / 1e9, rate, min(self._share, 1.0))


class Sources:
    """The sources of loads into a pool; shared by all loaders."""

    def __init__(self, pool: LoraPool) -> None:
        self._pool = pool
        self._sources: dict[int, tuple[PackedLora, Any]] = {}  # by slot: an adapter, and the owner of its memory

    def finished(self) -> list[Any]:
        """The owners of completed loads, each returned once. They are not read any more."""
        whole = [slot for slot in self._sources if self._whole(slot)]
        return [self._sources.pop(slot)[1] for slot in whole]

    @property
    def under_way(self) -> Mapping[int, Any]:
        """{slot: owner} of loads that `finished` has not returned yet."""
        return {slot: kept for slot, (_, kept) in self._sources.items()}

    def _whole(self, slot: int) -> bool:
        return bool(self._pool.loaded_layers[slot] == self._pool.layers)
