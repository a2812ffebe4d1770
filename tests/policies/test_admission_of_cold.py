"""Promise: a sequence whose adapter is being copied waits with its slot, and no other sequence waits for that copy."""

from __future__ import annotations

import random

import pytest

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.step.batch_admission import COLD_WINDOW, BatchAdmission
from motet.policies.step.batch_state import Sequence, StepPlan, remove, steady_steps
from motet.policies.step.cold_start import AssistRates, ColdStartName, ColdStarts
from motet.shared.model import PerfModel
from tests.policies.test_batch_admission import BLOCK_SIZE, World

LAYERS = 4
STEP_MS = PerfModel(
    prefill_base_ms=1.0,
    prefill_token_ms=0.0,
    prefill_lora_ms=0.0,
    decode_base_ms=1.0,
    decode_row_ms=0.0,
    decode_lora_ms=0.0,
    load_base_ms=0.0,
    load_ms_per_mib=0.0,
)


class ColdWorld(World):
    """Adapters of 10 bytes come in over a link, `per_step` bytes with every step of a millisecond."""

    def __init__(self, *, per_step: float = 2.0, forced: ColdStartName = "blocking", processes: int = 0, **options) -> None:
        slots = options.pop("slots", 4)
        super().__init__(slots=slots, **options)
        self.cold = ColdStarts(LAYERS, self.policy.limits.max_step_tokens, forced)
        self.policy = BatchAdmission(self.policy.limits, self.cold)
        self.state.adapters = AdapterSlots(slots, 1000, asynchronous=True)
        self.per_step, self.processes = per_step, processes
        self.left: dict[str, float] = {}  # the link's queue
        self.loads: list[str] = []

    def decide(self) -> StepPlan[Sequence]:
        self.look()
        self.now_s += 1.0
        plan = self.policy.decide(self.state)
        for digest, _ in plan.evictions:
            self.left.pop(digest, None)
        for seq in plan.loads:
            self.left[seq.adapter] = 10.0
            self.loads.append(seq.adapter)
        for seq in plan.decodes + plan.prefills:
            assert seq in self.state.running
            assert len(seq.blocks) * BLOCK_SIZE >= seq.computed + seq.scheduled
        assert plan.tokens or self.left or not (self.state.running or self.state.waiting), "no progress"
        budget = self.per_step
        for digest in self.left:
            part = min(self.left[digest], budget)
            self.left[digest] -= part
            budget -= part
        return plan

    def look(self) -> None:
        """Do what an engine does before it decides."""
        for digest in [digest for digest, left in self.left.items() if left <= 0]:
            self.state.adapters.arrived(digest)
            del self.left[digest]
        ahead, under_way = 0.0, {}
        for digest, left in self.left.items():
            ahead += left
            under_way[digest] = (10, ahead, int((10 - left) * LAYERS / 10))
        assist = AssistRates(self.processes, mib_row_ms=0.0, hop_ms=0.0) if self.processes else None
        rate = self.per_step * 1000
        self.cold.observe(perf=STEP_MS, bytes_per_s=rate, queued_bytes=ahead, under_way=under_way, assist=assist)

    def check(self) -> None:
        state = self.state
        state.kv.check(seq.blocks for seq in state.running)
        users: dict[str, int] = {}
        for seq in (*state.running, *state.waiting):
            if seq.slot >= 0:
                users[seq.adapter] = users.get(seq.adapter, 0) + 1
        state.adapters.check(users)
        assert set(state.adapters.loading) == set(self.left)
        assert all(seq.computed == len(seq.blocks) == 0 for seq in state.waiting)
        assert all(seq.slot >= 0 for seq in state.running if seq.adapter)


def test_a_cold_sequence_waits_with_its_slot_while_others_pass() -> None:
    world = ColdWorld()
    cold = world.add(8, adapter="a")
    first = world.add(8)
    plan = world.step()
    assert plan.loads == [cold] and plan.prefills == [first]
    assert cold.slot >= 0 and not cold.blocks and cold in world.state.waiting
    for _ in range(4):
        late = world.add(4)
        assert late in world.step().admitted, "the request does not wait for the copy"
    assert cold.bypassed == 0
    plan = world.step()
    assert plan.admitted == [cold] and plan.loads == []


def test_a_copy_is_begun_once_however_many_wait_for_it() -> None:
    world = ColdWorld()
    waiting = [world.add(4, adapter="a") for _ in range(5)]
    for _ in range(5):
        assert world.step().admitted == []
    assert world.step().admitted == waiting and world.loads == ["a"]


