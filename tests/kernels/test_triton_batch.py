"""The work list of the Triton kernels covers every row and every page exactly once, whatever the batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu_stages.layers import occupy
from motet.kernels import GROUPS, LoraPool
from motet.kernels.pool import MODULES
from motet.kernels.triton.batch import GroupWork, PackedBatch, Tile, WorkList, split_k_for, work_list
from motet.kernels.triton.lora import LARGE, PREFILL, SMALL
from tests.kernels.test_lora import LAYERS, load, make_pool, random_adapter, scattered_pool

TILES = (SMALL.tile, LARGE.tile, PREFILL.tile, Tile(rows=1, some=1, ranks=16, columns=32))


def random_slots(draw: random.Random, held: list[int], rows: int) -> np.ndarray:
    """Slots of rows: some adapters have many rows, some one, some none."""
    favourite = draw.choice(held)
    return np.array([favourite if draw.random() < 0.4 else draw.choice([-1, *held]) for _ in range(rows)], dtype=np.int32)


def check(pool: LoraPool, row_slot: np.ndarray, tile: Tile, work: WorkList) -> None:
    assert sorted(work.rows.tolist()) == np.flatnonzero(row_slot >= 0).tolist() == np.flatnonzero(work.adapted).tolist()
    at = 0
    group_slots = []
    for first, length in work.groups.tolist():
        assert first == at and 0 < length <= tile.rows
        at += length
        (slot,) = np.unique(row_slot[work.rows[first:at]])
        group_slots.append(int(slot))
    assert at == len(work.rows)
    assert group_slots == sorted(group_slots)
    for slot in set(group_slots):
        lengths = work.groups[np.array(group_slots) == slot, 1]
        assert len(lengths) == -(-np.count_nonzero(row_slot == slot) // tile.rows)
        assert lengths.max() - lengths.min() <= 1, "its rows are divided evenly"
    for name, modules in GROUPS.items():
        part = work.parts[name]
        assert (part.items[:, 7] == len(part.items)).all() and (part.tiles[:, 7] == len(part.tiles)).all()
        assert len(part.scales[0]) == len(group_slots) * len(modules)
        checked = [
            check_segment(pool, part, slot, members, modules, projection, tile)
            for slot, members in zip(group_slots, work.groups.tolist(), strict=True)
            for projection in range(len(modules))
        ]
        assert sum(items for items, _ in checked) == len(part.items) and sum(tiles for _, tiles in checked) == len(part.tiles)
        sizes = part.tiles[:, 4] * tile.of(part.tiles[:, 2])[1]
        assert (np.diff(sizes) <= 0).all(), "what reads most comes first"


def check_segment(
    pool: LoraPool, part: GroupWork, slot: int, members: list[int], modules: tuple[str, ...], projection: int, tile: Tile
) -> tuple[int, int]:
    """The items and tiles of a group's projection cover its pages and columns once. Returns how many there are."""
    module = MODULES.index(modules[projection])
    line = [projection, *members]
    items, tiles = (found[(found[:, :3] == line).all(axis=1)] for found in (part.items, part.tiles))
    few = members[1] <= tile.few
    ranks, columns = (tile.few_ranks, tile.wide) if few else (tile.ranks, tile.columns)
    pages, width = pool.pages[slot, module], pool.shapes[modules[projection]][1]
    assert items[:, 5].tolist() == list(range(0, 8 * pages, ranks))
    assert tiles[:, 5].tolist() == list(range(0, width, columns))
    read = [part.pages[at + page] for at, count in items[:, 3:5].tolist() for page in range(count)]
    assert read == pool.table[slot, module, :pages].tolist()
    assert (items[:, 4] <= ranks // 8).all()
    for first, count, segment in tiles[:, [3, 4, 6]].tolist():
        assert part.pages[first : first + count].tolist() == read
        assert (part.scales[:, segment] == pool.scales[slot, module]).all()
    return len(items), len(tiles)


@pytest.mark.parametrize("seed", range(8))
def test_rows_and_pages_are_covered_once(seed: int) -> None:
    draw = random.Random(seed)
    pool, held = scattered_pool(draw)
    for rows in (1, 2, 17, 64, 300):
        row_slot = random_slots(draw, list(held), rows)
        for tile in TILES:
            check(pool, row_slot, tile, work_list(pool, row_slot, tile))


def test_a_batch_of_the_base_alone_has_no_work() -> None:
    work = work_list(make_pool(), np.full(5, -1, dtype=np.int32), LARGE.tile)
    assert len(work.rows) == len(work.groups) == 0
    assert all(len(part.items) == len(part.tiles) == 0 for part in work.parts.values())


@pytest.mark.parametrize("tile", TILES[:3])
def test_reserved_buffers_hold_any_batch_and_keep_their_addresses(tile: Tile) -> None:
    draw = random.Random(1)
    pool = make_pool(bytes_total=64 << 20)
    for slot in range(12):
        load(pool, slot, random_adapter(draw, dict.fromkeys(MODULES, 128 if slot % 2 else draw.randint(1, 128))))
    rows = 40
    nothing = work_list(pool, np.full(rows, -1, dtype=np.int32), tile)
    packed = PackedBatch(pool, nothing, tile, max_rows=rows)
    address = packed.rows.data_ptr()
    for distinct in (1, 5, 12):
        row_slot = np.array([i % distinct for i in range(rows)], dtype=np.int32)
        work = work_list(pool, row_slot, tile)
        packed.fill(work)
        assert packed.rows.data_ptr() == address
        assert (packed.rows.cpu().numpy()[: len(work.rows)] == work.rows).all()
        assert (packed.adapted.cpu().numpy() == work.adapted).all()
        for name, want in work.parts.items():
            got = packed.parts[name]
            for lines, wanted in ((got.items.cpu().numpy(), want.items), (got.tiles.cpu().numpy(), want.tiles)):
                assert (lines[: len(wanted)] == wanted).all() and (lines[len(wanted) :] == 0).all()
            assert (got.pages.cpu().numpy()[: len(want.pages)] == want.pages).all()
            assert (got.scales.cpu().numpy()[:LAYERS, : want.scales.shape[1]] == want.scales).all()


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=12), tile=st.sampled_from(TILES[:3]))
def test_reserved_buffers_have_room_for_any_rows_of_any_adapters(counts: list[int], tile: Tile) -> None:
    shapes = dict.fromkeys(MODULES, (8, 1024))
    pool = LoraPool(shapes, layers=1, slots=12, max_rank=40, bytes_total=1 << 24, dtype=torch.bfloat16)
    occupy(pool, [40] * 12)
    rows = sum(counts)
    packed = PackedBatch(pool, work_list(pool, np.full(rows, -1, dtype=np.int32), tile), tile, max_rows=rows)
    row_slot = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    packed.fill(work_list(pool, row_slot, tile))  # raises where it does not fit


def test_k_is_split_until_two_items_fall_to_every_multiprocessor() -> None:
    assert [split_k_for(items, 132) for items in (0, 33, 34, 66, 67, 132, 263, 264, 9999)] == [8, 8, 8, 4, 4, 2, 2, 1, 1]
