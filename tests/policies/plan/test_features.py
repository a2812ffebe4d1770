"""Features of a load: those of the paper by hand, and those from the law without units."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from motet.policies.plan import features
from motet.policies.plan.capacity import Mix, Settings, judge
from motet.policies.plan.demand import Demand, Floats


@dataclass(frozen=True)
class Steady:
    """Steps of 20 ms, copies of 5 ms."""

    stalls = True
    times: float = 1.0

    def step_ms(self, mix: Mix) -> Floats:
        return np.full(mix.rows.shape, 20.0 * self.times)

    def copy_ms(self, demand: Demand) -> Floats:
        return np.full((1, len(demand)), 5.0 * self.times)


def settings(*slots: float, **changes: object) -> Settings:
    many = np.array(slots)
    plain = Settings(
        steps=Steady(),
        slots=many,
        adapter_bytes=np.full(len(many), np.inf),
        max_rank=np.full(len(many), 32.0),
        kv_tokens=np.full(len(many), 50_000.0),
        seats=128,
    )
    return replace(plain, **changes)


MIXED = Demand.of(
    [0.4, 0.1, 0.1], rank=[8, 16, 32], prompt_tokens=300, output_tokens=100, ttft_slo_ms=500, tpot_slo_ms=50, count=[2, 1, 1]
)


def of(name: str, demand: Demand = MIXED, *slots: float) -> list[float]:
    given = settings(*(slots or (2.0,)))
    found = features.law(demand, given, judge(demand, given))
    return np.asarray(found[:, features.LAW.index(name)]).tolist()


def test_the_papers_features_count_every_adapter() -> None:
    rates, ranks = [0.4, 0.4, 0.1, 0.1], [8, 8, 16, 32]
    found = features.paper(MIXED, np.array([8.0, 16.0]))
    expected = [4, sum(rates), np.std(rates), 32, np.mean(ranks), np.std(ranks)]
    assert found[0] == pytest.approx([*expected, 8])
    assert found[1] == pytest.approx([*expected, 16])


def test_the_hottest_adapters_share_is_that_of_as_many_as_there_are_slots() -> None:
    assert of("hottest_share", MIXED, 1.0, 2.0, 3.0, 9.0) == pytest.approx([0.4, 0.8, 0.9, 1.0])


def test_shares_say_how_much_of_the_worker_is_used() -> None:
    assert of("adapters_per_slot", MIXED, 2.0, 8.0) == [2.0, 0.5]
    assert of("busy")[0] == pytest.approx(MIXED.total_rate / judge(MIXED, settings(2.0)).capacity[0])
    assert of("rank_share")[0] == pytest.approx((0.8 * 8 + 0.1 * 16 + 0.1 * 32) / 32)
    assert of("length_spread") == [1.0]  # exponential
    assert of("prompt_share") == [0.75]
    assert of("miss_share", MIXED, 4.0) == [0.0]
    assert of("tpot_share")[0] == pytest.approx(20 / 50, rel=0.05)


def test_a_worker_that_is_twice_as_slow_at_half_the_load_looks_the_same() -> None:
    slow = replace(settings(2.0), steps=Steady(times=2.0))
    lazy = replace(MIXED.faster(0.5), ttft_slo_ms=MIXED.ttft_slo_ms * 2, tpot_slo_ms=MIXED.tpot_slo_ms * 2)
    fast = features.law(MIXED, settings(2.0), judge(MIXED, settings(2.0)))
    assert features.law(lazy, slow, judge(lazy, slow)) == pytest.approx(fast, rel=0.01)


def test_there_is_a_column_for_every_name() -> None:
    given = settings(2.0, 8.0)
    assert features.law(MIXED, given, judge(MIXED, given)).shape == (2, len(features.LAW))
    assert features.paper(MIXED, given.slots).shape == (2, len(features.PAPER))
