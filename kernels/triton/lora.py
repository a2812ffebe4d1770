"""add_lora on a GPU: the choice of kernels for a step's batch, and the buffers that they share.

Two plans over the same kernels, shrink and expand (kernels/triton/device.py):

    decode     both kernels run on a side stream, beside the base model's product, and their result is added by the small
               operation that reads it next (kernels/pointwise.py)
    prefill    steps with a prompt that fills large groups of rows. Shrink runs beside the product, expand adds to its result

Decode steps of up to SMALL_ROWS rows have constants of their own. In all of them K is divided by its own size alone and its
parts are added in order, so that the sums of a row whose adapter has few rows do not depend on the other rows of the step.
Kernels of both kinds of steps must round alike for that, so products are not fused with sums.

The constants are fixed: nothing is tuned while serving. They were chosen on an H200 (bench/results/gpu.md); a test checks
registers and load widths of the kernels compiled for sm_90 (tests/kernels/test_triton_compiled.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
import torch
import triton

from motet.kernels.pool import GROUPS, LoraPool
from motet.kernels.triton.batch import GroupTensors, PackedBatch, Tile, WorkList, split_k_for, work_list
from motet.kernels.triton.device import lora_expand, lora_shrink
from motet.kernels.triton.launch import INTERPRETED, Kernel
from motet.kernels.types import Delta

LaunchPlan = Literal["decode", "prefill"]
Beside = Literal["shrink", "all"]  # what runs beside the base model's product
BESIDE: dict[LaunchPlan, Beside] = {"decode": "all", "prefill": "shrink"}
INTERPRETED_PROGRAMS = 3  # more than one, so that the walk over the work list is what runs
MOST_SPLITS = 16  # of K in a decode step; h has a plane for each
FUSED = False  # of two products that are added the compiler would choose one to round, in every kernel another
ANY_REGISTERS = 255  # as many as a thread can have; left alone, ptxas spills instead where sizes have no promised divisor
RESERVED_GROUPS = 16  # of rows, which a reserved batch of the prefill plan is divided for: a short prompt beside a few decodes


@dataclass(frozen=True, slots=True)
class Launch:
    """Constants of a kernel. `programs`: per multiprocessor, more than it runs at a time where that was faster."""

    warps: int
    stages: int
    programs: int
    block: int = 0  # shrink: columns of K at once for many rows
    wide: int = 0  # shrink: columns of K for few rows
    ranks: int = 0  # expand: at once for many rows
    registers: int | None = None  # of a thread, at most, where 16-bit types are read in pieces of 16 bytes


@dataclass(frozen=True, slots=True)
class Constants:
    """What the kernels of a step are compiled for."""

    tile: Tile
    shrink: Launch
    expand: Launch


SMALL_ROWS = 16
SMALL = Constants(  # decode steps of up to SMALL_ROWS rows
    Tile(rows=16, some=16, ranks=32, columns=64, few=3, few_ranks=16, wide=512),
    Launch(block=128, wide=512, warps=4, stages=3, programs=5, registers=96),
    Launch(ranks=32, warps=2, stages=2, programs=8, registers=128),
)
LARGE = Constants(  # other decode steps
    Tile(rows=32, some=16, ranks=32, columns=128, few=3, few_ranks=16, wide=1024),
    Launch(block=128, wide=512, warps=4, stages=3, programs=5, registers=96),
    Launch(ranks=64, warps=4, stages=2, programs=8, registers=128),
)
PREFILL = Constants(
    Tile(rows=64, some=64, ranks=64, columns=64),
    Launch(block=64, wide=64, warps=4, stages=4, programs=2),
    Launch(ranks=64, warps=4, stages=2, programs=4, registers=128),
)
PLANS: tuple[LaunchPlan, ...] = ("decode", "prefill")


def constants_for(plan: LaunchPlan, rows: int) -> Constants:
    """The constants of a step of `rows` rows, or of one that is padded to so many."""
    if plan == "prefill":
        return PREFILL
    return SMALL if rows <= SMALL_ROWS else LARGE


@dataclass(frozen=True, eq=False, slots=True)
class Options:
    """What kernels are compiled for besides the sizes; there is one object for each combination."""

    constants: Constants
    upcast: bool
    early: bool


@dataclass(frozen=True, slots=True)
class Group:
    """What every layer's launches for a projection group have in common."""

    sizes: tuple[int, int, int, int]
    part: GroupTensors
    slices: int
    splits: int  # of K
    span: int  # columns of K of each
    aligned: bool  # the sizes are multiples of 16
    has_work: bool
    options: Options

    def alignment(self, rows: torch.Tensor) -> int:
        """16 when every size and the rows' stride are multiples of it, else 1."""
        return 16 if self.aligned and rows.stride(0) % 16 == 0 else 1


