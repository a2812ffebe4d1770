from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from itertools import count

import pytest

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.memory.ledger import device_budget
from motet.policies.step.batch_admission import AdmissionLimits, BatchAdmission
from motet.policies.step.batch_state import (
    AdmissionState,
    Sequence,
    StepPlan,
    advance,
    advance_steady,
    due_s,
    remove,
    steady_steps,
    wait,
)

BLOCK_SIZE, BLOCK_BYTES = 4, 100


class World:
    """The policy with its whole state, stepped as an engine would. Every drawn token is unique."""

    def __init__(
        self,
        *,
        max_running: int = 8,
        max_step_tokens: int = 64,
        blocks: int = 100,
        slots: int = 4,
        prefix_cache: bool = True,
        max_bypass: int = 64,
    ) -> None:
        limits = AdmissionLimits(max_running=max_running, max_step_tokens=max_step_tokens, max_bypass=max_bypass)
        self.policy: BatchAdmission[Sequence] = BatchAdmission(limits)
        self.state: AdmissionState[Sequence] = AdmissionState(
            kv=KvBlocks(blocks, BLOCK_SIZE, prefix_cache=prefix_cache, block_bytes=BLOCK_BYTES),
            adapters=AdapterSlots(slots, 1000),
        )
        self.orders = count()
        self.tokens = count(10_000)
        self.now_s = 0.0

    def add(self, prompt: int | list[int], *, adapter: str = "", ttft_slo_ms: float = 0.0) -> Sequence:
        """A waiting sequence. A number for the prompt stands for that many unique tokens."""
        tokens = prompt if isinstance(prompt, list) else [next(self.tokens) for _ in range(prompt)]
        due = due_s(self.now_s, ttft_slo_ms) if ttft_slo_ms else 0.0
        seq = Sequence(order=next(self.orders), due_s=due, tokens=array("i", tokens), adapter=adapter, adapter_bytes=10)
        wait(self.state, seq)
        return seq

    def step(self) -> StepPlan[Sequence]:
        """One step. Every sequence whose tokens are all computed gets another one."""
        plan = self.decide()
        for seq in advance(plan):
            seq.append(next(self.tokens))
        self.check()
        return plan

    def decide(self) -> StepPlan[Sequence]:
        self.now_s += 1.0
        plan = self.policy.decide(self.state)
        scheduled = plan.decodes + plan.prefills
        assert plan.tokens == sum(seq.scheduled for seq in scheduled) <= self.policy.limits.max_step_tokens
        assert len(self.state.running) <= self.policy.limits.max_running
        for seq in scheduled:
            assert seq in self.state.running
            assert len(seq.blocks) * BLOCK_SIZE >= seq.computed + seq.scheduled
        assert plan.tokens or not (self.state.running or self.state.waiting), "no progress"
        return plan

    def finish(self, seq: Sequence) -> None:
        remove(self.state, seq)
        self.check()

    def check(self) -> None:
        state = self.state
        state.kv.check(seq.blocks for seq in state.running)
        users: dict[str, int] = {}
        for seq in state.running:
            if seq.adapter:
                users[seq.adapter] = users.get(seq.adapter, 0) + 1
        state.adapters.check(users)
        memory = device_budget(state.kv, state.adapters)
        memory.check()
        assert memory.held()["kv", "running"] == BLOCK_BYTES * len({block for seq in state.running for block in seq.blocks})
        for seqs in (state.running, state.waiting):
            assert seqs == sorted(seqs, key=lambda seq: (seq.due_s, seq.order))
        assert all(seq.computed == seq.slot + 1 == len(seq.blocks) == 0 for seq in state.waiting)


def rows(seqs: Iterable[Sequence]) -> list[int]:
    return [seq.scheduled for seq in seqs]


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert World().decide() == StepPlan()


def test_a_short_prompt_is_computed_in_one_step_and_then_decodes() -> None:
    world = World()
    seq = world.add(10)
    first, second = world.step(), world.step()
    assert first.prefills == [seq] and first.admitted == [seq] and first.tokens == 10
    assert second.decodes == [seq] and second.prefills == [] and second.tokens == 1


def test_long_prompts_go_in_chunks_of_what_the_budget_leaves() -> None:
    world = World(max_step_tokens=16)
    decoding = world.add(4)
    world.step()
    world.add(40)
    sizes = []
    for _ in range(4):
        plan = world.decide()
        sizes.append((decoding in plan.decodes, rows(plan.prefills)))
        for seq in advance(plan):
            seq.append(next(world.tokens))
    assert sizes == [(True, [15]), (True, [15]), (True, [10]), (True, [])]


