"""One step's work list for the Triton kernels: rows sorted by adapter, groups of rows, blocks of ranks.

    rows      row numbers, those of one adapter together; rows of the base alone are absent. A row's place in this list is
              its position
    adapted   1 for every row of the step that has an adapter, else 0
    groups    [first position, rows]: rows of one adapter, for which A and B are read once. More than M rows are divided evenly
    pages     the arena lines of the pages of every segment, which is a (group, projection)
    items     blocks of ranks of a segment: [projection, first position, rows, first page, pages, first rank, segment, items]
    tiles     columns of B of a segment: [projection, first position, rows, first page, pages, first column, segment, tiles]
    scales    [layer, segment]

Items and tiles are lines of 32 bytes, so that a program knows after one load what it works on and how many lines there are: a
captured graph finds a new batch's counts there. Lines without work are 0. Segments with the longest tiles come first, so that
no long tile is begun when the others are done.

`work_list` is pure numpy; `PackedBatch` lays the arrays of all four projection groups into one buffer and sends it in one
copy. A buffer made for a number of rows takes every batch of up to that many, at the same addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from motet.kernels.pool import GROUPS, MODULES, PAGE_RANKS, LoraPool

SECTION_BYTES = 64  # sections begin at multiples of this
LINE = 8  # numbers of an item or a tile


@dataclass(frozen=True, slots=True)
class Tile:
    """What one item and one tile cover, by the number of rows in the group.

    A group of up to `few` rows is multiplied row by row, in items of `few_ranks` ranks of A and tiles of `wide` columns of B.
    A larger one is multiplied in one product of `rows` rows, in items of `ranks` and tiles of `columns`. In a tile that product
    has `some` rows where this is enough.
    """

    rows: int
    some: int
    ranks: int
    columns: int
    few: int = 0
    few_ranks: int = 0
    wide: int = 0

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ranks of a block and columns of a tile, int [n], for groups of `rows` rows, int [n]."""
        few = rows <= self.few
        return np.where(few, self.few_ranks, self.ranks), np.where(few, self.wide, self.columns)


