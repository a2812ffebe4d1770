"""Promise: the bench of autoscalers counts hours, refused requests and flaps as it says, and its oracle is the cheapest."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bench.autoscale import QUICK_ADAPTERS, law_of, made, motet
from bench.autoscale_parts import AGAIN_S, START_S, Day, Fleet, Law, View, oracle_looks, simulate
from bench.autoscale_rivals import Fixed, ForecastCeil, Hpa, waiting
from bench.autoscale_twin import in_twin
from motet.policies.scale.base_sizer import LOOK_S
from motet.twin.profile import a10_llama2_7b

LEAD = round(START_S / LOOK_S)


@pytest.fixture(scope="module")
def law() -> Law:
    return law_of(QUICK_ADAPTERS)


def view(now_s: float, *, ready: int = 2, queued: float = 0.0, arrived: float = 0.0) -> View:
    names = tuple(f"w{place}" for place in range(ready))
    return View(now_s=now_s, arrived=arrived, ready=names, starting={}, queued=queued, running=0.0)


def test_the_oracle_pays_a_short_gap_and_a_new_start_for_a_long_one() -> None:
    assert oracle_looks([1] * 10) == 10
    assert oracle_looks([2] * 3 + [1] * 5 + [2] * 4) == 12 + 3 + 5 + 4
    assert oracle_looks([2] * 3 + [1] * 50 + [2] * 4) == 57 + 3 + LEAD + 4
    assert oracle_looks([1] * 50 + [2] * 4) == 54 + 4 + LEAD


def test_no_other_way_to_be_there_in_time_costs_less_than_the_oracle() -> None:
    """All ways to have one worker more or not, look by look, for a need of 1 or 2: started LEAD looks before it serves."""
    needs = [1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2]
    best = len(needs) * 10
    for paid in product((0, 1), repeat=len(needs)):
        runs = np.split(np.arange(len(needs)), np.flatnonzero(np.diff(paid)) + 1)
        serves = {at for run in runs if paid[run[0]] for at in run[(LEAD if run[0] else 0) :]}
        late = [at for at, need in enumerate(needs) if need == 2 and at not in serves]
        if all(at < LEAD for at in late):  # one that is needed so early cannot have started
            best = min(best, len(needs) + sum(paid))
    assert oracle_looks(needs[LEAD:]) <= best


def test_with_enough_workers_nobody_is_refused_and_with_too_few_what_is_too_much(law: Law) -> None:
    rate = 1.2 * law.serves(2)
    day = Day(name="flat", rate=np.full(120, rate), tuned=60)
    assert simulate(law, day, Fixed(3), seed=1, since=30).attainment > 0.999
    few = simulate(law, day, Fixed(2), seed=1, since=30)
    assert few.attainment == pytest.approx(1.0 / 1.2, abs=0.02)
    assert few.late_minutes == 90.0 and few.worker_hours == pytest.approx(2 * 1.5)


def test_a_worker_serves_when_its_start_is_over_and_a_stop_that_is_undone_soon_is_a_flap() -> None:
    fleet = Fleet(ready=["a", "b"])
    fleet.follow(3, "", 0.0)
    fleet.begin(START_S - LOOK_S)
    assert len(fleet.ready) == 2
    fleet.begin(START_S)
    assert len(fleet.ready) == 3
    fleet.follow(2, "a", 1000.0)
    assert "a" not in fleet.ready
    fleet.follow(3, "", 1000.0 + AGAIN_S)
    fleet.begin(1500.0)
    fleet.follow(2, "", 2000.0)
    fleet.follow(3, "", 2015.0 + AGAIN_S)
    assert fleet.flaps(0.0) == 1


def test_an_hpa_is_proportional_within_its_tolerance_and_falls_to_the_largest_number_of_its_window() -> None:
    hpa = Hpa(waiting, 10.0, 60.0)
    assert hpa.look(view(15.0, queued=40.0))[0] == 4
    assert hpa.look(view(30.0, ready=4, queued=42.0))[0] == 4
    assert hpa.look(view(45.0, ready=4, queued=0.0))[0] == 4
    assert hpa.look(view(200.0, ready=4, queued=0.0))[0] == 1


def test_a_forecast_through_five_intervals_goes_on_along_their_line() -> None:
    scaler = ForecastCeil(1.0, 60.0, "line", 1.0)
    found = [scaler.look(view(turn * LOOK_S, arrived=LOOK_S * (1.0 + (turn - 1) // 4)))[0] for turn in range(1, 21)]
    assert found[-1] == 6  # after minutes with 1, 2, 3, 4 and 5 requests/s


def test_motet_reaches_the_goal_on_a_made_day_for_less_than_the_peak_all_day(law: Law) -> None:
    day = made(5.0, minutes=360)
    ours = simulate(law, day, motet(law), seed=1)
    peak = simulate(law, day, Fixed(law.needed(float(day.rate.max()))), seed=1)
    assert ours.attainment >= 0.99 and ours.flaps == 0
    assert ours.worker_hours < 0.9 * peak.worker_hours
    assert ours.vs_oracle <= 1.15


def test_in_the_twin_workers_come_and_go_as_they_are_told_and_attain_what_the_law_says(law: Law) -> None:
    rate = np.concatenate([np.full(30, 3.0), np.full(25, 6.0)])
    day = Day(name="step", rate=rate, tuned=30)
    seen = in_twin(law, a10_llama2_7b(), day, lambda: motet(law), since=28, until=55, seed=3)
    assert seen.attainment >= seen.law_attainment - 0.02
    assert seen.worker_hours == pytest.approx(seen.law_worker_hours, rel=0.15)
