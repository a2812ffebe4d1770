"""Promise: `--merge auto` merges an adapter only while that saves more time than it costs, and gives up when it does not."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest

from motet.policies.step.batch_state import AdmissionState, Sequence
from motet.policies.step.merge_decision import MergeCosts
from motet.policies.step.paying_merge import AGAIN, BLOCK, LOOK_S, REST_MS, RETRY_S, SETTLING, TURNS, PayingMerge
from motet.policies.times.step_record import Step
from tests.policies.support_queues import World

COSTS = MergeCosts(switch_ms=50.0, step_ms=10.0, row_ms=0.0, lora=0.1)
"""A step takes 11 ms, a merged one 10."""


class Policy:
    """A policy, and steps of an engine whose unmerged steps take `slower` times as long as merged ones."""

    def __init__(self, slower: float = 1.1, **facts: float) -> None:
        self.policy = PayingMerge(COSTS, **facts)  # type: ignore[arg-type]
        self.slower, self.now_s = slower, 0.0
        self.state = World().core.state

    def step(self, requests: dict[str, int]) -> str:
        """One step for these requests. Returns the adapter that was merged; copies are complete at once."""
        policy = self.policy
        self.now_s += 0.01
        self.state.running = [sequence(adapter) for adapter, count in requests.items() for _ in range(count)]
        if not policy.looks(self.state, self.now_s):
            return ""
        mode = policy.choose(requests, requests, 32)
        if policy.gives_up:
            policy.whole = ""
        merged, rows = mode.merged, requests[mode.merged] if mode.merged else sum(requests.values())
        policy.timed(Step(time_ms=10.0 * (1.0 if merged else self.slower), decode_rows=rows))
        policy.ran(1)
        if mode.candidate:
            policy.whole = mode.candidate
        return merged

    def steps(self, requests: dict[str, int], count: int) -> list[str]:
        return [self.step(requests) for _ in range(count)]


def sequence(adapter: str) -> Sequence:
    return Sequence(order=0, tokens=array("i", [1]), adapter=adapter)


def trusted(**facts: float) -> Policy:
    """A policy whose comparison merged steps have won."""
    case = Policy(**facts)
    case.steps({"a": 8}, 400)
    assert case.policy.gain == pytest.approx(0.1)
    return case


COMPARISON = len(TURNS) * (SETTLING + BLOCK)


def test_a_copy_is_made_once_merged_steps_would_have_saved_its_cost() -> None:
    case = Policy()
    assert case.steps({"a": 8}, 51) == [""] * 51, "a step saves 1 ms, the copy costs 50"
    assert case.policy.whole == ""
    case.step({"a": 8})
    assert case.policy.whole == "a"


def test_merged_and_unmerged_steps_are_compared_in_turn_and_faster_ones_go_on() -> None:
    case = Policy()
    case.steps({"a": 8}, 52)
    compared = case.steps({"a": 8}, COMPARISON)
    assert [merged == "a" for merged in compared] == [turn for turn in TURNS for _ in range(SETTLING + BLOCK)]
    assert case.policy.gain == pytest.approx(0.1)
    assert case.policy.mechanism.state == "on" and "10.0% faster" in case.policy.mechanism.why
    assert case.steps({"a": 8}, 100) == ["a"] * 100


def test_the_comparison_is_repeated_and_less_often_each_time() -> None:
    case = trusted()
    unmerged = [number for number, merged in enumerate(case.steps({"a": 8}, 3 * AGAIN + 1000)) if not merged]
    assert unmerged[0] < AGAIN and len(unmerged) == 2 * 2 * (SETTLING + BLOCK)
    assert unmerged[-1] - unmerged[0] > 2 * AGAIN


def test_a_prediction_that_fails_ends_merging_at_once_and_the_next_try_comes_after_twice_as_long() -> None:
    case = Policy(slower=0.98)
    case.steps({"a": 8}, 52 + COMPARISON)
    assert case.policy.gives_up and case.policy.mechanism.state == "waiting" and "-2.0% faster" in case.policy.mechanism.why
    first = case.steps({"a": 8}, 10_000)
    tries = [number for number, merged in enumerate(first) if merged]
    gaps = [b - a for a, b in pairwise(tries) if b - a > 500]
    assert tries[0] >= 100 * RETRY_S and gaps[0] == pytest.approx(2 * 100 * RETRY_S, rel=0.2)
    assert len(tries) < 0.03 * len(first)


def test_an_engine_that_gets_slower_while_merged_stops_merging_after_the_next_comparison() -> None:
    case = trusted()
    case.slower = 1.0
    case.steps({"a": 8}, AGAIN + COMPARISON)
    assert case.policy.gives_up and case.policy.merged == ""


def test_requests_of_others_may_rest_only_as_long_as_that_costs_them_less_than_it_saves() -> None:
    case = trusted()
    assert case.step({"a": 20, "b": 1}) == "a", "20 requests save 1 ms, one loses 10"
    assert case.step({"a": 20, "b": 2}) == "", "two lose as much as 20 save"
    assert case.step({"a": 9, "": 1}) == ""


def test_requests_rest_for_half_a_second_and_then_run_for_as_long() -> None:
    case = trusted()
    merged = [bool(one) for one in case.steps({"a": 30, "b": 1}, 300)]
    rest = int(REST_MS / 10.0)
    assert merged[:rest] == [True] * rest and merged[rest : rest + 40] == [False] * 40 and any(merged[rest + 60 :])
    assert sum(merged) < 0.6 * len(merged)


def test_prefixes_that_would_be_computed_again_have_to_be_saved_first() -> None:
    case = Policy(prefix_ms=100.0)
    case.steps({"a": 8}, 240)
    assert case.policy.whole == "", "the copy and two switches cost 250 ms"
    case.steps({"a": 8}, 12)
    assert case.policy.whole == "a"


def test_where_lora_costs_next_to_nothing_merging_is_seldom_considered() -> None:
    case = Policy()
    case.policy.costs = MergeCosts(switch_ms=0.0, step_ms=10.0, row_ms=0.0, lora=0.005)
    looked = []
    for _ in range(100):
        case.step({"a": 8})
        looked.append(case.policy.looks(case.state, case.now_s))
    assert sum(looked) < 0.02 / LOOK_S * 100 and case.policy.whole == ""
    assert case.policy.mechanism.why == "LoRA costs 0.5% of a step"


def test_a_policy_is_not_asked_about_mixed_requests_or_those_of_the_base_model() -> None:
    policy, state = PayingMerge(COSTS), World().core.state
    for adapters in (["a", "b"] * 8, ["b"] * 5 + ["a"] * 11, [""] * 4, []):
        state.running = [sequence(adapter) for adapter in adapters]
        assert not policy.looks(state, 0.0)
    state.running = [sequence(adapter) for adapter in ["b"] * 2 + ["a"] * 14]
    assert policy.looks(state, 0.0)


def test_another_adapter_takes_the_copy_only_when_the_first_one_is_not_merged_any_more() -> None:
    case = trusted()
    for _ in range(100):
        case.steps({"a": 8}, 10)
        case.steps({"b": 8}, 10)
    assert case.policy.whole == "a", "b never saves the cost of a copy while a is merged in between"
    case.steps({"b": 8}, 60)
    assert case.policy.whole == "b"


def test_an_answer_holds_for_as_many_steps_as_the_policy_says() -> None:
    ahead, one_by_one = Policy(), Policy()
    for requests in ({"a": 8}, {"a": 30, "b": 1}):
        for _ in range(150):
            mode = ahead.policy.choose(requests, requests, 32)
            steps = min(ahead.policy.steady(), 40)
            for _ in range(steps):
                other = one_by_one.policy.choose(requests, requests, 32)
                assert other == mode
                for case in (one_by_one, ahead):
                    rows = requests[mode.merged] if mode.merged else sum(requests.values())
                    case.policy.timed(Step(time_ms=10.0 if mode.merged else 11.0, decode_rows=rows))
                one_by_one.policy.ran(1)
            ahead.policy.ran(steps)
            for case in (ahead, one_by_one):
                case.policy.whole = mode.candidate or case.policy.whole
    assert ahead.policy.gain is not None


def test_an_empty_engine_needs_no_answer() -> None:
    state: AdmissionState[Sequence] = World().core.state
    assert not PayingMerge(COSTS).looks(state, 0.0)
