"""Promise: a worker merges the adapter that dominates, unmerges when it no longer does, and lets no request starve."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.policies.step.merge_decision import (
    MAX_KNOWN,
    MergeConfig,
    MergeCosts,
    Merging,
    Mode,
    displaced,
    repay,
    transfer,
)

COSTS = MergeCosts(switch_ms=50.0, step_ms=40.0, row_ms=0.1, lora=0.389)
counts = st.dictionaries(st.sampled_from(("", "a", "b", "c")), st.integers(1, 20), min_size=1)


def merging(**config: float) -> Merging:
    return Merging(COSTS, MergeConfig(**config))  # type: ignore[arg-type]


def step(one: Merging, here: dict[str, int], most: int = 1000) -> Mode:
    mode = one.choose(here, here, most)
    one.ran(1)
    return mode


def test_an_adapter_above_alpha_is_merged_and_below_beta_unmerged() -> None:
    one = merging(alpha=0.8, beta=0.6)
    assert step(one, {"a": 8, "b": 2}) == Mode(), "8 of 10 are not more than 0.8"
    assert step(one, {"a": 9, "b": 1}) == Mode("a", frozenset("a"))
    assert step(one, {"a": 6, "b": 4}).merged == "a", "between the thresholds nothing changes"
    assert step(one, {"a": 5, "b": 5}) == Mode()


def test_an_adapter_whose_requests_have_all_ended_is_unmerged() -> None:
    one = merging()
    assert step(one, {"a": 9}).merged == "a"
    assert step(one, {"b": 1, "c": 1}) == Mode()


def test_requests_that_wait_for_a_seat_count_for_their_adapter() -> None:
    one = merging(alpha=0.8)
    assert one.choose({"a": 5, "b": 5}, {"a": 12, "b": 5}, 10).merged == "a", "merged, the step would be full"


def test_the_base_model_is_never_merged() -> None:
    one = merging()
    assert step(one, {"": 10}) == Mode() and step(one, {"": 10, "a": 1}) == Mode()


def test_displaced_requests_starve_for_a_while_and_are_served_first_then() -> None:
    one = merging(credit=20.0, starving=35.0, normal=25.0, alpha=0.8)
    here = {"a": 9, "b": 1}
    modes = [step(one, here) for _ in range(200)]
    rests = [index for index, mode in enumerate(modes) if mode.merged == "a"]
    served = [index for index, mode in enumerate(modes) if mode.first == frozenset("b")]
    assert len(rests) > 50 and len(served) > 50
    assert all(modes[index].only is None for index in served), "the others are computed too"
    gaps = [index for index, mode in enumerate(modes) if mode.only is None]
    longest = max(b - a for a, b in zip([0, *gaps], gaps, strict=False))
    assert longest <= 17, "b rests for as many steps as it takes to starve, one credit each"


@pytest.mark.parametrize("credit", [40.0, 100_000.0])
@pytest.mark.parametrize("others", [1, 4])
def test_no_request_rests_longer_than_allowed_whatever_the_credits_say(credit: float, others: int) -> None:
    """A merged step of 30 requests takes 43 ms."""
    one = merging(alpha=0.5, beta=0.1, lowest=0.1, credit=credit, starving=1.5 * credit, normal=credit, rest_ms=500.0)
    here = {"a": 30, "b": others}
    modes = [step(one, here) for _ in range(2000)]
    rests = [mode.merged == "a" for mode in modes]
    longest = max(len(run) for run in "".join("m" if rest else " " for rest in rests).split())
    assert longest * COSTS.merged_ms(30) < 500.0 + COSTS.merged_ms(30)
    assert 0.3 < sum(rests) / len(rests) < 0.7, "resting and being served take turns"


def test_steps_after_a_mode_with_nothing_to_compute_count_as_no_rest() -> None:
    one = merging(rest_ms=500.0)
    assert step(one, {"a": 9}).merged == "a"
    one.unmerge()
    one.ran(1000)
    assert step(one, {"a": 9}).merged == "a"


def test_an_adapter_alone_is_merged_for_any_time() -> None:
    one = merging(rest_ms=500.0)
    assert {step(one, {"a": 9}).merged for _ in range(500)} == {"a"}


def test_the_adapter_that_may_be_merged_joins_first_so_that_few_requests_rest() -> None:
    one = merging(alpha=0.9, drain=0.6, lowest=0.9)
    assert step(one, {"a": 5, "b": 5}) == Mode(), "its share is below `drain`"
    assert step(one, {"a": 7, "b": 3}) == Mode(first=frozenset("a"))
    assert step(one, {"a": 10, "b": 1}).merged == "a"


def test_requests_that_the_adapter_overtakes_meanwhile_get_its_credits() -> None:
    one = merging(alpha=2.0, highest=2.0, drain=0.6)
    for _ in range(10):
        assert one.choose({"a": 6, "b": 4}, {"a": 8, "b": 2}, 10).first == {"a"}
        one.ran(1)
    assert one.credits["b"] > one.config.credit > one.credits["a"]


def test_an_adapter_that_has_paid_all_its_credits_is_merged_again_later() -> None:
    """No adapter starves, since each of the others got few of the paid credits."""
    one = merging(alpha=0.5, beta=0.1, lowest=0.1, credit=40.0, starving=60.0, normal=40.0)
    here = {"a": 30} | {f"other-{i}": 1 for i in range(5)}
    merged = [step(one, here).merged == "a" for _ in range(2000)]
    assert sum(merged[1000:]) > 100


def test_an_adapter_that_cannot_pay_is_not_merged() -> None:
    one = merging(credit=3.0, alpha=0.5, beta=0.1, starving=1000.0)
    assert step(one, {"a": 8, "b": 4}) == Mode(), "one step would cost 4 credits"
    assert step(one, {"a": 8, "b": 2}).merged == "a"
    assert step(one, {"a": 8, "b": 2}) == Mode(), "1 is left, and the next step costs 2"


def test_an_adapter_with_requests_is_known_however_many_others_have_come() -> None:
    """The first adapter is the oldest one, and the request that goes first is for an adapter that is still being copied."""
    one = merging()
    step(one, {"a": 1})
    step(one, {f"other-{i}": 1 for i in range(MAX_KNOWN - 1)}, most=MAX_KNOWN)
    one.choose({"copied": 1}, {"a": 1}, 10)
    one.ran(1)
    assert {"a", "copied"} <= one.credits.keys() and len(one.credits) == MAX_KNOWN


def test_an_adapter_that_was_forgotten_comes_back_as_a_new_one() -> None:
    """It could not pay when it was forgotten. Back again, it pays for others before it has the most requests itself."""
    one = merging(credit=10.0, starving=1000.0, normal=1000.0, alpha=0.6, drain=0.5)
    assert one.choose({"a": 1, "b": 20}, {"a": 21, "b": 20}, 21) == Mode(), "a step would cost 20 credits"
    one.ran(1)
    step(one, {f"other-{i}": 1 for i in range(MAX_KNOWN)}, most=MAX_KNOWN)
    assert not {"a", "b"} & one.credits.keys()
    one.choose({"a": 1, "c": 8, "d": 5}, {"a": 1, "c": 8}, 14)
    one.ran(1)
    assert 1.0 < one.credits["a"] < 10.0
    assert step(one, {"a": 9, "b": 1}).merged == "a", "that costs 1 credit"


def test_a_starving_adapter_that_was_forgotten_starves_no_more() -> None:
    one = merging(credit=20.0, starving=35.0, normal=25.0, alpha=0.8)
    for _ in range(17):
        step(one, {"a": 9, "b": 1})
    assert step(one, {"a": 9, "b": 1}).first == {"b"}
    step(one, {f"other-{i}": 1 for i in range(MAX_KNOWN)}, most=MAX_KNOWN)
    assert step(one, {"a": 9, "b": 1}).merged == "a"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=60), st.sampled_from((5.0, 100.0)))
def test_credits_move_and_are_never_made(history: list[tuple[dict[str, int], dict[str, int]]], credit: float) -> None:
    one = merging(credit=credit, starving=3 * credit, normal=2 * credit, alpha=0.6, period=5)
    for here, waiting in history:
        whole = {name: here.get(name, 0) + waiting.get(name, 0) for name in here | waiting}
        mode = one.choose(here, whole, sum(here.values()))
        assert mode.only is None or (mode.only and mode.only <= whole.keys()), "there is something to compute"
        assert not mode.merged or mode.only == {mode.merged}
        config = one.config
        assert config.lowest <= one.alpha <= config.highest and config.lowest_beta <= one.beta <= config.highest
        one.ran(1)
        assert sum(one.credits.values()) == pytest.approx(credit * len(one.credits))


@given(counts, st.sets(st.sampled_from(("", "a", "b", "c")), min_size=1), st.floats(0.5, 20.0))
def test_relief_moves_credits_faster_and_makes_none(here: dict[str, int], starving: set[str], relief: float) -> None:
    credits = {"": 0.0, "a": 90.0, "b": 10.0, "c": 100.0}
    moves = repay(starving, here, credits, 50.0, relief)
    assert sum(moves.values()) == pytest.approx(0.0)
    owed = relief * sum(here.get(name, 0) for name in starving if credits[name] > 50.0)
    assert sum(move for move in moves.values() if move > 0) <= min(owed, 90.0) + 1e-9


def test_an_adapter_with_just_its_fair_credits_gives_none_back() -> None:
    """The rich one gives a credit for each of its two requests."""
    credits, here = {"rich": 150.0, "fair": 100.0, "poor": 60.0}, {"rich": 2, "fair": 5, "poor": 1}
    assert repay(here, here, credits, 100.0) == {"rich": -2.0, "poor": 2.0}


@given(counts, counts)
def test_a_transfer_pays_every_displaced_request_one_credit(batch: dict[str, int], fcfs: dict[str, int]) -> None:
    moves = transfer(batch, fcfs)
    assert sum(moves.values()) == pytest.approx(0.0)
    if moves:
        assert sum(max(0, fcfs[name] - batch.get(name, 0)) for name in fcfs) == displaced(batch, fcfs)
        assert all(moves[name] >= 0 or name in batch for name in moves)


@settings(deadline=None)
@given(counts, counts, st.sampled_from((20.0, 200.0)), st.sampled_from((300.0, inf)), st.sampled_from((0.5, inf)))
def test_as_many_steps_as_the_policy_says_are_chosen_alike(
    here: dict[str, int], waiting: dict[str, int], credit: float, rest_ms: float, drain: float
) -> None:
    whole = {name: here.get(name, 0) + waiting.get(name, 0) for name in here | waiting}
    most = sum(here.values())
    one = merging(credit=credit, starving=3 * credit, normal=2 * credit, period=30, rest_ms=rest_ms, drain=drain)
    for _ in range(4):
        mode = one.choose(here, whole, most)
        steps = one.steady()
        one.ran(1)
        for _ in range(steps - 1):
            assert one.choose(here, whole, most) == mode
            one.ran(1)


def test_thresholds_follow_what_would_have_been_faster() -> None:
    """Algorithm 2. Of 10 requests, 8 of one adapter: merged steps take 40.8 ms for 8, unmerged ones 56.9 ms for 10."""
    one = merging(alpha=0.9, beta=0.5, period=50, decrement=0.02)
    for _ in range(51):
        assert step(one, {"a": 8, "b": 2}) == Mode()
    assert one.alpha == pytest.approx(0.88), "8 / 40.8 ms is more than 10 / 56.9 ms"
    for _ in range(300):
        step(one, {"a": 8, "b": 2})
    assert one.merged == "a", "the threshold fell below the adapter's share"
    rare = merging(alpha=0.7, period=50, multiply=1.1)
    for _ in range(51):
        step(rare, {"a": 6, "b": 4})
    assert rare.alpha == pytest.approx(0.77), "6 / 40.6 ms is less than 10 / 56.9 ms"


def test_the_threshold_for_unmerging_follows_what_would_have_been_faster() -> None:
    """Algorithm 2 for beta: as for alpha, but the other mode, unmerged steps, pays for the switch.

    Of 10 requests, 9 of one adapter: merged steps take 40.9 ms for 9, unmerged ones 56.9 ms for 10. With 6 of 10 it is 40.6 ms
    for 6. Then unmerged steps win, unless a switch of 2,000 ms makes 50 of them 40 ms longer each.
    """

    def after_a_period(biggest: int, switch_ms: float) -> Merging:
        one = Merging(
            MergeCosts(switch_ms=switch_ms, step_ms=40.0, row_ms=0.1, lora=0.389),
            MergeConfig(alpha=0.5, beta=0.5, period=50, decrement=0.02, multiply=1.1),
        )
        for _ in range(51):
            assert step(one, {"a": biggest, "b": 10 - biggest}).merged == "a"
        assert one.alpha == 0.5, "it belongs to the other mode"
        return one

    assert after_a_period(9, switch_ms=0.0).beta == pytest.approx(0.48), "9 / 40.9 ms is more than 10 / 56.9 ms"
    assert after_a_period(6, switch_ms=0.0).beta == pytest.approx(0.55), "6 / 40.6 ms is less than 10 / 56.9 ms"
    assert after_a_period(6, switch_ms=2000.0).beta == pytest.approx(0.48), "6 / 40.6 ms is more than 10 / 96.9 ms"


def test_an_adapter_is_unmerged_sooner_once_beta_has_risen() -> None:
    one = merging(alpha=0.5, beta=0.55, period=50, multiply=1.1)
    modes = [step(one, {"a": 6, "b": 4}).merged for _ in range(60)]
    assert modes[:50] == ["a"] * 50 and modes[50] == "", "0.6 is below 0.55 * 1.1"


def test_a_switch_that_does_not_pay_back_within_the_period_counts_against_merging() -> None:
    one = Merging(MergeCosts(switch_ms=10_000.0, step_ms=40.0, row_ms=0.1, lora=0.389), MergeConfig(alpha=0.9, period=50))
    for _ in range(51):
        step(one, {"a": 8, "b": 2})
    assert one.alpha > 0.9


# ---- where a copy of the weights is made beside the steps


def wanting(**config: float) -> Merging:
    """A policy without a complete copy, for which a copy of "a" would have paid by now."""
    one = merging(**config)
    one.whole = ""
    for _ in range(20):
        step(one, {"a": 9, "b": 1})
    return one


def test_steps_stay_unmerged_until_the_copy_is_whole_and_no_credits_move_meanwhile() -> None:
    one = wanting(alpha=0.8)
    assert step(one, {"a": 9, "b": 1}) == Mode(candidate="a")
    assert one.credits["a"] == one.credits["b"]
    one.whole = "c"
    assert step(one, {"a": 9, "b": 1}) == Mode(candidate="a"), "the copy is another adapter's"
    one.whole = "a"
    assert step(one, {"a": 9, "b": 1}) == Mode("a", frozenset("a"))


def test_a_copy_that_was_given_up_is_wanted_again() -> None:
    one = wanting()
    one.whole = "a"
    assert step(one, {"a": 9}).merged == "a"
    one.unmerge()
    one.whole = ""
    candidates = [step(one, {"a": 9}).candidate for _ in range(20)]
    assert candidates[-1] == "a"


def test_no_copy_is_made_before_merged_steps_would_have_saved_what_it_costs() -> None:
    """9 of 10 requests are for one adapter: merged steps of 9 take 40.9 ms, unmerged ones of 10 take 56.9 ms."""
    one = merging(alpha=0.8)
    one.whole = ""
    candidates = [step(one, {"a": 9, "b": 1}).candidate for _ in range(20)]
    saved_ms = 56.9 * 9 / 10 - 40.9
    assert candidates.index("a") == int(COSTS.switch_ms / saved_ms) + 1
    assert set(candidates[candidates.index("a") :]) == {"a"}


def test_no_copy_is_made_when_resting_requests_would_cost_more_seats_than_lora_costs_time() -> None:
    """Of 32 seats 4 are taken by other adapters: merged steps would compute 28 requests in 42.8 ms instead of 32 in 47.5 ms."""
    one = Merging(MergeCosts(switch_ms=0.0, step_ms=40.0, row_ms=0.1, lora=0.1), MergeConfig(alpha=0.8))
    one.whole = ""
    for _ in range(300):
        mode = one.choose({"a": 28, "b": 4}, {"a": 44, "b": 4}, 32)
        assert mode == Mode()
        one.ran(1)


def test_a_copy_that_takes_longer_than_a_period_saves_is_made_once_the_saved_time_exceeds_it() -> None:
    """Merged steps of 9 requests would take 40.9 ms and unmerged ones take 56.8 ms, so 2 s have been saved after 126 steps."""
    one = Merging(
        MergeCosts(switch_ms=2000.0, step_ms=40.0, row_ms=0.1, lora=0.389), MergeConfig(alpha=1.0, highest=1.0, period=50)
    )
    one.whole = ""
    candidates = [step(one, {"a": 9}).candidate for _ in range(400)]
    assert candidates.index("a") == 126
    assert set(candidates[126:]) == {"a"}, "it goes on to be wanted until it is whole"
    one.whole = "a"
    assert step(one, {"a": 9}).merged == "a"


def test_time_that_another_adapter_ended_does_not_pay_for_a_copy() -> None:
    one = Merging(
        MergeCosts(switch_ms=2000.0, step_ms=40.0, row_ms=0.1, lora=0.389), MergeConfig(alpha=1.0, highest=1.0, period=50)
    )
    one.whole = ""
    assert {step(one, {"ab"[i // 100 % 2]: 9}).candidate for i in range(1000)} == {""}


def test_an_adapter_stays_merged_only_while_merged_steps_gain_so_much() -> None:
    """LoRA costs 10%.

    With 32 requests, merged steps win if the adapter leaves out 2 (30 at 1.10 against 32), and lose if it leaves out 4 (28
    against 32).
    """
    one = Merging(
        MergeCosts(switch_ms=0.0, step_ms=40.0, row_ms=0.0, lora=0.1), MergeConfig(alpha=0.8, beta=0.5, min_speedup=0.01)
    )
    one.whole = "a"
    for others, merged in ((4, ""), (2, "a"), (4, ""), (2, "a")):
        here = {"a": 32 - others, "b": others}
        assert one.choose(here, here, 32).merged == merged
        one.ran(1)
