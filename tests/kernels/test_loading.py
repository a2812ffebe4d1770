"""Promise: adapters copied into the pool beside the steps arrive unchanged, layer by layer, at the link's rate.

It holds for both loaders: that of host memory, and that of devices. The device is this machine, or a driver whose copy stream
is a thread of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from motet.kernels import GROUPS, LoraPool, PackedLora
from motet.kernels.cpu import CpuEngine
from motet.kernels.cpu.loading import CpuLoader
from motet.kernels.device import DeviceLoader, host_streams
from tests.kernels.support_driver import LATE
from tests.support import until

MODULES = tuple(module for group in GROUPS.values() for module in group)
LAYERS = 6
PART_BYTES = 10_000  # neither a row, nor a whole number of them, nor of lines
PAGE_LINES = LAYERS * (64 + 48)
SHAPES = dict.fromkeys(MODULES, (64, 48))
DTYPES = (torch.float32, torch.bfloat16)


Loader = CpuLoader | DeviceLoader
Make = Callable[..., Loader]


@pytest.fixture(params=["host", "device", "driver"])
def make_loader(request: pytest.FixtureRequest) -> Iterator[Make]:
    engine = CpuEngine(threads=1)
    loaders = list[Loader]()
    with ExitStack() as stack:
        if request.param == "driver":
            driver = request.getfixturevalue("driver")
            stack.enter_context(driver.running())

        def make(pool: LoraPool, *, link_bytes_per_s: float = 0.0) -> Loader:
            if request.param == "host":
                loaders.append(CpuLoader(engine, pool, link_bytes_per_s=link_bytes_per_s))
                return loaders[-1]
            streams = driver.streams(engine, LATE) if request.param == "driver" else host_streams(engine)
            loaders.append(DeviceLoader(engine, pool, streams, link_bytes_per_s=link_bytes_per_s, part_bytes=PART_BYTES))
            return loaders[-1]

        yield make
        for loader in loaders:
            loader.close()


def pages_bytes(pages: int, dtype: torch.dtype = torch.float32) -> int:
    return pages * PAGE_LINES * 8 * dtype.itemsize


def make_pool(pages: int, dtype: torch.dtype = torch.float32, slots: int = 4) -> LoraPool:
    """Room for `pages` pages, all of it NaN."""
    pool = LoraPool(SHAPES, layers=LAYERS, slots=slots, max_rank=64, bytes_total=pages_bytes(pages, dtype), dtype=dtype)
    pool.arena.fill_(float("nan"))
    return pool


def adapter(rank: int, seed: int, modules: tuple[str, ...] = MODULES) -> dict:
    draw = torch.Generator().manual_seed(seed)
    return {
        (layer, module): (
            1.0 + layer,
            torch.randn(rank, SHAPES[module][0], generator=draw),
            torch.randn(SHAPES[module][1], rank, generator=draw),
        )
        for layer in range(LAYERS)
        for module in modules
    }


def in_host_memory(pairs: dict, dtype: torch.dtype = torch.float32) -> PackedLora:
    cast = {key: (scale, a.to(dtype), b.to(dtype)) for key, (scale, a, b) in pairs.items()}
    return PackedLora.pack(cast, SHAPES, layers=LAYERS)


def begin(loader: Loader, pool: LoraPool, slot: int, host: PackedLora) -> None:
    pool.reserve(slot, host)
    loader.begin(slot, host, host)


def at_once(pages: int, *hosts: PackedLora) -> LoraPool:
    """A pool after loading these adapters into slots 0, 1, .."""
    pool = make_pool(pages, hosts[0].arena.dtype, slots=len(hosts))
    for slot, host in enumerate(hosts):
        pool.load(slot, host)
    return pool


def rows_of(pool: LoraPool, slot: int, layers: range) -> list[torch.Tensor]:
    """The slot's bytes of these layers, page by page."""
    return [
        pool.rows(layer, module, b=b)[int(pool.table[slot, m, page])].clone()
        for layer in layers
        for m, module in enumerate(MODULES)
        for page in range(int(pool.pages[slot, m]))
        for b in (False, True)
    ]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def wait(done: Callable[[], bool]) -> None:
    until(done, within_s=20.0, every_s=0.0005)


def whole(pool: LoraPool, slot: int) -> bool:
    return int(pool.loaded_layers[slot]) == LAYERS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("link_bytes_per_s", [0.0, 50e6])
