"""Batched LoRA in plain torch: the fallback and test oracle of the compiled kernels. Runs on any device.

Rows of one adapter form a group. Per projection, groups whose adapters have equally many pages and similarly many rows
share two batched products (shrink, expand) over gathered pages, so a step costs a handful of calls per projection however
many adapters it mixes. A group is padded to the next power of two of rows by repeating its last row.

Rows with several adapters are several batches, one for each column of `row_slot`, whose parts are added one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from motet.kernels.pool import PAGE_RANKS, LoraPool

PLANS = ("torch",)
PADDED_ROWS = 16
"""Groups of up to this many rows are padded to a power of two; larger ones (prefill) are computed as they are."""


@dataclass(slots=True)
class _Bucket:
    """Row groups of one projection with equal numbers of pages and rows: `n` adapters with `m` rows and `pages` pages each."""

    n: int
    m: int
    pages: int
    rows: torch.Tensor  # int64 [n * m] rows of x and y
    lines: torch.Tensor  # int64 [n * pages] rows of LoraPool.rows
    scales: torch.Tensor  # [layers, n, 1, 1] in the pool's type, for classes of sites float32
    weights: torch.Tensor | None  # float32 [n, m, 1], of the rows; None for 1
    span: slice | None  # the rows, when they are one adapter's and stand together: computed in place


@dataclass(slots=True)
class LoraBatch:
    """One step's rows by adapter. It is valid as long as `version` is the pool's: a load or free outdates it."""

    version: int
    buckets: dict[str, list[_Bucket]]  # by module; a module that no adapter of the batch has is absent
    more: list[LoraBatch] = field(default_factory=list)  # the rows' further adapters

    @staticmethod
    def build(pool: LoraPool, row_slot: np.ndarray, weights: np.ndarray | None = None) -> LoraBatch:
        """A batch from `row_slot`, int32 [rows] or [rows, k]: each row's slots, -1 for none.

        `weights`, float32 of the same shape, multiply the adapters' parts. Raises ValueError when a row names an empty slot,
        because serving the base model instead would be a wrong answer.
        """
        if row_slot.ndim == 2:
            columns = [
                LoraBatch.build(pool, row_slot[:, k], None if weights is None else weights[:, k])
                for k in range(row_slot.shape[1])
            ]
            columns[0].more = [column for column in columns[1:] if column.buckets]
            return columns[0]
        if weights is not None and (weights[row_slot >= 0] == 1).all():
            weights = None
        batch = LoraBatch(pool.version, {})
        order = np.argsort(row_slot, kind="stable")
        slots, starts = np.unique(row_slot[order], return_index=True)
        ends = np.append(starts[1:], len(order))
        adapted = slots >= 0
        slots, starts, ends = slots[adapted], starts[adapted], ends[adapted]
        if not len(slots):
            return batch
        if slots[-1] >= len(pool.loaded) or not pool.loaded[slots].all():
            raise ValueError(f"rows name empty adapter slots: {slots.tolist()} of which some are not loaded")
        counts = ends - starts
        padded = np.where(counts <= PADDED_ROWS, 1 << np.ceil(np.log2(counts)).astype(np.int64), counts)
        device, dtype = pool.arena.device, torch.float32 if pool.of_sites else pool.arena.dtype
        shared_rows: dict[bytes, torch.Tensor] = {}  # projections with the same buckets share their row indices
        shared_weights: dict[bytes, torch.Tensor] = {}
        for m, module in enumerate(pool.names):
            pages = pool.pages[slots, m].astype(np.int64)
            keys = np.where(pages > 0, pages * (len(order) + 1) * 2 + padded, -1)
            for key in np.unique(keys[keys >= 0]):
                members = np.flatnonzero(keys == key)
                alone = members[0] if len(members) == 1 else None
                width = int(padded[members[0]] if alone is None else counts[alone])
                depth = int(pages[members[0]])
                within = np.minimum(np.arange(width)[None, :], counts[members, None] - 1)
                rows = order[starts[members, None] + within].reshape(-1)
                together = alone is not None and rows[-1] - rows[0] == width - 1  # order is stable: rows ascend
                identity = members.tobytes()
                if identity not in shared_rows:
                    shared_rows[identity] = torch.from_numpy(rows).to(device)
                    if weights is not None:
                        shared_weights[identity] = torch.from_numpy(weights[rows].reshape(-1, width, 1)).to(device)
                scales = pool.scales[slots[members], m].T[:, :, None, None]  # [layers, n, 1, 1]
                lines = pool.table[slots[members], m, :depth].reshape(-1)
                bucket = _Bucket(
                    n=len(members),
                    m=width,
                    pages=depth,
                    rows=shared_rows[identity],
                    lines=torch.from_numpy(lines).to(device),
                    scales=torch.from_numpy(scales).to(device, dtype),
                    weights=shared_weights.get(identity),
                    span=slice(int(rows[0]), int(rows[-1]) + 1) if together else None,
                )
                batch.buckets.setdefault(module, []).append(bucket)
        return batch

    @staticmethod
    def reserve(pool: LoraPool, rows: int, plan: str | None = None) -> LoraBatch:
        """A batch of `rows` rows without adapters. There is one `plan` only."""
        return LoraBatch.build(pool, np.full(rows, -1, dtype=np.int32))

    def update(self, pool: LoraPool, row_slot: np.ndarray) -> None:
        """Change the batch to `row_slot`."""
        built = LoraBatch.build(pool, row_slot)
        self.version, self.buckets, self.more = built.version, built.buckets, built.more


def plan_for(row_slot: np.ndarray) -> str:
    """The only plan."""
    return PLANS[0]


def prepare(pool: LoraPool) -> None:
    """Does nothing: there is nothing to compile."""


def start_lora(x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    """Does nothing: on this path add_lora does all the work."""


def add_lora(y: torch.Tensor, x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    """Add the adapters' part of one fused projection group to `y` in place; see the package's docstring for the formula.

    `y` [rows, sum of out], `x` [rows, in], both on the pool's device and of its type, or float32.
    """
    column = 0
    gathered: dict[int, torch.Tensor] = {}  # projections of a group read the same x
    for module in pool.groups[group]:
        fan_in, fan_out = pool.shapes[module]
        for bucket in batch.buckets.get(module, ()):
            n, m, rank = bucket.n, bucket.m, bucket.pages * PAGE_RANKS
            columns = y[:, column : column + fan_out]
            a = pool.rows(layer, module, b=False).index_select(0, bucket.lines).view(n, rank, fan_in)
            b = pool.rows(layer, module, b=True).index_select(0, bucket.lines).view(n, rank, fan_out)
            if a.dtype != x.dtype:
                a, b = a.to(x.dtype), b.to(x.dtype)
            if bucket.span is not None:
                shrunk = (x[bucket.span] @ a[0].T).mul_(bucket.scales[layer, 0])
                if bucket.weights is not None:
                    shrunk.mul_(bucket.weights[0])
                columns[bucket.span].addmm_(shrunk, b[0])
                continue
            xs = gathered.get(id(bucket.rows))
            if xs is None:
                xs = gathered[id(bucket.rows)] = x.index_select(0, bucket.rows).view(n, m, fan_in)
            shrunk = torch.bmm(xs, a.transpose(1, 2)).mul_(bucket.scales[layer])
            if bucket.weights is not None:
                shrunk.mul_(bucket.weights)
            sums = torch.baddbmm(columns.index_select(0, bucket.rows).view(n, m, fan_out), shrunk, b)
            columns.index_copy_(0, bucket.rows, sums.view(n * m, fan_out))  # a repeated row gets the same sum again
        column += fan_out
    for more in batch.more:
        add_lora(y, x, pool, layer, group, more)
