"""Promise: a request that has already missed its first token's objective does not make others miss theirs."""

from __future__ import annotations

from array import array
from itertools import count

import pytest

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.step.batch_admission import AdmissionLimits
from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import Sequence, StepPlan, advance, due_s, preempt
from motet.policies.step.request_queues import TURN, make_queues

TOKENS = count()


class World:
    """An engine with one seat and `queues=auto`."""

    def __init__(self) -> None:
        self.core: BatchCore[Sequence] = BatchCore(
            AdmissionLimits(max_running=1, max_step_tokens=16),
            kv=KvBlocks(100, 16, prefix_cache=False),
            slots=AdapterSlots(4, 1000),
            queues=make_queues("auto", total_tokens=1600.0, token_bytes=1.0),
        )

    def arrives(self, now_s: float, *, ttft_slo_ms: float = 1000.0, priority: int = 0, begun: bool = False) -> Sequence:
        """A request with 4 prompt tokens."""
        due = due_s(now_s, ttft_slo_ms, begun=begun)
        seq = Sequence(order=0, priority=priority, due_s=due, tokens=array("i", [next(TOKENS) for _ in range(4)]))
        self.core.start(seq, now_s)
        return seq

    def step(self, now_s: float) -> StepPlan[Sequence]:
        """One step."""
        plan = self.core.decide(now_s)
        for seq in advance(plan):
            seq.append(next(TOKENS))
        return plan

    def begins(self, now_s: float) -> Sequence:
        """The request that gets the free seat, and gives it back."""
        (seq,) = self.step(now_s).admitted
        self.core.end(seq)
        return seq


@pytest.fixture
def world() -> World:
    return World()


def test_the_first_one_goes_first_while_nobody_is_late(world: World) -> None:
    first = world.arrives(0.0)
    world.arrives(0.4)
    assert world.begins(0.8) is first


def test_a_late_request_comes_after_one_that_can_be_in_time(world: World) -> None:
    late = world.arrives(0.0)
    in_time = world.arrives(0.4)
    assert world.begins(1.0) is in_time
    assert world.begins(1.0) is late


def test_requests_in_time_keep_the_order_of_their_objectives(world: World) -> None:
    late = world.arrives(0.0)
    patient = world.arrives(0.5, ttft_slo_ms=10_000.0)
    urgent = world.arrives(0.6)
    assert [world.begins(1.0) for _ in range(3)] == [urgent, late, patient]


def test_late_requests_keep_their_order_among_themselves(world: World) -> None:
    first, second = world.arrives(0.0), world.arrives(0.1)
    assert [world.begins(5.0), world.begins(5.0)] == [first, second]


def test_a_late_request_of_a_higher_priority_still_goes_first(world: World) -> None:
    late = world.arrives(0.0, priority=0)
    world.arrives(1.0, priority=1)
    assert world.begins(1.5) is late


def test_after_enough_others_a_late_request_has_its_turn(world: World) -> None:
    late = [world.arrives(0.0), world.arrives(0.0)]
    begun = []
    for number in range(2 * TURN + 3):
        world.arrives(1.0 + number)
        begun.append(world.begins(1.0 + number))
    assert [begun.index(seq) for seq in late] == [TURN, 2 * TURN]


def test_what_continues_elsewhere_begun_output_is_never_late(world: World) -> None:
    begun = world.arrives(0.0, begun=True)
    world.arrives(4.0)
    assert world.begins(5.0) is begun


def test_a_preempted_request_is_not_late(world: World) -> None:
    seq = world.arrives(0.0)
    world.step(0.5)
    state = world.core.state
    preempt(state, seq, StepPlan())
    world.arrives(4.5)
    assert world.begins(5.0) is seq


def test_a_late_request_that_is_cancelled_counts_no_more(world: World) -> None:
    late = world.arrives(0.0)
    world.arrives(0.5)
    world.begins(1.0)
    world.arrives(1.0)
    assert world.core.mechanisms["queues"].why == "1 of 2 waiting requests are late"
    world.core.end(late)
    assert world.core.mechanisms["queues"].state == "waiting"


def test_a_late_urgent_request_still_goes_before_one_that_has_much_longer(world: World) -> None:
    late = world.arrives(0.0, ttft_slo_ms=500.0)
    world.arrives(0.0, ttft_slo_ms=10_000.0)
    assert world.begins(1.0) is late


def test_a_late_request_stays_behind_those_in_time_however_long_it_waits(world: World) -> None:
    late = world.arrives(0.0)
    for now_s in range(1, TURN):
        in_time = world.arrives(float(now_s))
        assert world.begins(now_s + 0.5) is in_time
    assert late in world.core.state.waiting


@pytest.mark.timeout(10)
def test_an_objective_far_below_a_step_costs_no_more_work_than_another(world: World) -> None:
    hopeless = world.arrives(100_000.0, ttft_slo_ms=1e-5)
    in_time = world.arrives(100_099.5, ttft_slo_ms=1000.0)
    assert [world.begins(100_100.0) for _ in range(2)] == [hopeless, in_time]