def test_no_token_is_drawn_before_the_last_chunk() -> None:
    world = World(max_step_tokens=8)
    seq = world.add(20)
    drawn = [advance(world.decide()) for _ in range(3)]
    assert drawn == [[], [], [seq]]


def test_decodes_go_before_prefills_that_arrived_earlier() -> None:
    world = World(max_step_tokens=8)
    early, late = world.add(30), world.add(4)
    world.step()
    assert late in world.state.waiting  # the budget went to the early one
    for _ in range(3):
        world.step()
    plan = world.decide()
    assert plan.decodes == [early] and plan.prefills == [late]


def test_newcomers_wait_for_a_seat() -> None:
    world = World(max_running=2)
    first, second, third = (world.add(4) for _ in range(3))
    world.step()
    assert world.state.running == [first, second] and world.state.waiting == [third]
    world.finish(first)
    world.step()
    assert world.state.running == [second, third]


def test_no_more_run_than_the_budget_has_tokens_for() -> None:
    world = World(max_running=8, max_step_tokens=3)
    for _ in range(5):
        world.add(1)
    world.step()
    assert len(world.state.running) == 3


def test_a_sequence_that_lacks_blocks_is_not_overtaken() -> None:
    world = World(blocks=10)
    world.add(24)
    world.step()
    big, small = world.add(24), world.add(4)
    world.step()
    assert world.state.waiting == [big, small]


def test_one_block_per_running_sequence_stays_free_when_others_come_in() -> None:
    world = World(blocks=4)
    world.add(4)
    world.add(4)
    world.add(8)
    world.step()
    assert len(world.state.running) == 2  # 1 + 1 blocks held, 2 kept for them, none for the third


def test_the_latest_is_preempted_when_a_decode_finds_no_block() -> None:
    world = World(blocks=5, prefix_cache=False)
    first, second = world.add(7), world.add(7)
    plans = [world.step() for _ in range(4)]
    assert [plan.preempted for plan in plans] == [[], [], [second], []]
    assert world.state.running == [first] and world.state.waiting == [second]
    assert len(second.tokens) == 9  # its output so far is kept
    world.finish(first)
    plan = world.decide()
    assert plan.admitted == [second] and rows(plan.prefills) == [9]


def test_a_preempted_sequence_finds_its_blocks_in_the_prefix_cache() -> None:
    world = World(blocks=5)
    first, second = world.add(7), world.add(7)
    for _ in range(3):
        world.step()
    assert world.state.waiting == [second]
    world.finish(first)
    plan = world.decide()
    assert plan.admitted == [second]
    assert second.computed >= 4 and second.computed + second.scheduled == 9


def test_the_first_to_arrive_is_never_preempted_and_all_end() -> None:
    world = World(blocks=6, max_running=6)
    seqs = [world.add(5) for _ in range(6)]
    want = 18
    while seqs:
        first = min(seqs, key=lambda seq: seq.order)
        plan = world.step()
        assert first not in plan.preempted
        for seq in [seq for seq in seqs if len(seq.tokens) >= want]:
            world.finish(seq)
            seqs.remove(seq)


def test_equal_prompts_share_blocks_also_within_one_step() -> None:
    world = World()
    prompt = list(range(13))
    seqs = [world.add(prompt) for _ in range(3)]
    plan = world.decide()
    assert plan.admitted == seqs
    assert [seq.computed for seq in seqs] == [0, 12, 12]
    assert seqs[0].blocks[:3] == seqs[1].blocks[:3] == seqs[2].blocks[:3]
    assert len({seq.blocks[3] for seq in seqs}) == 3


def test_the_last_token_of_a_cached_prompt_is_computed_again() -> None:
    world = World()
    prompt = list(range(12))
    first = world.add(prompt)
    world.step()
    world.finish(first)
    again = world.add(prompt)
    plan = world.decide()
    assert again.computed == 8 and rows(plan.prefills) == [4]


def test_output_tokens_are_cached_like_prompt_tokens() -> None:
    world = World()
    first = world.add(6)
    for _ in range(5):
        world.step()
    conversation = first.tokens.tolist()
    world.finish(first)
    longer = world.add([*conversation, 1, 2, 3])
    world.decide()
    assert longer.computed == 8  # of 10 computed ones, in whole blocks


def test_prompts_of_different_adapters_share_nothing() -> None:
    world = World()
    prompt = list(range(13))
    seqs = [world.add(prompt, adapter=adapter) for adapter in ("", "v1", "v2", "v1")]
    world.decide()
    assert [seq.computed for seq in seqs] == [0, 0, 0, 12]
    assert len({seq.blocks[0] for seq in seqs[:3]}) == 3