def split_k_for(items: int, multiprocessors: int) -> int:
    """Into how many parts K is divided per shrink item: enough for two items on every multiprocessor, at most 8."""
    return min(max(-(-2 * multiprocessors // max(items, 1)), 1), 8)


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The arrays of one projection group ("qkv", ..); L layers, N segments, n items, t tiles."""

    items: np.ndarray  # int32 [n, LINE]
    tiles: np.ndarray  # int32 [t, LINE]
    pages: np.ndarray  # int64
    scales: np.ndarray  # float32 [L, N]


@dataclass(frozen=True, slots=True)
class WorkList:
    """The rows of a step grouped by adapter, and the work of each projection group."""

    rows: np.ndarray  # int32
    adapted: np.ndarray  # int32 [rows of the step]
    groups: np.ndarray  # int32 [G, 2], on the host alone
    parts: dict[str, GroupWork]


def work_list(pool: LoraPool, row_slot: np.ndarray, tile: Tile) -> WorkList:
    """The work of a step, from `row_slot`, int32 [rows], -1 for the base model alone.

    Raises ValueError when a row names an empty slot, because serving the base model instead would be a wrong answer.
    """
    order = np.argsort(row_slot, kind="stable").astype(np.int32)
    rows = order[np.count_nonzero(row_slot < 0) :]
    slots, starts, counts = np.unique(row_slot[rows], return_index=True, return_counts=True)
    if len(slots) and (slots[-1] >= len(pool.loaded) or not pool.loaded[slots].all()):
        raise ValueError(f"rows name empty adapter slots: {slots.tolist()} of which some are not loaded")
    per_adapter = -(-counts // tile.rows)
    adapter, nth = np.repeat(np.arange(len(slots)), per_adapter), _counting(per_adapter)
    begin, end = (counts[adapter] * at // per_adapter[adapter] for at in (nth, nth + 1))
    groups = np.stack([starts[adapter] + begin, end - begin], axis=1).astype(np.int32)
    parts = {name: _group_work(pool, slots[adapter], groups, modules, tile) for name, modules in GROUPS.items()}
    return WorkList(rows, (row_slot >= 0).astype(np.int32), groups, parts)


def _group_work(pool: LoraPool, slots: np.ndarray, groups: np.ndarray, modules: tuple[str, ...], tile: Tile) -> GroupWork:
    """`slots` [G]: the adapter of each row group."""
    slot, members = np.repeat(slots, len(modules)), np.repeat(groups, len(modules), axis=0)  # of each segment
    projection = np.tile(np.arange(len(modules)), len(slots))
    module = np.array([MODULES.index(name) for name in modules])
    longest = np.argsort(-pool.pages[slot, module[projection]] * tile.of(members[:, 1])[1], kind="stable")
    slot, members, projection = slot[longest], members[longest], projection[longest]
    module, (ranks, columns) = module[projection], tile.of(members[:, 1])
    pages = pool.pages[slot, module].astype(np.int64)
    first_page = np.cumsum(pages) - pages

    segments = np.zeros((len(slot), LINE), dtype=np.int32)
    segments[:, 0], segments[:, 1:3], segments[:, 3], segments[:, 4] = projection, members, first_page, pages
    segments[:, 6] = np.arange(len(slot))
    items, ahead = _divided(segments, pages, ranks // PAGE_RANKS)  # pages before each
    items[:, 3] += ahead
    items[:, 4] = np.minimum(items[:, 4] - ahead, ranks[items[:, 6]] // PAGE_RANKS)
    items[:, 5] = ahead * PAGE_RANKS
    widths = np.array([pool.shapes[name][1] for name in modules])[projection]
    tiles, column = _divided(segments, widths, columns)
    tiles[:, 5] = column
    items[:, 7], tiles[:, 7] = len(items), len(tiles)
    return GroupWork(
        items=items,
        tiles=tiles,
        pages=pool.table[np.repeat(slot, pages), np.repeat(module, pages), _counting(pages)].astype(np.int64),
        scales=np.ascontiguousarray(pool.scales[slot, module].T),
    )


def _divided(segments: np.ndarray, sizes: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The line of each segment once for every piece of it, and where in its size the piece begins."""
    counts = -(-sizes // steps)
    of = np.repeat(np.arange(len(segments)), counts)
    return segments[of], (_counting(counts) * steps[of]).astype(np.int32)


def _counting(counts: np.ndarray) -> np.ndarray:
    """Counts up from 0 for each element: [2, 3] -> [0, 1, 0, 1, 2]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _most_work(tile: Tile, rows: int, few: int, many: int) -> int:
    """An upper bound of the work of `rows` rows, where each has `few` or a group of them `many`."""
    return max(rows * few if tile.few else 0, -(-rows // (tile.few + 1)) * many)


def _most_items(pool: LoraPool, modules: tuple[str, ...], tile: Tile, rows: int) -> int:
    few, many = (len(modules) * -(-pool.max_rank // (ranks or 1)) for ranks in (tile.few_ranks, tile.ranks))
    return _most_work(tile, rows, few, many)


def _most_tiles(pool: LoraPool, modules: tuple[str, ...], tile: Tile, rows: int) -> int:
    few, many = (sum(-(-pool.shapes[name][1] // (columns or 1)) for name in modules) for columns in (tile.wide, tile.columns))
    return _most_work(tile, rows, few, many)


@dataclass(slots=True)
class GroupTensors:
    """A `GroupWork` on the device."""

    items: torch.Tensor
    tiles: torch.Tensor
    pages: torch.Tensor
    scales: torch.Tensor


class PackedBatch:
    """Device buffers for work lists of one shape, filled by one copy from pinned memory.

    With `max_rows` the buffers take any batch of up to that many, with adapters of any rank; without it they have the size
    of `work`.
    """

    def __init__(self, pool: LoraPool, work: WorkList, tile: Tile, max_rows: int = 0) -> None:
        device = pool.arena.device
        most_pages = -(-pool.max_rank // PAGE_RANKS)
        self._sections: list[tuple[slice, torch.dtype, tuple[int, ...]]] = []
        self._bytes = 0
        self.positions = max_rows or len(work.rows)
        self._section((self.positions,), torch.int32)
        self._section((max_rows or len(work.adapted),), torch.int32)
        for name, modules in GROUPS.items():
            part, segments = work.parts[name], (max_rows or len(work.groups)) * len(modules)
            self._section((_most_items(pool, modules, tile, max_rows) or len(part.items), LINE), torch.int32)
            self._section((_most_tiles(pool, modules, tile, max_rows) or len(part.tiles), LINE), torch.int32)
            self._section((max_rows * len(modules) * most_pages or len(part.pages),), torch.int64)
            self._section((pool.layers, segments), torch.float32)
        self._buffer = torch.empty(self._bytes, dtype=torch.uint8, device=device)
        views = [self._buffer[at].view(dtype).view(shape) for at, dtype, shape in self._sections]
        self.rows, self.adapted = views[:2]
        self.parts = {}
        for i, name in enumerate(GROUPS):
            items, tiles, pages, scales = views[2 + 4 * i : 6 + 4 * i]
            self.parts[name] = GroupTensors(items, tiles, pages, scales)
        self.fill(work)

    def fill(self, work: WorkList) -> None:
        """Replace the contents. The copy comes before later launches on the current stream."""
        arrays = [work.rows, work.adapted]
        for name in GROUPS:
            part = work.parts[name]
            arrays += [part.items, part.tiles, part.pages, part.scales]
        host = torch.zeros(self._bytes, dtype=torch.uint8, pin_memory=self._buffer.is_cuda)  # the caching allocator's
        raw = host.numpy()
        for array, (at, _, shape) in zip(arrays, self._sections, strict=True):
            section = raw[at].view(array.dtype).reshape(shape)
            section[tuple(slice(size) for size in array.shape)] = array
        self._buffer.copy_(host, non_blocking=True)

    def _section(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self._sections.append((slice(self._bytes, self._bytes + size), dtype, shape))
        self._bytes += -(-size // SECTION_BYTES) * SECTION_BYTES
