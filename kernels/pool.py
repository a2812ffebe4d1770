"""Adapter weights on the device: every adapter at its own rank, in pages of 8 ranks, without padding to the largest rank.

A page is 8 ranks of one projection over all layers, contiguous, so that a layer of it is one copy:

    page of module m    | layer 0: A [8, in]  B^T [8, out] | layer 1: A [8, in]  B^T [8, out] | ...
    table[slot, m, p]   line where page p of that adapter's module m starts (a line is 8 elements)

Pages of different modules differ in size and lie wherever there is room in `arena`, which contains nothing else:

    arena    [ page | page | hole | page | hole ... )          holes are half-open [start, end) in lines, sorted, never adjacent

When the holes suffice together but none does alone, the pages between some of them move down. All readers use the table, so
moving is safe between steps, and all free bytes are usable. Ranks of a page beyond the adapter's are zero. Memory in holes is
never read: it may contain anything, NaN included.

The modules of a decoder are the seven `MODULES`, each in all layers. An image model has *classes* of sites with one role and
shape (`shared.image_shapes`) instead, each with its own count of sites. Where this file says module and layer, these are a
class and the index of a site in it.
"""

from __future__ import annotations

import itertools
import math
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from motet.kernels.memory import expect, give_back, lazy_zeros, move_down, reserved
from motet.kernels.pages import PhysicalPages

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

Shapes = Mapping[str, tuple[int, int]] | Mapping[str, tuple[int, int, int]]
"""{module: (in, out)} of the seven modules, which are in all layers; or {class: (in, out, number of its sites)}."""


def _layout(shapes: Shapes, layers: int) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """({module: (in, out)}, {module: layers}) in the order of the pool's tables. `layers` is 0 for classes."""
    if layers:
        return {module: shapes[module][:2] for module in MODULES}, dict.fromkeys(MODULES, layers)
    sized = {name: shape for name, shape in sorted(shapes.items()) if len(shape) == 3}  # the order of files, motet-lora/3
    if len(sized) != len(shapes) or not sized:
        raise ValueError("classes have (in, out, number of sites), and there is at least one; modules need `layers`")
    return {name: shape[:2] for name, shape in sized.items()}, {name: shape[2] for name, shape in sized.items()}