def test_the_first_user_of_an_adapter_loads_it() -> None:
    world = World()
    first, second = world.add(4, adapter="a"), world.add(4, adapter="a")
    plan = world.step()
    assert plan.loads == [first]
    assert first.slot == second.slot >= 0


def test_an_idle_adapter_makes_room() -> None:
    world = World(slots=1)
    first = world.add(4, adapter="a")
    world.step()
    world.finish(first)
    second = world.add(4, adapter="b")
    plan = world.step()
    assert plan.evictions == [("a", 0)] and plan.loads == [second]


def test_a_sequence_without_a_slot_lets_others_pass() -> None:
    world = World(slots=1)
    running = world.add(4, adapter="a")
    world.step()
    blocked = world.add(4, adapter="b")
    base, same = world.add(4), world.add(4, adapter="a")
    world.step()
    assert world.state.running == [running, base, same]
    assert world.state.waiting == [blocked] and blocked.bypassed == 2


def test_after_enough_have_passed_only_the_base_may() -> None:
    world = World(slots=1, max_bypass=2)
    world.add(4, adapter="a")
    world.step()
    blocked = world.add(4, adapter="b")
    others = [world.add(4, adapter="a") for _ in range(4)]
    base = world.add(4)
    world.step()
    world.step()
    assert base in world.state.running
    assert world.state.waiting == [blocked, *others[2:]]


def test_no_sequence_starves_behind_a_popular_adapter() -> None:
    world = World(slots=1, max_running=3, max_bypass=5)
    world.add(4, adapter="popular")
    world.step()
    blocked = world.add(4, adapter="rare")
    for _ in range(100):
        world.add(4, adapter="popular")
        world.step()
        if blocked in world.state.running:
            break
        for seq in [seq for seq in world.state.running if len(seq.tokens) > 8]:
            world.finish(seq)
    else:
        pytest.fail("it never ran")
    assert blocked.bypassed == 5


def test_a_removed_sequence_gives_everything_back() -> None:
    world = World()
    running = world.add(9, adapter="a")
    world.step()
    waiting = world.add(4)
    world.finish(waiting)
    world.finish(running)
    assert world.state.kv.free == 100
    assert world.state.adapters.users("a") == 0


@pytest.mark.parametrize("seed", range(8))
def test_any_load_is_worked_off_with_books_that_add_up(seed: int) -> None:
    draw = random.Random(seed)
    world = World(
        max_running=draw.choice([2, 5, 9]),
        max_step_tokens=draw.choice([3, 10, 30]),
        blocks=draw.choice([10, 16, 40]),
        slots=draw.choice([1, 2, 3]),
        prefix_cache=draw.random() < 0.7,
        max_bypass=draw.choice([0, 2, 8]),
    )
    wanted: dict[Sequence, int] = {}
    added = 0
    for _ in range(3000):
        while added < 60 and draw.random() < 0.3:
            seq = world.add(
                [draw.randrange(2) for _ in range(draw.randint(1, 20))], adapter=draw.choice(["", "a", "b", "c", "d"])
            )
            wanted[seq] = len(seq.tokens) + draw.randint(1, 18)
            added += 1
        world.step()
        for seq in [seq for seq, length in wanted.items() if len(seq.tokens) >= length or draw.random() < 0.002]:
            world.finish(seq)
            del wanted[seq]
        if added == 60 and not wanted:
            break
    assert not wanted, "some never ended"
    assert world.state.kv.free == world.state.kv.total


