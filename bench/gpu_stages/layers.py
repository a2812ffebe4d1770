"""The base model's products of a step, and several implementations of LoRA beside them: Motet's kernels and others.

A step is 32 layers with different weights, so that nothing stays in a cache from one layer to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from motet.kernels import GROUPS, LoraPool
from motet.kernels.pool import MODULES, PAGE_RANKS
from motet.kernels.triton import LoraBatch, add_lora, start_lora
from motet.kernels.triton.lora import Beside

Start = Callable[[int, str, torch.Tensor], object]
Finish = Callable[[int, str, torch.Tensor, torch.Tensor], None]
"""(layer, group, x) before the base model's product, (layer, group, y, x) after it."""
Base = Callable[[], torch.Tensor]
Apply = Callable[[int, str, torch.Tensor, Base], torch.Tensor]
"""(layer, group, x, base): the base model's product and LoRA, in whatever order. `base` computes y [rows, sum of out]."""
DTYPE = torch.bfloat16


class Layers:
    """Base weights of every layer, and a step over them."""

    def __init__(
        self, shapes: dict[str, tuple[int, int]], layers: int, device: torch.device, dtype: torch.dtype = DTYPE
    ) -> None:
        self.layers, self.device, self.dtype = layers, device, dtype
        self.shapes = {group: (shapes[modules[0]][0], sum(shapes[m][1] for m in modules)) for group, modules in GROUPS.items()}
        self._weights = [
            {g: torch.randn(out, fan_in, dtype=dtype, device=device) for g, (fan_in, out) in self.shapes.items()}
            for _ in range(layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of one layer."""
        return sum(fan_in * out for fan_in, out in self.shapes.values()) * self.dtype.itemsize

    def inputs(self, rows: int) -> dict[str, torch.Tensor]:
        """Inputs of `rows` rows for every group."""
        return {g: torch.randn(rows, fan_in, dtype=self.dtype, device=self.device) for g, (fan_in, _) in self.shapes.items()}

    def product(self, layer: int, group: str, x: torch.Tensor) -> torch.Tensor:
        """One matrix product of the base model: x [rows, in] to [rows, sum of out]."""
        return torch.nn.functional.linear(x, self._weights[layer][group])

    def step(self, x: dict[str, torch.Tensor], before: Start | None = None, after: Finish | None = None) -> None:
        """Every matrix product once, in order."""
        for layer in range(self.layers):
            for group in GROUPS:
                if before is not None:
                    before(layer, group, x[group])
                y = self.product(layer, group, x[group])
                if after is not None:
                    after(layer, group, y, x[group])


def another_stream(stream: torch.cuda.Stream | None) -> torch.cuda.Stream:
    """`stream`, unless there is none or it is the current one: then a new one."""
    while stream is None or stream == torch.cuda.current_stream():
        stream = torch.cuda.Stream()
    return stream


def make_pool(
    shapes: dict[str, tuple[int, int]],
    layers: int,
    *,
    slots: int,
    max_rank: int,
    nbytes: int,
    device: torch.device,
    dtype: torch.dtype = DTYPE,
) -> LoraPool:
    """A pool filled with random numbers."""
    pool = LoraPool(shapes, layers=layers, slots=slots, max_rank=max_rank, bytes_total=nbytes, dtype=dtype, device=device)
    pool.arena.normal_(std=0.02)
    return pool


def occupy(pool: LoraPool, ranks: Sequence[int]) -> None:
    """Give slot i pages for rank ranks[i] of every projection. Their content is whatever the arena contains."""
    for slot in range(len(pool.loaded)):
        pool.free(slot)
    for slot, rank in enumerate(ranks):
        pool.loaded[slot], pool.loaded_layers[slot], pool.scales[slot] = True, pool.layers, 1.0
        for m, module in enumerate(MODULES):
            for page in range(-(-rank // PAGE_RANKS)):
                pool.table[slot, m, page] = pool._allocate(pool.page_lines[module])
                pool.pages[slot, m] = page + 1
    pool.version += 1


def matrices(pool: LoraPool, slot: int, layer: int, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [out, rank] of the adapter in a slot, whose rank is a multiple of PAGE_RANKS."""
    m, fan_in, fan_out = MODULES.index(module), *pool.shapes[module]
    lines = torch.from_numpy(pool.table[slot, m, : pool.pages[slot, m]]).to(pool.arena.device)
    a, b = (pool.rows(layer, module, b=b).index_select(0, lines) for b in (False, True))
    return a.view(-1, fan_in), b.view(-1, fan_out).T


Way = Literal["after", "beside", "apart"]
"""Where our kernels run: both after the base model's product, the first half beside it, or all of it beside it with a result
of its own, which the next small operation of the engine adds."""
WAYS: tuple[Way, ...] = ("after", "beside", "apart")


def batched(pool: LoraPool, batch: LoraBatch, way: Way = "after") -> tuple[Start | None, Finish]:
    """Our kernels."""

    beside: Beside = "all" if way == "apart" else "shrink"

    def before(layer: int, group: str, x: torch.Tensor) -> None:
        start_lora(x, pool, layer, group, batch, beside)

    def after(layer: int, group: str, y: torch.Tensor, x: torch.Tensor) -> None:
        add_lora(y, x, pool, layer, group, batch)

    return None if way == "after" else before, after


class _Stacks:
    """Weights [adapters, rank, width] padded to the largest rank.

    They are pieces of the pool's memory, different ones in every layer.
    """

    def __init__(self, pool: LoraPool, ranks: Sequence[int]) -> None:
        self._arena, self._shape, self._at = pool.arena, (len(ranks), max(ranks)), 0

    def next(self, width: int) -> torch.Tensor:
        """The next stack of this width."""
        adapters, rank = self._shape
        size = adapters * rank * width
        self._at = self._at + size if self._at + 2 * size <= len(self._arena) else 0
        return self._arena[self._at : self._at + size].view(adapters, rank, width)


def grouped_mm(pool: LoraPool, ranks: Sequence[int], row_slot: np.ndarray) -> Finish:
    """PyTorch's grouped product over rows sorted by adapter, and stacks padded to the largest rank.

    The results have no meaning.
    """
    device, stacks = pool.arena.device, _Stacks(pool, ranks)
    order = torch.from_numpy(np.argsort(row_slot, kind="stable")).to(device)
    ends = torch.from_numpy(np.cumsum(np.bincount(row_slot, minlength=len(ranks))).astype(np.int32)).to(device)

    def after(layer: int, group: str, y: torch.Tensor, x: torch.Tensor) -> None:
        sorted_x, column = x.index_select(0, order), 0
        for module in GROUPS[group]:
            fan_in, fan_out = pool.shapes[module]
            shrunk = torch._grouped_mm(sorted_x, stacks.next(fan_in).transpose(1, 2), offs=ends)
            y[:, column : column + fan_out].index_add_(0, order, torch._grouped_mm(shrunk, stacks.next(fan_out), offs=ends))
            column += fan_out

    return after


def einsum(pool: LoraPool, ranks: Sequence[int], row_slot: np.ndarray) -> Finish:
    """Each row's matrices gathered from padded stacks, then two contractions. The results have no meaning."""
    stacks, slots = _Stacks(pool, ranks), torch.from_numpy(row_slot.astype(np.int64)).to(pool.arena.device)

    def after(layer: int, group: str, y: torch.Tensor, x: torch.Tensor) -> None:
        column = 0
        for module in GROUPS[group]:
            fan_in, fan_out = pool.shapes[module]
            shrunk = torch.einsum("bi,bri->br", x, stacks.next(fan_in).index_select(0, slots))
            y[:, column : column + fan_out] += torch.einsum("br,bro->bo", shrunk, stacks.next(fan_out).index_select(0, slots))
            column += fan_out

    return after
