"""Promise: a request enters an engine only when it has a seat, blocks and its adapter."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from bench.rivals.queues import SizeQueues
from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.step.engine_entry import TURN, EngineEntry, Entrant, EntryLimits


def entry(seats: int = 2, slots: int = 1, max_bypass: int = 64) -> EngineEntry[Entrant]:
    kv = KvBlocks(16, 4, prefix_cache=False)
    return EngineEntry(
        EntryLimits(seats=seats, max_bypass=max_bypass), kv=kv, slots=AdapterSlots(slots, slots, asynchronous=True)
    )


def start(core: EngineEntry[Entrant], adapter: str = "", length: int = 4, **more: Any) -> Entrant:
    seq = Entrant(order=0, tokens=array("i", [1] * length), adapter=adapter, adapter_bytes=1 if adapter else 0, **more)
    core.start(seq, 0.0)
    return seq


def run(core: EngineEntry[Entrant], adapter: str, *, tokens: int = TURN, **more: Any) -> Entrant:
    """A pausable request that has entered and drawn some tokens."""
    seq = start(core, adapter, pausable=True, **more)
    core.decide(0.0, 16)
    if adapter in core.slots.loading:
        core.slots.arrived(adapter)
        core.decide(0.0, 16)
    assert seq in core.state.running
    for _ in range(tokens):
        seq.append(1)
    return seq


def test_as_many_enter_as_there_are_seats_in_their_order() -> None:
    core = entry()
    first, second, third = (start(core) for _ in range(3))
    assert core.decide(0.0, 16).entered == [first, second]
    core.end(first)
    assert core.decide(0.0, 16).entered == [third]


def test_a_request_that_lacks_blocks_is_not_overtaken() -> None:
    core = entry(seats=4)
    first, long, short = start(core), start(core, length=60), start(core)
    assert core.decide(0.0, 8).entered == [first]
    core.end(first)
    assert core.decide(0.0, 16).entered == [long]
    assert core.decide(0.0, 16).entered == [] and short in core.state.waiting


def test_a_request_enters_when_its_adapter_has_come_and_others_go_ahead_meanwhile() -> None:
    core = entry()
    cold, base = start(core, "a"), start(core)
    decided = core.decide(0.0, 16)
    assert decided.loads == [cold] and decided.entered == [base]
    core.slots.arrived("a")
    assert core.decide(0.0, 16).entered == [cold]


def test_a_request_without_a_slot_is_overtaken_a_few_times_and_then_by_base_requests_only() -> None:
    core = entry(seats=8, max_bypass=1)
    running = start(core, "a")
    core.decide(0.0, 16)
    core.slots.arrived("a")
    assert core.decide(0.0, 16).entered == [running]
    stuck, same = start(core, "b"), start(core, "a")
    assert core.decide(0.0, 16).entered == [same]
    again, base = start(core, "a"), start(core)
    assert core.decide(0.0, 16).entered == [base]
    for seq in (running, same):
        core.end(seq)
    decided = core.decide(0.0, 16)
    assert decided.loads == [stuck] and decided.evictions == [("a", 0)] and again in core.state.waiting


def test_an_unloaded_adapter_leaves_after_its_last_request() -> None:
    core = entry()
    user = start(core, "a")
    core.decide(0.0, 16)
    core.slots.arrived("a")
    core.doomed.add("a")
    assert core.sweep() == []
    core.end(user)
    assert core.sweep() == ["a"] and core.slots.digests() == []


def test_a_new_request_without_a_slot_pauses_the_adapter_with_the_fewest_requests() -> None:
    core = entry(seats=8, slots=2)
    first, second = run(core, "a"), run(core, "a")
    alone = run(core, "b")
    new = start(core, "c")
    decided = core.decide(0.0, 16)
    assert decided.pauses == [alone] and decided.evictions == [("b", 1)] and decided.loads == [new]
    core.slots.arrived("c")
    assert core.decide(0.0, 16).entered == [new]
    assert core.state.running == [first, second, new] and core.state.waiting == [alone]
    core.slots.check({"a": 2, "c": 1})


def test_a_paused_request_enters_again_when_a_slot_is_free_and_pauses_no_other() -> None:
    core = entry(seats=8)
    paused, new = run(core, "a"), start(core, "b", pausable=True)
    core.decide(0.0, 16)
    core.slots.arrived("b")
    core.decide(0.0, 16)
    for _ in range(TURN):
        new.append(1)
    assert core.decide(0.0, 16).pauses == [] and core.state.waiting == [paused]
    core.end(new)
    assert core.decide(0.0, 16).loads == [paused]
    core.slots.arrived("a")
    assert core.decide(0.0, 16).entered == [paused]


@pytest.mark.parametrize(
    "running",
    [{"tokens": TURN - 1}, {"priority": -1}],
    ids=["that has not had its turn", "that goes before it"],
)
def test_a_new_request_pauses_no_request(running: dict[str, Any]) -> None:
    core = entry(seats=8)
    run(core, "a", **running)
    start(core, "b")
    assert core.decide(0.0, 16).pauses == []


def test_a_request_that_would_not_continue_unchanged_keeps_its_adapter_in_its_slot() -> None:
    core = entry(seats=8)
    run(core, "a")
    run(core, "a").pausable = False
    start(core, "b")
    assert core.decide(0.0, 16).pauses == []


def test_of_two_adapters_the_one_that_has_drawn_fewer_tokens_is_paused() -> None:
    core = entry(seats=8, slots=2)
    run(core, "a", tokens=TURN + 1)
    younger = run(core, "b")
    start(core, "c")
    assert core.decide(0.0, 16).pauses == [younger]


def test_a_request_is_paused_only_once() -> None:
    core = entry(seats=8)
    paused = run(core, "a")
    core.end(run(core, "b"))
    assert core.decide(0.0, 16).loads == [paused]
    core.slots.arrived("a")
    core.decide(0.0, 16)
    for _ in range(TURN):
        paused.append(1)
    start(core, "c")
    assert core.decide(0.0, 16).pauses == []


def test_a_pinned_adapter_is_not_paused() -> None:
    core = entry(seats=8)
    run(core, "a")
    core.slots.pinned = ["a"]
    start(core, "b")
    assert core.decide(0.0, 16).pauses == []


def test_a_paused_request_that_was_overtaken_often_pauses_others_in_its_turn() -> None:
    core = entry(seats=8, max_bypass=2)
    paused, new = run(core, "a"), run(core, "b")
    assert core.decide(0.0, 16).pauses == [] and core.state.waiting == [paused]
    same = start(core, "b", pausable=True)
    assert core.decide(0.0, 16).entered == [same]
    late = start(core, "b")
    assert core.decide(0.0, 16).entered == []
    for _ in range(TURN):
        same.append(1)
    decided = core.decide(0.0, 16)
    assert decided.pauses == [new, same] and decided.loads == [paused] and late in core.state.waiting


def test_a_suspect_runs_alone_until_it_has_drawn_a_token() -> None:
    core = entry(seats=8)
    running = run(core, "")
    suspect, other = start(core, suspect=True), start(core)
    decided = core.decide(0.0, 16)
    assert decided.pauses == [running] and decided.entered == [suspect]
    assert core.decide(0.0, 16).entered == [], "beside a suspect"
    suspect.append(1)
    assert core.decide(0.0, 16).entered == [running, other]


def test_a_suspect_waits_for_the_end_of_a_request_that_cannot_be_paused() -> None:
    core = entry(seats=8)
    running = run(core, "")
    running.pausable = False
    suspect, other = start(core, suspect=True), start(core)
    assert core.decide(0.0, 16).entered == []
    core.end(running)
    assert core.decide(0.0, 16).entered == [suspect] and other in core.state.waiting


def test_suspects_enter_one_after_the_other() -> None:
    core = entry(seats=8)
    first, second = start(core, suspect=True, pausable=True), start(core, suspect=True)
    assert core.decide(0.0, 16).entered == [first]
    first.append(1)
    assert core.decide(0.0, 16).entered == [second] and core.state.waiting == [first]


def test_requests_that_wait_keep_their_place_when_the_engine_is_lost() -> None:
    core = entry(seats=1)
    run(core, "a")
    waiting = start(core, "a")
    core.decide(0.0, 16)
    core.end(core.state.running[0])
    core.empty_slots()
    assert core.slots.digests() == []
    assert core.decide(0.0, 16).loads == [waiting]


def test_an_adapter_that_may_be_needed_soon_takes_an_idle_ones_slot_while_nothing_waits_or_is_copied() -> None:
    core = entry(slots=1)
    core.slots.prefetch("old", 1)
    assert core.foresee("new", 1, ["old"]) is None, "another copy is under way"
    core.slots.arrived("old")
    assert core.foresee("new", 1, []) is None, "no adapter may leave for it"
    waiting = start(core, "third")
    assert core.foresee("new", 1, ["old"]) is None, "a request waits"
    core.end(waiting)
    assert core.foresee("old", 1, ["old"]) is None, "it is there"
    grant = core.foresee("new", 1, ["old"])
    assert grant is not None and grant.load and [digest for digest, _ in grant.evicted] == ["old"]
    assert core.slots.loading == {"new": grant.slot}


def test_queues_learn_when_requests_enter_and_are_paused() -> None:
    """A request of 4 tokens, with a predicted output of 4 and an adapter of one byte, costs 9 tokens of a quota."""
    queues: SizeQueues[Entrant] = SizeQueues(100.0, 1.0)
    core = EngineEntry(
        EntryLimits(seats=2), kv=KvBlocks(16, 4, prefix_cache=False), slots=AdapterSlots(1, 1, asynchronous=True), queues=queues
    )
    first = start(core, "a", pausable=True, expected_length=8)
    core.decide(1.0, 16)
    core.slots.arrived("a")
    assert core.decide(2.0, 16).entered == [first]
    assert (queues.lanes[0].used, queues.lanes[0].running) == (9.0, 1)
    for _ in range(TURN):
        first.append(1)
    start(core, "b", pausable=True, expected_length=8)
    assert core.decide(3.0, 16).pauses == [first]
    assert (queues.lanes[0].used, queues.lanes[0].running) == (0.0, 0)
    assert queues.facts[first.order].duration_s == pytest.approx(3.0 - 2.0)


def test_a_check_passes_through_the_life_of_requests_and_adapters() -> None:
    core = entry(seats=3, slots=2)
    core.check()
    base, first = run(core, "", tokens=1), run(core, "a")
    core.check()
    start(core, "b")
    core.decide(0.0, 16)
    core.check()
    core.slots.arrived("b")
    core.decide(0.0, 16)
    core.check()
    for seq in (base, first, *core.state.running[-1:]):
        core.end(seq)
    core.check()
    core.empty_slots()
    core.check()


def test_a_check_says_what_does_not_add_up() -> None:
    core = entry()
    seq = run(core, "a")
    seq.slot = -1
    with pytest.raises(AssertionError, match="a request runs without its adapter"):
        core.check()
    core = entry()
    run(core, "a")
    core.slots.release("a")
    with pytest.raises(AssertionError, match="reference counts"):
        core.check()
    core = entry(seats=1)
    run(core, "", tokens=0)
    core.state.running.append(start(core))
    with pytest.raises(AssertionError, match="more requests than seats"):
        core.check()
    core = entry()
    start(core, "a")
    core.decide(0.0, 16)
    core.state.running.append(core.state.waiting.pop())
    with pytest.raises(AssertionError, match="before its adapter has come"):
        core.check()