class Scripted:
    """Sequences whose tokens are all known beforehand, so that the same history can be stepped in two ways."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.policy: BatchAdmission[Sequence] = BatchAdmission(
            AdmissionLimits(max_running=draw.choice([3, 6]), max_step_tokens=draw.choice([8, 40]))
        )
        kv = KvBlocks(draw.choice([26, 40, 200]), BLOCK_SIZE, prefix_cache=draw.random() < 0.7, block_bytes=BLOCK_BYTES)
        self.state: AdmissionState[Sequence] = AdmissionState(kv=kv, adapters=AdapterSlots(2, 1000))
        self.arrivals: list[tuple[int, Sequence]] = []
        self.ends: dict[Sequence, int] = {}
        step = 0
        for order in range(40):
            step += draw.choice([0, 0, 1, 7, 30])
            prompt, output = draw.randint(1, 20), draw.randint(1, 60)
            tokens = array("i", [draw.randrange(2) for _ in range(prompt + output)])
            seq = Sequence(
                order=order, tokens=tokens, length=prompt, adapter=draw.choice(["", "a", "b", "c"]), adapter_bytes=10
            )
            self.arrivals.append((step, seq))
            self.ends[seq] = prompt + output
        self.step = 0
        self.history: list[object] = []

    def run(self, *, at_once: bool) -> list[object]:
        """Run until all have ended. Returns the state after each step that is not inside a run of equal steps."""
        while self.ends:
            while self.arrivals and self.arrivals[0][0] <= self.step:
                self.state.waiting.append(self.arrivals.pop(0)[1])
            plan = self.policy.decide(self.state)
            until_arrival = self.arrivals[0][0] - self.step if self.arrivals else 1000
            until_end = min((self.ends[seq] - seq.length for seq in plan.decodes), default=1)
            limit = 1 if plan.prefills else min(until_arrival, until_end)
            steps = steady_steps(self.state, plan, limit) if at_once else 1
            if plan.prefills or not at_once:
                for seq in advance(plan):
                    seq.length += 1
            else:
                advance_steady(self.state, plan, steps)
            self.step += steps
            for seq in [seq for seq in self.state.running if seq.length >= self.ends[seq]]:
                remove(self.state, seq)
                del self.ends[seq]
            self.state.kv.check(seq.blocks for seq in self.state.running)
            self.history.append((self.step, self._books()))
        return self.history

    def _books(self) -> object:
        kv = self.state.kv
        held = [(seq.order, seq.computed, seq.length, seq.published, tuple(seq.blocks)) for seq in self.state.running]
        waiting = [(seq.order, seq.bypassed, seq.length) for seq in self.state.waiting]
        return held if kv.prefix_cache else [(*entry[:-1], len(entry[-1])) for entry in held], waiting, kv.free, kv.cached


@pytest.mark.parametrize("seed", range(30))
def test_a_run_of_equal_steps_leaves_the_state_of_its_single_steps(seed: int) -> None:
    single, at_once = Scripted(seed).run(at_once=False), Scripted(seed).run(at_once=True)
    assert len(at_once) < len(single)
    books = dict(single)
    assert all(books[step] == entry for step, entry in at_once)


def test_a_run_ends_before_a_sequence_must_be_preempted() -> None:
    world = World(blocks=4, prefix_cache=False)
    seqs = [world.add(4), world.add(4)]
    world.step()
    plan = world.decide()
    assert plan.decodes == seqs and world.state.kv.free == 0
    assert steady_steps(world.state, plan, 100) == 4
    assert steady_steps(world.state, plan, 3) == 3


def test_a_step_with_prefill_does_not_repeat_itself() -> None:
    world = World(max_step_tokens=8)
    world.add(4)
    world.step()
    world.add(20)
    assert steady_steps(world.state, world.decide(), 100) == 1


# ---- who goes before whom


def test_an_urgent_sequence_overtakes_patient_ones_that_wait() -> None:
    world = World(max_running=1)
    running = world.add(4, ttft_slo_ms=60_000.0)
    world.step()
    batch = world.add(4, ttft_slo_ms=60_000.0)
    interactive = world.add(4, ttft_slo_ms=500.0)
    world.step()
    world.finish(running)
    world.step()
    assert world.state.running == [interactive] and world.state.waiting == [batch]


def test_equal_objectives_are_first_come_first_served() -> None:
    world = World(max_running=1)
    seqs = []
    for _ in range(4):
        seqs.append(world.add(4, ttft_slo_ms=500.0))
        world.step()
    for seq in seqs:
        assert world.state.running == [seq]
        world.finish(seq)
        if world.state.waiting:
            world.step()


def test_a_patient_sequence_is_not_overtaken_for_ever() -> None:
    world = World(max_running=1)
    batch = world.add(4, ttft_slo_ms=60_000.0)
    world.add(4, ttft_slo_ms=500.0)
    rounds = 0
    while batch in world.state.waiting:
        world.add(4, ttft_slo_ms=500.0)  # there is always another one; a step is a second
        world.step()
        if batch in world.state.waiting:
            world.finish(world.state.running[0])
        rounds += 1
    assert 60 < rounds < 300


def test_short_of_blocks_the_patient_sequence_is_preempted_and_not_the_urgent_one() -> None:
    world = World(blocks=5, prefix_cache=False)
    batch = world.add(2 * BLOCK_SIZE - 1, ttft_slo_ms=60_000.0)
    world.step()
    interactive = world.add(2 * BLOCK_SIZE - 1, ttft_slo_ms=500.0)
    for _ in range(BLOCK_SIZE + 1):
        world.step()
    assert world.state.running == [interactive] and world.state.waiting == [batch]


def test_sequences_with_output_run_before_new_ones() -> None:
    assert due_s(10.0, 60_000.0, begun=True) < due_s(10.0, 500.0)
