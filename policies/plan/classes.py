"""Adapters in few classes, for the lower bound: none needs more than before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.fleet import Rows

MOST = 64
RATES = 16  # of a group at most
EASIER = {
    "prompt_tokens": np.floor,
    "output_tokens": np.floor,
    "output_square": np.floor,
    "size_bytes": np.floor,
    "rank": np.floor,
    "ttft_slo_ms": np.ceil,
    "tpot_slo_ms": np.ceil,
}
"""Columns that classes round, each to what is easier to serve."""
RATIOS = (1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 8.0, 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Adapters as classes: the rows of `demand`, with counts that need not be whole."""

    demand: Demand
    rate: Floats  # [adapters]
    nearest: Rows  # class, [adapters]; 0 for those without requests
    groups: tuple[tuple[Rows, Rows], ...]  # adapters with requests, and their classes, which differ in the rate alone

    def of_adapters(self, values: Floats) -> Floats:
        """Values of classes, [classes], as those of adapters, [adapters]: shared as the adapters are; 0 without requests."""
        found = np.zeros(len(self.rate))
        for adapters, alike in self.groups:
            found[adapters] = np.interp(self.rate[adapters], self.demand.rate[alike], values[alike])
        return found


def classes(demand: Demand, most: int = MOST) -> Classes:
    """The demand in about `most` classes at most.

    An adapter between two rates of a grid counts as a share of each, so the sum of rates is kept. Adapters without requests are
    left out.
    """
    rows = np.flatnonzero(demand.rate * demand.count > 0)
    columns = np.stack([getattr(demand, name)[rows] for name in EASIER], axis=1)
    for ratio in RATIOS:
        groups, which = np.unique(_rounded(columns, ratio), axis=0, return_inverse=True)
        if len(groups) <= most // 2:
            break
    each = max(2, min(RATES, most // len(groups)))
    parts, members_of, nearest, before = [], [], np.zeros(len(demand), dtype=np.intp), 0
    for at, values in enumerate(groups):
        members = rows[which.ravel() == at]
        grid, count = _on_grid(demand.rate[members], demand.count[members], each)
        kept = np.flatnonzero(count > 0)
        parts.append((grid[kept], count[kept], np.tile(values, (len(kept), 1))))
        middles = np.sqrt(grid[kept][1:] * grid[kept][:-1])
        nearest[members] = before + np.searchsorted(middles, demand.rate[members])
        members_of.append((members, before + np.arange(len(kept))))
        before += len(kept)
    values = np.concatenate([part[2] for part in parts])
    found = Demand.of(
        np.concatenate([part[0] for part in parts]),
        count=np.concatenate([part[1] for part in parts]),
        share=float(demand.share.min()),
        peakedness=demand.peakedness,
        **dict(zip(EASIER, values.T, strict=True)),
    )
    return Classes(demand=found, rate=demand.rate, nearest=nearest, groups=tuple(members_of))


def _rounded(columns: Floats, ratio: float) -> Floats:
    """Columns on geometric grids, to the easier side; the ends are kept."""
    if ratio == 1.0:
        return columns
    rounded = columns.copy()
    for at, easier in enumerate(EASIER.values()):
        column = columns[:, at]
        finite = np.isfinite(column) & (column > 0)
        rounded[finite, at] = ratio ** easier(np.log(column[finite]) / np.log(ratio))
        if easier is np.floor:
            rounded[:, at] = np.clip(rounded[:, at], column.min(), column)
        else:
            rounded[:, at] = np.clip(rounded[:, at], column, column.max())
    return rounded


def _on_grid(rate: Floats, count: Floats, most: int) -> tuple[Floats, Floats]:
    """(rates, counts) of at most `most` points with the same number and the same sum of rates."""
    distinct = np.unique(rate)
    grid: Floats = distinct if len(distinct) <= most else np.geomspace(distinct[0], distinct[-1], most)
    if len(grid) == 1:
        return grid, np.array([count.sum()])
    after = np.clip(np.searchsorted(grid, rate), 1, len(grid) - 1)
    share = np.clip((rate - grid[after - 1]) / (grid[after] - grid[after - 1]), 0.0, 1.0)
    found = np.zeros(len(grid))
    np.add.at(found, after - 1, count * (1.0 - share))
    np.add.at(found, after, count * share)
    return grid, found