@dataclass(frozen=True, slots=True)
class PackedLora:
    """An adapter outside the pool, in the pool's layout: one slot whose pages follow each other, module after module.

    Files (`motet-lora/2`) have the same layout, so `arena` may be a mapping of a file.
    """

    arena: torch.Tensor  # [elements]
    table: np.ndarray  # int64 [1, modules, most pages of a module], lines from the arena's beginning
    pages: np.ndarray  # int32 [1, modules]
    scales: np.ndarray  # float32 [1, modules, most layers of a module], 0 for what is not adapted
    shapes: dict[str, tuple[int, int]]  # of all modules of the base
    layers: int  # the most of a module
    counts: dict[str, int]  # layers of each module

    @staticmethod
    def over(
        arena: torch.Tensor,
        shapes: Shapes,
        *,
        layers: int = 0,
        pages: Mapping[str, int],
        scales: Mapping[str, Sequence[float]],
    ) -> PackedLora:
        """The adapter in `arena`. `pages`: {module: its pages}, `scales`: {module: scale of each layer}, of adapted modules."""
        fans, counts = _layout(shapes, layers)
        layers = max(counts.values())
        packed = PackedLora(
            arena=arena,
            table=np.zeros((1, len(fans), max(pages.values())), dtype=np.int64),
            pages=np.zeros((1, len(fans)), dtype=np.int32),
            scales=np.zeros((1, len(fans), layers), dtype=np.float32),
            shapes=fans,
            layers=layers,
            counts=counts,
        )
        line = 0
        for m, module in enumerate(fans):
            count = pages.get(module, 0)
            if count:
                step = counts[module] * sum(fans[module])
                packed.table[0, m, :count] = line + step * np.arange(count)
                packed.pages[0, m] = count
                packed.scales[0, m, : counts[module]] = scales[module]
                line += count * step
        if line * LINE != arena.numel():
            raise ValueError(f"pages of {line * LINE} elements do not fill the {arena.numel()} that are there")
        return packed

    @staticmethod
    def pack(pairs: Pairs, shapes: Shapes, *, layers: int = 0) -> PackedLora:
        """Pack an adapter from separate matrices. Raises ValueError when a shape or layer does not fit."""
        ranks: dict[str, int] = {}
        fans, counts = _layout(shapes, layers)
        for (layer, module), (_, a, b) in pairs.items():
            rank, (fan_in, fan_out) = a.shape[0], fans[module]
            if a.shape != (rank, fan_in) or b.shape != (fan_out, rank) or rank < 1 or not 0 <= layer < counts[module]:
                raise ValueError(
                    f"layer {layer} of {counts[module]}, {module}: A {tuple(a.shape)} and B {tuple(b.shape)} do not fit "
                    f"[rank, {fan_in}] and [{fan_out}, rank]"
                )
            ranks[module] = max(rank, ranks.get(module, 0))
        pages = {module: -(-rank // PAGE_RANKS) for module, rank in ranks.items()}
        elements = sum(count * PAGE_RANKS * counts[module] * sum(fans[module]) for module, count in pages.items())
        scales = {module: [0.0] * counts[module] for module in pages}
        index = {module: m for m, module in enumerate(fans)}
        arena = torch.zeros(elements, dtype=next(iter(pairs.values()))[1].dtype)
        packed = PackedLora.over(arena, shapes, layers=layers, pages=pages, scales=scales)
        for (layer, module), (scale, a, b) in pairs.items():
            m, (fan_in, fan_out) = index[module], fans[module]
            packed.scales[0, m, layer] = scale
            for page in range(-(-a.shape[0] // PAGE_RANKS)):
                some = slice(page * PAGE_RANKS, (page + 1) * PAGE_RANKS)
                line = int(packed.table[0, m, page]) + layer * (fan_in + fan_out)
                row = arena[line * LINE : (line + fan_in + fan_out) * LINE]
                row[: a[some].numel()] = a[some].flatten()
                row[PAGE_RANKS * fan_in :][: b[:, some].numel()] = b[:, some].T.flatten()
        return packed


class PoolFull(Exception):
    """An adapter needs more bytes than the pool has free."""


class LoraPool:
    """Slots 0..slots-1, each empty or with one adapter (`loaded`), of which the first `loaded_layers` layers are there.

    `shapes` is {module: (in, out)} of the base model, which has `layers`; or {class: (in, out, number of its sites)}, without
    `layers`. `bytes_total` is rounded down to whole lines. With `capacity`, `resize` changes it, up to that; on a device it
    needs `pages`. `version` changes whenever slots or page addresses change; a LoraBatch is outdated then.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        layers: int = 0,
        slots: int,
        max_rank: int,
        bytes_total: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        capacity: int = 0,
        pages: PhysicalPages | None = None,
    ) -> None:
        self.shapes, self.counts = _layout(shapes, layers)
        self.names = tuple(self.shapes)
        self.groups = GROUPS if layers else {name: (name,) for name in self.names}
        self.of_sites = not layers
        self.layers = max(self.counts.values())  # the most of a module
        self.max_rank = max_rank
        self.version = 0
        self._line_bytes = LINE * dtype.itemsize
        self._lines = bytes_total // self._line_bytes
        self._capacity = max(bytes_total, capacity) // self._line_bytes  # in lines
        # one page of slack behind the end keeps the strided views below inside the storage
        self.page_lines = {m: self.counts[m] * (fan_in + fan_out) for m, (fan_in, fan_out) in self.shapes.items()}
        slack = max(self.page_lines.values())
        shape = ((self._capacity + slack) * LINE,)
        self.arena = reserved(shape, dtype=dtype, pages=pages) if capacity else lazy_zeros(shape, dtype=dtype, device=device)
        if capacity:
            expect(self.arena[: self._lines * LINE])
        max_pages = -(-max_rank // PAGE_RANKS)
        self.table = np.zeros((slots, len(self.names), max_pages), dtype=np.int64)
        self.pages = np.zeros((slots, len(self.names)), dtype=np.int32)
        self.scales = np.zeros((slots, len(self.names), self.layers), dtype=np.float32)
        self.loaded = np.zeros(slots, dtype=bool)
        self.loaded_layers = np.frombuffer(mmap.mmap(-1, 4 * slots), dtype=np.int32)  # whole pages: a device writes it too
        self.still: Callable[[], AbstractContextManager[None]] = nullcontext
        self.resizing: Callable[[int], None] | None = None  # called with `bytes_total` before memory beyond it is given back
        self.holes: list[tuple[int, int]] = [(0, self._lines)] if self._lines else []
        self._views: dict[tuple[int, str, bool], torch.Tensor] = {}

    @property
    def bytes_total(self) -> int:
        return self._lines * self._line_bytes

    @property
    def bytes_free(self) -> int:
        return sum(end - start for start, end in self.holes) * self._line_bytes

    def bytes_needed(self, ranks: Mapping[str, int]) -> int:
        """The bytes of an adapter with these ranks, {module: largest rank over its layers}."""
        lines = sum(-(-rank // PAGE_RANKS) * self.page_lines[module] for module, rank in ranks.items())
        return lines * self._line_bytes

    def load(self, slot: int, adapter: PackedLora) -> None:
        """Copy an adapter into an empty slot, cast to the pool's type.

        Raises PoolFull when the bytes are short, ValueError when the slot is taken or the adapter does not fit the model or
        `max_rank`; the pool is unchanged then.
        """
        self.reserve(slot, adapter)
        self.fill(slot, adapter)

    def fill(self, slot: int, adapter: PackedLora) -> None:
        """Copy an adapter into the slot that is reserved for it, cast to the pool's type."""
        for _ in self.filling(slot, adapter, piece_bytes=sys.maxsize):
            pass

    def filling(self, slot: int, adapter: PackedLora, *, piece_bytes: int) -> Iterator[int]:
        """`fill` in pieces, between steps: yields the bytes of each after it is copied. At most `piece_bytes`, or one line.

        The slot may be used when the iterator has ended (`loaded_layers`). Pages may move between two pieces.
        """
        most = max(piece_bytes // self._line_bytes, 1)
        for m, module in enumerate(self.names):
            for page in range(int(adapter.pages[0, m])):
                for line in range(0, self.page_lines[module], most):
                    some = slice(line * LINE, (line + most) * LINE)
                    to = self._span(self.arena, self.table[slot, m, page], m)[some]
                    to.copy_(self._span(adapter.arena, adapter.table[0, m, page], m)[some])
                    yield to.nbytes
        self.loaded_layers[slot] = self.layers

    def reserve(self, slot: int, adapter: PackedLora) -> None:
        """Take a slot and its pages, to be filled by a copy (`loaded_layers` counts its layers). Raises as `load`."""
        if self.loaded[slot]:
            raise ValueError(f"slot {slot} is taken")
        if adapter.shapes != self.shapes or adapter.counts != self.counts or adapter.pages.max() > self.table.shape[2]:
            raise ValueError(
                f"an adapter for {adapter.layers} layers of {adapter.shapes} with {adapter.pages.max()} pages does not fit "
                f"{self.layers} layers of {self.shapes} with ranks up to {self.max_rank}"
            )
        needed = self.bytes_needed(dict(zip(self.names, (adapter.pages[0] * PAGE_RANKS).tolist(), strict=True)))
        if needed > self.bytes_free:
            raise PoolFull(f"adapter needs {needed} bytes, {self.bytes_free} are free")
        self.loaded[slot] = True
        self.loaded_layers[slot] = 0
        self.version += 1
        for m, module in enumerate(self.names):
            for page in range(int(adapter.pages[0, m])):
                self.table[slot, m, page] = self._allocate(self.page_lines[module])
                self.pages[slot, m] = page + 1  # at once: an allocation may compact, which moves what is counted here
        self.scales[slot] = adapter.scales[0]

    def free(self, slot: int) -> None:
        """Empty a slot. No effect on an empty one."""
        spans = []
        for m, module in enumerate(self.names):
            starts = self.table[slot, m, : self.pages[slot, m]].tolist()
            spans += [(start, start + self.page_lines[module]) for start in starts]
        self._release(spans)
        self.pages[slot] = 0
        self.scales[slot] = 0.0
        self.loaded[slot] = False
        self.loaded_layers[slot] = 0
        self.version += 1

    def norms(self, slot: int) -> dict[str, np.ndarray]:
        """{module: float64 [layers, 2]} of a slot's adapter: the Frobenius norms of A and of scale * B in each layer."""
        found: dict[str, np.ndarray] = {}
        for m, module in enumerate(self.names):
            if not self.pages[slot, m]:
                continue
            count, split = self.counts[module], PAGE_RANKS * self.shapes[module][0]
            squares = torch.zeros((count, 2), dtype=torch.float32, device=self.arena.device)
            for start in self.table[slot, m, : self.pages[slot, m]].tolist():
                page = self._span(self.arena, start, m).view(count, -1)
                for column, part in enumerate((page[:, :split], page[:, split:])):
                    squares[:, column] += torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).square()
            found[module] = squares.double().sqrt().cpu().numpy()
            found[module][:, 1] *= np.abs(self.scales[slot, m, :count])
        return found

    def resize(self, bytes_total: int) -> None:
        """Change `bytes_total`, between steps. When it falls, pages move down and the end of the arena is given back.

        Raises PoolFull when the present adapters need more, or when it exceeds the capacity.
        """
        lines, old = bytes_total // self._line_bytes, self._lines
        held = old - sum(end - start for start, end in self.holes)
        if not held <= lines <= self._capacity:
            raise PoolFull(f"{held * self._line_bytes} bytes are in use, {bytes_total} are to be left")
        self._lines = lines
        if lines >= old:
            expect(self.arena[old * LINE : lines * LINE])
            if lines > old:
                self._release([(old, lines)])
        else:
            self._clear_above(lines)
        if self.resizing is not None:
            self.resizing(self.bytes_total)
        if lines < old:
            give_back(self.arena[lines * LINE : old * LINE])

    def rows(self, layer: int, module: str, *, b: bool) -> torch.Tensor:
        """A view whose row `table[slot, m, p]` is that page's A [8 * in] of `layer`, or its B^T [8 * out] with `b`."""
        key = (layer, module, b)
        view = self._views.get(key)
        if view is None:
            fan_in, fan_out = self.shapes[module]
            if not 0 <= layer < self.counts[module]:
                raise IndexError(f"layer {layer} of {module}, which has {self.counts[module]}")
            offset = layer * (fan_in + fan_out) + (fan_in if b else 0)
            width = PAGE_RANKS * (fan_out if b else fan_in)
            view = self.arena.as_strided((self._capacity, width), (LINE, 1), offset * LINE)
            self._views[key] = view
        return view

    def _span(self, arena: torch.Tensor, line: int, m: int) -> torch.Tensor:
        """A page of module m that starts at `line`."""
        return arena[line * LINE : (line + self.page_lines[self.names[m]]) * LINE]

    def _clear_above(self, limit: int) -> None:
        """Move the pages beyond `limit` into holes below it. There is enough room, but perhaps not in one piece."""
        self.holes = [(start, min(end, limit)) for start, end in self.holes if start < limit]
        owned = self._owned()
        for at in reversed(range(len(owned.starts))):
            start, lines = int(owned.starts[at]), int(owned.lines[at])
            if start + lines <= limit:
                return
            if sum(high - low for low, high in self.holes) < lines:  # the page fits only with what it takes below the limit
                self.compact()
                return
            self._move(owned, slice(at, at + 1), self._allocate(lines))
            if start < limit:
                self._release([(start, limit)])

    def _move(self, owned: _Owned, some: slice, to: int) -> None:
        """Move pages that lie one behind the other, and their addresses, down to `to`."""
        start, lines = int(owned.starts[some][0]), int(owned.lines[some].sum())
        with self.still():
            move_down(self.arena, start * LINE, to * LINE, lines * LINE)
            self.table[owned.slots[some], owned.modules[some], owned.pages[some]] -= start - to
        self.version += 1

    def _allocate(self, lines: int) -> int:
        """Take the first hole that is large enough, and return its start. The caller has checked the total."""
        hole = next((i for i, (start, end) in enumerate(self.holes) if end - start >= lines), None)
        if hole is None:
            hole = self._join(lines)
        start, end = self.holes[hole]
        self.holes[hole : hole + 1] = [(start + lines, end)] if end - start > lines else []
        return start

    def _join(self, lines: int) -> int:
        """Make one hole of neighbouring ones with `lines` together, those with the least between them. Returns its index."""
        sizes = [end - start for start, end in self.holes]
        least, first, joined = math.inf, 0, 0
        window = slice(0, 0)
        for last, size in enumerate(sizes):
            joined += size
            while joined - sizes[first] >= lines:
                joined -= sizes[first]
                first += 1
            between = self.holes[last][1] - self.holes[first][0] - joined
            if joined >= lines and between < least:
                least, window = between, slice(first, last + 1)
        assert window.stop, "free bytes were counted wrongly"
        low, high = self.holes[window.start][0], self.holes[window.stop - 1][1]
        self.holes[window] = [(self._slide(low, high), high)]
        return window.start

    def _release(self, spans: Iterable[tuple[int, int]]) -> None:
        """Make holes of spans of lines, [start, end)."""
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*self.holes, *spans]):
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self.holes = merged

    def _owned(self) -> _Owned:
        """Every page in use, by address."""
        used = (np.arange(self.table.shape[2]) < self.pages[:, :, None]) & self.loaded[:, None, None]
        slots, modules, pages = np.nonzero(used)
        starts = self.table[slots, modules, pages]
        order = np.argsort(starts)
        lines = np.array([self.page_lines[module] for module in self.names])[modules]
        return _Owned(starts[order], lines[order], slots[order], modules[order], pages[order])

    def compact(self) -> None:
        """Move every page down to the end of the one before it; one hole remains at the top."""
        end = self._slide(0, math.inf)
        self.holes = [(end, self._lines)] if end < self._lines else []

    def _slide(self, low: int, high: float) -> int:
        """Move the pages of [low, high) down to `low`, one behind the other. Returns where the last one ends."""
        owned = self._owned()
        first, last = (int(at) for at in np.searchsorted(owned.starts, (low, high)))
        ends = owned.starts + owned.lines
        after_hole = owned.starts[first + 1 : last] != ends[first : last - 1] if last > first else ends[:0]
        for begin, end in itertools.pairwise([first, *(first + 1 + np.flatnonzero(after_hole)).tolist(), last]):
            if begin == end:
                break  # no page at all
            lines = int(ends[end - 1] - owned.starts[begin])
            if owned.starts[begin] != low:
                self._move(owned, slice(begin, end), low)
            low += lines
        return low


@dataclass(frozen=True, slots=True)
class _Owned:
    """Pages in use, by address: first line, lines, slot, module index and number of each. int64 [n]."""

    starts: np.ndarray
    lines: np.ndarray
    slots: np.ndarray
    modules: np.ndarray
    pages: np.ndarray
