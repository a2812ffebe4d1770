"""What the law of a worker adds up over adapters.

All of it is sums and extremes, so sets of adapters are judged from the sums of their adapters, without looking at each again.
An adapter with l requests/s and O output tokens is in use, where a token takes t seconds, for the share 1 - exp(-l O t) of
time. Such functions are kept at fixed times and interpolated in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan.demand import Demand, Floats

TIMES = 128
TOKEN_S = np.geomspace(1e-6, 1e5, TIMES)
"""Seconds per output token at which the adapters in use are counted."""
KEPT_S = np.geomspace(1e-3, 1e6, TIMES)
"""Seconds for which an adapter without requests may stay."""
TOTALS = ("rate", "prompt", "prompt_square", "prompt_p99", "output", "square", "inverse", "rank", "adapters", "lora_rate")
EXTREMES = ("rank", "size_bytes", "share", "ttft_slo_ms", "tpot_slo_ms")
CURVES = ("used", "variance", "kept", "used_bytes", "variance_bytes", "kept_bytes", "missed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Sets of adapters, one a row.

    `totals` [sets, TOTALS], sums weighted by rate; `curves` [sets, CURVES, TIMES]; `copies` [sets, settings], time of copies
    weighted by rate; `extremes` [sets, EXTREMES], the largest, of objectives the smallest with a minus.
    """

    totals: Floats
    curves: Floats
    copies: Floats
    extremes: Floats
    peakedness: float

    @classmethod
    def of(cls, demand: Demand, copy_ms: Floats) -> Loads:
        """Each row of a demand as a set. `copy_ms`: [settings, rows]."""
        count, rate, size = demand.count, demand.rate, demand.size_bytes
        lora = count * (demand.rank > 0)
        lengths = (
            np.ones_like(rate),
            demand.prompt_tokens,
            demand.prompt_square,
            demand.prompt_p99,
            demand.output_tokens,
            demand.output_square,
            demand.output_inverse,
            demand.rank,
        )
        idle = np.exp(-np.outer(rate * demand.output_tokens, TOKEN_S))
        not_asked = np.exp(-np.outer(rate, KEPT_S))
        curves = np.empty((len(rate), len(CURVES), TIMES))
        number, size_bytes = lora[:, None], (lora * size)[:, None]
        curves[:, 0] = number * (1.0 - idle)
        curves[:, 1] = curves[:, 0] * idle
        curves[:, 2] = number * (1.0 - not_asked)
        curves[:, 3] = size_bytes * (1.0 - idle)
        curves[:, 4] = curves[:, 3] * idle * size[:, None]
        curves[:, 5] = size_bytes * (1.0 - not_asked)
        curves[:, 6] = (lora * rate)[:, None] * not_asked
        return cls(
            totals=np.stack([*(count * rate * each for each in lengths), count, lora * rate], axis=1),
            curves=curves,
            copies=(lora * rate)[:, None] * np.broadcast_to(copy_ms, (len(copy_ms), len(rate))).T,
            extremes=np.stack(
                [demand.rank, np.where(lora > 0, size, 0.0), demand.share, -demand.ttft_slo_ms, -demand.tpot_slo_ms], axis=1
            ),
            peakedness=demand.peakedness,
        )

    def __len__(self) -> int:
        return len(self.totals)

    def take(self, rows: Sequence[int] | NDArray[np.intp]) -> Loads:
        """Some of the sets."""
        return replace(
            self, totals=self.totals[rows], curves=self.curves[rows], copies=self.copies[rows], extremes=self.extremes[rows]
        )

    def joined(self, rows: Sequence[int] | NDArray[np.intp]) -> Loads:
        """The union of some of the sets, as one."""
        rows = np.asarray(rows, dtype=np.intp)
        if len(rows) == 1:
            return self.take(rows)
        return replace(
            self,
            totals=self.totals[rows].sum(axis=0, keepdims=True),
            curves=self.curves[rows].sum(axis=0, keepdims=True),
            copies=self.copies[rows].sum(axis=0, keepdims=True),
            extremes=self.extremes[rows].max(axis=0, keepdims=True),
        )

    def with_each(self, others: Loads) -> Loads:
        """The union of each set with the one in the same row; a single set is joined to all."""
        return replace(
            self,
            totals=self.totals + others.totals,
            curves=self.curves + others.curves,
            copies=self.copies + others.copies,
            extremes=np.maximum(self.extremes, others.extremes),
        )

    def without_each(self, others: Loads) -> Loads:
        """Each set without a part of it, of the other in the same row. Extremes stay."""
        return replace(
            self,
            totals=np.maximum(self.totals - others.totals, 0.0),
            curves=np.maximum(self.curves - others.curves, 0.0),
            copies=np.maximum(self.copies - others.copies, 0.0),
            extremes=np.broadcast_to(self.extremes, (max(len(self), len(others)), len(EXTREMES))),
        )

    @staticmethod
    def stack(parts: Sequence[Loads]) -> Loads:
        """All sets of the parts."""
        totals, curves, copies, extremes = (
            np.concatenate(columns)
            for columns in zip(*((one.totals, one.curves, one.copies, one.extremes) for one in parts), strict=True)
        )
        return replace(parts[0], totals=totals, curves=curves, copies=copies, extremes=extremes)

    @property
    def rate(self) -> Floats:
        """Requests/s, [sets]."""
        return self.totals[:, 0]

    @property
    def adapters(self) -> Floats:
        """Number of adapters, [sets]."""
        return self.totals[:, TOTALS.index("adapters")]

    def mean(self, name: str) -> Floats:
        """The mean over requests of one of `TOTALS`, [sets]."""
        return self.totals[:, TOTALS.index(name)] / self.rate

    def extreme(self, name: str) -> Floats:
        """The largest rank, size or share, or the smallest objective, [sets]."""
        values = self.extremes[:, EXTREMES.index(name)]
        return -values if name.endswith("_slo_ms") else values

    def curve(self, name: str) -> Floats:
        """One of `CURVES`, [sets, TIMES]."""
        return self.curves[:, CURVES.index(name)]


class At:
    """Times [sets, ...] on a geometric grid, for reading several curves at them."""

    def __init__(self, times_s: Floats, grid: Floats) -> None:
        place = np.log(np.maximum(times_s, grid[0]) / grid[0]) * ((len(grid) - 1) / np.log(grid[-1] / grid[0]))
        self._before = np.minimum(place.astype(np.intp), len(grid) - 2)
        low_s = grid[self._before]
        self._share = np.minimum(np.maximum((times_s - low_s) / (grid[self._before + 1] - low_s), 0.0), 1.0)

    def __call__(self, curve: Floats) -> Floats:
        """Curves [sets, TIMES] at the times."""
        sets = np.arange(len(curve)).reshape(-1, *[1] * (self._share.ndim - 1)) if len(curve) > 1 else 0
        low = curve[sets, self._before]
        return np.asarray(low + self._share * (curve[sets, self._before + 1] - low))


def when(curve: Floats, values: Floats, grid: Floats) -> Floats:
    """The times at which rising curves [sets, TIMES] reach `values` [cases]; the ends of the grid outside."""
    after = np.clip((curve < values[:, None]).sum(axis=1), 1, len(grid) - 1)
    sets = np.arange(len(curve)) if len(curve) > 1 else 0
    low, high = curve[sets, after - 1], curve[sets, after]
    share = np.clip((values - low) / np.maximum(high - low, 1e-300), 0.0, 1.0)
    return np.asarray(grid[after - 1] + share * (grid[after] - grid[after - 1]))