def test_copies_for_all_waiting_sequences_begin_at_once_but_only_the_first_may_join_early() -> None:
    world = ColdWorld(forced="assist", processes=1, slots=20, max_running=32)
    waiting = [world.add(2, adapter=str(i)) for i in range(20)]
    plan = world.step()
    assert plan.loads == waiting and plan.admitted == waiting[:COLD_WINDOW]
    assert all(seq.slot >= 0 for seq in waiting)


def test_a_cold_sequence_that_is_removed_gives_its_slot_back_and_the_copy_continues() -> None:
    world = ColdWorld(slots=1)
    first = world.add(4, adapter="a")
    world.step()
    world.finish(first)
    again = world.add(4, adapter="a")
    world.step()
    assert world.loads == ["a"] and world.state.adapters.users("a") == 1
    world.finish(again)
    other = world.add(4, adapter="b")
    plan = world.step()
    assert plan.evictions == [("a", 0)] and plan.loads == [other], "a copy without a waiting request gives its slot up"


def test_assist_joins_at_once_and_the_next_of_that_adapter_too() -> None:
    world = ColdWorld(forced="auto", processes=1)
    first = world.add(8, adapter="a")
    assert world.step().admitted == [first] and world.cold.modes == {"a": "assist"}
    second = world.add(8, adapter="a")
    plan = world.step()
    assert plan.admitted == [second] and plan.decodes == [first]


def test_layer_by_layer_joins_when_the_copy_is_ahead_and_before_it_is_whole() -> None:
    world = ColdWorld(forced="auto", per_step=8.0)
    cold = world.add(8, adapter="a")
    world.step()
    assert cold.slot >= 0 and not cold.blocks
    assert world.step().admitted == [cold] and "a" in world.state.adapters.loading
    assert world.cold.modes == {"a": "layerwise"}


def test_a_preempted_sequence_goes_back_to_waiting_for_its_copy_without_blocks() -> None:
    world = ColdWorld(forced="assist", processes=1, blocks=7, per_step=0.1)
    old, young = world.add(12, adapter="a"), world.add(8, adapter="b")
    while young not in world.step().preempted:
        assert world.now_s < 50
    assert young.computed == len(young.blocks) == 0 and old in world.state.running
    world.finish(young)
    assert world.state.adapters.users("b") == 0 and "b" in world.state.adapters.loading


def test_a_sequence_with_a_slot_joins_although_another_has_been_passed_too_often() -> None:
    world = ColdWorld(slots=1, max_bypass=1)
    holder = world.add(4, adapter="a")
    world.step()
    wanting = world.add(4, adapter="b")
    for _ in range(3):
        world.add(4)
        world.step()
    assert wanting.bypassed >= 1, "it finds no slot, others have passed it"
    while holder not in world.state.running:
        assert world.now_s < 20
        world.step()
    world.finish(holder)
    while wanting not in world.state.running:
        assert world.now_s < 40
        world.step()


def test_every_step_is_decided_anew_while_an_adapter_is_copied() -> None:
    world = ColdWorld()
    world.add(4)
    world.step()
    plan = world.decide()
    assert steady_steps(world.state, plan, 100) > 1
    for seq in plan.decodes:
        seq.scheduled = 0
    world.add(4, adapter="a")
    assert steady_steps(world.state, world.decide(), 100) == 1


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_end_with_every_sequence_served(seed: int) -> None:
    draw = random.Random(seed)
    world = ColdWorld(
        forced=draw.choice(["auto", "blocking", "layerwise", "assist"]),
        processes=draw.choice([0, 1]),
        per_step=draw.choice([0.5, 3.0, 40.0]),
        slots=draw.choice([1, 2, 4]),
        blocks=draw.choice([12, 40]),
        max_bypass=draw.choice([1, 64]),
        prefix_cache=draw.random() < 0.5,
    )
    todo, ends = 40, dict[int, int]()
    while todo or world.state.waiting or world.state.running:
        if todo and draw.random() < 0.5:
            seq = world.add(draw.randint(1, 16), adapter=draw.choice(["", "a", "b", "c", "d", "e"]))
            ends[seq.order] = seq.length + draw.randint(1, 20)
            todo -= 1
        world.step()
        for seq in [seq for seq in world.state.running if seq.length >= ends[seq.order]]:
            remove(world.state, seq)
        if draw.random() < 0.05 and world.state.waiting:
            world.finish(draw.choice(world.state.waiting))
        world.check()
        assert world.now_s < 5000
