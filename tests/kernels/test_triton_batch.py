"""The work list of the Triton kernels covers every row and every page exactly once, whatever the batch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from motet.kernels import GROUPS, LoraPool
from motet.kernels.pool import MODULES
from motet.kernels.triton.batch import (
    DECODE,
    PREFILL,
    PackedBatch,
    Tile,
    WorkList,
    split_k_for,
    tile_for,
    work_list,
)
from tests.kernels.test_lora import LAYERS, load, make_pool, random_adapter, scattered_pool


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
    for slot in set(group_slots):  # no group is short while another of the same adapter follows
        assert group_slots.count(slot) == -(-np.count_nonzero(row_slot == slot) // tile.rows)
    for name, modules in GROUPS.items():
        part = work.parts[name]
        assert part.header.tolist() == [len(part.items), len(part.tiles)]
        covered = 0
        for segment, (first, blocks, *members) in enumerate(part.segments.tolist()):
            group, projection = divmod(segment, len(modules))
            slot, module = group_slots[group], MODULES.index(modules[projection])
            assert members == work.groups[group].tolist()
            assert first == covered
            covered += blocks
            assert part.items[first:covered].tolist() == [[projection, *members, block] for block in range(blocks)]
            lines = part.item_pages[first:covered].reshape(-1)
            pages = pool.pages[slot, module]
            assert lines[:pages].tolist() == pool.table[slot, module, :pages].tolist()
            assert (lines[pages:] == -1).all() and len(lines) - pages < tile.ranks // 8
            assert (part.scales[:, segment] == pool.scales[slot, module]).all()
            width = pool.shapes[modules[projection]][1]
            tiles = part.tiles[part.tiles[:, 0] == segment, 1].tolist()
            columns = tile.wide if members[1] <= tile.few else tile.columns
            assert tiles == list(range(-(-width // columns)))
        assert covered == len(part.items)


@pytest.mark.parametrize("seed", range(8))
def test_rows_and_pages_are_covered_once(seed: int) -> None:
    draw = random.Random(seed)
    pool, held = scattered_pool(draw)
    for rows in (1, 2, 17, 64, 300):
        row_slot = random_slots(draw, list(held), rows)
        for tile in (DECODE, PREFILL, Tile(rows=1, ranks=16, columns=32)):
            check(pool, row_slot, tile, work_list(pool, row_slot, tile))


def test_a_batch_of_the_base_alone_has_no_work() -> None:
    work = work_list(make_pool(), np.full(5, -1, dtype=np.int32), DECODE)
    assert len(work.rows) == len(work.groups) == 0
    assert all(part.header.tolist() == [0, 0] for part in work.parts.values())


def test_reserved_buffers_hold_any_batch_and_keep_their_addresses() -> None:
    draw = random.Random(1)
    pool = make_pool(bytes_total=64 << 20)
    for slot in range(12):
        load(pool, slot, random_adapter(draw, dict.fromkeys(MODULES, 128 if slot % 2 else draw.randint(1, 128))))
    rows = 40
    nothing = work_list(pool, np.full(rows, -1, dtype=np.int32), DECODE)
    packed = PackedBatch(pool, nothing, DECODE, max_rows=rows)
    address = packed.rows.data_ptr()
    for distinct in (1, 5, 12):
        row_slot = np.array([i % distinct for i in range(rows)], dtype=np.int32)
        work = work_list(pool, row_slot, DECODE)
        packed.fill(work)
        assert packed.rows.data_ptr() == address
        assert (packed.rows.cpu().numpy()[: len(work.rows)] == work.rows).all()
        assert (packed.adapted.cpu().numpy() == work.adapted).all()
        for name, want in work.parts.items():
            got = packed.parts[name]
            assert (got.header.cpu().numpy() == want.header).all()
            assert (got.segments.cpu().numpy()[: len(want.segments)] == want.segments).all()
            assert (got.items.cpu().numpy()[: len(want.items)] == want.items).all()
            assert (got.tiles.cpu().numpy()[: len(want.tiles)] == want.tiles).all()
            assert (got.item_pages.cpu().numpy()[: len(want.item_pages)] == want.item_pages).all()
            assert (got.scales.cpu().numpy()[:LAYERS, : want.scales.shape[1]] == want.scales).all()


def test_k_is_split_until_two_items_fall_to_every_multiprocessor() -> None:
    assert [split_k_for(items, 132) for items in (0, 33, 34, 66, 67, 132, 263, 264, 9999)] == [8, 8, 8, 4, 4, 2, 2, 1, 1]


def test_large_tiles_are_for_batches_in_which_an_adapter_fills_one() -> None:
    assert tile_for(np.repeat(np.arange(8, dtype=np.int32), 64)) is DECODE
    assert tile_for(np.array([*range(32), *[5] * 64], dtype=np.int32)) is PREFILL
    assert tile_for(np.full(500, -1, dtype=np.int32)) is DECODE
