"""One step's work list for the Triton kernels: rows sorted by adapter, groups of rows, blocks of ranks.

    rows      row numbers, those of one adapter together; rows of the base alone are absent. A row's place in this list is
              its position
    adapted   1 for every row of the step that has an adapter, else 0
    groups    [first position, rows]: at most M rows of one adapter, so that A and B are read once for all of them
    segments  [first item, items, first position, rows] of every (group, projection); no items where the adapter lacks it
    items     blocks of R ranks of a segment: [projection, first position, rows, which block], and in `item_pages` the arena
              lines of its R / 8 pages (-1 beyond the rank)
    tiles     [segment, which tile]: the columns of B in tiles, which are wide for few rows
    header    [items, tiles], on the device: a captured graph finds a new batch's counts there
    scales    [layer, segment]

`work_list` is pure numpy; `PackedBatch` lays the arrays of all four projection groups into one buffer and sends it in one
copy. A buffer made for a number of rows takes every batch of up to that many, at the same addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from motet.kernels.pool import GROUPS, MODULES, PAGE_RANKS, LoraPool

SECTION_BYTES = 64  # sections begin at multiples of this


@dataclass(frozen=True, slots=True)
class Tile:
    """What one work item covers: `rows` of a group, `ranks` of a block, and `columns` of B.

    Groups of up to `few` rows are multiplied row by row, with `wide` columns of B.
    """

    rows: int
    ranks: int
    columns: int
    few: int = 0
    wide: int = 0


DECODE = Tile(rows=16, ranks=16, columns=256, few=3, wide=1024)
PREFILL = Tile(rows=64, ranks=64, columns=128)


def split_k_for(items: int, multiprocessors: int) -> int:
    """Into how many parts K is divided per shrink item: enough for two items on every multiprocessor, at most 8."""
    return min(max(-(-2 * multiprocessors // max(items, 1)), 1), 8)


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The arrays of one projection group ("qkv", ..); S projections, L layers, G row groups, n items."""

    header: np.ndarray  # int32 [2]
    segments: np.ndarray  # int32 [G * S, 4]
    items: np.ndarray  # int32 [n, 4]
    tiles: np.ndarray  # int32 [t, 2]
    item_pages: np.ndarray  # int64 [n, ranks / 8]
    scales: np.ndarray  # float32 [L, G * S]


@dataclass(frozen=True, slots=True)
class WorkList:
    """The rows of a step grouped by adapter, and the work of each projection group."""

    rows: np.ndarray  # int32
    adapted: np.ndarray  # int32 [rows of the step]
    groups: np.ndarray  # int32 [G, 2], on the host alone
    parts: dict[str, GroupWork]


def tile_for(row_slot: np.ndarray) -> Tile:
    """The tile for a step.

    Large tiles pay when an adapter has enough rows to fill one: its prompt then takes longer than all decodes.
    """
    adapted = row_slot[row_slot >= 0]
    return PREFILL if len(adapted) and np.bincount(adapted).max() > PREFILL.rows else DECODE


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
    adapter = np.repeat(np.arange(len(slots)), per_adapter)
    within = tile.rows * _counting(per_adapter)
    groups = np.stack([starts[adapter] + within, np.minimum(counts[adapter] - within, tile.rows)], axis=1).astype(np.int32)
    parts = {name: _group_work(pool, slots[adapter], groups, modules, tile) for name, modules in GROUPS.items()}
    return WorkList(rows, (row_slot >= 0).astype(np.int32), groups, parts)


