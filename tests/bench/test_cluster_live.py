"""The parts of the bench that compares policies on live workers: its steps, its requests, its order of policies, its twin."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bench.cluster_live import PACE, listed_policies, rank_order, told_apart
from bench.cluster_live_parts import MOST_TOKENS, MixedSteps, Outcome, Setting, popularity_and_lengths, predicted, request_for
from bench.paced import MOST_BEHIND_S, VARIABLE, Pace, Schedule
from motet.policies.times.step_record import Step
from motet.shared.model import PerfModel, Slo
from motet.twin.events import PS_PER_MS
from motet.twin.steps import Batch

SHARES, LENGTHS = popularity_and_lengths(None, 10)
SETTING = Setting(workers=2, seats=8, pace=PACE, rate=6.0, requests=60, seed=3, shares=SHARES, lengths=LENGTHS)
PERF = PerfModel(
    prefill_base_ms=1.0,
    prefill_token_ms=0.5,
    prefill_lora_ms=0.01,
    decode_base_ms=10.0,
    decode_row_ms=2.0,
    decode_lora_ms=0.1,
    load_base_ms=0.0,
    load_ms_per_mib=0.0,
)


def test_a_paced_step_takes_a_pass_and_what_its_prompts_rows_and_ranks_add() -> None:
    pace = Pace(step_ms=10.0, token_ms=2.0, row_ms=0.5, rank_ms=0.01)
    step = Step(decode_rows=4, decode_rank_sum=100, prefill_requests=1, prefill_tokens=20, prefill_rank_sum=50)
    assert pace.takes_ms(step) == pytest.approx(10.0 + 2.0 * 20 + 0.5 * 4 + 0.01 * 150)


def test_a_step_that_ended_late_is_followed_by_shorter_ones_until_the_worker_is_idle() -> None:
    schedule = Schedule()
    assert schedule.end_s(10.0, 0.5) == 10.5
    schedule.ended(10.6, busy=True)
    assert schedule.end_s(10.6, 0.5) == 11.0
    schedule.ended(11.1, busy=False)
    assert schedule.end_s(11.15, 0.5) == 11.65


def test_a_delay_that_is_too_long_is_made_up_in_part() -> None:
    schedule = Schedule()
    schedule.end_s(0.0, 0.5)
    schedule.ended(2.0, busy=True)
    assert schedule.end_s(2.0, 0.5) == pytest.approx(2.0 - MOST_BEHIND_S + 0.5)


def test_a_pace_reaches_a_process_through_a_variable_and_what_is_not_given_takes_no_time() -> None:
    assert Pace.of(PACE.variables()) == PACE
    assert Pace.of({VARIABLE: '{"step_ms": 7}'}) == Pace(step_ms=7.0)
    with pytest.raises(msgspec.ValidationError, match="token_ms"):
        Pace.of({VARIABLE: '{"step_ms": 7, "token_ms": "long"}'})


def test_a_simulated_prefill_that_is_alone_takes_a_pass_over_the_weights_too() -> None:
    steps = MixedSteps(PERF)
    alone = Batch(prefill_requests=1, prefill_tokens=8, prefill_rank_sum=16)
    beside = Batch(prefill_requests=1, prefill_tokens=8, prefill_rank_sum=16, decode_rows=3, decode_rank_sum=40)
    assert steps.fixed_ps(alone) / PS_PER_MS == pytest.approx(10.0 + 1.0 + 4.0 + 0.16)
    assert steps.fixed_ps(beside) / PS_PER_MS == pytest.approx(10.0 + 6.0 + 4.0 + 1.0 + 4.0 + 0.16)


def test_each_round_and_each_seed_has_requests_of_its_own_and_the_same_ones_again() -> None:
    first, again, next_round = SETTING.draw(0, 30.0), SETTING.draw(0, 30.0), SETTING.draw(1, 30.0)
    other = replace(SETTING, seed=4).draw(0, 30.0)
    assert first.arrival_s.tolist() == again.arrival_s.tolist()
    assert first.arrival_s.tolist() != next_round.arrival_s.tolist() and first.arrival_s.tolist() != other.arrival_s.tolist()
    assert len(first) == SETTING.requests and first.output_tokens.max() <= MOST_TOKENS
    assert first.arrival_s[-1] == pytest.approx(SETTING.requests / SETTING.rate, rel=0.5)


def test_of_five_adapters_that_are_neighbours_in_popularity_each_has_another_rank() -> None:
    assert sorted(SETTING.ranks[:5]) == sorted(SETTING.ranks[5:]) == [8, 16, 32, 64, 128]


def test_what_a_client_asks_for_does_not_say_how_long_the_answer_will_be() -> None:
    short, long = (
        json.loads(request_for(0.0, "a", 4, tokens, Slo()).wire.split(b"\r\n\r\n", 1)[1]) | {"prompt": [], "seed": 0}
        for tokens in (3, 100)
    )
    assert short == long and short["max_tokens"] == MOST_TOKENS


def kept(*rounds: str) -> Outcome:
    """An outcome of requests that kept their objective (+) or did not (-)."""
    one = np.array([sign == "+" for sign in "".join(rounds)])
    return Outcome(kept=one, tpot_ms=np.array([10.0]), ttft_ms=np.array([1.0]))


def test_policies_are_told_apart_when_they_differ_by_more_than_two_standard_errors_on_the_same_requests() -> None:
    live = {"best": kept("+" * 20), "near": kept("+" * 17, "-" * 3), "worst": kept("+" * 10, "-" * 10)}
    assert told_apart(live) == [("best", "worst"), ("near", "worst")]


def test_the_twins_order_is_alike_opposite_or_in_between() -> None:
    live = {"a": kept("+++"), "b": kept("++-"), "c": kept("+--")}
    reverse = {"a": live["c"], "b": live["b"], "c": live["a"]}
    swapped = {"a": live["a"], "b": live["c"], "c": live["b"]}
    pairs = [("a", "b"), ("a", "c"), ("b", "c")]
    assert rank_order(live, live, pairs) == 1.0
    assert rank_order(live, reverse, pairs) == -1.0
    assert rank_order(live, swapped, pairs) == pytest.approx(1 / 3)


def test_the_twin_answers_every_request_and_filling_one_worker_first_is_slower() -> None:
    workload = SETTING.draw(0, 30.0)
    idle, first = (predicted(SETTING, [PERF, PERF], policy, workload) for policy in ("most-idle", "first-fit"))
    assert idle.failed == first.failed == 0 and len(idle.kept) == len(workload)
    assert float(idle.tpot_ms.mean()) < float(first.tpot_ms.mean())


def test_the_rounds_of_a_policy_count_together() -> None:
    both = Outcome.together([kept("+++-"), kept("--")])
    assert both.attainment == 0.5 and len(both.tpot_ms) == 2


def test_a_policy_that_nobody_knows_is_refused_before_anything_is_measured() -> None:
    assert listed_policies("motet,most-idle,motet without shared prefills") == (
        "motet",
        "most-idle",
        "motet without shared prefills",
    )
    with pytest.raises(SystemExit, match="--policies: fastest is none of motet"):
        listed_policies("motet,most-idle,fastest")
    with pytest.raises(SystemExit, match="--policies: most-idle must be among them"):
        listed_policies("motet,random")
