"""Promise: a layer comes to the device whole and to its own pages only, and what a copy stream does late does no harm."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import motet.kernels.device.staging as staging
from motet.kernels import LoraPool
from motet.kernels.cpu import CpuEngine
from motet.kernels.device import DeviceLoader, DeviceStreams, cuda_streams, host_streams
from motet.kernels.device.driver import MemoryOperations
from motet.kernels.device.staging import LayerStaging
from motet.kernels.triton.scatter import BLOCK, scatter
from tests.kernels.support_assist import ADAPTERS, LAYERS, SHAPES, HostAdapter
from tests.kernels.test_loading import wait

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOTHING = -1  # what no copy may change


@pytest.mark.parametrize("unit", [2, 4])
def test_every_piece_comes_to_its_place_and_nothing_else_changes(unit: int) -> None:
    draw = random.Random(unit)
    lengths = [1, 0, 7, BLOCK // unit, BLOCK // unit + 1, 3 * BLOCK // unit - 1]
    gaps = [draw.randrange(5) for _ in lengths]
    source = torch.arange(sum(lengths) * unit, device=DEVICE)
    target = torch.full(((sum(lengths) + sum(gaps) + 3) * unit,), NOTHING, device=DEVICE)
    want, firsts, at = target.clone(), np.cumsum(lengths) - lengths, 0
    pieces = []
    for piece in draw.sample(range(len(lengths)), len(lengths)):
        at += gaps[piece]
        first, lines = int(firsts[piece]), lengths[piece]
        want[at * unit : (at + lines) * unit] = source[first * unit : (first + lines) * unit]
        pieces.append((first, lines, at))
        at += lines
    scatter(torch.tensor(pieces, device=DEVICE), source, target, unit=unit, most_lines=max(lengths))
    assert torch.equal(target, want)


def make_pool(dtype: torch.dtype, device: str = "cpu") -> LoraPool:
    """A pool whose memory is all NaN."""
    pool = LoraPool(SHAPES, layers=LAYERS, slots=6, max_rank=64, bytes_total=2 << 20, dtype=dtype, device=device)
    pool.arena.fill_(float("nan"))
    return pool


def bits(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(torch.int64)


@pytest.fixture(scope="module")
def engine() -> CpuEngine:
    return CpuEngine(threads=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_scattered_by_the_kernel_are_those_of_a_load_at_once(
    engine: CpuEngine, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "scatter_for", lambda arena: scatter)
    pool, want = (make_pool(dtype, DEVICE) for _ in range(2))
    streams = cuda_streams(pool.arena.device, MemoryOperations()) if DEVICE == "cuda" else host_streams(engine)
    layers = LayerStaging(pool, streams)
    for slot, ranks in enumerate(ADAPTERS):
        host = HostAdapter(ranks, slot, dtype)
        pool.reserve(slot, host.packed)
        want.load(slot, host.packed)
        if slot == 2:
            for one in (pool, want):
                one.free(0)
                one.compact()
        parts = layers.parts(host.packed)
        streams.copies.after(streams.steps)
        for layer in range(LAYERS):
            layers.send(slot, parts, layer)
        streams.steps.after(streams.copies)
    assert torch.equal(bits(pool.arena), bits(want.arena))


class LateStream:
    """A copy stream whose numbers and marks come when the test says so."""

    def __init__(self, here: Any) -> None:
        self._here, self._late, self._lock = here, deque[Callable[[], object]](), threading.Lock()
        self._prompt = False

    def __enter__(self) -> LateStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def after(self, other: Any) -> None:
        pass

    def write(self, word: int, value: int) -> None:
        self._do(lambda: self._here.write(word, value))

    def mark(self) -> LateMark:
        mark = LateMark()
        self._do(mark.reached.set)
        return mark

    def _do(self, operation: Callable[[], object]) -> None:
        with self._lock:
            if self._prompt:
                operation()
            else:
                self._late.append(operation)

    def __len__(self) -> int:
        return len(self._late)

    def proceed(self, count: int) -> None:
        """Do this many of the operations that are late."""
        for _ in range(count):
            self._late.popleft()()

    def catch_up(self) -> None:
        """From now on nothing is late."""
        with self._lock:
            self.proceed(len(self))
            self._prompt = True


class LateMark:
    def __init__(self) -> None:
        self.reached = threading.Event()

    def synchronize(self) -> None:
        assert self.reached.wait(20.0)


class Late:
    """A load of four layers, on a copy stream that is late. The loader has enqueued two layers and cannot go on."""

    def __init__(self, streams: DeviceStreams) -> None:
        self.stream = LateStream(streams.copies)
        self.pool, self.want = (make_pool(torch.float32) for _ in range(2))
        self.host = HostAdapter(ADAPTERS[2], 1, torch.float32)
        self.want.load(0, self.host.packed)
        self.loader = DeviceLoader(self.pool, replace(streams, copies=self.stream))  # type: ignore[arg-type]
        self.pool.reserve(0, self.host.packed)
        self.loader.begin(0, self.host.packed, self.host)
        wait(lambda: len(self.stream) == 4)

    @property
    def layers(self) -> int:
        return int(self.pool.loaded_layers[0])

    def there(self) -> list[bool]:
        """Which layers of the adapter's first page are in the pool."""
        rows = [self.pool.rows(layer, "q_proj", b=False)[int(self.pool.table[0, 0, 0])] for layer in range(LAYERS)]
        return [not bool(row.isnan().any()) for row in rows]