class SideStream:
    """The stream for work beside the current one. All batches of a device share it; the events are a batch's own."""

    def __init__(self, device: int) -> None:
        self.stream, self._device = _side_stream(device), device
        self._begin, self._end = torch.cuda.Event(), torch.cuda.Event()
        self._beside: torch.cuda.Stream | None = None

    def begin(self) -> torch.cuda.Stream:
        """The stream, which waits for what the current one has now."""
        self._beside = torch.cuda.current_stream(self._device)  # a number: a torch.device is looked up slowly
        self._begin.record(self._beside)
        self.stream.wait_event(self._begin)
        return self.stream

    def end(self) -> None:
        """The stream that was current in `begin` waits for the other one."""
        assert self._beside is not None, "it has begun"
        self._end.record(self.stream)
        self._beside.wait_event(self._end)


class LoraBatch:
    """One step's rows by adapter, on the device. It is valid as long as `version` is the pool's.

    A batch made by `reserve` keeps its buffers over `update`s, so that a captured graph that uses it works for the next step
    too.
    """

    def __init__(self, pool: LoraPool, work: WorkList, plan: LaunchPlan, constants: Constants, max_rows: int) -> None:
        device, tile = pool.arena.device, constants.tile
        self.version = pool.version
        self.plan, self.constants = plan, constants
        self.packed = PackedBatch(pool, work, tile, max_rows)
        self.multiprocessors = multiprocessors_of(device)
        self.ranks = -(-pool.max_rank // tile.ranks) * tile.ranks
        self.groups = {name: self._group(pool, name, reserved=max_rows > 0) for name in GROUPS}
        planes = max(group.splits * group.slices for group in self.groups.values())
        self.h = torch.empty(planes * self.packed.positions * self.ranks, dtype=torch.float32, device=device)
        most_items = max(len(group.part.items) for group in self.groups.values())
        self.arrived = torch.zeros(most_items, dtype=torch.int32, device=device)  # zero between launches
        self.side = SideStream(pool.arena.get_device()) if device.type == "cuda" else None
        self.started: Beside | None = None  # by start_lora, of the group under way

    @staticmethod
    def build(pool: LoraPool, row_slot: np.ndarray, plan: LaunchPlan | None = None, *, group_rows: int = 0) -> LoraBatch:
        """A batch from `row_slot`, int32 [rows]: each row's slot, -1 for the base model alone.

        `group_rows` is the most rows that read an adapter together, 0 for as many as the plan's tile holds. Raises ValueError
        when a row names an empty slot.
        """
        plan = plan or plan_for(row_slot)
        constants = constants_for(plan, len(row_slot))
        tile = replace(constants.tile, rows=group_rows) if group_rows else constants.tile
        return LoraBatch(pool, work_list(pool, row_slot, tile), plan, constants, 0)

    @staticmethod
    def reserve(pool: LoraPool, rows: int, plan: LaunchPlan | None = None) -> LoraBatch:
        """An empty batch with room for any `rows` rows."""
        plan = plan or "decode"
        constants = constants_for(plan, rows)
        nothing = work_list(pool, np.full(rows, -1, dtype=np.int32), constants.tile)
        return LoraBatch(pool, nothing, plan, constants, rows)

    def update(self, pool: LoraPool, row_slot: np.ndarray) -> None:
        """Change a reserved batch to `row_slot`. Raises ValueError when a row names an empty slot."""
        self.packed.fill(work_list(pool, row_slot, self.constants.tile))
        self.version = pool.version

    def _group(self, pool: LoraPool, name: str, *, reserved: bool) -> Group:
        """K is divided by its own size alone in a decode step, so that a row's sums do not depend on the other rows."""
        sizes, part, launch = _sizes(pool, name), self.packed.parts[name], self.constants.shrink
        step = max(launch.block, launch.wide)
        items = RESERVED_GROUPS * len(GROUPS[name]) if reserved else len(part.items)
        most = MOST_SPLITS if self.plan == "decode" else split_k_for(items, self.multiprocessors)
        span = -(-sizes[0] // (step * most)) * step
        return Group(
            sizes=sizes,
            part=part,
            slices=len(GROUPS[name]),
            splits=-(-sizes[0] // span),
            span=span,
            aligned=all(size % 16 == 0 for size in sizes),
            has_work=reserved or len(part.items) > 0,
            options=_options(self.constants, _upcast(pool), _early(pool.arena.device)),
        )


def plan_for(row_slot: np.ndarray) -> LaunchPlan:
    """The plan of a step, from `row_slot`, int32 [rows].

    That for prefills pays when an adapter has enough rows to fill a large group: its prompt then takes longer than all decodes.
    """
    adapted = row_slot[row_slot >= 0]
    return "prefill" if len(adapted) and np.bincount(adapted).max() > PREFILL.tile.rows else "decode"


def prepare(pool: LoraPool) -> None:
    """Compile and load the kernels that serving launches for this pool: each runs once, with nothing to do."""
    steps: list[tuple[LaunchPlan, int]] = [("decode", SMALL_ROWS), ("decode", SMALL_ROWS + 1), ("prefill", 1)]
    for plan, rows in steps:
        batch = LoraBatch.reserve(pool, rows, plan)
        for group in GROUPS:
            fan_in, *outs = _sizes(pool, group)
            x, y = (pool.arena.new_zeros(rows, size) for size in (fan_in, sum(outs)))
            start_lora(x, pool, 0, group, batch)
            add_lora(y, x, pool, 0, group, batch)


def start_lora(
    x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch, beside: Beside | None = None
) -> Delta | None:
    """Begin the adapters' part of one projection group beside the next work of the current stream; add_lora finishes it.

    With all of it `beside`, which is the default of decode steps, returns that part, valid after add_lora, which then has
    nothing to add; else None. `x` must not change until add_lora.
    """
    work = batch.groups[group]
    if not work.has_work:
        return None
    batch.started = beside or BESIDE[batch.plan]
    stream = None if batch.side is None else batch.side.begin()
    delta = x.new_empty(x.shape[0], sum(work.sizes[1:])) if batch.started == "all" else None
    _shrink(x, pool, layer, work, batch, stream)
    if delta is None:
        return None
    _expand(delta, pool, layer, work, batch, stream, add=False)
    return Delta(delta, batch.packed.adapted)


def add_lora(y: torch.Tensor, x: torch.Tensor, pool: LoraPool, layer: int, group: str, batch: LoraBatch) -> None:
    """Add the adapters' part of one fused projection group to `y` in place; see the package `kernels` for the formula.

    `y` [rows, sum of out], `x` [rows, in], both of the pool's type and device, rows contiguous. What start_lora has begun is
    finished instead.
    """
    work = batch.groups[group]
    if not work.has_work:
        return
    started, batch.started = batch.started, None
    if started is None:
        _shrink(x, pool, layer, work, batch)
    elif batch.side is not None:
        batch.side.end()
    if started != "all":
        _expand(y, pool, layer, work, batch)


def _shrink(
    x: torch.Tensor, pool: LoraPool, layer: int, group: Group, batch: LoraBatch, stream: torch.cuda.Stream | None = None
) -> None:
    part, row = group.part, group.slices * batch.ranks
    launch = _shrink_kernel(group.options, group.alignment(x), group.sizes[0])
    launch(
        _programs(batch, group.options.constants.shrink),
        x, x.stride(0), pool.arena, batch.h, row, batch.packed.positions * row, batch.packed.rows, part.items,
        len(part.items), part.pages, batch.arrived, layer, group.splits, group.span, batch.ranks, *group.sizes, stream=stream,
    )  # fmt: skip


def _expand(
    y: torch.Tensor,
    pool: LoraPool,
    layer: int,
    group: Group,
    batch: LoraBatch,
    stream: torch.cuda.Stream | None = None,
    *,
    add: bool = True,
) -> None:
    part, row = group.part, group.slices * batch.ranks
    launch = _expand_kernel(group.options, group.alignment(y), group.sizes[1:], group.splits, add)
    launch(
        _programs(batch, group.options.constants.expand),
        y, y.stride(0), pool.arena, batch.h, row, batch.packed.positions * row, batch.packed.rows, part.tiles, len(part.tiles),
        part.pages, part.scales, part.scales.stride(0), layer, group.splits, batch.ranks, *group.sizes, stream=stream,
    )  # fmt: skip


_options = cache(Options)


@cache
def _shrink_kernel(options: Options, align: int, k: int) -> Kernel:
    tile, launch = options.constants.tile, options.constants.shrink
    return Kernel(
        lora_shrink,
        M=tile.rows, R=tile.ranks, BK=launch.block, FEW=tile.few, FEW_R=tile.few_ranks, WIDE=launch.wide, ALIGN=align,
        WHOLE_K=k % max(launch.block, launch.wide) == 0, EARLY=options.early, UPCAST=options.upcast,
        **_compiled_with(options, launch, align),
    )  # fmt: skip


@cache
def _expand_kernel(options: Options, align: int, outs: tuple[int, ...], splits: int, add: bool) -> Kernel:
    tile, launch = options.constants.tile, options.constants.expand
    return Kernel(
        lora_expand,
        M=tile.rows, SOME=tile.some, R=launch.ranks, BN=tile.columns, FEW=tile.few, FEW_R=tile.few_ranks, WIDE=tile.wide,
        PLANES=triton.next_power_of_2(splits) if tile.few else 1, ADD=add, ALIGN=align,
        WHOLE_N=all(n % max(tile.wide, tile.columns) == 0 for n in outs), EARLY=options.early, UPCAST=options.upcast,
        **_compiled_with(options, launch, align),
    )  # fmt: skip


def _compiled_with(options: Options, launch: Launch, align: int) -> dict[str, int | bool | None]:
    return {
        "num_warps": launch.warps,
        "num_stages": launch.stages,
        "enable_fp_fusion": FUSED,
        "launch_pdl": options.early,
        "maxnreg": registers_of(launch, ragged=align == 1, upcast=options.upcast),
    }


def registers_of(launch: Launch, *, ragged: bool, upcast: bool) -> int | None:
    """The most that a thread may have; None leaves it to ptxas."""
    if upcast:
        return None
    return ANY_REGISTERS if ragged else launch.registers


def _sizes(pool: LoraPool, group: str) -> tuple[int, int, int, int]:
    """(in, out of each projection; 0 for projections that the group lacks)."""
    outs = [pool.shapes[module][1] for module in GROUPS[group]] + [0, 0]
    return pool.shapes[GROUPS[group][0]][0], outs[0], outs[1], outs[2]


def _upcast(pool: LoraPool) -> bool:
    return INTERPRETED or pool.arena.dtype == torch.float32


def _programs(batch: LoraBatch, launch: Launch) -> tuple[int]:
    return (INTERPRETED_PROGRAMS if INTERPRETED else batch.multiprocessors * launch.programs,)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def multiprocessors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _early(device: torch.device) -> bool:
    """Whether launches can begin before those ahead of them are over: from sm_90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
