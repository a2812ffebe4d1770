"""Compiled LoRA for linear layers of another engine: paged adapters of any ranks per layer, in the engine's types and threads.

    layer = LayerLora(fan_in, (out, ..), slots=.., max_rank=.., dtype=..)      once per layer
    layer.set(slot, [A or None, ..], [B or None, ..])                          an adapter, at its own rank
    batch = LayerBatch.build(row_slot)                                         once per step, for all layers
    add_layer_lora(y, x, layer, batch)                                         y[i, out_s] += (x[i] @ A_s.T) @ B_s.T

A slice is what kernels/lora.py calls a projection: its outputs are some of the layer's columns. Pages are those of
kernels/pool.py, of one layer, and lie wherever the memory of an adapter was allocated: a slot takes no memory before it has an
adapter, and then as much as the adapter's own ranks need. src/layer_lora.h has the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from functools import lru_cache

import numpy as np
import torch

from motet.kernels.cpu.build import choose_isa
from motet.kernels.cpu.library import MAX_RANK, TYPES, CpuEngine, Pool
from motet.kernels.cpu.sites import torch_threads
from motet.kernels.pool import LINE, MODULES, PAGE_RANKS

TYPES_HERE = tuple(TYPES)
"""Types of layers: x, y and adapters have the same."""

_GROUPS = {1: (1, 3), 2: (2, 4), 3: (0, 0)}
"""{slices: (the kernels' group of so many projections, its first module)}. More slices take several calls."""
_MOST = max(_GROUPS)


class LayerStep(Structure):
    """A step's rows."""

    _fields_ = [("row_slot", c_void_p), ("rows", c_int64), ("threads", c_int64), ("parallel", c_void_p)]


class LayerBatch:
    """One step's rows by adapter. It does not depend on a layer, and stays valid when adapters are set or reset."""

    __slots__ = ("adapted", "call", "row_slot", "step")

    def __init__(self, row_slot: np.ndarray, isa: str | None, threads: int) -> None:
        self.row_slot = np.ascontiguousarray(row_slot, dtype=np.int32)
        self.adapted = bool((self.row_slot >= 0).any())
        parallel = torch_threads() if threads > 1 else None
        self.step = LayerStep(self.row_slot.ctypes.data, len(self.row_slot), threads, parallel)
        self.call = layers_engine(isa).library.motet_layer_lora

    @staticmethod
    def build(row_slot: np.ndarray, *, isa: str | None = None, threads: int = 0) -> LayerBatch:
        """A batch from `row_slot`, int32 [rows]: each row's slot, -1 for the base alone.

        `isa` is one of `available_isas()`, by default the best one; `threads` 0 means as many as torch's. Raises BuildError
        when the library cannot be built.
        """
        return LayerBatch(row_slot, isa, threads or torch.get_num_threads())


class LayerLora:
    """The adapters of one linear layer: `slots` of them, each at its own rank up to `max_rank`.

    Raises ValueError for a type or rank that the compiled kernels do not have.
    """

    def __init__(self, fan_in: int, outs: Sequence[int], *, slots: int, max_rank: int, dtype: torch.dtype) -> None:
        if max_rank > MAX_RANK or dtype not in TYPES:
            raise ValueError(f"ranks up to {max_rank} in {dtype}: the compiled kernels take {MAX_RANK} and {list(TYPES)}")
        self.fan_in, self.outs, self.slots, self.dtype = fan_in, tuple(outs), slots, dtype
        self._type = TYPES[dtype]
        self._held: list[torch.Tensor | None] = [None] * slots
        max_pages = -(-max_rank // PAGE_RANKS)
        self._parts = [
            _Part(fan_in, self.outs[first : first + _MOST], sum(self.outs[:first]), slots, max_pages)
            for first in range(0, len(self.outs), _MOST)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters."""
        return sum(held.nbytes for held in self._held if held is not None)

    def set(self, slot: int, a: Sequence[torch.Tensor | None], b: Sequence[torch.Tensor | None]) -> None:
        """Put an adapter into a slot, in place of what is there. `a`, `b`: A [rank, in] and B [out, rank] of each slice.

        A slice without A or B is not adapted. Raises ValueError when a shape does not fit; the slot is empty then.
        """
        self.reset(slot)
        pairs = [None if one is None or other is None else (one, other) for one, other in zip(a, b, strict=True)]
        if len(pairs) != len(self.outs):
            raise ValueError(f"{len(pairs)} slices for a layer of {len(self.outs)}")
        pages = [0 if pair is None else self._pages(pair, out) for pair, out in zip(pairs, self.outs, strict=True)]
        sizes = [count * PAGE_RANKS * (self.fan_in + out) for count, out in zip(pages, self.outs, strict=True)]
        if not sum(sizes):
            return
        held = torch.zeros(sum(sizes), dtype=self.dtype)
        at = 0
        for number, (pair, count, size) in enumerate(zip(pairs, pages, sizes, strict=True)):
            if pair is not None:
                _fill(held[at : at + size].view(count, -1), *pair)
                self._part(number).point(slot, number % _MOST, count, held[at:], size // count)
            at += size
        self._held[slot] = held

    def reset(self, slot: int) -> None:
        """Empty a slot, and free its memory."""
        for part in self._parts:
            part.pages[slot] = 0
        self._held[slot] = None

    def norms(self, slot: int) -> list[tuple[float, float]]:
        """The norms of A and B of each slice of a slot; 0 for a slice that is not adapted."""
        held, found, at = self._held[slot], list[tuple[float, float]](), 0
        for number, out in enumerate(self.outs):
            count = self._part(number).pages_of(slot, number % _MOST)
            size, cut = count * PAGE_RANKS * (self.fan_in + out), PAGE_RANKS * self.fan_in
            if held is None or not count:
                found.append((0.0, 0.0))
                continue
            pages = held[at : at + size].view(count, -1).float()
            found.append((pages[:, :cut].norm().item(), pages[:, cut:].norm().item()))
            at += size
        return found

    def calls(self) -> list[tuple[_Part, int]]:
        """Groups of slices that one call computes each, and the column where they begin."""
        return [(part, part.column) for part in self._parts]

    def _part(self, number: int) -> _Part:
        return self._parts[number // _MOST]

    def _pages(self, pair: tuple[torch.Tensor, torch.Tensor], out: int) -> int:
        a, b = pair
        rank = a.shape[0]
        pages = -(-rank // PAGE_RANKS)
        if a.shape != (rank, self.fan_in) or b.shape != (out, rank) or pages > self._parts[0].table.shape[2]:
            raise ValueError(
                f"A {tuple(a.shape)} and B {tuple(b.shape)} do not fit [rank, {self.fan_in}] and [{out}, rank] with ranks "
                f"up to {self._parts[0].table.shape[2] * PAGE_RANKS}"
            )
        return pages


def add_layer_lora(y: torch.Tensor, x: torch.Tensor, layer: LayerLora, batch: LayerBatch) -> None:
    """Add the adapters' part of a layer to `y` [rows, sum of outs] in place; `x` [rows, in], both of the layer's type.

    Rows beyond those of the batch are left as they are. Raises ValueError for other shapes or types; neighbours of a row are
    neighbours in memory.
    """
    if not batch.adapted:
        return
    rows = batch.step.rows
    if (
        x.dtype is not layer.dtype
        or y.dtype is not layer.dtype
        or x.dim() != 2
        or y.dim() != 2
        or x.shape[0] < rows
        or y.shape[0] < rows
        or x.shape[1] != layer.fan_in
        or y.shape[1] < sum(layer.outs)
        or x.stride(1) != 1
        or y.stride(1) != 1
    ):
        raise ValueError(
            f"x {x.dtype} {tuple(x.shape)} and y {y.dtype} {tuple(y.shape)}: {layer.dtype} [{rows}, {layer.fan_in}] and "
            f"[{rows}, {sum(layer.outs)}] are expected"
        )
    for part, column in layer.calls():
        at = y.data_ptr() + column * y.element_size()
        batch.call(byref(part.pool), byref(batch.step), layer._type, part.group, x.data_ptr(), x.stride(0), at, y.stride(0))


def slots_of(numbers: Iterable[int], in_slots: Sequence[int | None]) -> np.ndarray:
    """int32 [rows]: the slot of each row's adapter, -1 for none.

    `numbers`: the number of each row's adapter, 0 for none. `in_slots`: the number of the adapter in each slot. Raises KeyError
    for an adapter that is in no slot.
    """
    found, inverse = np.unique(np.fromiter(numbers, dtype=np.int64), return_inverse=True)
    slots = {number: slot for slot, number in enumerate(in_slots) if number is not None}
    slot_of = np.array([slots[number] if number > 0 else -1 for number in found.tolist()], dtype=np.int32)
    return slot_of[inverse.reshape(-1)]


class _Part:
    """Up to three slices of a layer, as a pool of one layer whose arena is all memory."""

    def __init__(self, fan_in: int, outs: Sequence[int], column: int, slots: int, max_pages: int) -> None:
        self.group, self._first = _GROUPS[len(outs)]
        self.column = column
        self.table = np.zeros((slots, len(MODULES), max_pages), dtype=np.int64)
        self.pages = np.zeros((slots, len(MODULES)), dtype=np.int32)
        self._scales = np.ones((slots, len(MODULES), 1), dtype=np.float32)
        fans = [(fan_in, outs[m - self._first] if 0 <= m - self._first < len(outs) else 0) for m in range(len(MODULES))]
        self.pool = Pool(
            None,
            self.table.ctypes.data,
            self.pages.ctypes.data,
            self._scales.ctypes.data,
            slots,
            max_pages,
            1,
            (c_int64 * len(MODULES))(*(into for into, _ in fans)),
            (c_int64 * len(MODULES))(*(out for _, out in fans)),
            None,
        )

    def pages_of(self, slot: int, number: int) -> int:
        """The pages of slice `number` of a slot."""
        return int(self.pages[slot, self._first + number])

    def point(self, slot: int, number: int, pages: int, held: torch.Tensor, elements: int) -> None:
        """Slice `number` of a slot has `pages` pages of `elements` elements each, from where `held` begins."""
        line_bytes = LINE * held.element_size()
        begin, rest = divmod(held.data_ptr(), line_bytes)
        if rest:
            raise ValueError(f"memory at {held.data_ptr():#x} is not at a multiple of {line_bytes}")
        self.table[slot, self._first + number, :pages] = begin + elements // LINE * np.arange(pages)
        self.pages[slot, self._first + number] = pages


def _fill(pages: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Write A [rank, in] and B [out, rank] to `pages` [count, 8 * (in + out)], which are zero."""
    rank, split = a.shape[0], PAGE_RANKS * a.shape[1]
    for number, page in enumerate(pages):
        some = slice(number * PAGE_RANKS, min((number + 1) * PAGE_RANKS, rank))
        page[:split].view(PAGE_RANKS, -1)[: some.stop - some.start].copy_(a[some])
        page[split:].view(PAGE_RANKS, -1)[: some.stop - some.start].copy_(b[:, some].T)


@lru_cache
def layers_engine(isa: str | None = None) -> CpuEngine:
    """The library for an instruction set, whose registers this process may use. Raises BuildError, ValueError."""
    return CpuEngine(threads=1, isa=choose_isa(isa))
