"""Streams that write and wait for numbers in host memory: calls as in NVIDIA's header, and a step ordered by them."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from motet.kernels import GROUPS, LoraBatch, LoraPool, add_lora
from motet.kernels.cpu import CpuEngine
from motet.kernels.cpu.assist import Channel, Helpers, loading_of
from motet.kernels.device import DeviceAssist, DeviceLoader, DeviceStreams, host_streams
from motet.kernels.device.driver import DriverError, MemoryOperations
from tests.kernels.support_assist import ADAPTERS, LAYERS, MODULES, SHAPES, HostAdapter, served
from tests.kernels.support_driver import NOW, Driver


class Memory:
    """A page of words."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.words = np.frombuffer(self._page, dtype=np.uint32)
        self.address = self.words.ctypes.data

    def word(self, index: int) -> int:
        return self.address + 4 * index


def test_streams_write_and_wait_for_words_at_their_device_addresses(driver: Driver) -> None:
    operations, memory = MemoryOperations(str(driver.library)), Memory()
    operations.register(memory.address, mmap.PAGESIZE)
    operations.write(NOW, memory.word(3), 7)
    operations.write(NOW, memory.word(1023), -1)
    assert memory.words[3] == 7 and memory.words[1023] == 0xFFFFFFFF
    operations.wait(NOW, memory.word(3), 6)
    late = threading.Timer(0.05, lambda: operations.write(NOW, memory.word(5), 2))
    late.start()
    operations.wait(NOW, memory.word(5), 2)
    assert memory.words[5] == 2
    memory.words[6] = 3
    operations.wait(NOW, memory.word(6), 0xFFFFFFFE)  # numbers have wrapped: 3 comes after
    operations.forget(memory.address)
    with pytest.raises(DriverError, match="in no registered memory"):
        operations.write(NOW, memory.word(3), 8)


def test_what_the_driver_refuses_is_an_error_with_its_text(driver: Driver) -> None:
    operations, memory = MemoryOperations(str(driver.library)), Memory()
    with pytest.raises(DriverError, match="cuMemHostRegister: invalid argument"):
        operations.register(memory.word(1), 64)
    operations.register(memory.address, mmap.PAGESIZE)
    with pytest.raises(DriverError, match="cuStreamWriteValue32: invalid argument"):
        operations.write(0xBAD, memory.word(1), 1)
    with pytest.raises(DriverError, match="in no registered memory"):
        operations.wait(NOW, memory.address + mmap.PAGESIZE, 1)
    operations.forget(memory.address)
    with pytest.raises(DriverError, match="no-such-driver"):
        MemoryOperations("no-such-driver.so")


@pytest.fixture(scope="module")
def engine() -> CpuEngine:
    return CpuEngine(threads=1)


@pytest.fixture(params=["the caller's own", "the driver's"])
def streams(request: pytest.FixtureRequest, engine: CpuEngine) -> DeviceStreams:
    if request.param == "the caller's own":
        return host_streams(engine)
    return request.getfixturevalue("driver").streams(engine, NOW)


