"""The loads of a plan: drawn as requests they are what was asked, and a recorded workload gives its busy hours."""

from __future__ import annotations

import numpy as np
import pytest

from motet.shared.model import Slo
from motet.twin.planning.loads import Loads, Objective, from_workload, peakedness
from motet.twin.workload import Intensity, Lengths, Workload, arrivals

STANDARD = Objective(slo=Slo())


def loads(rate: list[float], *, rank: list[int] | None = None, cv: float = 1.0) -> Loads:
    n = len(rate)
    return Loads(
        names=tuple(f"a{place}" for place in range(n)),
        rate=np.array(rate),
        rank=np.array(rank or [8] * n),
        size_bytes=np.full(n, 1000),
        pool=np.arange(n) % 2,
        objective=np.zeros(n, np.int64),
        lengths=(Lengths(np.array([10]), np.array([20])), Lengths(np.array([500]), np.array([600]))),
        objectives=(STANDARD,),
        cv=cv,
    )


def test_drawn_requests_have_the_rates_and_lengths_of_their_adapters() -> None:
    work = loads([2.0, 0.5]).workload(np.random.default_rng(0), 4000.0)
    assert np.bincount(work.adapter) / 4000.0 == pytest.approx([2.0, 0.5], rel=0.1)
    assert set(work.prompt_tokens[work.adapter == 0].tolist()) == {10}
    assert set(work.output_tokens[work.adapter == 1].tolist()) == {600}


def test_requests_of_the_base_model_have_no_adapter() -> None:
    work = loads([1.0, 1.0], rank=[0, 16]).workload(np.random.default_rng(0), 100.0)
    assert set(work.adapter.tolist()) == {-1, 1}


def test_pairs_that_no_worker_takes_are_left_out() -> None:
    with pytest.raises(ValueError, match="every request is longer than 15 tokens"):
        loads([1.0]).workload(np.random.default_rng(0), 100.0, most_tokens=15)


def test_what_no_adapter_draws_from_is_left_out_of_a_slim_copy() -> None:
    one = loads([1.0, 2.0]).take(np.array([1]), np.array([2.0])).slim()
    assert one.demand.prompt_tokens.tolist() == [500.0]
    assert len(one.lengths) == 1


def test_a_day_is_planned_for_its_busy_windows() -> None:
    """Half of the windows have 2, half 10 requests/s: the 95th percentile is 10."""
    rng = np.random.default_rng(0)
    times = arrivals(rng, Intensity(np.array([0.0, 6000.0, 12_000.0]), np.array([2.0, 10.0])))
    n = len(times)
    work = Workload(
        arrival_s=times,
        adapter=np.arange(n) % 4 - 1,
        prompt_tokens=np.full(n, 30),
        output_tokens=np.full(n, 40),
        ranks=np.array([8, 16, 32]),
        adapter_bytes=np.array([1, 2, 3]),
    )
    found = from_workload(work, (STANDARD,), percentile=95.0)
    assert found.rate.sum() == pytest.approx(10.0, rel=0.05)
    assert found.rate == pytest.approx(np.full(4, found.rate.sum() / 4), rel=0.01)
    assert found.names[-1] == "base"
    assert found.rank.tolist() == [8, 16, 32, 0]
    assert found.peakedness == pytest.approx(1.0, abs=0.1)


def test_bursts_are_measured_and_a_slow_change_of_the_rate_is_none() -> None:
    rng = np.random.default_rng(0)
    edges = np.linspace(0.0, 30_000.0, 101)
    bursty = arrivals(rng, Intensity.constant(5.0, 30_000.0), cv=3.0)
    slow = arrivals(rng, Intensity(edges, np.linspace(1.0, 9.0, 100)))
    assert peakedness(bursty, edges) == pytest.approx(9.0, rel=0.25)
    assert peakedness(slow, edges) == pytest.approx(1.0, abs=0.1)


def test_adapters_with_many_requests_keep_their_own_lengths() -> None:
    n = 400
    work = Workload(
        arrival_s=np.linspace(0.0, 600.0, n),
        adapter=np.where(np.arange(n) % 40 == 0, 1, 0),
        prompt_tokens=np.where(np.arange(n) % 40 == 0, 900, 100),
        output_tokens=np.full(n, 10),
        ranks=np.array([8, 8]),
        adapter_bytes=np.array([1, 1]),
    )
    demand = from_workload(work, (STANDARD,), percentile=95.0).demand
    assert demand.prompt_tokens.tolist() == [100.0, 120.0], "ten requests are too few: those of all"
