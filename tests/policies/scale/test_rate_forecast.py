"""Promise: the forecast of rates is what a worker that starts now will meet, and stays below it as seldom as it should."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.policies.scale.rate_forecast import DAY_S, UNKNOWN, Ahead, ForecastConfig, RateForecast, Rates

PERIOD_S, LEAD_S = 15.0, 120.0
HORIZON_S = 135.0
TOKENS = 400.0
CONFIG = ForecastConfig()


def looks(
    rate: Callable[[float], float], until_s: float, *, config: ForecastConfig = CONFIG, seed: int | None = None
) -> list[tuple[float, Ahead]]:
    """A look every 15 s at arrivals of a rate, without noise unless a seed is given.

    Workers serve exactly what was forecast, so there are too few of them when the rate is above the forecast.
    """
    forecast, chance, found = RateForecast(period_s=PERIOD_S, config=config), np.random.default_rng(seed), []
    served: dict[float, float] = {}
    for turn in range(int(until_s / PERIOD_S) + 1):
        now_s = turn * PERIOD_S
        arrived = rate(now_s - PERIOD_S / 2) * PERIOD_S
        arrived = arrived if seed is None else float(chance.poisson(arrived))
        ahead = forecast.look(now_s, Rates(arrived, arrived * TOKENS), lead_s=LEAD_S)
        forecast.missed(ahead.now.requests_s > served.get(now_s, math.inf))
        served[now_s + HORIZON_S] = ahead.upper.requests_s
        found.append((now_s, ahead))
    return found


def test_a_constant_rate_is_forecast_as_it_is() -> None:
    ahead = looks(lambda at_s: 20.0, 3000.0)[-1][1]
    assert ahead.upper.requests_s == pytest.approx(20.0)
    assert ahead.upper.tokens_s == pytest.approx(20.0 * TOKENS)
    assert ahead.now.requests_s == pytest.approx(20.0)


def test_before_errors_are_known_the_forecast_has_a_margin() -> None:
    ahead = looks(lambda at_s: 20.0, 120.0)[-1][1]
    assert ahead.upper.requests_s == pytest.approx(20.0 * UNKNOWN)


def test_the_first_look_says_nothing_as_the_time_of_its_arrivals_is_not_known() -> None:
    first = looks(lambda at_s: 20.0, 0.0)[0][1]
    assert first.upper == Rates(0.0, 0.0)


def test_the_horizon_is_the_lead_and_one_period_in_whole_periods() -> None:
    forecast = RateForecast(period_s=15.0)
    assert forecast.look(0.0, Rates(0.0, 0.0), lead_s=120.0).horizon_s == 135.0
    assert forecast.look(15.0, Rates(0.0, 0.0), lead_s=121.0).horizon_s == 150.0


def test_growth_is_forecast_as_it_goes_on_before_it_happens() -> None:
    """10 requests/s more in 1,000 s: after the horizon it is 1.35 more. The trend is damped, its errors add some."""
    ahead = looks(lambda at_s: 10.0 + at_s / 100.0, 3000.0)[-1][1]
    assert ahead.source == "trend"
    assert 40.0 < ahead.point.requests_s < 41.35
    assert ahead.point.requests_s < ahead.upper.requests_s <= 1.05 * 41.35


def test_a_sudden_rate_counts_half_at_once_and_all_of_it_before_a_worker_could_have_started() -> None:
    found = dict(looks(lambda at_s: 50.0 if at_s > 1800.0 else 10.0, 1920.0))
    assert found[1830.0].upper.requests_s >= 30.0
    assert found[1920.0].upper.requests_s >= 50.0


def test_what_happened_at_the_last_full_hours_is_expected_at_this_one() -> None:
    found = dict(looks(lambda at_s: 60.0 if at_s % 3600.0 < 60.0 else 20.0, 4 * 3600.0 - 60.0))
    before = found[4 * 3600.0 - HORIZON_S]
    assert before.source == "hour"
    assert before.point.requests_s == pytest.approx(60.0)
    assert found[4 * 3600.0 - 600.0].point.requests_s == pytest.approx(20.0, rel=0.1)


def test_yesterday_is_scaled_to_today() -> None:
    """Twice as much today as yesterday: the rise at noon is expected twice as high."""

    def rate(at_s: float) -> float:
        day, time_s = divmod(at_s, DAY_S)
        return (1.0 + (day >= 1.0)) * (30.0 if time_s >= DAY_S / 2 else 10.0)

    found = dict(looks(rate, 1.5 * DAY_S - HORIZON_S))
    before = found[1.5 * DAY_S - HORIZON_S]
    assert before.source == "day"
    assert before.point.requests_s == pytest.approx(60.0)


def test_without_a_whole_day_there_is_no_yesterday() -> None:
    assert {ahead.source for _, ahead in looks(lambda at_s: 10.0, 0.9 * DAY_S)} <= {"fast", "trend", "hour"}


@pytest.mark.parametrize("miss_share", [0.05, 0.2])
def test_there_are_too_few_workers_as_often_as_there_may_be(miss_share: float) -> None:
    def rate(at_s: float) -> float:
        return 30.0 + 15.0 * math.sin(at_s / 900.0)

    found = looks(rate, 40_000.0, config=ForecastConfig(miss_share=miss_share), seed=1)
    upper = {now_s + HORIZON_S: ahead.upper.requests_s for now_s, ahead in found}
    missed = [ahead.now.requests_s > upper[now_s] for now_s, ahead in found if now_s > 8000.0]
    assert np.mean(missed) <= miss_share + 0.04  # the level is told of a miss when the horizon is over
    assert np.mean(missed) >= miss_share / 8  # the fast mean as a floor makes it too safe, within bounds


def test_where_workers_are_never_too_few_no_margin_is_paid() -> None:
    """As many as the mean load needs are enough: they are whole, and leave late."""
    forecast, chance = RateForecast(period_s=PERIOD_S), np.random.default_rng(1)
    for turn in range(4000):
        ahead = forecast.look(turn * PERIOD_S, Rates(float(chance.poisson(300.0)), 0.0), lead_s=LEAD_S)
        forecast.missed(False)
    assert ahead.upper.requests_s == ahead.now.requests_s


def test_errors_of_another_horizon_are_forgotten() -> None:
    forecast = RateForecast(period_s=PERIOD_S)
    for turn in range(100):
        last = forecast.look(turn * PERIOD_S, Rates(300.0, 0.0), lead_s=LEAD_S)
    assert last.upper.requests_s == pytest.approx(20.0)
    assert forecast.look(1500.0, Rates(300.0, 0.0), lead_s=240.0).upper.requests_s == pytest.approx(20.0 * UNKNOWN)
    assert forecast.look(1515.0, Rates(300.0, 0.0), lead_s=240.0).upper.requests_s == pytest.approx(20.0 * UNKNOWN)


@given(
    counts=st.lists(st.integers(0, 10_000), min_size=1, max_size=60),
    gaps=st.lists(st.floats(0.0, 4000.0), min_size=60, max_size=60),
)
def test_any_arrivals_give_finite_forecasts_not_below_the_rate_now_and_the_same_again(
    counts: list[int], gaps: list[float]
) -> None:
    def again() -> list[Ahead]:
        forecast, now_s, found = RateForecast(period_s=PERIOD_S), 0.0, []
        for count, gap_s in zip(counts, gaps, strict=False):
            now_s += gap_s
            found.append(forecast.look(now_s, Rates(count, count * TOKENS), lead_s=LEAD_S))
        return found

    first = again()
    assert first == again()
    for ahead in first:
        assert all(math.isfinite(value) and value >= now for value, now in zip(ahead.upper, ahead.now, strict=True))
