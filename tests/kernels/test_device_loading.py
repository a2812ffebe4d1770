"""Promise: what a copy stream does late does no harm.

Memory is not filled again too early, numbers come after their bytes, and nothing is written after a load has been cancelled or
given up.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import motet.kernels.device.loading as loading
from motet.kernels import LoraPool, PackedLora
from motet.kernels.cpu import CpuEngine
from motet.kernels.device import DeviceLoader, DeviceStreams, cuda_streams, host_streams
from motet.kernels.device.driver import MemoryOperations
from motet.kernels.device.loading import PARTS
from motet.kernels.pool import LINE, MODULES
from tests.kernels.support_assist import ADAPTERS, LAYERS, SHAPES, HostAdapter
from tests.kernels.support_driver import LATE, Driver
from tests.kernels.test_loading import wait

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS = ADAPTERS[2]  # of the adapter that comes late
ROW_BYTES = 8 * sum(SHAPES["q_proj"]) * 4


def make_pool(dtype: torch.dtype, device: str = "cpu") -> LoraPool:
    """A pool whose memory is all NaN."""
    pool = LoraPool(SHAPES, layers=LAYERS, slots=6, max_rank=64, bytes_total=2 << 20, dtype=dtype, device=device)
    pool.arena.fill_(float("nan"))
    return pool


def bits(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(torch.int64)


def adapter_bits(pool: LoraPool, slot: int) -> torch.Tensor:
    """All pages of an adapter."""
    starts = [(start, m) for m, count in enumerate(pool.pages[slot]) for start in pool.table[slot, m, :count].tolist()]
    return bits(torch.cat([pool.arena[at * LINE : (at + pool.page_lines[MODULES[m]]) * LINE] for at, m in starts]))


def whole(pool: LoraPool, slot: int) -> bool:
    return int(pool.loaded_layers[slot]) == LAYERS


@pytest.fixture(scope="module")
def one() -> CpuEngine:
    return CpuEngine(threads=1)


@pytest.mark.parametrize("part_bytes", [ROW_BYTES - 100, 4 << 20], ids=["parts of less than a page", "parts of a layer"])
@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_adapters_of_all_ranks_come_as_those_of_a_load_at_once_while_others_move(
    one: CpuEngine, dtype: torch.dtype, threads: int, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU where there is one."""
    monkeypatch.setattr(loading, "gather_threads", lambda: threads)
    pool, want = (make_pool(dtype, DEVICE) for _ in range(2))
    streams = cuda_streams(pool.arena.device, MemoryOperations()) if DEVICE == "cuda" else host_streams(one)
    loader = DeviceLoader(one, pool, streams, part_bytes=part_bytes)
    for slot, ranks in enumerate(ADAPTERS):
        host = HostAdapter(ranks, slot, dtype)
        pool.reserve(slot, host.packed)
        want.load(slot, host.packed)
        loader.begin(slot, host.packed, host)
        if slot == 2:
            loader.cancel(0)
            for some in (pool, want):
                some.free(0)
                some.compact()
    wait(lambda: all(whole(pool, slot) for slot in range(1, len(ADAPTERS))))
    streams.steps.after(streams.copies)
    for slot in range(1, len(ADAPTERS)):
        assert torch.equal(adapter_bits(pool, slot), adapter_bits(want, slot))
    loader.close()


class Late:
    """A load of four layers on a stream in which nothing happens.

    The ring has room for some pieces of it, then the thread waits.
    """

    def __init__(self, engine: CpuEngine, streams: DeviceStreams, driver: Driver, part_bytes: int) -> None:
        self.driver = driver
        self.pool, self.want = (make_pool(torch.float32) for _ in range(2))
        self.host = HostAdapter(RANKS, 1, torch.float32)
        self.want.load(0, self.host.packed)
        self.loader = DeviceLoader(engine, self.pool, streams, part_bytes=part_bytes)
        self.begin()

    def begin(self) -> None:
        self.pool.reserve(0, self.host.packed)
        self.loader.begin(0, self.host.packed, self.host)

    @property
    def layers(self) -> int:
        return int(self.pool.loaded_layers[0])

    def settled(self) -> int:
        """The operations in the stream, one at least, when the loader's thread adds none any more."""
        wait(lambda: self.driver.late)
        seen = -1
        while seen != self.driver.late:
            seen = self.driver.late
            threading.Event().wait(0.02)  # time: the thread has nothing to wait for but the stream
        return seen

    def as_wanted(self) -> bool:
        return torch.equal(bits(self.pool.arena), bits(self.want.arena))


