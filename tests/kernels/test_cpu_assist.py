"""Steps beside adapter copies: the same numbers as with all adapters on the device, wherever each row is computed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from motet.kernels import GROUPS
from motet.kernels.cpu import CpuEngine, available_isas
from motet.kernels.cpu.assist import Channel, Helpers, loading_of
from tests.kernels.support_assist import (
    ADAPTERS,
    LAYERS,
    MODULES,
    SHAPES,
    VOCAB,
    Decoder,
    HostAdapter,
    Sequence_,
    random_weights,
    rows_of,
    served,
)
from tests.support import until

ISAS = os.environ.get("MOTET_TEST_ISAS", "").split() or sorted({available_isas()[0], available_isas()[-1]})
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.08}
PATIENT_S = 30.0  # a watchdog that no slow machine sets off
STEPS: list[Sequence[int]] = [(9, 14, 5, 20, 1), (9, 1, 5, 17, 3), (1, 1, 1, 1, 1), (1, 1, 1, 1, 0)]
"""Rows of every sequence in every step: prefill in chunks beside decoding."""


@pytest.fixture(scope="module", params=[(isa, dtype) for isa in ISAS for dtype in TOLERANCE], ids=str)
def world(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    isa, dtype = request.param
    engine = CpuEngine(threads=2, isa=isa)
    weights = random_weights(engine, dtype)
    hosts = [HostAdapter(ranks, seed, dtype) for seed, ranks in enumerate(ADAPTERS)]
    decoders = [Decoder(engine, weights, hosts, dtype) for _ in range(2)]
    yield SimpleNamespace(engine=engine, whole=decoders[0], cold=decoders[1], dtype=dtype)


@pytest.fixture
def channels(world: SimpleNamespace) -> Iterator[list[Channel]]:
    made = [Channel(world.engine, world.cold.pool, max_rows=64, sequence=start) for start in (0, 2**32 - 7)]
    with served(made):
        yield made


def run(
    world: SimpleNamespace,
    slots: Sequence[int],
    before: Callable[[int], Helpers | None],
    *,
    steps: Sequence[Sequence[int]] = STEPS,
) -> None:
    """Both decoders through the same steps; `before(step)` prepares the cold one. Logits must agree after every step."""
    draw = np.random.default_rng(5)
    tokens = [draw.integers(0, VOCAB, 60).tolist() for _ in slots]
    ours, theirs = ([Sequence_(slot, list(t)) for slot, t in zip(slots, tokens, strict=True)] for _ in range(2))
    for number, takes in enumerate(steps):
        live = [i for i, take in enumerate(takes) if take]
        takes_now = [takes[i] for i in live]
        want = world.whole.forward(rows_of([theirs[i] for i in live], takes_now)).clone()
        helpers = before(number)
        got = world.cold.forward(rows_of([ours[i] for i in live], takes_now), helpers).clone()
        assert not got.isnan().any(), f"step {number} read what is not there"
        scale = max(want.abs().max().item(), 1.0)
        assert (got - want).abs().max().item() <= TOLERANCE[world.dtype] * scale, f"step {number}"
        if world.dtype == torch.float32:
            assert torch.equal(got.argmax(1), want.argmax(1))
        for i, take in zip(live, takes_now, strict=True):
            ours[i].done += take
            theirs[i].done += take


def on_their_way(world: SimpleNamespace, *slots: int, layerwise: Sequence[int] = ()) -> list:
    return [loading_of(slot, world.cold.hosts[slot], layerwise=slot in layerwise) for slot in slots]


MIXED = (1, 2, -1, 3, 4)  # cached, cold and base rows


@pytest.mark.parametrize("watermark", range(LAYERS + 1))
def test_rows_of_a_cold_adapter_get_what_a_cached_one_gives(
    world: SimpleNamespace, channels: list[Channel], watermark: int
) -> None:
    def before(_: int) -> Helpers:
        for slot in (2, 3, 4):
            world.cold.have(slot, watermark)
        return Helpers(on_their_way(world, 2, 3, 4), channels, watchdog_s=PATIENT_S)

    done = [channel.counters.requests for channel in channels]
    counts = world.cold.forward.assisted
    on_device, by_processes = counts.on_device, counts.by_processes
    run(world, MIXED, before)
    rows = sum(takes[i] for takes in STEPS for i in (1, 3, 4))
    assert counts.on_device - on_device == rows * watermark
    assert counts.by_processes - by_processes == rows * (LAYERS - watermark)
    assert counts.in_place == counts.repaired == 0
    if watermark < LAYERS:
        assert all(channel.counters.requests > before for channel, before in zip(channels, done, strict=True))


@pytest.mark.parametrize("chunk", range(len(STEPS)))
@pytest.mark.parametrize("layer", range(LAYERS))
def test_rows_move_to_the_device_at_any_layer_of_any_chunk(
    world: SimpleNamespace, channels: list[Channel], chunk: int, layer: int
) -> None:
    """The rows of slot 4 delay the step at `layer`; meanwhile the copy of slot 3 is completed."""
    release: threading.Thread | None = None

    def before(step: int) -> Helpers | None:
        nonlocal release
        if step > chunk:
            return None
        world.cold.have(3, 0)
        if step < chunk:
            return Helpers(on_their_way(world, 3), channels, watchdog_s=PATIENT_S)
        world.cold.have(4, layer)
        began = [channel.counters.requests for channel in channels]
        release = threading.Thread(target=arrive, args=(began,))
        release.start()
        return Helpers(on_their_way(world, 3, 4, layerwise=(4,)), channels, watchdog_s=PATIENT_S, layer_wait_s=PATIENT_S)

    def arrive(began: list[int]) -> None:
        groups = sum(any(module in ADAPTERS[2] for module in group) for group in GROUPS.values())
        wanted = sum(began) + groups * layer
        with suppress(AssertionError):
            until(lambda: sum(channel.counters.requests for channel in channels) >= wanted, within_s=20, every_s=0.0005)
        time.sleep(0.002)  # time: the step waits for the copies meanwhile
        world.cold.have(3, LAYERS)
        world.cold.have(4, LAYERS)

    world.cold.have(2, LAYERS)
    steps = [(*takes[:4], 1) for takes in STEPS]
    counts = world.cold.forward.assisted
    by_processes = counts.by_processes
    run(world, (1, 2, -1, 3, 4), before, steps=steps)
    assert release is not None
    release.join()
    assert counts.by_processes - by_processes == sum(takes[3] for takes in steps[:chunk]) * LAYERS + steps[chunk][3] * layer


def test_rows_that_no_process_has_room_for_are_computed_in_place(world: SimpleNamespace) -> None:
    small = [Channel(world.engine, world.cold.pool, max_rows=7)]

    def before(_: int) -> Helpers:
        world.cold.have(2, 1)
        world.cold.have(3, 1)
        return Helpers(on_their_way(world, 2, 3), small, watchdog_s=PATIENT_S)

    counts = world.cold.forward.assisted
    in_place, by_processes = counts.in_place, counts.by_processes
    with served(small):
        run(world, (1, 2, -1, 3, 1), before)
    assert counts.in_place > in_place and counts.by_processes > by_processes


def test_work_is_cut_by_what_a_process_can_do_in_a_layer(world: SimpleNamespace, channels: list[Channel]) -> None:
    elements = sum(40 * sum(SHAPES[module]) for module in MODULES)
    for rows_each, helping in ((100, 1), (19, 2), (5, 2)):

        def before(_: int, rows_each: int = rows_each) -> Helpers:
            world.cold.have(3, 0)
            rates = {"read_ns": 5.0, "row_ns": 2.0, "layer_ns": elements * (5.0 + 2.0 * rows_each)}
            return Helpers(on_their_way(world, 3), channels, watchdog_s=PATIENT_S, **rates)

        done = [channel.counters.requests for channel in channels]
        run(world, (3,), before, steps=[(20,)])
        assert sum(channel.counters.requests > was for channel, was in zip(channels, done, strict=True)) == helping


def test_without_processes_or_in_time_copies_rows_are_computed_in_place(world: SimpleNamespace) -> None:
    def before(_: int) -> Helpers:
        world.cold.have(2, 2)
        world.cold.have(3, 0)
        return Helpers(on_their_way(world, 2, 3, layerwise=(3,)), layer_wait_s=0.003)

    counts = world.cold.forward.assisted
    late, waited = counts.layers_late, counts.layer_waited_ns
    run(world, (1, 2, -1, 3, 1), before)
    assert counts.layers_late > late
    assert counts.layer_waited_ns - waited < len(STEPS) * 0.5e9, "bounded by the step, not by the layer"


@pytest.mark.parametrize("answered", [0, 1, 4, 9])
def test_a_process_that_stops_answering_changes_nothing_but_its_channel(world: SimpleNamespace, answered: int) -> None:
    """The process stops after `answered` requests.

    The rest of its rows are computed in place; those of other processes are not affected.
    """
    good, bad = (Channel(world.engine, world.cold.pool, max_rows=64) for _ in range(2))

    def hush() -> None:
        with suppress(AssertionError):
            until(lambda: bad.counters.requests >= answered, within_s=20, every_s=0.0002)
        bad.stop()

    def before(_: int) -> Helpers:
        for slot in (2, 3):
            world.cold.have(slot, 0)
        return Helpers(on_their_way(world, 2, 3), [bad, good], layer_ns=1.0, row_ns=1e-9, watchdog_s=0.05)

    hushed = threading.Thread(target=hush)
    hushed.start()
    counts = world.cold.forward.assisted
    repaired = counts.repaired
    with served([good, bad]):
        run(world, MIXED[:4], before, steps=[takes[:4] for takes in STEPS] * 1)
        hushed.join()
        if bad.state == "alive":  # silent only after the last step
            assert counts.repaired == repaired
        else:
            assert bad.state == "late" and counts.repaired > repaired
            assert bad.counters.requests >= answered
    assert good.state == "alive"


def test_a_channel_that_its_watcher_gives_up_lets_the_step_continue_at_once(world: SimpleNamespace) -> None:
    lonely = Channel(world.engine, world.cold.pool, max_rows=64)  # no process serves it
    watcher = threading.Timer(0.1, lonely.fail, ["died"])

    def before(step: int) -> Helpers:
        world.cold.have(3, 1)
        if step == 0:
            watcher.start()
        return Helpers(on_their_way(world, 3), [lonely], watchdog_s=PATIENT_S)

    began = time.monotonic()
    run(world, (1, 3, -1), before, steps=[(3, 9, 2), (1, 1, 1)])
    assert time.monotonic() - began < PATIENT_S / 2 and lonely.state == "died"


def test_memory_that_cannot_be_mapped_fails_the_channel_and_not_the_rows(
    world: SimpleNamespace, channels: list[Channel]
) -> None:
    def before(_: int) -> Helpers:
        world.cold.have(2, 0)
        loading = on_their_way(world, 2)
        loading[0].fd, loading[0].inode = 999_999, 0
        return Helpers(loading, channels[:1], watchdog_s=PATIENT_S)

    run(world, (1, 2, -1), before, steps=[(3, 9, 2), (1, 1, 1)])
    assert channels[0].state == "unreadable"


@pytest.mark.parametrize("group", range(4))
def test_a_request_by_itself_is_scale_times_b_a_x(world: SimpleNamespace, channels: list[Channel], group: int) -> None:
    host = world.cold.hosts[3]
    modules = list(GROUPS.values())[group]
    x = torch.randn(37, SHAPES[modules[0]][0])
    y = torch.empty(37, sum(SHAPES[module][1] for module in modules))
    assert channels[1].call(loading_of(3, host), x, y, layer=2, group=group, bound_s=PATIENT_S)
    want = torch.zeros_like(y)
    slots = torch.full((37,), 3, dtype=torch.int32)
    world.engine.lora(want, x, world.whole.pool, 2, group, slots)
    if world.dtype == torch.bfloat16 and world.engine.isa in ("avx512bf16", "amx"):  # activations are then, and so is y
        want = want.bfloat16().float()
    assert torch.equal(y, want), "the same code over the same bytes"


def test_numbers_wrap_and_adapters_beyond_what_a_process_keeps_mapped_come_again(world: SimpleNamespace) -> None:
    channel = Channel(world.engine, world.cold.pool, max_rows=8, sequence=2**32 - 3)
    hosts = [HostAdapter({"q_proj": 8}, seed, world.dtype) for seed in range(40)]
    x, y, want = torch.randn(2, 64), torch.empty(2, 128), torch.empty(2, 128)
    before = len(os.listdir("/proc/self/map_files")) if os.access("/proc/self/map_files", os.R_OK) else 0
    with served([channel]):
        for _ in range(2):
            for host in hosts:
                assert channel.call(loading_of(1, host), x, y, layer=0, group=0, bound_s=PATIENT_S)
                want.zero_()
                m = host.packed
                a = m.arena[: 8 * 64].view(8, 64).double()
                b = m.arena[8 * 64 : 8 * 128].view(8, 64).double()
                want[:, :64] = 0.5 * (x.double() @ a.T) @ b
                assert (y - want).abs().max() < 0.02
        if before:
            assert len(os.listdir("/proc/self/map_files")) < before + 25
    assert channel.counters.requests == 80