def test_a_load_beside_the_steps_writes_the_bits_of_a_load_at_once(
    make_loader: Make, dtype: torch.dtype, link_bytes_per_s: float
) -> None:
    pairs = adapter(12, seed=1, modules=MODULES[1:6])
    pool, host = make_pool(20, dtype), in_host_memory(pairs, dtype)
    want = at_once(20, host)
    loader = make_loader(pool, link_bytes_per_s=link_bytes_per_s)
    begin(loader, pool, 2, host)
    wait(lambda: whole(pool, 2) and not loader.link.bytes_queued)  # it counts after it has told
    assert same(rows_of(pool, 2, range(LAYERS)), rows_of(want, 0, range(LAYERS)))
    assert np.array_equal(pool.scales[2], want.scales[0])
    assert loader.link.bytes_copied == pages_bytes(10, dtype)
    assert loader.finished() == [host] and not loader.under_way


def test_layers_come_in_order_and_each_is_whole_when_it_is_announced(make_loader: Make) -> None:
    pairs = adapter(16, seed=2)
    pool, host = make_pool(30), in_host_memory(pairs)
    want = at_once(30, host)
    loader = make_loader(pool, link_bytes_per_s=1e6)
    begin(loader, pool, 0, host)
    seen = [0]
    while not whole(pool, 0):
        layers = int(pool.loaded_layers[0])
        if layers != seen[-1]:
            seen.append(layers)
            assert same(rows_of(pool, 0, range(layers)), rows_of(want, 0, range(layers)))
        last, finished = rows_of(pool, 0, range(LAYERS - 1, LAYERS)), loader.finished()
        if int(pool.loaded_layers[0]) < LAYERS - 1:
            assert all(bool(row.isnan().all()) for row in last), "what lies far ahead is untouched"
            assert not finished and loader.under_way == {0: host}
    assert seen == sorted(seen) and len(seen) > 3


def test_a_load_takes_the_time_that_the_link_needs_and_others_wait_their_turn(make_loader: Make) -> None:
    pool, host = make_pool(60), in_host_memory(adapter(8, seed=3))
    loader = make_loader(pool, link_bytes_per_s=4e6)
    each_s = pages_bytes(7) / 4e6
    began = time.monotonic()
    for slot in (1, 0, 3):
        begin(loader, pool, slot, host)
    assert loader.link.bytes_per_s == 4e6
    assert pages_bytes(20) < loader.bytes_ahead(3) <= pages_bytes(21) and loader.bytes_ahead(1) <= pages_bytes(7)
    ends = []
    for slot in (1, 0, 3):
        wait(lambda slot=slot: whole(pool, slot))
        ends.append(time.monotonic() - began)
        assert loader.bytes_ahead(slot) == 0
    for number, end in enumerate(ends, 1):
        assert number * each_s * 0.98 <= end <= number * each_s + 0.1, "no earlier than the link allows, and not much later"
    assert loader.link.busy_s == pytest.approx(3 * each_s, abs=0.1)
    assert 3.5e6 < loader.link.bytes_per_s <= 4e6 and loader.link.core_share < 0.2, "the thread sleeps most of the time"


def test_a_link_faster_than_memory_is_as_fast_as_memory_and_takes_a_core(make_loader: Make) -> None:
    pool, host = make_pool(700, slots=1), in_host_memory(adapter(64, seed=4))
    loader = make_loader(pool, link_bytes_per_s=1e12)
    assert loader.link.bytes_per_s == 1e12 and loader.link.core_share == 0
    for _ in range(200):
        begin(loader, pool, 0, host)
        wait(lambda: whole(pool, 0))
        pool.free(0)
        loader.link  # noqa: B018 (looks, as before every step)
    least_share = 0.05 if isinstance(loader, CpuLoader) else 0.0  # a device's own part of a copy takes no core
    assert loader.link.bytes_per_s < 5e11 and loader.link.core_share > least_share


def test_an_unpaced_link_is_measured(make_loader: Make) -> None:
    pool, host = make_pool(700, slots=1), in_host_memory(adapter(64, seed=4))
    loader = make_loader(pool)
    first = loader.link.bytes_per_s
    for _ in range(200):  # the first guess is forgotten
        begin(loader, pool, 0, host)
        wait(lambda: whole(pool, 0))
        pool.free(0)
    link = loader.link
    assert (
        link.bytes_per_s != first
        and link.bytes_copied / link.busy_s / 5 < link.bytes_per_s < link.bytes_copied / link.busy_s * 5
    )


