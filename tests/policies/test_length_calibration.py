"""Promise: levels say how often lengths really end below a model's quantiles, per adapter, and older ones weigh less."""

from __future__ import annotations

from math import log

import pytest

from motet.policies.lengths.calibration import BINS, MIN_SAMPLES, PRIOR, Calibration, pinball


def observed(
    calibration: Calibration, adapter: str, level: float, times: int = 1, *, model: float = 1.0, own: float = 2.0
) -> None:
    for _ in range(times):
        calibration.observe(adapter, level, model_loss=model, adapter_loss=own)


def test_before_anything_was_seen_a_share_is_its_own_level() -> None:
    assert Calibration(4).levels("a", (0.1, 0.5, 0.9)) == pytest.approx([0.1, 0.5, 0.9])


def test_the_levels_of_an_adapter_are_those_of_its_counts_and_of_some_of_everybodys() -> None:
    """Adapter "low" ended ten times in the lowest of 25 bins and "high" ten times in the highest."""
    calibration = Calibration(4)
    observed(calibration, "low", 0.01, 10)
    observed(calibration, "high", 0.99, 10)
    weight = sum(0.996**age for age in range(10))  # of ten requests, in the count of their adapter
    everybody = [weight * 0.996**10, weight]
    own_share = (weight + PRIOR * everybody[0] / sum(everybody)) / (weight + PRIOR)  # of "low", in the lowest bin
    (level,) = calibration.levels("low", (own_share / 2,))
    assert level == pytest.approx(0.5 / BINS, rel=1e-3), "half of the lowest bin"
    (level,) = calibration.levels("low", (own_share + (1 - own_share) / 2,))
    assert level == pytest.approx(1 - 0.5 / BINS, rel=1e-3)
    (level,) = calibration.levels("unknown", (everybody[0] / sum(everybody) / 2,))
    assert level == pytest.approx(0.5 / BINS, rel=1e-3)


def test_losses_and_counts_fade() -> None:
    calibration = Calibration(4)
    observed(calibration, "a", 0.5, model=3.0, own=5.0)
    observed(calibration, "a", 0.5, model=1.0, own=2.0)
    for record in (calibration.all, calibration.adapters["a"]):
        assert (record.model_loss, record.adapter_loss) == (pytest.approx(3.0 * 0.996 + 1.0), pytest.approx(5.0 * 0.996 + 2.0))
        assert record.samples == 2 and sum(record.counts) == record.counts[12] == pytest.approx(1.996)


def test_an_adapter_with_enough_requests_is_judged_by_its_own_losses() -> None:
    calibration = Calibration(4)
    observed(calibration, "good", 0.5, 100, model=1.0, own=2.0)
    observed(calibration, "bad", 0.5, MIN_SAMPLES - 1, model=2.0, own=1.0)
    assert calibration.model_is_better("bad") and calibration.model_is_better("unknown")
    observed(calibration, "bad", 0.5, 1, model=2.0, own=1.0)
    assert not calibration.model_is_better("bad") and calibration.model_is_better("good")


def test_the_adapters_counted_least_recently_are_forgotten() -> None:
    calibration = Calibration(2)
    for adapter in ("a", "b", "a", "c"):
        observed(calibration, adapter, 0.5)
    assert list(calibration.adapters) == ["a", "c"]


def test_a_new_model_starts_with_its_own_levels_and_half_of_the_adapters() -> None:
    calibration = Calibration(2)
    observed(calibration, "a", 0.99)
    calibration.seed([])
    assert calibration.all.counts[-1] == calibration.adapters["a"].counts[-1] == 1.0
    calibration.seed([0.01, 0.02, 1.0, -1.0])
    assert (calibration.all.counts[0], calibration.all.counts[-1], sum(calibration.all.counts)) == (3.0, 1.0, 4.0)
    assert calibration.adapters["a"].counts[-1] == 0.5


def test_the_loss_of_a_quantile_is_its_share_above_and_the_rest_below() -> None:
    below, above = log(11) - log(21), log(11) - log(6)
    assert pinball(10, (20.0, 5.0), (0.5, 0.9)) == pytest.approx(-0.5 * below + 0.9 * above)
    assert pinball(10, (20.0,), (0.9,)) == pytest.approx(-0.1 * below)
    assert pinball(10, (10.0, 10.0), (0.5, 0.9)) == 0.0