@pytest.fixture
def late(request: pytest.FixtureRequest, one: CpuEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """With parts that hold a layer, or as a test asks for."""
    part_bytes = getattr(request, "param", 256 << 10)
    monkeypatch.setattr(loading, "gather_threads", lambda: 2)
    made = Late(one, driver.streams(one, LATE), driver, part_bytes)
    yield made
    with driver.running():
        made.loader.close()
    driver.proceed()


LAYER_PIECES = sum(-(-rank // 8) for rank in RANKS.values())
LAYER_OPERATIONS = LAYER_PIECES + 2  # an event and a number


@pytest.mark.parametrize("late", [5000], indirect=True)
def test_a_part_of_the_ring_is_filled_again_when_the_device_has_read_it(late: Late) -> None:
    with_events = late.settled()
    assert 0 < with_events < LAYERS * LAYER_OPERATIONS and late.layers == 0
    for _ in range(1000):
        late.driver.proceed(7)
        if whole(late.pool, 0):
            break
        wait(lambda: late.driver.late)
    assert late.as_wanted()


def test_a_layer_counts_when_its_bytes_are_there(late: Late) -> None:
    nbytes = late.host.packed.arena.nbytes
    assert PARTS == LAYERS
    wait(lambda: late.driver.late == LAYERS * LAYER_OPERATIONS + 1)  # all of it, and the event of its end
    assert late.layers == 0 and late.loader.bytes_ahead(0) == nbytes
    late.driver.proceed(LAYER_PIECES + 1)
    assert late.layers == 0, "bytes without their number"
    late.driver.proceed(1)
    assert late.layers == 1 and not late.loader.finished()
    rows = [late.pool.rows(layer, "q_proj", b=False)[int(late.pool.table[0, 0, 0])] for layer in range(2)]
    assert not rows[0].isnan().any() and rows[1].isnan().all()
    late.driver.proceed()
    wait(lambda: late.loader.bytes_ahead(0) == 0)
    assert late.layers == LAYERS and late.loader.finished() == [late.host] and late.as_wanted()
    assert late.loader.link.bytes_copied == nbytes


def test_cancel_returns_when_the_stream_has_written_its_last_number(late: Late) -> None:
    late.settled()
    cancelling = threading.Thread(target=late.loader.cancel, args=(0,))
    cancelling.start()
    wait(lambda: late.loader.link.bytes_queued == 0)
    late.driver.proceed(LAYER_OPERATIONS)
    late.settled()
    assert cancelling.is_alive() and late.layers == 1
    with late.driver.running():  # also what the loader's thread adds last
        cancelling.join()
    late.pool.free(0)
    assert late.driver.late == 0 and late.layers == 0
    late.begin()
    with late.driver.running():
        wait(lambda: whole(late.pool, 0))
    assert late.as_wanted()


@pytest.mark.parametrize("late", [90_000], indirect=True, ids=["two layers"])
def test_numbers_that_are_written_late_keep_no_stream_waiting_for_a_copy_that_was_given_up(late: Late) -> None:
    late.settled()
    giving_up = threading.Thread(target=late.loader.give_up, args=([0],))
    giving_up.start()
    wait(lambda: whole(late.pool, 0))
    late.driver.proceed(late.driver.late - 1)  # writes 1
    wait(lambda: whole(late.pool, 0))
    assert giving_up.is_alive() and not late.loader.finished()
    with late.driver.running():  # also what the loader's thread adds last
        giving_up.join()
    assert whole(late.pool, 0) and not late.loader.finished(), "it is to be mended"
    late.pool.arena.fill_(float("nan"))
    late.loader.mend(np.array([0], dtype=np.int32))
    assert late.as_wanted() and late.loader.finished() == [late.host]


def test_a_source_is_not_read_any_more_when_cancel_returns(one: CpuEngine) -> None:
    shapes, count = dict.fromkeys(MODULES, (4096, 4096)), 8
    sizes = {"pages": dict.fromkeys(MODULES, count), "scales": {module: [1.0] for module in MODULES}}
    host = PackedLora.over(torch.empty(count * len(MODULES) * 8 * 8192), shapes, layers=1, **sizes)
    nbytes = host.arena.nbytes
    pool = LoraPool(shapes, layers=1, slots=1, max_rank=64, bytes_total=nbytes, dtype=torch.float32)
    loader = DeviceLoader(one, pool, host_streams(one), part_bytes=nbytes)
    ring, draw = np.frombuffer(loader.ring, dtype=np.float32), random.Random(0)  # what was read comes here
    for _ in range(20):
        host.arena.fill_(1.0)
        pool.reserve(0, host)
        loader.begin(0, host, host)
        threading.Event().wait(draw.random() * 0.003)  # time: anywhere in a piece of some milliseconds
        loader.cancel(0)
        pool.free(0)
        host.arena.fill_(2.0)
        assert not (ring == 2.0).any()
    del ring
    loader.close()


def test_a_copy_that_the_driver_refuses_is_made_again_before_a_step_reads_it(
    one: CpuEngine, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    pool, want, host = make_pool(torch.float32), make_pool(torch.float32), HostAdapter(ADAPTERS[0], 1, torch.float32)
    want.load(0, host.packed)
    with driver.running():
        loader = DeviceLoader(one, pool, driver.streams(one, LATE))
        pool.reserve(0, host.packed)
        driver.fail(700)
        loader.begin(0, host.packed, host)
        wait(lambda: whole(pool, 0))
        assert not loader.finished() and bool(pool.arena.isnan().any())
        with caplog.at_level(logging.WARNING):
            loader.mend(np.array([-1, 3], dtype=np.int32))
            assert not caplog.messages, "no step of this adapter"
            loader.mend(np.array([-1, 0], dtype=np.int32))
        assert "driver error 700" in caplog.text
        assert torch.equal(bits(pool.arena), bits(want.arena)) and loader.finished() == [host]
        loader.close()


def test_memory_of_the_loader_is_let_go_with_it(one: CpuEngine, driver: Driver) -> None:
    pool, streams = make_pool(torch.float32), driver.streams(one, LATE)
    loader = DeviceLoader(one, pool, streams)
    address = pool.loaded_layers.ctypes.data
    assert streams.memory.there(address) != address
    loader.close()
    driver.proceed()
    with pytest.raises(Exception, match="in no registered memory"):
        streams.memory.there(address)
