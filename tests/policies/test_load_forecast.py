from __future__ import annotations

from math import exp, sqrt

import numpy as np
import pytest

from motet.policies.times.load_forecast import Forecast


def test_an_adapter_that_is_asked_for_more_often_is_more_likely_to_come_again() -> None:
    forecast = Forecast()
    rng = np.random.default_rng(0)
    for name, mean_s in (("often", 2.0), ("seldom", 40.0)):
        for at in np.cumsum(rng.exponential(mean_s, int(600 / mean_s))).tolist():
            forecast.used(name, at)
    assert forecast.chance("often", 600.0, 10.0) > 3 * forecast.chance("seldom", 600.0, 10.0)


def test_the_rate_is_that_of_a_steady_adapter() -> None:
    forecast = Forecast()
    for turn in range(2000):
        forecast.used("a", turn / 2)
    assert forecast.rate("a", 1000.0) == pytest.approx(2.0, rel=0.01)
    assert forecast.rate("b", 1000.0) == 0.0


def test_after_a_burst_the_chance_falls_faster_than_the_rate() -> None:
    forecast = Forecast()
    for burst in range(10):
        for turn in range(10):
            forecast.used("bursty", burst * 300.0 + turn * 0.5)
    end_s = 9 * 300.0 + 4.5
    assert forecast.chance("bursty", end_s + 0.1, 5.0) > 2 * forecast.chance("bursty", end_s + 30.0, 5.0)


def test_an_unknown_adapter_gets_the_pooled_chance_and_all_chances_are_between_0_and_1() -> None:
    forecast = Forecast()
    assert forecast.chance("new", 0.0, 10.0) == 0.5
    for turn in range(200):
        forecast.used(f"a{turn % 7}", float(turn))
    for name in ("a0", "new"):
        for now_s in (200.0, 1e3, 1e6):
            assert 0.0 <= forecast.chance(name, now_s, 10.0) <= 1.0


def test_the_chance_is_the_geometric_mean_of_that_by_rate_and_that_by_gaps() -> None:
    """Requests for "a" at 0, 3 and 6 s: two gaps in the bin of 2 to 4 s. At 6 s, half of them are within the next 3 s."""
    forecast = Forecast()
    for at in (0.0, 3.0, 6.0):
        forecast.used("a", at)
    faded = exp(-3 / 900)
    rate = (1 + faded * (1 + faded)) / (900 * (1 - exp(-6 / 900)))
    assert forecast.rate("a", 6.0) == pytest.approx(rate)
    by_gaps = (2 * 0.5 + 2.0 * 0.5) / (2 + 2.0)  # the pooled histogram has the same gaps
    assert forecast.chance("a", 6.0, 3.0) == pytest.approx(sqrt(by_gaps * (1 - exp(-rate * 3))))
    assert forecast.chance("unknown", 6.0, 3.0) == pytest.approx(0.5), "no gap is below 2 s, and half of 2 to 4 s is below 3 s"
    forecast.used("once", 6.0)
    assert forecast.chance("once", 6.0, 3.0) == pytest.approx(sqrt(0.5 * (1 - exp(-forecast.rate("once", 6.0) * 3))))
    later = (2 * (4 - 3.5) / 2, 2.0)  # own gaps above 3.5 s, and the prior
    assert forecast.chance("a", 9.5, 10.0) == pytest.approx(
        sqrt((later[0] + later[1]) / sum(later) * (1 - exp(-forecast.rate("a", 9.5) * 10)))
    )
