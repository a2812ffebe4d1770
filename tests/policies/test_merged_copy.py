"""Promise: the merged copy of the weights takes memory that is not needed, gives it back at once, and estimates its gain."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping

import pytest

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.memory.ledger import Budget
from motet.policies.step.batch_admission import AdmissionLimits
from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import Sequence, StepPlan, advance
from motet.policies.step.cold_start import ColdStarts
from motet.policies.step.merge_decision import MergeConfig, Merging, Mode
from motet.policies.step.merged_copy import NOTHING_KNOWN, START_MS_PER_MIB, MergedCopy, SpareMemory
from motet.policies.step.paying_merge import PayingMerge
from motet.policies.times.perf_model import MIB
from motet.policies.times.step_record import Step
from motet.shared.model import PerfModel

SIZE, BLOCK = 4, 1000  # tokens and bytes of a KV block
BLOCKS = 128
COPY = 20 * BLOCK  # bytes; the boundary moves by 2 blocks at a time
PERF = PerfModel(
    prefill_base_ms=1.0,
    prefill_token_ms=0.1,
    prefill_lora_ms=0.0,
    decode_base_ms=10.0,
    decode_row_ms=0.5,
    decode_lora_ms=0.04,
    load_base_ms=0.0,
    load_ms_per_mib=1.0,
)


class Engine:
    """A core whose copies are complete as soon as they may be made."""

    def __init__(self, blocks: int = BLOCKS, *, careful: bool = False) -> None:
        self.modes = PayingMerge(NOTHING_KNOWN) if careful else Merging(NOTHING_KNOWN, MergeConfig(alpha=0.7))
        self.core: BatchCore[Sequence] = BatchCore(
            AdmissionLimits(max_running=16, max_step_tokens=64),
            kv=KvBlocks(blocks, SIZE, capacity=blocks + 4, block_bytes=BLOCK, prefix_cache=careful),
            slots=AdapterSlots(4, 4 * BLOCK),
            shared=True,
            modes=self.modes,
            copies=PERF,
        )
        assert self.core.copy is not None
        self.copy: MergedCopy = self.core.copy
        self.drops: list[str] = []
        self.now_s = 0.0

    def start(self, adapter: str, tokens: int = 8) -> Sequence:
        seq = Sequence(
            order=0, tokens=array("i", range(tokens)), adapter=adapter, adapter_bytes=BLOCK, rank=8, merged_bytes=COPY
        )
        self.core.start(seq)
        return seq

    def step(self) -> StepPlan[Sequence]:
        before = self.copy.adapter
        self.now_s += 0.02
        plan = self.core.decide(self.now_s)
        if plan.dropped:
            self.drops.append(before)
        for seq in advance(plan):
            seq.append(7)
        if plan.tokens:
            self.modes.ran(1)
        if plan.copy_started:
            self.copy.made(took_ms=12.0)
        self.core.check()
        return plan

    @property
    def claimed(self) -> int:
        return self.core.memory.claims["merged"].size_bytes


def until_merged(engine: Engine, adapter: str) -> int:
    for steps in range(1, 400):
        if engine.step().merged == adapter:
            return steps
    raise AssertionError(f"{adapter} was not merged")


def test_memory_for_a_copy_is_claimed_in_steps_and_the_adapter_is_merged_when_it_is_whole() -> None:
    engine = Engine()
    engine.start("a")
    plans = [engine.step() for _ in range(3)]
    assert [plan.merge_candidate for plan in plans] == ["", "", "a"], "only its steps say what merging would save"
    assert not plans[-1].copy_started and 0 < engine.claimed < COPY
    assert until_merged(engine, "a") == 10
    assert engine.claimed == COPY and engine.core.memory.held()["merged", "used"] == COPY


def test_a_copy_leaves_when_a_sequence_finds_no_block_and_takes_none_back_before_there_is_room() -> None:
    engine = Engine()
    seq = engine.start("a", tokens=4 * SIZE)
    until_merged(engine, "a")
    engine.start("a", tokens=(BLOCKS - 8) * SIZE)
    plans = [engine.step() for _ in range(3)]
    assert engine.drops == ["a"] and engine.claimed == 0
    assert not any(plan.preempted for plan in plans) and seq.blocks
    for _ in range(20):
        engine.step()
    assert engine.claimed == 0, "a quarter of the blocks is not free"


def test_a_copy_of_another_adapter_takes_the_place_of_the_first() -> None:
    engine = Engine()
    first = engine.start("a")
    until_merged(engine, "a")
    engine.core.end(first)
    engine.start("b")
    until_merged(engine, "b")
    assert engine.drops == ["a"] and engine.claimed == COPY and engine.copy.adapter == "b"


def test_a_copy_without_use_stays_for_its_adapters_next_requests() -> None:
    engine = Engine()
    seq = engine.start("a")
    until_merged(engine, "a")
    engine.core.end(seq)
    engine.start("")
    assert engine.step().merged == ""
    assert engine.core.memory.held()["merged", "idle"] == COPY
    engine.core.end(engine.core.state.running[0])
    engine.start("a")
    assert until_merged(engine, "a") == 1


def test_with_an_adapter_that_is_unloaded_its_copy_leaves_and_none_is_merged() -> None:
    engine = Engine()
    seq = engine.start("a")
    until_merged(engine, "a")
    engine.core.end(seq)
    engine.core.unload("a")
    engine.core.sweep()
    engine.step()
    assert engine.drops == ["a"] and engine.claimed == 0
    assert engine.core.state.merged == engine.modes.merged == ""


def test_lent_blocks_count_as_free_because_the_copy_would_leave() -> None:
    engine = Engine()
    free = engine.core.kv_blocks_free
    seq = engine.start("a")
    until_merged(engine, "a")
    engine.core.end(seq)
    assert engine.core.kv_blocks_free == free


def cached_after(engine: Engine, tokens: int, adapter: str = "b") -> None:
    """A request of another adapter ends and leaves its blocks to the prefix cache."""
    seq = engine.start(adapter, tokens=tokens)
    while engine.core.state.waiting or seq.computed < tokens:
        engine.step()
    engine.core.end(seq)


def test_a_careful_copy_takes_cached_blocks_only_if_they_are_hardly_ever_used_again() -> None:
    engine = Engine(careful=True)
    cached_after(engine, 40 * SIZE)
    kv, boundary = engine.core.state.kv, engine.core.boundary
    assert boundary is not None and kv.reuse is not None and kv.idle >= 40
    assert boundary.spare_blocks(careful=True) == kv.blank < kv.free == boundary.spare_blocks(careful=False)
    for _ in range(100):
        kv.reuse.left(1)
    assert boundary.spare_blocks(careful=True) == kv.free


def test_a_careful_copy_leaves_before_the_prefix_cache_lacks_blocks() -> None:
    engine = Engine(careful=True)
    seq = engine.start("a")
    while not engine.copy.whole:
        engine.step()
    engine.core.end(seq)
    kv, cached = engine.core.state.kv, 0
    for adapter in "bcdefghijklmnopq":
        cached_after(engine, 8 * SIZE, adapter)
        if engine.drops:
            break
        assert kv.cached >= cached + 8, "no cached block has left for the copy"
        cached = kv.cached
    assert engine.drops == ["a"] and engine.claimed == 0 and cached >= 60


def test_prefixes_that_running_requests_found_count_once() -> None:
    engine = Engine(careful=True)
    first = engine.start("a", tokens=5 * SIZE)
    engine.step()
    second = engine.start("a", tokens=5 * SIZE)
    engine.step()
    assert (first.found, second.found) == (0, 4)
    engine.copy.weigh([first, second, second])
    assert engine.modes.prefix_ms == pytest.approx(4 * SIZE * PERF.prefill_token_ms)


def step_of(rows: int, ranks: int, ms: float) -> Step:
    return Step(time_ms=ms, decode_rows=rows, decode_rank_sum=ranks)


def test_the_saved_share_is_learned_from_merged_and_unmerged_steps() -> None:
    engine = Engine()
    running = [engine.start("a") for _ in range(8)]
    engine.step()
    draw = random.Random(1)
    for _ in range(3000):
        rows, lora = draw.choice((2, 4, 8)), draw.random() < 0.5
        plain_ms = 6.0 + 0.5 * rows
        engine.copy.observe(step_of(rows, 8 * rows, 1.15 * plain_ms) if lora else step_of(rows, 0, plain_ms))
    engine.copy.weigh(running)
    assert engine.copy.lora == pytest.approx(0.15, abs=0.03)


def test_making_a_copy_costs_what_the_last_one_took() -> None:
    engine = Engine()
    running = [engine.start("a")]
    engine.copy.weigh(running)
    assert engine.modes.costs.switch_ms == pytest.approx(START_MS_PER_MIB * COPY / MIB)
    until_merged(engine, "a")
    engine.copy.weigh(running)
    assert engine.modes.costs.switch_ms == pytest.approx(12.0)


# ---- which requests a mode is chosen by, and which it finds


class Told:
    """Merges "a" once there are five of its requests, and records what it was told."""

    def __init__(self) -> None:
        self.merged, self.whole = "", None
        self.fcfs: dict[str, int] = {}
        self.here: dict[str, int] = {}

    def choose(self, fcfs: Mapping[str, int], here: Mapping[str, int], most: int) -> Mode:
        self.fcfs, self.here = dict(fcfs), dict(here)
        self.merged = "a" if here.get("a", 0) > 4 else ""
        return Mode(self.merged, frozenset("a")) if self.merged else Mode()

    def ran(self, steps: int) -> None: ...

    def steady(self) -> int:
        return 1

    def unmerge(self) -> None:
        self.merged = ""


def with_seats(modes: Told, seats: int) -> BatchCore[Sequence]:
    return BatchCore(
        AdmissionLimits(max_running=seats, max_step_tokens=64),
        kv=KvBlocks(4000, SIZE),
        slots=AdapterSlots(4, 4 * BLOCK),
        modes=modes,
    )


def come(core: BatchCore[Sequence], adapter: str, count: int) -> None:
    for _ in range(count):
        core.start(Sequence(order=0, tokens=array("i", range(8)), adapter=adapter, adapter_bytes=BLOCK, rank=8))


def test_requests_that_were_overtaken_count_as_first_come_first_served_would_have_them() -> None:
    told = Told()
    core = with_seats(told, 8)
    come(core, "a", 6)
    core.decide()
    come(core, "b", 5)
    come(core, "a", 2)
    core.decide()
    assert [seq.adapter for seq in core.state.running] == ["a"] * 8, "the merged adapter's went past the others"
    core.decide()
    assert told.fcfs == {"a": 6, "b": 2}


def test_the_merged_adapters_requests_are_found_behind_hundreds_of_others() -> None:
    core = with_seats(Told(), 16)
    come(core, "a", 5)
    core.decide()
    come(core, "b", 400)
    come(core, "a", 3)
    assert len(core.decide().admitted) == 3


def test_requests_count_for_merging_their_adapter_once_it_is_on_the_device() -> None:
    told, slots, cold = Told(), AdapterSlots(4, 4 * BLOCK, asynchronous=True), ColdStarts(4, 64, "blocking")
    cold.perf = PERF
    core: BatchCore[Sequence] = BatchCore(
        AdmissionLimits(max_running=8, max_step_tokens=64),
        kv=KvBlocks(4000, SIZE),
        slots=slots,
        cold=cold,
        modes=told,
    )
    come(core, "a", 2)
    come(core, "", 1)
    for _ in range(2):  # its copy begins, and is under way
        core.decide()
        assert (told.fcfs["a"], told.here) == (2, {"": 1})
    slots.arrived("a")
    core.decide()
    assert told.here == {"a": 2, "": 1}


def test_spare_memory_is_booked_as_the_copys_and_given_back() -> None:
    budget = Budget("device", 100)
    budget.claim("kv", 100, dict)
    spare = SpareMemory(budget)
    spare.lends(lambda: {"idle": spare.lent_bytes})
    assert budget.claims["merged"].size_bytes == 0
    assert spare.lend(30) and (budget.total_bytes, budget.claims["merged"].size_bytes, budget.unclaimed_bytes) == (130, 30, 0)
    assert spare.lend(10) and budget.held() == {("merged", "idle"): 10} and budget.total_bytes == 110
    assert spare.lend(0) and budget.total_bytes == 100
    budget.check()
