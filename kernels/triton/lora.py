"""add_lora on a GPU: the choice of kernels for a step's batch, and the buffers that they share.

Two plans over the same kernels, shrink and expand (kernels/triton/device.py):

    decode     groups of up to 16 rows; both kernels run on a side stream, beside the base model's product, and their result is
               added by the small operation that reads it next (kernels/pointwise.py)
    prefill    groups of up to 64 rows: steps with a prompt in them. Shrink runs beside the product, expand adds to its result

The constants are fixed: nothing is tuned while serving. They were chosen on an H200 (bench/results/gpu.md); a test checks
registers and load widths of the kernels compiled for sm_90 (tests/kernels/test_triton_compiled.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
import torch
import triton

from motet.kernels.pool import GROUPS, LoraPool
from motet.kernels.triton.batch import DECODE, PREFILL, PackedBatch, Tile, WorkList, split_k_for, tile_for, work_list
from motet.kernels.triton.device import lora_expand, lora_shrink
from motet.kernels.types import Delta

LaunchPlan = Literal["decode", "prefill"]
Beside = Literal["shrink", "all"]  # what runs beside the base model's product
BESIDE: dict[LaunchPlan, Beside] = {"decode": "all", "prefill": "shrink"}
INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRETED_PROGRAMS = 3  # more than one, so that the walk over the work list is what runs
TILES: dict[LaunchPlan, Tile] = {"decode": DECODE, "prefill": PREFILL}
MOST_SPLITS = 16  # of K in a decode step; h has a plane for each


@dataclass(frozen=True, slots=True)
class Launch:
    """Constants of a kernel. `programs`: per multiprocessor, more than it runs at a time where that was faster."""

    warps: int
    stages: int
    programs: int
    block: int  # columns at once for many rows: of K (shrink), of B (expand)
    wide: int = 0  # shrink: columns of K for few rows
    ranks: int = 0  # expand: at once for many rows
    registers: int | None = None  # of a thread, at most, where 16-bit types are read in pieces of 16 bytes


SHRINKS: dict[LaunchPlan, Launch] = {
    "decode": Launch(block=128, wide=512, warps=4, stages=3, programs=9),
    "prefill": Launch(block=64, wide=64, warps=4, stages=4, programs=2),
}
EXPANDS: dict[LaunchPlan, Launch] = {
    "decode": Launch(block=128, ranks=64, warps=4, stages=2, programs=8, registers=128),
    "prefill": Launch(block=64, ranks=64, warps=8, stages=2, programs=2, registers=128),
}


class LoraBatch:
    """One step's rows by adapter, on the device. It is valid as long as `version` is the pool's.

    A batch made by `reserve` keeps its buffers over `update`s, so that a captured graph that uses it works for the next step
    too.
    """

    def __init__(self, pool: LoraPool, work: WorkList, plan: LaunchPlan, max_rows: int) -> None:
        device = pool.arena.device
        self.version = pool.version
        self.plan = plan
        self.packed = PackedBatch(pool, work, TILES[plan], max_rows)
        self.always_launch = max_rows > 0
        self.multiprocessors = multiprocessors_of(device)
        self.early = _early(device)
        self.ranks = -(-pool.max_rank // TILES[plan].ranks) * TILES[plan].ranks
        self.splits = {group: self._split(pool, group) for group in GROUPS}
        planes = max(splits * len(GROUPS[group]) for group, (splits, _) in self.splits.items())
        self.h = torch.empty(planes * self.packed.positions * self.ranks, dtype=torch.float32, device=device)
        self.side = _side_stream(device)
        self.started: Beside | None = None  # by start_lora, of the group under way

    @staticmethod
    def build(pool: LoraPool, row_slot: np.ndarray, plan: LaunchPlan | None = None, *, group_rows: int = 0) -> LoraBatch:
        """A batch from `row_slot`, int32 [rows]: each row's slot, -1 for the base model alone.

        `group_rows` is the most rows that read an adapter together, 0 for as many as the plan's tile holds. Raises ValueError
        when a row names an empty slot.
        """
        if plan is None:
            plan = "prefill" if tile_for(row_slot) is PREFILL else "decode"
        tile = replace(TILES[plan], rows=group_rows) if group_rows else TILES[plan]
        return LoraBatch(pool, work_list(pool, row_slot, tile), plan, 0)

    @staticmethod
    def reserve(pool: LoraPool, rows: int, plan: LaunchPlan = "decode") -> LoraBatch:
        """An empty batch with room for any `rows` rows."""
        nothing = work_list(pool, np.full(rows, -1, dtype=np.int32), TILES[plan])
        return LoraBatch(pool, nothing, plan, rows)

    def update(self, pool: LoraPool, row_slot: np.ndarray) -> None:
        """Change a reserved batch to `row_slot`. Raises ValueError when a row names an empty slot."""
        self.packed.fill(work_list(pool, row_slot, TILES[self.plan]))
        self.version = pool.version

    def _split(self, pool: LoraPool, group: str) -> tuple[int, int]:
        """Into how many parts K is divided, and the columns of each.

        In a decode step it depends on K alone, so that a row's sums do not depend on the other rows.
        """
        k, launch = _sizes(pool, group)[0], SHRINKS[self.plan]
        step = max(launch.block, launch.wide)
        items = self.packed.parts[group].max_items
        most = MOST_SPLITS if self.plan == "decode" else split_k_for(items, self.multiprocessors)
        span = -(-k // (step * most)) * step
        return -(-k // span), span


def prepare(pool: LoraPool) -> None:
    """Compile and load the kernels that serving launches for this pool: each runs once, with nothing to do."""
    for plan in TILES:
        batch = LoraBatch.reserve(pool, 1, plan)
        for group in GROUPS:
            fan_in, *outs = _sizes(pool, group)
            x, y = (pool.arena.new_zeros(1, size) for size in (fan_in, sum(outs)))
            start_lora(x, pool, 0, group, batch)
            add_lora(y, x, pool, 0, group, batch)


def start_lora(
    x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch, beside: Beside | None = None
) -> Delta | None:
    """Begin the adapters' part of one projection group beside the next work of the current stream; add_lora finishes it.

    With all of it `beside`, which is the default of decode steps, returns that part, valid after add_lora, which then has
    nothing to add; else None. `x` must not change until add_lora.
    """
    if not _has_work(batch, group):
        return None
    batch.started = beside or BESIDE[batch.plan]
    delta = x.new_empty(x.shape[0], sum(_sizes(pool, group)[1:])) if batch.started == "all" else None
    if batch.side is not None:
        batch.side.wait_stream(torch.cuda.current_stream(x.device))
    with nullcontext() if batch.side is None else torch.cuda.stream(batch.side):
        _shrink(x, pool, layer, group, batch)
        if delta is not None:
            _expand(delta, pool, layer, group, batch, add=False)
    return None if delta is None else Delta(delta, batch.packed.adapted)


def add_lora(y: torch.Tensor, x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    """Add the adapters' part of one fused projection group to `y` in place; see the package `kernels` for the formula.

    `y` [rows, sum of out], `x` [rows, in], both of the pool's type and device, rows contiguous. What start_lora has begun is
    finished instead.
    """
    if not _has_work(batch, group):
        return
    started, batch.started = batch.started, None
    if started is None:
        _shrink(x, pool, layer, group, batch)
    elif batch.side is not None:
        torch.cuda.current_stream(y.device).wait_stream(batch.side)
    if started != "all":
        _expand(y, pool, layer, group, batch)


def _has_work(batch: LoraBatch, group: str) -> bool:
    return batch.always_launch or batch.packed.parts[group].max_items > 0


def _shrink(x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    part, tile, launch = batch.packed.parts[group], TILES[batch.plan], SHRINKS[batch.plan]
    sizes, (splits, span), row = _sizes(pool, group), batch.splits[group], len(GROUPS[group]) * batch.ranks
    lora_shrink[_programs(batch, launch.programs)](
        x, x.stride(0), pool.arena, batch.h, row, batch.packed.positions * row, batch.packed.rows, part.items, part.item_pages,
        part.header, layer, splits, span, batch.ranks, *sizes,
        M=tile.rows, R=tile.ranks, BK=launch.block, WIDE=launch.wide, FEW=tile.few, ALIGN=_alignment(x, pool, group),
        WHOLE_K=sizes[0] % max(launch.block, launch.wide) == 0, EARLY=batch.early, UPCAST=_upcast(pool),
        num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True, launch_pdl=batch.early,
    )  # fmt: skip


def _expand(y: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch, *, add: bool = True) -> None:
    part, tile, launch = batch.packed.parts[group], TILES[batch.plan], EXPANDS[batch.plan]
    sizes, (splits, _), row = _sizes(pool, group), batch.splits[group], len(GROUPS[group]) * batch.ranks
    align = _alignment(y, pool, group)
    lora_expand[_programs(batch, launch.programs)](
        y, y.stride(0), pool.arena, batch.h, row, batch.packed.positions * row, batch.packed.rows, part.segments, part.tiles,
        part.item_pages, part.scales, part.scales.stride(0), part.header, layer, splits, batch.ranks, *sizes,
        S=len(GROUPS[group]), M=tile.rows, R=tile.ranks, RANKS=launch.ranks, COLUMNS=tile.columns, BN=launch.block,
        FEW=tile.few, WIDE=tile.wide, PLANES=triton.next_power_of_2(splits) if tile.few else 1, ADD=add, ALIGN=align,
        WHOLE_N=all(n % max(tile.wide, tile.columns) == 0 for n in sizes[1:]), EARLY=batch.early, UPCAST=_upcast(pool),
        num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True, launch_pdl=batch.early,
        maxnreg=None if align == 1 or _upcast(pool) else launch.registers,
    )  # fmt: skip


def _sizes(pool: LoraPool, group: str) -> tuple[int, int, int, int]:
    """(in, out of each projection; 0 for projections that the group lacks)."""
    outs = [pool.shapes[module][1] for module in GROUPS[group]] + [0, 0]
    return pool.shapes[GROUPS[group][0]][0], outs[0], outs[1], outs[2]


def _alignment(rows: torch.Tensor, pool: LoraPool, group: str) -> int:
    """16 when every size of the group and the rows' stride are multiples of it, else 1."""
    return 16 if all(size % 16 == 0 for size in (*_sizes(pool, group), rows.stride(0))) else 1


def _upcast(pool: LoraPool) -> bool:
    return INTERPRETED or pool.arena.dtype == torch.float32


def _programs(batch: LoraBatch, each: int) -> tuple[int]:
    return (INTERPRETED_PROGRAMS if INTERPRETED else batch.multiprocessors * each,)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@cache
def multiprocessors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _early(device: torch.device) -> bool:
    """Whether launches can begin before those ahead of them are over: from sm_90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