class World:
    """Adapters 0.. in slots 1..: complete in one pool, and as far as a test says in the other."""

    def __init__(self, engine: CpuEngine, streams: DeviceStreams, dtype: torch.dtype) -> None:
        self.hosts = [HostAdapter(ranks, seed, dtype) for seed, ranks in enumerate(ADAPTERS)]
        self.whole, self.pool = (self._pool(dtype) for _ in range(2))
        for slot, host in enumerate(self.hosts, 1):
            self.whole.load(slot, host.packed)
            self.pool.load(slot, host.packed)
        self.channels = [Channel(engine, self.pool, max_rows=16, sequence=0xFFFFFFF0) for _ in range(2)]
        self.assist = DeviceAssist(self.pool, streams, engine)
        self.streams = streams

    def _pool(self, dtype: torch.dtype) -> LoraPool:
        pool = LoraPool(SHAPES, layers=LAYERS, slots=8, max_rank=64, bytes_total=4 << 20, dtype=dtype)
        pool.arena.fill_(float("nan"))
        return pool

    def leave(self, *slots: int) -> None:
        """These adapters are being copied: what the device reads of them now is NaN."""
        for slot in slots:
            self.pool.loaded_layers[slot] = 0
            for place, _ in self._pages(slot):
                place.fill_(float("nan"))

    def arrive(self, slot: int) -> None:
        for place, source in self._pages(slot):
            place.copy_(source)
        self.pool.loaded_layers[slot] = LAYERS

    def arrive_soon(self, slot: int) -> None:
        threading.Timer(0.05, self.arrive, [slot]).start()

    def _pages(self, slot: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        host = self.hosts[slot - 1].packed
        for m, module in enumerate(MODULES):
            n = self.pool.page_lines[module] * 8
            for page in range(int(host.pages[0, m])):
                at, source = int(self.pool.table[slot, m, page]) * 8, int(host.table[0, m, page]) * 8
                yield self.pool.arena[at : at + n], host.arena[source : source + n]

    def helpers(self, slots: list[int], *, layerwise: tuple[int, ...] = (), late_s: float = 0.02) -> Helpers:
        loading = [loading_of(slot, self.hosts[slot - 1], layerwise=slot in layerwise) for slot in slots]
        return Helpers(loading, self.channels, watchdog_s=late_s)


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def world(request: pytest.FixtureRequest, engine: CpuEngine, streams: DeviceStreams) -> Iterator[World]:
    one = World(engine, streams, request.param)
    streams.memory.register(one.pool.loaded_layers.ctypes.data, one.pool.loaded_layers.nbytes)
    yield one
    one.assist.close()
    streams.memory.forget(one.pool.loaded_layers.ctypes.data)


def through(world: World, row_slot: np.ndarray, step: Any, arrives: dict[int, int], seed: int = 0) -> None:
    """Check that every group of every layer gives what complete adapters give.

    `arrives`: {slot: the layer before which it is complete}.
    """
    dtype, draw = world.pool.arena.dtype, torch.Generator().manual_seed(seed)
    batch = LoraBatch.build(world.whole, row_slot)
    for layer in range(LAYERS):
        for slot, when in arrives.items():
            if layer == when:
                world.arrive(slot)
        lora = step.layer(layer)
        for group, modules in GROUPS.items():
            x = torch.randn(len(row_slot), SHAPES[modules[0]][0], generator=draw).to(dtype)
            y = torch.randn(len(row_slot), sum(SHAPES[module][1] for module in modules), generator=draw).to(dtype)
            want = y.clone()
            add_lora(want, x, world.whole, layer, group, batch)
            step.start(x, layer, group)
            add_lora(y, x, world.pool, layer, group, lora)
            step.collect(y, group)
            near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
            torch.testing.assert_close(y, want, **near)


ROWS = np.array([1, 1, -1, 3, 2, 4, 4, 4, -1, 5, 3, 1], dtype=np.int32)


def test_rows_of_cold_adapters_come_out_as_of_whole_ones_whenever_each_arrives(world: World) -> None:
    with served(world.channels):
        for seed in range(LAYERS + 1):
            slots = [1, 3, 5]
            world.leave(*slots)
            step = world.assist.begin(ROWS, world.helpers(slots))
            through(world, ROWS, step, {1: seed, 3: (seed + 2) % (LAYERS + 1), 5: LAYERS}, seed)
            assert step.finish()
        counts = world.assist.counts
        assert counts.by_processes > 0 and counts.on_device > 0 and counts.repaired == 0
        asked = [channel.counters for channel in world.channels]
        assert all(one.requests > 0 and one.work >= one.elements > 0 and one.busy_s > 0 for one in asked)


def test_rows_that_wait_for_their_copy_have_it_layer_by_layer(engine: CpuEngine, world: World) -> None:
    world.assist.pool.free(2)
    world.pool.reserve(2, world.hosts[1].packed)
    world.streams.memory.forget(world.pool.loaded_layers.ctypes.data)  # the loader registers it
    loader = DeviceLoader(engine, world.pool, world.streams, link_bytes_per_s=5e6)
    with served(world.channels):
        step = world.assist.begin(ROWS, world.helpers([2], layerwise=(2,)))
        loader.begin(2, world.hosts[1].packed, world.hosts[1])
        through(world, ROWS, step, {})
        assert step.finish() and world.assist.counts.by_processes == 0
    loader.close()
    world.streams.memory.register(world.pool.loaded_layers.ctypes.data, world.pool.loaded_layers.nbytes)


def test_more_rows_than_processes_have_room_for_wait_instead(world: World) -> None:
    rows = np.full(40, 1, dtype=np.int32)
    world.leave(1)
    with served(world.channels):
        step = world.assist.begin(rows, world.helpers([1]))
        world.arrive_soon(1)
        through(world, rows, step, {})
        assert step.finish() and world.assist.counts.by_processes == 0


def test_ending_a_process_lets_the_device_continue_and_the_step_reports_it(world: World) -> None:
    world.leave(1)
    step = world.assist.begin(ROWS, world.helpers([1]))  # no process serves the channels
    x = torch.zeros(len(ROWS), SHAPES["q_proj"][0], dtype=world.pool.arena.dtype)
    y = torch.zeros(len(ROWS), sum(SHAPES[module][1] for module in GROUPS["qkv"]), dtype=x.dtype)
    step.layer(0)
    step.start(x, 0, "qkv")
    waiting = [channel for channel in world.channels if channel.pending is not None]
    assert waiting, "a request is under way"
    threading.Timer(0.05, lambda: [channel.release() for channel in world.channels]).start()
    step.collect(y, "qkv")
    assert [channel.state for channel in waiting] == ["died"] * len(waiting)
    world.arrive_soon(1)
    step.layer(1)  # waits for the copy now
    step.start(x, 1, "qkv")
    step.collect(y, "qkv")
    assert not step.finish()
    world.channels = []
    again = world.assist.begin(ROWS, world.helpers([1]))
    through(world, ROWS, again, {})
    assert again.finish()


def test_memory_that_a_process_cannot_map_fails_the_step_and_not_the_process(world: World) -> None:
    world.leave(1)
    with served(world.channels):
        helpers = world.helpers([1])
        helpers.loading[0].fd, helpers.loading[0].inode = 1 << 20, 1
        step = world.assist.begin(ROWS, helpers)
        step.layer(0)
        x = torch.zeros(len(ROWS), SHAPES["q_proj"][0], dtype=world.pool.arena.dtype)
        y = torch.zeros(len(ROWS), sum(SHAPES[module][1] for module in GROUPS["qkv"]), dtype=x.dtype)
        step.start(x, 0, "qkv")
        step.collect(y, "qkv")
        assert not step.finish()


class Timeline:
    """A stream that only records its operations. No process answers, and no operation ever completes."""

    def __init__(self, name: str, told: list[tuple[Any, ...]]) -> None:
        self.name, self._told = name, told

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def after(self, other: Timeline) -> None:
        self._told.append((self.name, "after", other.name))

    def write(self, word: int, value: int) -> None:
        self._told.append((self.name, "write", word, value))

    def wait(self, word: int, value: int) -> None:
        self._told.append((self.name, "wait", word, value))

    def mark(self) -> Any:
        raise AssertionError("the thread that enqueues a step looks for its end")


def test_the_thread_that_enqueues_a_step_never_waits(engine: CpuEngine) -> None:
    told: list[tuple[Any, ...]] = []
    here = host_streams(engine)
    steps, copies, assist = (Timeline(name, told) for name in ("steps", "copies", "assist"))
    world = World(engine, replace(here, steps=steps, copies=copies, assist=assist), torch.float32)
    world.channels = world.channels[:1]
    world.leave(1, 3)
    step = world.assist.begin(ROWS, world.helpers([1, 3], layerwise=(3,)))
    words, layer = world.channels[0].words(), 2
    loaded = world.pool.loaded_layers.ctypes.data + 4 * 3
    step.layer(layer)
    want: list[tuple[Any, ...]] = [("steps", "wait", loaded, layer + 1)]
    for number, (group, modules) in enumerate(GROUPS.items()):
        x = torch.zeros(len(ROWS), SHAPES[modules[0]][0])
        y = torch.zeros(len(ROWS), sum(SHAPES[module][1] for module in modules))
        step.start(x, layer, group)
        step.collect(y, group)
        want += [
            ("assist", "after", "steps"),
            ("assist", "write", words.layer, layer),
            ("assist", "write", words.group, number),
            ("assist", "write", words.slices, 1),
            ("assist", "write", words.sequence, 0xFFFFFFF0 + number + 1),
            ("assist", "wait", words.done, 0xFFFFFFF0 + number + 1),
            ("steps", "after", "assist"),
        ]
    assert told == want
    world.assist.close()


class Registry(MemoryOperations):
    """Knows what memory is registered."""

    def __init__(self, library: str) -> None:
        super().__init__(library)
        self.present: set[int] = set()

    def register(self, address: int, nbytes: int) -> None:
        super().register(address, nbytes)
        self.present.add(address)

    def forget(self, address: int) -> None:
        super().forget(address)
        self.present.discard(address)


def test_registered_memory_is_let_go_with_its_channel(driver: Driver, engine: CpuEngine) -> None:
    operations = Registry(str(driver.library))
    streams = replace(driver.streams(engine, NOW), memory=operations)
    world = World(engine, streams, torch.float32)
    world.assist.begin(ROWS, world.helpers([])).finish()
    registered = [channel.memory[0] for channel in world.channels]
    assert set(registered) <= operations.present
    world.channels = world.channels[:1]
    world.assist.begin(ROWS, world.helpers([])).finish()
    assert set(registered) & operations.present == {registered[0]}
    world.assist.close()
    assert not operations.present


def test_every_word_of_a_channel_has_an_aligned_address_of_its_own(engine: CpuEngine) -> None:
    """A channel's words lie in its memory, each where a 32-bit access does not tear."""
    pool = LoraPool(SHAPES, layers=LAYERS, slots=1, max_rank=8, bytes_total=1 << 20, dtype=torch.float32)
    channel = Channel(engine, pool, max_rows=4)
    start, nbytes = channel.memory
    words = channel.words()
    addresses = [words.sequence, words.layer, words.group, words.slices, words.done, words.failures]
    assert len(set(addresses)) == 6 and all(start <= at < start + nbytes and at % 4 == 0 for at in addresses)
    assert words.sequence // 64 == words.layer // 64 == words.slices // 64 != words.done // 64 == words.failures // 64
    ctypes.c_uint32.from_address(words.sequence).value = 5
    assert channel.pending == 5
