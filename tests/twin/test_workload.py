from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import motet.twin.workload
from motet.twin.workload import Intensity, Lengths, arrivals, per_adapter, pick, rank_mix, zipf
from tests.twin.support import workload


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    times = arrivals(rng(), Intensity.constant(50.0, 2000.0), cv=cv)
    gaps = np.diff(times)
    assert len(times) / 2000.0 == pytest.approx(50.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert times[0] >= 0 and times[-1] < 2000.0 and (gaps >= 0).all()


def test_a_flash_crowd_comes_at_the_given_time() -> None:
    times = arrivals(rng(), Intensity.flash_crowd(20.0, 1000.0, at_s=400.0, length_s=100.0, factor=10.0))
    before, during, after = np.histogram(times, [0, 400, 500, 1000])[0] / [400, 100, 500]
    assert (before, during, after) == (pytest.approx(20, rel=0.1), pytest.approx(200, rel=0.1), pytest.approx(20, rel=0.1))


def test_a_day_has_its_low_at_the_start_and_its_high_in_the_middle() -> None:
    times = arrivals(rng(), Intensity.diurnal(10.0, 10_000.0, period_s=10_000.0, swing=0.8))
    tenth = np.histogram(times, 10, (0, 10_000))[0] / 1000.0
    assert tenth.argmax() in (4, 5) and tenth[0] < 4.0 < 16.0 < tenth.max()
    assert len(times) / 10_000.0 == pytest.approx(10.0, rel=0.05)


def test_no_rate_means_no_arrivals() -> None:
    assert len(arrivals(rng(), Intensity.constant(0.0, 100.0))) == 0


def test_adapters_are_drawn_by_their_shares() -> None:
    shares = zipf(10, 1.0)
    drawn = np.bincount(pick(rng(), shares, 200_000), minlength=10) / 200_000
    assert drawn == pytest.approx(shares, abs=0.005)
    assert shares[0] / shares[9] == pytest.approx(10.0)


def test_ranks_occur_as_often_as_asked() -> None:
    ranks, counts = np.unique(rank_mix(rng(), 100, {8: 1, 64: 3}), return_counts=True)
    assert (ranks.tolist(), counts.tolist()) == ([8, 64], [25, 75])


def test_each_adapter_has_its_own_rate() -> None:
    times, adapter = per_adapter(rng(), np.array([1.0, 4.0, 0.0]), 2000.0)
    assert np.bincount(adapter, minlength=3) / 2000.0 == pytest.approx([1.0, 4.0, 0.0], rel=0.1)
    assert (np.diff(times) >= 0).all()


def test_lognormal_lengths_have_their_means() -> None:
    pool = Lengths.lognormal(rng(), prompt_mean=200, output_mean=50)
    assert (pool.prompt_tokens.mean(), pool.output_tokens.mean()) == (pytest.approx(200, rel=0.05), pytest.approx(50, rel=0.05))
    capped = pool.capped(300, 320)
    assert capped.prompt_tokens.max() <= 300 and (capped.prompt_tokens + capped.output_tokens).max() <= 320


def test_the_same_seed_gives_the_same_workload() -> None:
    first, again, other = workload(1), workload(1), workload(2)
    assert list(first) == list(again) != list(other)


def test_a_request_is_the_same_alone_and_in_a_row_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(motet.twin.workload, "AT_ONCE", 7)
    load = workload(1)
    assert len(load) > 14
    assert list(load) == [load.request(index) for index in range(len(load))]
    assert [request.index for request in load] == list(range(len(load)))


def test_rates_are_cut_where_they_end_at_the_latest() -> None:
    rates = Intensity(np.array([0.0, 10.0, 20.0]), np.array([1.0, 2.0]))
    for end_s, edges in ((15.0, [0.0, 10.0, 15.0]), (20.0, [0.0, 10.0, 20.0]), (99.0, [0.0, 10.0, 20.0])):
        cut = rates.until(end_s)
        assert (cut.edges_s.tolist(), cut.rates.tolist()) == (edges, [1.0, 2.0])


def test_cutting_and_stretching_keep_the_requests() -> None:
    load = workload(1)
    half = load.until(10.0)
    assert list(half) == list(load)[: len(half)] and half.arrival_s[-1] < 10.0 <= load.arrival_s[len(half)]
    assert load.faster(2.0).arrival_s == pytest.approx(load.arrival_s / 2)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"arrival_s": np.array([1.0, np.nan])}, "arrival_s"),
        ({"arrival_s": np.array([2.0, 1.0])}, "arrival_s"),
        ({"arrival_s": np.array([-1.0, 1.0])}, "arrival_s"),
        ({"adapter": np.array([0, 63])}, "adapter"),
        ({"prompt_tokens": np.array([0, 1])}, "prompt_tokens"),
        ({"output_tokens": np.array([1])}, "output_tokens"),
    ],
)
def test_columns_that_make_no_sense_are_refused(change, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replace(workload().take(np.arange(2)), **change)
