"""Promise: a region that shrinks gives its memory back to the system, and the content of the rest is not changed."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from motet.kernels import KvCache, LoraPool, PackedLora, PoolFull
from motet.kernels.cpu import CpuEngine
from motet.kernels.cpu.loading import CpuLoader
from motet.kernels.memory import move_by_buffer, move_down
from tests.kernels.test_lora import LAYERS, SHAPES, load_or_free

MIB = 1 << 20
PAGE = mmap.PAGESIZE
HUGE = 2 * MIB  # the first write to a place may bring in this much around it
EDGES = 64 * 1024  # pages that lie in part in what stays, and the null block


def resident_bytes(memory: torch.Tensor) -> int:
    """Bytes of the tensor's own pages that are in memory, by the system's page map: the highest bit of an entry says so."""
    first, last = memory.data_ptr() // PAGE, (memory.data_ptr() + memory.nbytes - 1) // PAGE
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(first * 8)
        found = np.frombuffer(entries.read((last - first + 1) * 8), np.uint64)
    return int(np.count_nonzero(found >> np.uint64(63))) * PAGE


def kv_cache(blocks: int, capacity: int) -> KvCache:
    """Blocks of 16 KiB over all layers."""
    shape = {"layers": 4, "block_size": 8, "kv_heads": 2, "head_dim": 32, "dtype": torch.float32}
    return KvCache(blocks=blocks, capacity=capacity, **shape)


def test_a_smaller_cache_gives_back_its_end_and_grows_again_with_zeros() -> None:
    cache = kv_cache(4096, 4096)
    cache.data[:, :4096] = 1.0
    assert 64 * MIB <= resident_bytes(cache.data) <= 64 * MIB + 4 * HUGE
    cache.resize(1024)
    assert 16 * MIB <= resident_bytes(cache.data) <= 16 * MIB + EDGES
    cache.resize(2048)
    assert cache.data[:, :1024].eq(1).all() and cache.data[:, 1024:2048].eq(0).all()
    cache.data[:, 1024:2048] = 2.0
    assert resident_bytes(cache.data) <= 32 * MIB + 4 * HUGE
    assert cache.data[:, :1024].eq(1).all()


def test_a_cache_with_more_capacity_takes_no_more_memory_than_its_blocks() -> None:
    cache = kv_cache(1000, 8192)
    cache.data[:, :1000] = 1.0
    assert resident_bytes(cache.data) <= 16 * MIB + 5 * HUGE  # after the blocks of each of 4 layers, and the null block
    assert cache.null_block == 8192 and cache.data[:, 8192].eq(0).all()


def test_moved_blocks_are_copied_in_order_in_every_layer() -> None:
    cache = kv_cache(8, 8)
    for block in range(8):
        cache.data[:, block] = float(block)
    cache.move([(7, 1), (1, 0), (6, 1)])
    assert [cache.data[layer, block].unique().tolist() for layer in range(4) for block in (0, 1)] == [[7.0], [6.0]] * 4


@pytest.mark.parametrize("seed", range(4))
def test_adapters_stay_what_they_are_while_the_pool_shrinks_and_grows(seed: int) -> None:
    draw = random.Random(seed)
    pool = LoraPool(SHAPES, layers=LAYERS, slots=8, max_rank=128, bytes_total=2 * MIB, dtype=torch.float32, capacity=8 * MIB)
    held: dict[int, PackedLora] = {}
    for _ in range(80):
        load_or_free(draw, pool, held)
        used = pool.bytes_total - pool.bytes_free
        pool.resize(draw.randint(used, 8 * MIB))
        assert pool.bytes_total - pool.bytes_free == used
        if used:
            with pytest.raises(PoolFull):
                pool.resize(used - 8 * 4)
        for slot, packed in held.items():
            for m, module in enumerate(SHAPES):
                for page in range(int(packed.pages[0, m])):
                    lines = pool.page_lines[module]
                    at, source = int(pool.table[slot, m, page]), int(packed.table[0, m, page])
                    assert (at + lines) * 8 * 4 <= pool.bytes_total
                    assert torch.equal(pool.arena[at * 8 : (at + lines) * 8], packed.arena[source * 8 : (source + lines) * 8])


@pytest.mark.parametrize("down", [1, 3, 40, 100])
@pytest.mark.parametrize("move", [move_down, partial(move_by_buffer, buffer_bytes=64)], ids=["at once", "by a buffer"])
def test_what_moves_down_onto_itself_stays_what_it_is(move: Callable[..., None], down: int) -> None:
    memory = torch.arange(200.0)
    move(memory, 100, 100 - down, 90)
    assert memory.tolist() == [*range(100 - down), *range(100, 190), *range(190 - down, 200)]


def test_a_smaller_pool_gives_back_its_end() -> None:
    pool = LoraPool(SHAPES, layers=LAYERS, slots=8, max_rank=64, bytes_total=64 * MIB, dtype=torch.float32)
    pool.arena.fill_(1.0)
    pool.resize(16 * MIB)
    assert resident_bytes(pool.arena) <= 16 * MIB + EDGES
    pool.resize(32 * MIB)
    pool.arena[: 8 * MIB] = 2.0
    assert resident_bytes(pool.arena) <= 32 * MIB + HUGE


def test_the_loader_touches_the_memory_of_the_pool_and_none_of_the_caches() -> None:
    def settled() -> int:
        """Resident bytes once they have not changed for a while."""
        seen = [-1, resident_bytes(pool.arena)]
        while seen[-1] < pool.bytes_total or seen[-1] != seen[-2]:
            time.sleep(0.05)  # time: the size has not changed for so long
            seen.append(resident_bytes(pool.arena))
        return seen[-1]

    pool = LoraPool(SHAPES, layers=LAYERS, slots=8, max_rank=64, bytes_total=16 * MIB, dtype=torch.float32, capacity=128 * MIB)
    loader = CpuLoader(CpuEngine(threads=1), pool)
    assert settled() <= 16 * MIB + EDGES
    pool.resize(64 * MIB)
    assert 64 * MIB <= settled() <= 64 * MIB + HUGE
    pool.resize(32 * MIB)
    assert 32 * MIB <= settled() <= 32 * MIB + EDGES
    loader.close()
