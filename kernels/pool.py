"""Adapter weights on the device: every adapter at its own rank, in pages of 8 ranks, nothing padded to the largest.

A page is 8 ranks of one projection over all layers, contiguous, so that a layer of it is one copy:

    page of module m    | layer 0: A [8, in]  B^T [8, out] | layer 1: A [8, in]  B^T [8, out] | ...
    table[slot, m, p]   line where page p of that adapter's module m starts (a line is 8 elements)

Pages of different modules differ in size and lie wherever there is room; `arena` belongs to them and to nobody else:

    arena    [ page | page | hole | page | hole ... )          holes are half-open [start, end) in lines, sorted, never adjacent

When the holes would do together but none does alone, pages move down (`_compact`); everything finds them through the
table, so moving is safe between steps and free bytes are always usable bytes. Ranks that a page has and its adapter has
not are zero. Memory in holes is never read: it may hold anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from kernels.memory import lazy_zeros

PAGE_RANKS = 8
LINE = 8  # elements; 8 * in and 8 * out are whole numbers of lines for any in and out
GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
MODULES = tuple(module for group in GROUPS.values() for module in group)

Pairs = Mapping[tuple[int, str], tuple[float, torch.Tensor, torch.Tensor]]
"""{(layer, module): (scale, A [rank, in], B [out, rank])}: an adapter. What is missing is not adapted."""


class PoolFull(Exception):
    """An adapter needs more bytes than the pool has free."""


class LoraPool:
    """Slots 0..slots-1, each empty or holding one adapter.

    `shapes` is {module: (in, out)} of the base model; `bytes_total` is rounded down to whole lines. `version` changes
    whenever slots or page addresses do, so that a LoraBatch knows when it is out of date. `loaded` says which slots are
    taken, `loaded_layers` how many layers of each may be read: fewer than all while a copy runs beside the steps, which pauses
    while `still()` is entered.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        *,
        layers: int,
        slots: int,
        max_rank: int,
        bytes_total: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shapes = {module: shapes[module] for module in MODULES}
        self.layers = layers
        self.max_rank = max_rank
        self.version = 0
        self._line_bytes = LINE * dtype.itemsize
        self._lines = bytes_total // self._line_bytes
        # one page of slack behind the end keeps the strided views below inside the storage
        slack = max(fan_in + fan_out for fan_in, fan_out in self.shapes.values()) * layers
        self.arena = lazy_zeros(((self._lines + slack) * LINE,), dtype=dtype, device=device)
        self.page_lines = {m: layers * (fan_in + fan_out) for m, (fan_in, fan_out) in self.shapes.items()}
        max_pages = -(-max_rank // PAGE_RANKS)
        self.table = np.zeros((slots, len(MODULES), max_pages), dtype=np.int64)
        self.pages = np.zeros((slots, len(MODULES)), dtype=np.int32)
        self.scales = np.zeros((slots, len(MODULES), layers), dtype=np.float32)
        self.loaded = np.zeros(slots, dtype=bool)
        self.loaded_layers = np.zeros(slots, dtype=np.int32)
        self.still: Callable[[], AbstractContextManager[None]] = nullcontext
        self._holes: list[tuple[int, int]] = [(0, self._lines)] if self._lines else []
        self._views: dict[tuple[int, str, bool], torch.Tensor] = {}

    @property
    def bytes_total(self) -> int:
        return self._lines * self._line_bytes

    @property
    def bytes_free(self) -> int:
        return sum(end - start for start, end in self._holes) * self._line_bytes

    def bytes_needed(self, ranks: Mapping[str, int]) -> int:
        """What an adapter with these ranks, {module: largest rank over its layers}, occupies."""
        lines = sum(-(-rank // PAGE_RANKS) * self.page_lines[module] for module, rank in ranks.items())
        return lines * self._line_bytes

    def load(self, slot: int, pairs: Pairs) -> None:
        """Copy an adapter into an empty slot, cast to the pool's type.

        Raises PoolFull when the bytes are short, ValueError when the slot is taken or a rank, shape or layer does not
        fit; the pool is unchanged then.
        """
        self.allocate(slot, self._check(pairs))
        for m, module in enumerate(MODULES):
            for page in range(int(self.pages[slot, m])):
                self._fill(int(self.table[slot, m, page]), module, page, pairs)
        for (layer, module), (scale, _, _) in pairs.items():
            self.scales[slot, MODULES.index(module), layer] = scale
        self.loaded_layers[slot] = self.layers

    def allocate(self, slot: int, ranks: Mapping[str, int]) -> None:
        """Give an empty slot the pages for these ranks, {module: largest rank over its layers}; what they hold is to come.

        Raises PoolFull or ValueError; the pool is unchanged then.
        """
        if self.loaded[slot]:
            raise ValueError(f"slot {slot} is taken")
        if self.bytes_needed(ranks) > self.bytes_free:
            raise PoolFull(f"adapter needs {self.bytes_needed(ranks)} bytes, {self.bytes_free} are free")
        self.loaded[slot] = True
        self.version += 1
        for module, rank in ranks.items():
            m = MODULES.index(module)
            for page in range(-(-rank // PAGE_RANKS)):
                self.table[slot, m, page] = self._allocate(self.page_lines[module])
                self.pages[slot, m] = page + 1  # at once: an allocation may compact, which moves what is counted here

    def free(self, slot: int) -> None:
        """Empty a slot. An empty one stays empty."""
        for start, lines, owner, _, _ in self._owned():
            if owner == slot:
                self._release(start, lines)
        self.pages[slot] = 0
        self.scales[slot] = 0.0
        self.loaded[slot] = False
        self.loaded_layers[slot] = 0
        self.version += 1

    def rows(self, layer: int, module: str, *, b: bool) -> torch.Tensor:
        """A view whose row `table[slot, m, p]` is that page's A [8 * in] of `layer`, or its B^T [8 * out] with `b`."""
        key = (layer, module, b)
        view = self._views.get(key)
        if view is None:
            fan_in, fan_out = self.shapes[module]
            offset = layer * (fan_in + fan_out) + (fan_in if b else 0)
            width = PAGE_RANKS * (fan_out if b else fan_in)
            view = self.arena.as_strided((self._lines, width), (LINE, 1), offset * LINE)
            self._views[key] = view
        return view

    def _check(self, pairs: Pairs) -> dict[str, int]:
        ranks: dict[str, int] = {}
        for (layer, module), (_, a, b) in pairs.items():
            fan_in, fan_out = self.shapes[module]
            rank = a.shape[0]
            if a.shape != (rank, fan_in) or b.shape != (fan_out, rank) or not 0 < rank <= self.max_rank:
                raise ValueError(
                    f"layer {layer} {module}: A {tuple(a.shape)} and B {tuple(b.shape)} do not fit "
                    f"[rank, {fan_in}] and [{fan_out}, rank] with rank at most {self.max_rank}"
                )
            if not 0 <= layer < self.layers:
                raise ValueError(f"layer {layer} of {self.layers}")
            ranks[module] = max(rank, ranks.get(module, 0))
        return ranks

    def _fill(self, start: int, module: str, page: int, pairs: Pairs) -> None:
        fan_in, fan_out = self.shapes[module]
        host = torch.zeros(self.layers, PAGE_RANKS, fan_in + fan_out, dtype=self.arena.dtype)
        flat = host.view(self.layers, -1)
        first = page * PAGE_RANKS
        for layer in range(self.layers):
            pair = pairs.get((layer, module))
            if pair is None or pair[1].shape[0] <= first:
                continue
            a, b = pair[1][first : first + PAGE_RANKS], pair[2][:, first : first + PAGE_RANKS]
            ranks = a.shape[0]
            flat[layer, : ranks * fan_in].view(ranks, fan_in).copy_(a)
            at = PAGE_RANKS * fan_in
            flat[layer, at : at + ranks * fan_out].view(ranks, fan_out).copy_(b.T)
        self.arena[start * LINE : (start + self.page_lines[module]) * LINE].copy_(host.view(-1))

    def _allocate(self, lines: int) -> int:
        """The start of a piece of the first hole that is large enough. The caller has checked the total."""
        for attempt in range(2):
            for i, (start, end) in enumerate(self._holes):
                if end - start >= lines:
                    self._holes[i : i + 1] = [(start + lines, end)] if end - start > lines else []
                    return start
            if attempt == 0:
                self._compact()
        raise AssertionError("free bytes were counted wrongly")

    def _release(self, start: int, lines: int) -> None:
        holes = sorted([*self._holes, (start, start + lines)])
        merged: list[tuple[int, int]] = []
        for begin, end in holes:
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._holes = merged

    def _owned(self) -> list[tuple[int, int, int, int, int]]:
        """(start, lines, slot, module index, page) of every page in use, by address."""
        return sorted(
            (int(self.table[slot, m, page]), self.page_lines[module], slot, m, page)
            for slot in np.flatnonzero(self.loaded).tolist()
            for m, module in enumerate(MODULES)
            for page in range(int(self.pages[slot, m]))
        )

    def _compact(self) -> None:
        """Move every page down to the end of the one before it; one hole remains at the top."""
        at = 0
        for start, lines, slot, m, page in self._owned():
            if start != at:
                with self.still():
                    source = self.arena[start * LINE : (start + lines) * LINE]
                    self.arena[at * LINE : (at + lines) * LINE].copy_(source.clone() if start - at < lines else source)
                    self.table[slot, m, page] = at
            at += lines
        self._holes = [(at, self._lines)] if at < self._lines else []
