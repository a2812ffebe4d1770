"""The loop that makes a plan: what is packed anew after a miss, when it ends, and what a plan promises beyond its load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from motet.policies.plan.bound import bound
from motet.policies.plan.capacity import Limits
from motet.policies.plan.fleet import CannotServe
from motet.twin.planning.check import Job
from motet.twin.planning.kinds import Outcome, Part
from motet.twin.planning.planner import (
    LEAST_CUT,
    LOAD_STEP,
    MORE_Z,
    MOST_CUT,
    MOST_LOAD,
    ROUNDS,
    Goal,
    Offer,
    bounding,
    breaking,
    make,
    tightened,
    tried,
    without,
)
from tests.twin.planning.support import (
    GOOD,
    NATIVE,
    SHORT,
    TPOT_MS,
    TTFT_MS,
    VLLM,
    Told,
    bad,
    good,
    loads,
    outcome,
    simulated,
    vllm,
)

ONE = loads([2.0, 1.0, 0.5])
"""One worker is enough."""
SEVERAL = loads([9.0] * 16)
"""About three workers."""


def test_a_plan_is_valid_in_the_twin_with_requests_that_were_not_seen() -> None:
    """Promise: a plan counts only once every worker kept its objectives in the twin."""
    made = make(SEVERAL, [VLLM], Goal(), SHORT, simulated)
    assert made.valid and len(made.results) == len(made.workers) > 1
    again = tried(made.parts, [VLLM], SHORT, simulated, 1.0)
    assert all(result.share >= 0.99 for result in again)
    assert sorted({row for worker in made.workers for row in worker.rows}) == list(range(16))


def test_without_a_trial_the_plan_is_the_laws_alone() -> None:
    made = make(ONE, [VLLM], Goal(), None, Told(lambda _, part: pytest.fail("nothing is simulated")))
    assert (len(made.workers), made.rounds, made.results, made.valid) == (1, 1, (), False)


def test_a_worker_that_misses_tpot_gets_a_smaller_share_of_its_latency_objectives() -> None:
    tells = Told(lambda call, part: bad(part, tpot_ms=TPOT_MS / 0.9) if call == 0 else good(part))
    made = make(ONE, [VLLM], Goal(), SHORT, tells)
    limits = made.kinds[0].limits.at(made.workers[0].setting)
    assert (made.rounds, made.valid) == (2, True)
    assert limits.latency == pytest.approx(0.9)
    assert (limits.busy, limits.z) == (Limits().busy, Limits().z)


@pytest.mark.parametrize(("tpot_ms", "cut"), [(TPOT_MS * 1.001, MOST_CUT), (TPOT_MS * 10, LEAST_CUT)])
def test_one_round_cuts_a_little_at_least_and_not_too_much(tpot_ms: float, cut: float) -> None:
    tells = Told(lambda call, part: bad(part, tpot_ms=tpot_ms) if call == 0 else good(part))
    made = make(ONE, [VLLM], Goal(), SHORT, tells)
    assert made.kinds[0].limits.at(made.workers[0].setting).latency == pytest.approx(cut)


def test_a_worker_that_misses_ttft_gets_less_load_and_more_room_for_chance() -> None:
    first = make(ONE, [VLLM], Goal(), None, GOOD)
    tells = Told(lambda call, part: bad(part, ttft_ms=2 * TTFT_MS) if call == 0 else good(part))
    made = make(ONE, [VLLM], Goal(), SHORT, tells)
    limits = made.kinds[0].limits.at(first.workers[0].setting)
    assert limits.busy == pytest.approx(first.workers[0].busy * MOST_CUT)
    assert limits.z == pytest.approx(Limits().z * MORE_Z)
    assert limits.latency == 1.0


def test_workers_that_miss_alike_tighten_the_limits_of_their_rank_once() -> None:
    made = make(SEVERAL, [VLLM], Goal(), None, GOOD)
    run = Told(lambda _, part: bad(part, ttft_ms=2 * TTFT_MS))
    made = replace(made, results=tuple(tried(made.parts, [VLLM], SHORT, run)))
    after = tightened(made, made.kinds)[0].limits.at(made.workers[0].setting)
    assert len(made.workers) > 1
    assert after.z == pytest.approx(Limits().z * MORE_Z)
    assert after.busy == pytest.approx(min(worker.busy for worker in made.workers) * MOST_CUT)


@pytest.mark.parametrize(("missed", "rounds"), [(5, 1), (6, 2)])
def test_a_worker_that_barely_kept_its_objectives_gets_more_room(missed: int, rounds: int) -> None:
    """Promise: a plan does not rest on the luck of one trial. Of 1,000 requests 10 may miss; half of these are enough."""

    def says(call: int, part: Part) -> Outcome:
        return outcome([1000] * len(part.loads), attained=[1000 - missed * (call == 0)] * len(part.loads))

    made = make(ONE, [VLLM], Goal(), SHORT, Told(says))
    assert (made.rounds, made.sure) == (rounds, True)


def test_a_plan_that_kept_its_objectives_is_valid_even_if_it_is_never_sure() -> None:
    run = Told(lambda _, part: outcome([1000] * len(part.loads), attained=[993] * len(part.loads)))
    made = make(ONE, [VLLM], Goal(), SHORT, run)
    assert made.rounds > 1 and made.valid and not made.sure


def test_after_six_rounds_the_last_plan_is_given_as_it_is() -> None:
    tells = Told(lambda _, part: bad(part, tpot_ms=TPOT_MS * 1.01))
    made = make(ONE, [VLLM], Goal(), SHORT, tells)
    assert len(tells.calls) == made.rounds == ROUNDS
    assert not made.valid


def test_where_tighter_limits_leave_no_plan_the_one_before_is_given() -> None:
    """A worker that is full by the law, and the only one: with 2% less it cannot take the load."""
    one, eight, fits = Offer(kind=vllm(), most=1), loads([1.0] * 8), 1.0
    while len(make(eight.faster(1.01 * fits), [VLLM], Goal(), None, GOOD).workers) == 1:
        fits *= 1.01
    made = make(eight.faster(fits), [one], Goal(), SHORT, Told(lambda _, part: bad(part)))
    assert made.rounds == 1 and made.results and not made.valid


def test_an_adapter_that_no_worker_takes_is_named() -> None:
    with pytest.raises(CannotServe, match="the adapter a1 has rank 64; the largest that a worker takes is 32"):
        make(loads([1.0, 1.0], [8, 64]), [VLLM], Goal(), None, GOOD)


def test_headroom_is_planned_and_simulated_as_load() -> None:
    tells = Told(lambda _, part: good(part))
    made = make(ONE, [VLLM], Goal(headroom=0.15), SHORT, tells)
    assert made.loads.rate == pytest.approx(1.15 * ONE.rate)
    assert tells.calls[0][0].parts[0].loads.rate.sum() == pytest.approx(1.15 * 3.5)


def test_the_least_cost_takes_another_kind_than_the_fewest_workers() -> None:
    """Two kinds that differ in price: `workers` counts, `cost` pays."""
    offers = [VLLM, Offer(kind=vllm(seats=64), cost=0.1)]
    fewest = make(SEVERAL, offers, Goal(), None, GOOD)
    cheapest = make(SEVERAL, offers, Goal(objective="cost"), None, GOOD)
    assert {worker.kind for worker in cheapest.workers} == {1}
    assert cheapest.cost == pytest.approx(0.1 * len(cheapest.workers)) and cheapest.cost < fewest.cost
    assert len(fewest.workers) <= len(cheapest.workers)


def test_the_lowest_latencies_use_every_worker_that_there_is() -> None:
    made = make(ONE, [Offer(kind=vllm(), most=5)], Goal(objective="latency"), SHORT, simulated)
    assert len(made.workers) == 5 and made.valid
    assert max(worker.tpot_ms for worker in made.workers) < make(ONE, [VLLM], Goal(), None, GOOD).workers[0].tpot_ms


# ---- workers that are lost


@pytest.mark.parametrize("lost", [1, 2])
def test_any_workers_that_a_plan_survives_may_be_gone_by_the_law(lost: int) -> None:
    plain = make(SEVERAL, [VLLM], Goal(), None, GOOD)
    made = make(SEVERAL, [VLLM], Goal(survive=lost), SHORT, GOOD)
    assert made.valid and made.left is not None
    assert len(made.workers) >= len(plain.workers) + lost
    assert len(made.left.workers) == len(made.workers) - lost
    served = sum(float((made.loads.rate[list(one.rows)] * np.array(one.shares)).sum()) for one in made.left.workers)
    assert served == pytest.approx(made.loads.rate.sum())
    assert max(worker.busy for worker in made.left.workers) < 1.0


def test_a_plan_that_survives_is_simulated_without_its_most_loaded_workers() -> None:
    made = make(SEVERAL, [VLLM], Goal(survive=1), SHORT, simulated)
    assert made.valid and made.left is not None
    assert all(result.share >= 0.99 for result in made.left.results)
    assert {row for worker in made.left.workers for row in worker.rows} == set(range(16))


def test_where_the_workers_that_are_left_miss_the_plan_is_packed_again() -> None:
    tells = Told(lambda call, part: bad(part, ttft_ms=2 * TTFT_MS) if call == 1 else good(part))
    made = make(SEVERAL, [VLLM], Goal(survive=1), SHORT, tells)
    assert (made.rounds, made.valid, len(tells.calls)) == (2, True, 4)


def test_where_the_workers_that_are_left_barely_keep_their_objectives_the_plan_is_packed_again() -> None:
    def says(call: int, part: Part) -> Outcome:
        return outcome([1000] * len(part.loads), attained=[1000 - 7 * (call == 1)] * len(part.loads))

    made = make(SEVERAL, [VLLM], Goal(survive=1), SHORT, Told(says))
    assert (made.rounds, made.sure) == (2, True)


def test_one_adapter_is_on_as_many_workers_as_are_needed_when_one_is_lost() -> None:
    made = make(loads([1.0]), [VLLM], Goal(survive=1), SHORT, GOOD)
    assert [worker.rows for worker in made.workers] == [(0,), (0,)]
    assert [worker.shares for worker in made.workers] == [(0.5,), (0.5,)]
    assert made.left is not None and made.left.workers[0].shares == (1.0,)


def test_a_loss_that_the_allowed_workers_cannot_survive_is_said() -> None:
    with pytest.raises(CannotServe, match="2 workers are allowed; the load cannot do without 2 of them"):
        make(ONE, [Offer(kind=vllm(), most=2)], Goal(survive=2), None, GOOD)


def test_without_some_workers_the_most_loaded_are_gone() -> None:
    """One worker serves 40 requests/s of rank 8, the other 30 of rank 32 and, when the first is gone, both."""
    made = make(loads([40.0, 30.0], [8, 32]), [VLLM], Goal(), None, GOOD)
    lighter = next(worker for worker in made.workers if worker.rows == (1,))
    (left,) = without(made, 1).workers
    assert (left.setting, left.rows, left.shares) == (lighter.setting, (0, 1), (1.0, 1.0))
    assert without(made, 0).workers == made.workers


# ---- native workers


@pytest.mark.parametrize("fewer", [0, 1, 2])
def test_native_workers_are_as_few_as_the_twin_allows(fewer: int) -> None:
    """They share the load of all, so margins of single workers are tried away."""
    many = loads([0.55] * 80)
    by_law = len(make(many, [NATIVE], Goal(), None, GOOD).workers)

    def enough(jobs: Sequence[Job]) -> list[list[Outcome]]:
        return [[good(part) if len(job.parts) >= by_law - fewer else bad(part) for part in job.parts] for job in jobs]

    made = make(many, [NATIVE], Goal(), SHORT, enough)
    assert by_law > 4 and made.valid
    assert len(made.workers) == by_law - fewer


@pytest.mark.parametrize("cost", [0.4, 3.0])
def test_the_fewest_native_workers_are_found_whatever_one_costs(cost: float) -> None:
    """The bound from which they are looked for counts workers, not their cost."""
    many, offer = loads([0.55] * 80), replace(NATIVE, cost=cost)
    by_law = len(make(many, [offer], Goal(objective="cost"), None, GOOD).workers)
    made = make(many, [offer], Goal(objective="cost"), SHORT, GOOD)
    assert len(made.workers) == bound(many.demand, bounding([offer], Goal())).least < by_law
    assert made.cost == pytest.approx(cost * len(made.workers))


def test_native_workers_have_one_setting() -> None:
    made = make(loads([0.5] * 30, [8, 16, 128] * 10), [NATIVE], Goal(), None, GOOD)
    assert len(made.workers) > 1
    assert len({worker.setting for worker in made.workers}) == 1


# ---- where a plan breaks


def up_to(most: float) -> Told:
    """Workers with more requests per second than this miss TPOT."""
    return Told(lambda _, part: bad(part, tpot_ms=2 * TPOT_MS) if part.loads.rate.sum() > most else good(part))


def test_the_load_at_which_a_plan_breaks_is_found() -> None:
    parts = [(0, Part(setting=0, loads=loads([4.0]))), (0, Part(setting=0, loads=loads([5.0])))]
    found = breaking(parts, [VLLM], SHORT, up_to(5.0 * 1.2))
    assert 1.2 - LOAD_STEP <= found.holds_to <= 1.2
    assert (found.worker, found.missed) == (1, "TPOT")


def test_a_plan_that_does_not_break_says_how_far_it_was_looked() -> None:
    parts = [(0, Part(setting=0, loads=loads([4.0])))]
    tells = up_to(1000.0)
    found = breaking(parts, [VLLM], SHORT, tells)
    assert (found.holds_to, found.worker, found.missed) == (MOST_LOAD, None, "")
    assert len(tells.calls) == 5


def test_what_breaks_first_is_the_worker_with_the_fewest_requests_in_time() -> None:
    def says(_: int, part: Part) -> Outcome:
        too_much = max(0.0, float(part.loads.rate.sum()) - 4.3)
        return outcome([1000], attained=[round(1000 - 100 * (1 + too_much) * (too_much > 0) * part.loads.rank[0] / 8)])

    parts = [(0, Part(setting=0, loads=loads([4.2], [rank]))) for rank in (8, 16)]
    found = breaking(parts, [VLLM], SHORT, Told(says))
    assert (found.worker, found.missed) == (1, "TTFT")