def test_loads_that_are_cancelled_in_the_middle_of_a_piece_leave_nothing_queued(make_loader: Make) -> None:
    pool = make_pool(700, slots=1)
    loader = make_loader(pool)
    host = in_host_memory(adapter(64, seed=9))
    draw = random.Random(10)
    for _ in range(3000):
        begin(loader, pool, 0, host)
        until = time.perf_counter() + draw.random() * 100e-6
        while time.perf_counter() < until:
            pass
        loader.cancel(0)
        pool.free(0)
        assert loader.link.bytes_queued == 0


def test_what_is_cancelled_writes_nothing_more_and_the_next_load_of_the_slot_is_whole(make_loader: Make) -> None:
    pool = make_pool(60)
    loader = make_loader(pool, link_bytes_per_s=40e6)
    hosts = old, new, other = [in_host_memory(adapter(16, seed=seed)) for seed in (5, 6, 7)]
    want = at_once(60, *hosts)
    draw = random.Random(8)
    for _ in range(40):
        begin(loader, pool, 1, old)
        begin(loader, pool, 2, other)
        time.sleep(draw.random() * 0.004)  # time: anywhere in the two loads
        cancelled = draw.choice([1, 2])
        loader.cancel(cancelled)
        pool.free(cancelled)
        for start, end in pool.holes:
            pool.arena[start * 8 : end * 8] = float("nan")
        before = pool.loaded_layers[cancelled]
        begin(loader, pool, cancelled, new)
        assert before == 0
        for slot, host in ((cancelled, 1), (3 - cancelled, 2 if cancelled == 1 else 0)):
            wait(lambda slot=slot: whole(pool, slot))
            assert same(rows_of(pool, slot, range(LAYERS)), rows_of(want, host, range(LAYERS)))
        for start, end in pool.holes:
            assert bool(pool.arena[start * 8 : end * 8].isnan().all()), "memory outside of the adapter's pages was written"
        pool.free(1)
        pool.free(2)
        assert loader.link.bytes_queued == 0


def test_pages_that_move_during_their_copy_arrive_whole(make_loader: Make) -> None:
    pool = make_pool(56, slots=8)
    loader = make_loader(pool, link_bytes_per_s=20e6)
    hosts = [in_host_memory(adapter(8, seed=seed)) for seed in range(8)]
    want = at_once(56, *hosts)
    for slot in range(4):
        pool.load(slot, hosts[slot])
    for round_ in range(30):
        begin(loader, pool, 5, hosts[5])
        pool.free(round_ % 4)  # a hole below what is being copied
        begin(loader, pool, 6, hosts[6])
        pool.compact()
        pool.load(round_ % 4, hosts[round_ % 4])
        wait(lambda: whole(pool, 5) and whole(pool, 6))
        for slot in (0, 1, 2, 3, 5, 6):
            assert same(rows_of(pool, slot, range(LAYERS)), rows_of(want, slot, range(LAYERS)))
        pool.free(5)
        pool.free(6)


def test_nothing_is_written_to_pages_while_they_may_move(make_loader: Make) -> None:
    pool, host = make_pool(30), in_host_memory(adapter(16, seed=9))
    loader = make_loader(pool, link_bytes_per_s=2e6)  # 0.15 s
    begin(loader, pool, 0, host)
    wait(lambda: int(pool.loaded_layers[0]) == 1)
    with pool.still():
        before = pool.arena.clone()
        time.sleep(0.1)  # time: several layers would come
        assert torch.equal(pool.arena.view(torch.int32), before.view(torch.int32)) and not whole(pool, 0)
    wait(lambda: whole(pool, 0))
    assert same(rows_of(pool, 0, range(LAYERS)), rows_of(at_once(30, host), 0, range(LAYERS)))


def test_a_loader_that_is_closed_in_the_middle_leaves_the_pool_usable(make_loader: Make) -> None:
    pool, host = make_pool(30), in_host_memory(adapter(16, seed=9))
    loader = make_loader(pool, link_bytes_per_s=1e6)
    begin(loader, pool, 0, host)
    loader.close()
    pool.free(0)
    pool.compact()
    pool.load(0, host)
    assert whole(pool, 0) and same(rows_of(pool, 0, range(LAYERS)), rows_of(at_once(30, host), 0, range(LAYERS)))