@pytest.fixture
def late(engine: CpuEngine) -> Iterator[Late]:
    one = Late(host_streams(engine))
    yield one
    one.stream.catch_up()
    one.loader.close()


def test_memory_is_filled_again_when_the_device_has_fetched_it_and_a_layer_counts_when_it_is_there(late: Late) -> None:
    assert late.there() == [True, True, False, False] and late.layers == 0
    assert late.loader.bytes_ahead(0) == late.host.packed.arena.nbytes
    late.stream.proceed(1)  # the first buffer's mark
    wait(lambda: late.there() == [True, True, True, False])
    assert late.layers == 0
    late.stream.proceed(1)
    assert late.layers == 1
    assert late.loader.bytes_ahead(0) == late.host.packed.arena.nbytes * 3 // 4 and not late.loader.finished()
    late.stream.catch_up()
    wait(lambda: late.layers == LAYERS)
    assert late.loader.finished() == [late.host] and late.loader.bytes_ahead(0) == 0
    assert late.loader.link.bytes_copied == late.host.packed.arena.nbytes
    assert torch.equal(bits(late.pool.arena), bits(late.want.arena))


def test_cancel_returns_when_the_stream_has_written_its_last_number(late: Late) -> None:
    cancelling = threading.Thread(target=late.loader.cancel, args=(0,))
    cancelling.start()
    wait(lambda: late.loader.link.bytes_queued == 0)
    late.stream.proceed(3)  # the loader's thread finishes the third layer and leaves; one number and two marks are to come
    wait(lambda: len(late.stream) == 3)
    assert cancelling.is_alive() and late.layers == 1
    late.stream.catch_up()
    cancelling.join()
    late.pool.free(0)
    assert late.layers == 0 and late.loader.link.bytes_queued == 0
    late.pool.reserve(0, late.host.packed)
    late.loader.begin(0, late.host.packed, late.host)
    wait(lambda: late.layers == LAYERS)
    assert torch.equal(bits(late.pool.arena), bits(late.want.arena))


def test_numbers_that_are_written_late_keep_no_stream_waiting_for_a_copy_that_was_given_up(late: Late) -> None:
    giving_up = threading.Thread(target=late.loader.give_up, args=([0],))
    giving_up.start()
    wait(lambda: late.layers == LAYERS)
    late.stream.proceed(2)  # writes 1
    wait(lambda: late.layers == LAYERS)
    assert giving_up.is_alive()
    late.stream.catch_up()
    giving_up.join()
    assert late.layers == LAYERS
    late.loader.mend(np.array([0], dtype=np.int32))
    assert torch.equal(bits(late.pool.arena), bits(late.want.arena))
