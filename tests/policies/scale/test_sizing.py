"""Promise: the number of workers rises at once when it must, falls slowly, and does neither for a reason that is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.policies.scale.rate_forecast import RateForecast, Rates
from motet.policies.scale.sizing import Decision, Look, Need, Sizer, SizingConfig

EACH = 10.0  # requests/s of a worker
LEAD_S = 120.0
CONFIG = SizingConfig(least_workers=1, most_workers=20, down_s=300.0, ttft_slo_ms=1000.0)
TO_ZERO = replace(CONFIG, least_workers=0, idle_s=600.0)


def needed(rates: Rates) -> Need:
    return Need(math.ceil(rates.requests_s / EACH), "compute")


def hopeless(rates: Rates) -> Need:
    return Need(100, "TPOT", "an idle worker needs 33.5 ms per token; the objective is 20")


def look(now_s: float, rate: float, ready: int | Mapping[str, float] = 0, **others: object) -> Look:
    """A look at ready workers w0, w1, ... which are the more expensive to lose, or at those given."""
    workers = {f"w{place}": float(place) for place in range(ready)} if isinstance(ready, int) else ready
    defaults: dict[str, object] = {"ready": workers, "asked_s": now_s, "lead_s": LEAD_S}
    return Look(now_s=now_s, demand=Rates(rate, rate * 400.0), **(defaults | others))  # type: ignore[arg-type]


def steadily(sizer: Sizer, until_s: float, rate: float, ready: int, **others: object) -> list[Decision]:
    """Looks every 15 s from 0 on, at workers that nobody starts or stops."""
    return [sizer.look(look(turn * 15.0, rate, ready, **others)) for turn in range(int(until_s / 15.0) + 1)]


class Plant:
    """Workers that follow the decisions: ready after `start_s`, gone at once."""

    def __init__(self, sizer: Sizer, ready: int, *, start_s: float = LEAD_S) -> None:
        self.sizer, self.start_s = sizer, start_s
        self.ready = {f"w{place}": 1.0 for place in range(ready)}
        self.starting: dict[str, float] = {}
        self.counts: list[int] = []

    def run(self, since_s: float, until_s: float, demand: Callable[[float], Rates]) -> None:
        for turn in range(int(since_s / 15.0), int(until_s / 15.0)):
            now_s = turn * 15.0
            for name in [name for name, began_s in self.starting.items() if now_s - began_s >= self.start_s]:
                del self.starting[name]
                self.ready[name] = 1.0
            found = self.sizer.look(
                Look(now_s=now_s, demand=demand(now_s), ready=self.ready, starting=dict(self.starting), lead_s=LEAD_S)
            )
            self._follow(found, now_s)
            self.counts.append(len(self.ready) + len(self.starting))

    def _follow(self, found: Decision, now_s: float) -> None:
        if found.leaves:
            self.ready.pop(found.leaves, None)
            self.starting.pop(found.leaves, None)
        for place in range(found.desired - found.current):
            self.starting[f"{now_s:.0f}-{place}"] = now_s


def constant(rate: float) -> Callable[[float], Rates]:
    return lambda now_s: Rates(rate, rate * 400.0)


# ---- up


def test_the_count_rises_at_once_to_what_the_forecast_needs() -> None:
    found = Sizer(CONFIG, needed).look(look(0.0, 45.0, ready=2))
    assert (found.desired, found.reason, found.limit, found.needed) == (5, "up", "compute", 5)


def test_workers_that_start_count_so_that_the_count_does_not_run_away() -> None:
    plant = Plant(Sizer(CONFIG, needed), 1)
    plant.run(0.0, 900.0, constant(45.0))
    assert max(plant.counts) == 5


def test_what_waits_is_served_by_the_time_when_a_started_worker_is_of_use() -> None:
    """1,210 requests in 121 s are 10 requests/s: one more worker."""
    found = Sizer(CONFIG, needed).look(look(0.0, 20.0, ready=2, queued=Rates(1210.0, 0.0)))
    assert found.desired == 3


def test_a_few_waiting_requests_start_no_worker() -> None:
    assert Sizer(CONFIG, needed).look(look(0.0, 19.0, ready=2, queued=Rates(5.0, 0.0))).desired == 2


def test_more_than_allowed_is_not_asked_for_and_said() -> None:
    found = Sizer(replace(CONFIG, most_workers=3), needed).look(look(0.0, 95.0, ready=3))
    assert (found.desired, found.reason, found.needed) == (3, "most", 10)


def test_an_objective_that_an_idle_worker_misses_never_starts_a_worker() -> None:
    found = steadily(Sizer(CONFIG, hopeless), 3000.0, 95.0, 2)
    assert {one.desired for one in found} == {2}
    assert found[-1].reason == "impossible"
    assert "33.5 ms" in found[-1].impossible


# ---- workers that vanish


def test_a_worker_that_vanished_is_expected_back_and_no_other_one_leaves_meanwhile() -> None:
    sizer = Sizer(CONFIG, needed)
    steadily(sizer, 600.0, 15.0, 3, told=3)
    found = sizer.look(look(615.0, 15.0, ready=2, told=3, lost={"w2": 610.0}))
    assert (found.desired, found.reason, found.leaves) == (3, "steady", "")


def test_all_workers_that_vanish_at_once_are_no_reason_to_have_fewer() -> None:
    gone = {"w0": 0.0, "w1": 0.0, "w2": 0.0}
    found = Sizer(CONFIG, lambda _: Need(1)).look(look(10.0, 25.0, told=3, lost=gone))
    assert found.desired == 3
    doubt = Sizer(CONFIG, needed).look(look(1000.0, 25.0, told=3, lost=gone, missing=["the reports of s1"]))
    assert (doubt.desired, doubt.reason) == (3, "doubt"), "however long they have been away"


def test_a_lost_worker_that_somebody_has_replaced_starts_no_further_one() -> None:
    found = Sizer(CONFIG, needed).look(look(10.0, 25.0, ready=2, told=3, lost={"w2": 0.0}, starting={"new": 5.0}))
    assert found.desired == 3


def test_a_worker_that_does_not_come_back_is_not_counted() -> None:
    found = Sizer(CONFIG, needed).look(look(1000.0, 25.0, ready=2, told=3, lost={"w2": 0.0}))
    assert (found.desired, found.reason, found.current) == (3, "up", 2)


def test_a_count_that_somebody_lowered_is_accepted() -> None:
    found = Sizer(CONFIG, needed).look(look(1000.0, 15.0, ready=2, told=3))
    assert (found.desired, found.current) == (2, 2)


# ---- starts that fail


def test_a_worker_that_is_not_ready_after_two_leads_is_reported_and_replaced_by_one_other() -> None:
    sizer = Sizer(CONFIG, needed)
    early = sizer.look(look(200.0, 15.0, ready=1, starting={"slow": 0.0}))
    assert (early.desired, early.overdue) == (2, ())
    late = sizer.look(look(241.0, 15.0, ready=1, starting={"slow": 0.0}))
    assert (late.desired, late.overdue) == (3, ("slow",))


def test_where_no_worker_starts_the_count_does_not_grow_further() -> None:
    plant = Plant(Sizer(CONFIG, needed), 1, start_s=math.inf)
    plant.run(0.0, 6000.0, constant(45.0))
    assert plant.counts[-1] == 6


def test_of_workers_that_are_too_many_an_overdue_one_goes_first() -> None:
    found = steadily(Sizer(CONFIG, needed), 300.0, 15.0, 2, starting={"slow": -1000.0})[-1]
    assert (found.desired, found.leaves) == (2, "slow")


# ---- down


def test_the_count_falls_only_after_fewer_were_enough_all_the_time() -> None:
    found = steadily(Sizer(CONFIG, needed), 300.0, 15.0, 3)
    assert [one.reason for one in found[:-1]] == ["settling"] * 20
    assert (found[-1].reason, found[-1].desired) == ("down", 2)


def test_one_look_that_needs_all_workers_begins_the_time_anew() -> None:
    sizer = Sizer(CONFIG, needed)
    steadily(sizer, 285.0, 15.0, 3)
    assert sizer.look(look(300.0, 25.0, ready=3)).desired == 3
    assert sizer.look(look(590.0, 15.0, ready=3)).desired == 3
    assert sizer.look(look(615.0, 15.0, ready=3)).desired == 2


def test_one_leaves_at_a_time() -> None:
    sizer = Sizer(CONFIG, needed)
    steadily(sizer, 300.0, 5.0, 6)
    assert sizer.look(look(315.0, 5.0, ready=5, leaving=["w5"])).desired == 5
    assert sizer.look(look(330.0, 5.0, ready=5)).desired == 4


def test_none_leaves_while_one_starts() -> None:
    sizer = Sizer(CONFIG, needed)
    found = steadily(sizer, 600.0, 15.0, 4, starting={"new": 550.0})
    assert {one.desired for one in found} == {5}
    assert sizer.look(look(615.0, 15.0, ready=5)).desired == 4


def test_the_worker_leaves_whose_adapters_are_cheapest_to_load_elsewhere() -> None:
    sizer = Sizer(CONFIG, needed)
    found = [sizer.look(look(at_s, 15.0, ready={"a": 5e9, "b": 1e9, "c": 1e9})) for at_s in (0.0, 300.0)]
    assert found[-1].leaves == "b"


def test_at_a_constant_load_with_noise_the_count_never_swings() -> None:
    """One day of Poisson arrivals at 48 requests/s, close to the edge of five workers."""
    forecast, chance = RateForecast(period_s=15.0), np.random.default_rng(3)

    def demand(now_s: float) -> Rates:
        arrived = float(chance.poisson(48.0 * 15.0))
        return forecast.look(now_s, Rates(arrived, arrived * 400.0), lead_s=LEAD_S).upper

    plant = Plant(Sizer(CONFIG, needed), 5)
    plant.run(0.0, 86_400.0, demand)
    changes = np.flatnonzero(np.diff(plant.counts[240:]))
    assert len(changes) <= 4
    assert min(plant.counts[20:]) >= 5


# ---- doubt, and others that decide


def test_with_a_missing_input_the_count_stays_whatever_the_demand_says() -> None:
    sizer = Sizer(CONFIG, needed)
    for rate in (0.0, 95.0):
        found = sizer.look(look(0.0, rate, ready=4, missing=["demand of scheduler-2"]))
        assert (found.desired, found.reason, found.missing) == (4, "doubt", ("demand of scheduler-2",))


def test_after_a_doubt_the_time_to_fall_begins_anew() -> None:
    sizer = Sizer(CONFIG, needed)
    steadily(sizer, 285.0, 15.0, 3)
    sizer.look(look(290.0, 15.0, ready=3, missing=["NATS"]))
    assert sizer.look(look(300.0, 15.0, ready=3)).desired == 3
    assert sizer.look(look(600.0, 15.0, ready=3)).desired == 2


def test_the_least_number_is_asked_for_even_in_doubt() -> None:
    sizer = Sizer(replace(CONFIG, least_workers=3), needed)
    assert sizer.look(look(0.0, 0.0, ready=1, missing=["NATS"])).desired == 3
    assert sizer.look(look(15.0, 0.0, ready=1)).desired == 3


def test_a_count_that_somebody_else_set_is_where_the_next_decision_starts() -> None:
    sizer = Sizer(CONFIG, needed)
    steadily(sizer, 150.0, 25.0, 3)
    assert sizer.look(look(165.0, 25.0, ready=8)).desired == 8
    assert sizer.look(look(180.0, 25.0, ready=2)).desired == 3


def test_more_workers_than_allowed_leave_one_at_a_time_without_delay() -> None:
    found = Sizer(replace(CONFIG, most_workers=3), needed).look(look(0.0, 95.0, ready=6))
    assert (found.desired, found.leaves) == (5, "w0")


# ---- to zero and back


def test_without_a_request_for_long_the_last_worker_leaves() -> None:
    sizer = Sizer(TO_ZERO, needed)
    before = sizer.look(look(599.0, 0.0, ready=1, asked_s=0.0))
    after = sizer.look(look(600.0, 0.0, ready=1, asked_s=0.0))
    assert (before.desired, after.desired, after.reason, after.leaves) == (1, 0, "idle", "w0")
    assert sizer.look(look(615.0, 3.0, asked_s=0.0)).reason == "asleep"  # what a forecast still expects wakes nobody


@pytest.mark.parametrize("waits", [{"parked": 1}, {"queued": Rates(1.0, 400.0)}])
def test_nobody_falls_asleep_while_something_waits(waits: Mapping[str, object]) -> None:
    assert Sizer(TO_ZERO, needed).look(look(5000.0, 0.0, ready=1, asked_s=0.0, **waits)).desired == 1


@pytest.mark.parametrize("waits", [{"parked": 1}, {"queued": Rates(1.0, 400.0)}])
def test_one_worker_starts_at_once_when_something_waits(waits: Mapping[str, object]) -> None:
    found = Sizer(TO_ZERO, needed).look(look(5000.0, 0.0, asked_s=0.0, missing=["NATS"], **waits))
    assert (found.desired, found.reason) == (1, "woken")


def test_the_worker_that_was_woken_is_waited_for() -> None:
    """It starts for long, and nobody asks again."""
    found = Sizer(TO_ZERO, needed).look(look(5000.0, 0.0, asked_s=0.0, starting={"new": 4900.0}))
    assert found.desired == 1


def test_without_idle_s_or_with_a_least_number_nobody_sleeps() -> None:
    for config in (replace(TO_ZERO, idle_s=0.0), replace(TO_ZERO, least_workers=1)):
        found = [Sizer(config, needed).look(look(at_s, 0.0, ready=1, asked_s=0.0)) for at_s in (0.0, 1e4, 1e6)]
        assert {one.desired for one in found} == {1}


def test_missing_demand_is_no_reason_to_sleep() -> None:
    assert Sizer(TO_ZERO, needed).look(look(5000.0, 0.0, ready=2, asked_s=0.0, missing=["demand of s1"])).desired == 2


# ---- always


@st.composite
def histories(draw: st.DrawFn) -> list[Look]:
    now_s, found = 0.0, []
    for _ in range(draw(st.integers(1, 30))):
        now_s += draw(st.floats(1.0, 400.0))
        starting = {f"s{place}": now_s - draw(st.floats(0.0, 600.0)) for place in range(draw(st.integers(0, 3)))}
        found.append(
            look(
                now_s,
                draw(st.floats(0.0, 300.0)),
                draw(st.integers(0, 8)),
                starting=starting,
                leaving=["x"] * draw(st.integers(0, 1)),
                queued=Rates(draw(st.sampled_from([0.0, 10.0, 1e4])), 0.0),
                asked_s=now_s - draw(st.floats(0.0, 1000.0)),
                missing=draw(st.sampled_from([(), ("NATS",)])),
            )
        )
    return found


@given(history=histories(), least=st.integers(0, 4), more=st.integers(1, 8), possible=st.booleans())
def test_whatever_happens_the_bounds_hold_and_the_same_history_gives_the_same_decisions(
    history: list[Look], least: int, more: int, possible: bool
) -> None:
    config = SizingConfig(least_workers=least, most_workers=least + more, down_s=100.0, idle_s=300.0)

    def again() -> list[Decision]:
        sizer = Sizer(config, needed if possible else hopeless)
        return [sizer.look(one) for one in history]

    decisions = again()
    assert decisions == again()
    for seen, found in zip(history, decisions, strict=True):
        current = len(seen.ready) + len(seen.starting)
        assert found.current == current
        assert found.desired >= least
        assert found.desired <= max(current, config.most_workers)
        assert found.desired >= current - 1
        assert (found.desired < current) == bool(found.leaves)
        if seen.missing:
            assert found.desired >= current
        if not possible:
            assert found.desired <= max(current, least, 1)
        if seen.leaving:
            assert found.desired >= current


@pytest.mark.parametrize(
    "wrong", [{"least_workers": 3, "most_workers": 2}, {"least_workers": -1}, {"most_workers": 0}, {"down_s": -1.0}]
)
def test_bounds_that_contradict_each_other_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SizingConfig(**wrong)  # type: ignore[arg-type]