def _group_work(pool: LoraPool, slots: np.ndarray, groups: np.ndarray, modules: tuple[str, ...], tile: Tile) -> GroupWork:
    """`slots` [G]: the adapter of each row group."""
    module = np.array([MODULES.index(name) for name in modules])
    pages_each = tile.ranks // PAGE_RANKS
    segment_slot, segment_module = np.repeat(slots, len(module)), np.tile(module, len(slots))
    members = np.repeat(groups, len(module), axis=0)
    pages = pool.pages[segment_slot, segment_module]
    blocks = -(-pages // pages_each)
    item_segment, item_block = np.repeat(np.arange(len(blocks)), blocks), _counting(blocks)
    page = (pages_each * item_block)[:, None] + np.arange(pages_each)
    exists = page < pages[item_segment, None]
    page = np.where(exists, page, 0)
    lines = pool.table[segment_slot[item_segment, None], segment_module[item_segment, None], page]
    items = np.column_stack([item_segment % len(module), members[item_segment], item_block])
    widths = np.array([pool.shapes[name][1] for name in modules])[np.tile(np.arange(len(module)), len(slots))]
    counts = -(-widths // np.where(members[:, 1] <= tile.few, tile.wide or 1, tile.columns))
    tiles = np.column_stack([np.repeat(np.arange(len(blocks)), counts), _counting(counts)])
    return GroupWork(
        header=np.array([len(items), len(tiles)], dtype=np.int32),
        segments=np.column_stack([np.cumsum(blocks) - blocks, blocks, members]).astype(np.int32),
        items=items.astype(np.int32),
        tiles=tiles.astype(np.int32),
        item_pages=np.where(exists, lines, -1),
        scales=np.ascontiguousarray(pool.scales[segment_slot, segment_module].T),
    )


def _counting(counts: np.ndarray) -> np.ndarray:
    """Counts up from 0 for each element: [2, 3] -> [0, 1, 0, 1, 2]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _most_tiles(pool: LoraPool, modules: tuple[str, ...], tile: Tile, groups: int) -> int:
    """An upper bound of the number of tiles."""
    narrowest = min(tile.columns, tile.wide or tile.columns)
    return groups * sum(-(-pool.shapes[name][1] // narrowest) for name in modules)


@dataclass(slots=True)
class GroupTensors:
    """A `GroupWork` on the device, and the number of items for which it has room."""

    header: torch.Tensor
    segments: torch.Tensor
    items: torch.Tensor
    tiles: torch.Tensor
    item_pages: torch.Tensor
    scales: torch.Tensor
    max_items: int


class PackedBatch:
    """Device buffers for work lists of one shape, filled by one copy from pinned memory.

    With `max_rows` the buffers take any batch of up to that many rows, with adapters of any rank; without it they have the size
    of `work`.
    """

    def __init__(self, pool: LoraPool, work: WorkList, tile: Tile, max_rows: int = 0) -> None:
        device = pool.arena.device
        max_groups = max_rows or len(work.groups)
        blocks = -(-pool.max_rank // tile.ranks)
        self._sections: list[tuple[slice, torch.dtype, tuple[int, ...]]] = []
        self._bytes = 0
        self.positions = max_rows or len(work.rows)
        self._section((self.positions,), torch.int32)
        self._section((max_rows or len(work.adapted),), torch.int32)
        limits: dict[str, int] = {}
        for name, modules in GROUPS.items():
            items = max_rows * len(modules) * blocks or len(work.parts[name].items)
            segments = max_groups * len(modules)
            limits[name] = items
            self._section((2,), torch.int32)
            self._section((segments, 4), torch.int32)
            self._section((items, 4), torch.int32)
            self._section((_most_tiles(pool, modules, tile, max_rows) or len(work.parts[name].tiles), 2), torch.int32)
            self._section((items, tile.ranks // PAGE_RANKS), torch.int64)
            self._section((pool.layers, segments), torch.float32)
        self._buffer = torch.empty(self._bytes, dtype=torch.uint8, device=device)
        views = [self._buffer[at].view(dtype).view(shape) for at, dtype, shape in self._sections]
        self.rows, self.adapted = views[:2]
        self.parts = {}
        for i, (name, max_items) in enumerate(limits.items()):
            header, spans, work_items, tiles, pages, scales = views[2 + 6 * i : 8 + 6 * i]
            self.parts[name] = GroupTensors(header, spans, work_items, tiles, pages, scales, max_items)
        self.fill(work)

    def fill(self, work: WorkList) -> None:
        """Replace the contents. The copy comes before later launches on the current stream."""
        arrays = [work.rows, work.adapted]
        for name in GROUPS:
            part = work.parts[name]
            arrays += [part.header, part.segments, part.items, part.tiles, part.item_pages, part.scales]
        host = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=self._buffer.is_cuda)  # the caching allocator's
        raw = host.numpy()
        for array, (at, _, shape) in zip(arrays, self._sections, strict=True):
            section = raw[at].view(array.dtype).reshape(shape)
            section[tuple(slice(size) for size in array.shape)] = array
        self._buffer.copy_(host, non_blocking=True)

    def _section(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self._sections.append((slice(self._bytes, self._bytes + size), dtype, shape))
        self._bytes += -(-size // SECTION_BYTES) * SECTION_BYTES
