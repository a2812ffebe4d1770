"""add_lora on a GPU: the choice of kernels for a step's batch, and the buffers that they share.

Three plans over the same device functions:

    two_launches   shrink, expand; `start_lora` puts the shrink on a side stream, beside the base model's product
    ticketed       one launch for both
    segmented      two launches with 64-row tiles: steps with a prompt in them

`TILES` is a fixed table: nothing is tuned while serving. It was chosen for sm_90, for which a test checks registers and load
widths of the compiled kernels (tests/kernels/test_triton_compiled.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
import torch
import triton

from motet.kernels.pool import GROUPS, LoraPool
from motet.kernels.triton.batch import DECODE, PREFILL, PackedBatch, WorkList, tile_for, work_list
from motet.kernels.triton.device import lora_expand, lora_shrink, lora_ticketed

LaunchPlan = Literal["two_launches", "ticketed", "segmented"]
INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRETED_PROGRAMS = 3  # more than one, so that the walk over the work list is what runs


@dataclass(frozen=True, slots=True)
class Launch:
    """Constants of one kernel: block sizes, warps, pipeline stages and programs per multiprocessor."""

    block: int  # of K (shrink) or of columns (expand)
    warps: int
    stages: int
    programs: int
    unroll: bool = True  # expand: load all planes of h at once


TILES: dict[tuple[int, str], Launch] = {
    (16, "shrink"): Launch(block=256, warps=4, stages=3, programs=4),
    (16, "expand"): Launch(block=128, warps=4, stages=3, programs=6),
    (64, "shrink"): Launch(block=64, warps=4, stages=4, programs=2),
    (64, "expand"): Launch(block=128, warps=8, stages=2, programs=2, unroll=False),
}
TICKETED = Launch(block=128, warps=4, stages=3, programs=4)  # both of K and of columns


class LoraBatch:
    """One step's rows by adapter, on the device. It is valid as long as `version` is the pool's.

    A batch made by `reserve` keeps its buffers over `update`s, so that a captured graph that uses it works for the next step
    too.
    """

    def __init__(self, pool: LoraPool, work: WorkList, plan: LaunchPlan, max_rows: int) -> None:
        device = pool.arena.device
        self.version = pool.version
        self.plan = plan
        self.tile = PREFILL if plan == "segmented" else DECODE
        self.multiprocessors = _multiprocessors(device)
        self.packed = PackedBatch(pool, work, self.tile, max_rows)
        self.always_launch = max_rows > 0
        most = max(part.max_items for part in self.packed.parts.values())
        planes = most + 2 * self.multiprocessors + 8  # split_k * items is never more, see split_k_for
        self.h = torch.empty(planes * self.tile.rows * self.tile.ranks, dtype=torch.float32, device=device)
        segments = max(part.segments.shape[0] for part in self.packed.parts.values())
        self.counters = torch.zeros(2 + segments, dtype=torch.int32, device=device)
        self.side = _side_stream(device)
        self.shrunk: tuple[int, str] | None = None  # what the side stream is working on

    @staticmethod
    def build(pool: LoraPool, row_slot: np.ndarray, plan: LaunchPlan | None = None, *, group_rows: int = 0) -> LoraBatch:
        """A batch from `row_slot`, int32 [rows]: each row's slot, -1 for the base model alone.

        `group_rows` is the most rows that read an adapter together, 0 for as many as the plan's tile holds. Raises ValueError
        when a row names an empty slot.
        """
        if plan is None:
            plan = "segmented" if tile_for(row_slot) is PREFILL else "two_launches"
        tile = PREFILL if plan == "segmented" else DECODE
        if group_rows:
            tile = replace(tile, rows=group_rows)
        return LoraBatch(pool, work_list(pool, row_slot, tile, _multiprocessors(pool.arena.device)), plan, 0)

    @staticmethod
    def reserve(pool: LoraPool, rows: int, plan: LaunchPlan = "two_launches") -> LoraBatch:
        """An empty batch with room for any `rows` rows."""
        tile = PREFILL if plan == "segmented" else DECODE
        nothing = work_list(pool, np.full(rows, -1, dtype=np.int32), tile, 1)
        return LoraBatch(pool, nothing, plan, rows)

    def update(self, pool: LoraPool, row_slot: np.ndarray) -> None:
        """Change a reserved batch to `row_slot`. Raises ValueError when a row names an empty slot."""
        self.packed.fill(work_list(pool, row_slot, self.tile, self.multiprocessors))
        self.version = pool.version


def prepare(pool: LoraPool) -> None:
    """Compile and load the kernels that serving launches for this pool: each runs once, with nothing to do."""
    plans: tuple[LaunchPlan, ...] = ("two_launches", "segmented")
    for plan in plans:
        batch = LoraBatch.reserve(pool, 1, plan)
        for group in GROUPS:
            fan_in, *outs = _sizes(pool, group)
            x, y = (pool.arena.new_zeros(1, size) for size in (fan_in, sum(outs)))
            add_lora(y, x, pool, 0, group, batch)


def start_lora(x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    """Begin the adapters' part of one projection group beside the next work of the current stream; add_lora finishes it.

    `x` must not change until then. Does nothing for the ticketed plan, whose single kernel cannot be divided.
    """
    if batch.side is None or batch.plan == "ticketed" or not _has_work(batch, group):
        return
    current = torch.cuda.current_stream(x.device)
    batch.side.wait_stream(current)
    with torch.cuda.stream(batch.side):
        _shrink(x, pool, layer, group, batch)
    batch.shrunk = (layer, group)


def add_lora(y: torch.Tensor, x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    """Add the adapters' part of one fused projection group to `y` in place; see the package `kernels` for the formula.

    `y` [rows, sum of out], `x` [rows, in], both of the pool's type and device, rows contiguous.
    """
    if not _has_work(batch, group):
        return
    if batch.plan == "ticketed":
        _ticketed(y, x, pool, layer, group, batch)
        return
    if batch.side is not None and batch.shrunk == (layer, group):
        torch.cuda.current_stream(y.device).wait_stream(batch.side)
        batch.shrunk = None
    else:
        _shrink(x, pool, layer, group, batch)
    _expand(y, pool, layer, group, batch)


def _has_work(batch: LoraBatch, group: str) -> bool:
    return batch.always_launch or batch.packed.parts[group].max_items > 0


def _shrink(x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    part, tile, launch = batch.packed.parts[group], batch.tile, TILES[batch.tile.rows, "shrink"]
    sizes = _sizes(pool, group)
    lora_shrink[_programs(batch, launch)](
        x, x.stride(0), pool.arena, batch.h, batch.packed.rows, batch.packed.groups, part.item_segment, part.item_pages,
        part.header, layer, *sizes,
        S=len(GROUPS[group]), M=tile.rows, R=tile.ranks, BK=launch.block, ALIGN=_alignment(x, pool, group),
        WHOLE_K=sizes[0] % launch.block == 0, UPCAST=_upcast(pool),
        num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True,
    )  # fmt: skip


def _expand(y: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    part, tile, launch = batch.packed.parts[group], batch.tile, TILES[batch.tile.rows, "expand"]
    sizes = _sizes(pool, group)
    lora_expand[_programs(batch, launch)](
        y, y.stride(0), pool.arena, batch.h, batch.packed.rows, batch.packed.groups, part.segments, part.item_pages,
        part.scales, part.scales.stride(0), part.header, layer, *sizes,
        S=len(GROUPS[group]), M=tile.rows, R=tile.ranks, BN=launch.block, UNROLL=launch.unroll,
        ALIGN=_alignment(y, pool, group), WHOLE_N=all(n % launch.block == 0 for n in sizes[1:]), UPCAST=_upcast(pool),
        num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True,
    )  # fmt: skip


def _ticketed(y: torch.Tensor, x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    part, tile, launch = batch.packed.parts[group], batch.tile, TICKETED
    sizes = _sizes(pool, group)
    lora_ticketed[_programs(batch, launch)](
        x, x.stride(0), y, y.stride(0), pool.arena, batch.h, batch.packed.rows, batch.packed.groups, part.segments,
        part.item_segment, part.item_pages, part.scales, part.scales.stride(0), part.header, batch.counters, layer, *sizes,
        S=len(GROUPS[group]), M=tile.rows, R=tile.ranks, BK=launch.block, BN=launch.block, UNROLL=launch.unroll,
        ALIGN=min(_alignment(x, pool, group), _alignment(y, pool, group)), WHOLE_K=sizes[0] % launch.block == 0,
        WHOLE_N=all(n % launch.block == 0 for n in sizes[1:]), UPCAST=_upcast(pool),
        num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True,
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


def _programs(batch: LoraBatch, launch: Launch) -> tuple[int]:
    return (INTERPRETED_PROGRAMS if INTERPRETED else batch.multiprocessors * launch.programs,)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
