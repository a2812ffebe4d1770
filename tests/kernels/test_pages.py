"""Promise: memory of a device comes page by page as it is expected and goes as it is given back, within the budget.

The driver (tests/support_pages.py) maps host memory, so that touching anything that was not expected ends the process.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from motet.kernels import KvCache, LoraPool, PackedLora
from motet.kernels.device.driver import DriverError, OutOfMemory
from motet.kernels.device.virtual_memory import CudaPages
from motet.kernels.memory import expect, give_back, reserved
from motet.kernels.pages import PhysicalPages
from motet.services.worker.native.device_memory import DeviceMemory, edge_bytes
from tests.kernels.test_lora import LAYERS, SHAPES, load_or_free
from tests.support_pages import PAGE, HostPages, driver_library, host_pages

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SHAPE = {"layers": LAYERS, "block_size": 8, "kv_heads": 2, "head_dim": 24, "dtype": torch.float32}
BLOCK_BYTES = LAYERS * 8 * 2 * 2 * 24 * 4  # no divisor of a page: layers begin and end anywhere


@pytest.fixture
def pages(tmp_path: Path) -> PhysicalPages:
    """Of a device that no other test has."""
    return host_pages(tmp_path)


def driver_of(pages: PhysicalPages) -> HostPages:
    assert isinstance(pages.driver, HostPages)
    return pages.driver


def test_a_page_is_there_from_its_first_expected_byte_to_its_last(pages: PhysicalPages) -> None:
    driver, memory = driver_of(pages), reserved((40 * PAGE,), dtype=torch.uint8, pages=pages)
    assert driver.mapped == 1, "the first page, always"
    expect(memory[10 * PAGE - 1 : 12 * PAGE + 1])  # four pages, of the outer ones a byte each
    expect(memory[12 * PAGE + 1 : 12 * PAGE + 9])
    assert driver.mapped == 1 + 4
    memory[10 * PAGE - 1 : 12 * PAGE + 9] = 7
    give_back(memory[10 * PAGE - 1 : 12 * PAGE + 1])
    assert driver.mapped == 1 + 1
    assert memory[12 * PAGE + 1 : 12 * PAGE + 9].eq(7).all()
    give_back(memory[12 * PAGE + 1 : 12 * PAGE + 9])
    assert driver.mapped == 1
    expect(memory[5:5])
    expect(memory[20 * PAGE + 5 : 20 * PAGE + 5])
    assert driver.mapped == 1, "nothing was asked for"
    with pytest.raises(AssertionError, match="more is given back"):
        give_back(memory[20 * PAGE : 20 * PAGE + 1])


def test_pages_that_come_are_zero_whoever_had_them_before(pages: PhysicalPages) -> None:
    one, other = (reserved((8 * PAGE,), dtype=torch.bfloat16, pages=pages) for _ in range(2))
    expect(one)
    one.fill_(1.0)
    give_back(one[PAGE // 2 :])  # all pages but the first
    there = driver_of(pages).existing
    expect(other[PAGE // 2 :])
    assert driver_of(pages).existing == there, "pages went from the one to the other"
    assert other[PAGE // 2 :].eq(0).all() and one[: PAGE // 2].eq(1).all()


def test_the_device_is_waited_for_before_a_page_goes_and_only_then(pages: PhysicalPages) -> None:
    driver, memory = driver_of(pages), reserved((8 * PAGE,), dtype=torch.uint8, pages=pages)
    expect(memory[PAGE : 4 * PAGE])
    assert driver.waits == 0
    give_back(memory[PAGE : PAGE + 5])
    assert driver.waits == 0, "the page stays"
    give_back(memory[PAGE + 5 : 4 * PAGE])
    assert driver.waits == 1


def test_a_device_without_enough_pages_refuses_and_changes_nothing(pages: PhysicalPages) -> None:
    driver, memory = driver_of(pages), reserved((8 * PAGE,), dtype=torch.uint8, pages=pages)
    driver.allow(4)
    with pytest.raises(MemoryError, match="cuMemCreate: out of memory"):
        expect(memory[PAGE : 6 * PAGE])
    assert driver.mapped == 1
    expect(memory[PAGE : 4 * PAGE])
    assert driver.mapped == 4
    assert issubclass(OutOfMemory, DriverError)


def test_a_range_goes_with_the_last_tensor_over_it_and_pages_with_the_last_range(tmp_path: Path) -> None:
    pages = host_pages(tmp_path)
    driver, memory = driver_of(pages), reserved((8 * PAGE,), dtype=torch.uint8, pages=pages)
    other = reserved((PAGE,), dtype=torch.uint8, pages=pages)
    del pages
    expect(memory)
    part = memory[4:10].view(torch.int16)
    del memory
    assert driver.mapped == 8 + 1
    part.fill_(3)
    del part
    assert (driver.mapped, driver.existing) == (1, 8 + 1)
    del other
    assert driver.mapped == driver.existing == 0


def test_touching_what_was_not_expected_ends_the_process(tmp_path: Path) -> None:
    driver_library()
    script = """
import sys
from pathlib import Path
import torch
from motet.kernels.memory import expect, reserved
from tests.support_pages import PAGE, host_pages
memory = reserved((8 * PAGE,), dtype=torch.uint8, pages=host_pages(Path(sys.argv[1])))
expect(memory[: 3 * PAGE])
memory[: 3 * PAGE] = 1
print("so far", flush=True)
memory[3 * PAGE] = 1
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode < 0 and done.stdout == "so far\n", done.stderr


def test_a_driver_that_cannot_do_it_says_why() -> None:
    with pytest.raises(DriverError, match="no-such-driver"):
        CudaPages(torch.device("cuda", 3), "no-such-driver.so")
    with pytest.raises(DriverError, match="cuda:1 has no virtual memory management"):
        CudaPages(torch.device("cuda", 1), str(driver_library()))


def test_the_driver_refuses_what_the_real_one_refuses(pages: PhysicalPages) -> None:
    driver = driver_of(pages)
    address, page = driver.reserve(4 * PAGE), driver.create()
    driver.map(address, [page])
    for misuse in (
        lambda: driver.map(address, [page]),
        lambda: driver.unmap(address + PAGE, 1),
        lambda: driver.release(page),
        lambda: driver.free(address, 4 * PAGE),
        lambda: driver.reserve(PAGE - 1),
    ):
        with pytest.raises(DriverError, match="invalid argument"):
            misuse()
    driver.unmap(address, 1)
    driver.release(page)
    driver.free(address, 4 * PAGE)


@pytest.mark.parametrize("seed", range(4))
def test_a_cache_keeps_its_blocks_while_it_shrinks_and_grows(seed: int, pages: PhysicalPages) -> None:
    draw, capacity = random.Random(seed), 900
    cache = KvCache(blocks=draw.randint(1, capacity), capacity=capacity, spare=1, pages=pages, **SHAPE)
    cache.data[:, : cache.blocks] = torch.arange(cache.blocks).view(-1, 1, 1, 1, 1).float()
    scratch, null = cache.null_block - 1, cache.null_block
    for _ in range(60):
        before = cache.blocks
        cache.resize(draw.choice([1, capacity, draw.randint(1, capacity), max(1, before - 3), min(capacity, before + 3)]))
        kept = min(before, cache.blocks)
        assert (cache.data[:, :kept] == torch.arange(kept).view(-1, 1, 1, 1, 1)).all()
        cache.data[:, kept : cache.blocks] = torch.arange(kept, cache.blocks).view(-1, 1, 1, 1, 1).float()
        cache.data[:, scratch] = float("nan")
        assert cache.data[:, null].eq(0).all()
        used = (cache.blocks + 2) * BLOCK_BYTES
        assert used <= driver_of(pages).mapped * PAGE <= used + 2 * (LAYERS + 1) * PAGE


@pytest.mark.parametrize("seed", range(4))
def test_adapters_stay_what_they_are_while_the_pool_shrinks_and_grows(seed: int, pages: PhysicalPages) -> None:
    draw = random.Random(seed)
    pool = lora_pool(2 * MIB, 8 * MIB, pages)
    held: dict[int, PackedLora] = {}
    for _ in range(60):
        load_or_free(draw, pool, held)
        pool.resize(draw.randint(pool.bytes_total - pool.bytes_free, 8 * MIB))
        check_adapters(pool, held)
        assert driver_of(pages).mapped <= -(-pool.bytes_total // PAGE) + (pool.bytes_total == 0)


@pytest.mark.parametrize("seed", range(4))
def test_however_the_memory_is_divided_no_page_is_created_after_the_start(seed: int, pages: PhysicalPages) -> None:
    """And a merged copy gets its room from the blocks that were lent for it."""
    draw, driver = random.Random(seed), driver_of(pages)
    budget = 4 * MIB + draw.randrange(PAGE)
    pages.prepare(budget + edge_bytes(LAYERS, BLOCK_BYTES, PAGE, spare_blocks=1))
    driver.allow(driver.existing)
    lora_bytes = draw.randint(0, budget // 2)
    capacity = budget // BLOCK_BYTES
    cache = KvCache(blocks=(budget - lora_bytes) // BLOCK_BYTES, capacity=capacity, spare=1, pages=pages, **SHAPE)
    pool = lora_pool(lora_bytes, budget, pages)
    memory = DeviceMemory(None, torch.float32, torch.device("cpu"), cache, pool, elastic=True, pages=pages)  # type: ignore[arg-type]
    held: dict[int, PackedLora] = {}
    lent, room = 0, None
    for _ in range(80):
        load_or_free(draw, pool, held)
        used = pool.bytes_total - pool.bytes_free
        if draw.random() < 0.3:
            lent, room = draw.choice([0, draw.randint(0, min(budget // 4, budget - used))]), None
        lora_bytes = draw.randint(used, budget - lent)
        blocks = (budget - lora_bytes - lent) // BLOCK_BYTES
        ids = draw.sample(range(cache.blocks), min(cache.blocks, blocks, 5))
        moves = [(block, to) for to, block in enumerate(sorted(ids, reverse=True)) if to < block]
        memory.divide(blocks, lora_bytes, moves if blocks else [])
        check_adapters(pool, held)
        cache.data[:, :blocks] = 1.0
        if lent and room is None:
            room = memory.room(lent // 4)
        if room is not None:
            room.fill_(2.0)


def lora_pool(bytes_total: int, capacity: int, pages: PhysicalPages) -> LoraPool:
    return LoraPool(
        SHAPES,
        layers=LAYERS,
        slots=8,
        max_rank=128,
        bytes_total=bytes_total,
        dtype=torch.float32,
        capacity=capacity,
        pages=pages,
    )


def check_adapters(pool: LoraPool, held: dict[int, PackedLora]) -> None:
    """They are what they were packed from."""
    for slot, packed in held.items():
        for m, module in enumerate(SHAPES):
            lines = pool.page_lines[module]
            for page in range(int(packed.pages[0, m])):
                at, source = int(pool.table[slot, m, page]), int(packed.table[0, m, page])
                assert torch.equal(pool.arena[at * 8 : (at + lines) * 8], packed.arena[source * 8 : (source + lines) * 8])
