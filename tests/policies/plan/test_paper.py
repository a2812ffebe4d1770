"""The greedy of the paper on cases worked by hand, and the other rivals."""

from __future__ import annotations

import numpy as np
import pytest

from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.fleet import CannotServe, Kind, Rows
from motet.policies.plan.paper import Flags, Predict, by_law, greedy
from motet.policies.plan.rivals import NO_SETTING, RIVALS, at_random, max_base, proposed_lat
from tests.policies.plan.support import demand_of, native_kind, served, vllm_kind


def at_most(kind: Kind, adapters: int, rate: float = np.inf) -> Predict:
    """A GPU starves with more adapters than its A_max, more than `adapters`, or a larger rate; fewer slots are faster."""

    def predict(demand: Demand, settings: Rows) -> tuple[Floats, Flags]:
        slots = kind.settings.slots[settings]
        few = (len(demand) > slots) | (len(demand) > adapters) | (demand.total_rate > rate)
        return 1000.0 - slots, few

    return predict


def placed(demand: Demand, kind: Kind, predict: Predict) -> list[tuple[int, float]]:
    """(adapters, A_max) of each worker."""
    return [(len(one.rows), kind.settings.slots[one.setting]) for one in greedy(demand, kind, predict).workers]


def test_a_gpu_is_filled_to_the_last_testing_point_that_it_passes() -> None:
    """40 adapters, 20 to a GPU: tests at 8 and 16 pass, that at 32 fails. The second GPU does the same; 8 are left."""
    kind = vllm_kind()
    assert placed(demand_of(np.full(40, 0.1)), kind, at_most(kind, 20)) == [(16, 16), (16, 16), (8, 8)]


def test_the_last_test_raises_a_max_until_nothing_starves() -> None:
    """12 adapters need 16 slots: the test at 8 chose 8, the last one raises it."""
    kind = vllm_kind()
    assert placed(demand_of(np.full(12, 0.1)), kind, at_most(kind, 20)) == [(12, 16)]


def test_the_last_test_goes_on_to_larger_a_max() -> None:
    """The paper's looks one step further only: 4 adapters that need three slots each are served with 16."""
    kind = vllm_kind()

    def three_slots_each(demand: Demand, settings: Rows) -> tuple[Floats, Flags]:
        slots = kind.settings.slots[settings]
        return 1000.0 - slots, 3 * len(demand) > slots

    assert placed(demand_of(np.full(4, 0.1)), kind, three_slots_each) == [(4, 16)]


def test_of_two_a_max_the_faster_one_counts_that_does_not_starve() -> None:
    """At 8 adapters, 8 slots are faster and do not starve; at 16 adapters 8 slots would be faster, but starve."""
    kind = vllm_kind()
    assert placed(demand_of(np.full(8, 0.1)), kind, at_most(kind, 20)) == [(8, 8)]
    assert placed(demand_of(np.full(16, 0.1)), kind, at_most(kind, 20)) == [(16, 16)]


def test_adapters_that_fail_go_back_in_their_order() -> None:
    """16 slow ones of rank 32 pass; with the next 16 the rate is too large. The second GPU keeps the first 8 of these."""
    kind = vllm_kind()
    rate = np.concatenate([np.full(16, 0.1), 1.0 + 0.01 * np.arange(16)])
    packing = greedy(demand_of(rate, rank=np.repeat([32, 8], 16)), kind, at_most(kind, 64, rate=10.0))
    assert [one.rows for one in packing.workers[1:]] == [
        (16, 17, 18, 19, 28, 29, 30, 31),
        (20, 21, 22, 23, 24, 25, 26, 27),
    ]


def test_adapters_starve_where_an_empty_gpu_fails_its_first_test_or_none_is_left() -> None:
    """ERROR STARVATION of Algorithm 1."""
    kind = vllm_kind(most=2)
    with pytest.raises(CannotServe, match="an empty worker cannot serve the next 8 adapters"):
        greedy(demand_of(np.full(40, 0.1)), kind, at_most(kind, 5))
    with pytest.raises(CannotServe, match="adapters starve on 2 workers"):
        greedy(demand_of(np.full(40, 0.1)), kind, at_most(kind, 16))


def test_s_max_is_the_largest_rank_of_a_gpu() -> None:
    """It follows the adapters and is no decision."""
    kind = vllm_kind()
    packing = greedy(demand_of(np.full(32, 0.1), rank=np.repeat([8, 32], 16)), kind, at_most(kind, 16))
    assert [kind.settings.max_rank[one.setting] for one in packing.workers] == [32, 8]


def test_by_the_law_no_worker_is_strained_and_by_the_rule_of_90_percent_fewer_workers_are_used() -> None:
    """ "No starvation" is less than objectives."""
    kind = vllm_kind()
    demand = demand_of(np.full(200, 0.4))
    strict = greedy(demand, kind)
    assert strict.strain <= 1.0
    assert len(greedy(demand, kind, by_law(kind, served=0.9)).workers) <= len(strict.workers)


@pytest.mark.parametrize("name", sorted(RIVALS))
def test_every_rival_places_every_adapter(name: str) -> None:
    """Copies share the requests of an adapter."""
    demand = demand_of(np.geomspace(0.05, 2.0, 48), rank=np.tile([8, 32], 24))
    for kind in (vllm_kind(), native_kind()):
        if name == "paper" and kind.name == "native":
            continue  # it decides A_max
        packing = RIVALS[name](demand, [kind])
        assert served(packing, 48) == pytest.approx(np.ones(48))
        assert RIVALS[name](demand, [kind]) == packing


def test_max_base_knows_neither_slots_nor_their_cost() -> None:
    """A_max is the number of adapters, or half of it; where there is no such setting, there is no memory."""
    kind = vllm_kind()
    few, half = (max_base(demand_of(np.full(30, 0.1)), [kind], half=half) for half in (False, True))
    assert [kind.settings.slots[one.setting] for one in few.workers] == [32]
    assert [kind.settings.slots[one.setting] for one in half.workers] == [16]
    many = max_base(demand_of(np.full(120, 0.01)), [kind])
    assert [one.setting for one in many.workers] == [NO_SETTING]
    assert many.strain == np.inf


def test_proposed_lat_levels_rates_and_random_does_not() -> None:
    """Each adapter goes where the rate is the least so far."""
    demand = demand_of(np.geomspace(2.0, 0.1, 20))
    kind = vllm_kind()

    def rates(packing: object) -> list[float]:
        return [one.demand(demand).total_rate for one in packing.workers]  # type: ignore[attr-defined]

    level, random = rates(proposed_lat(demand, kind, 3)), rates(at_random(demand, kind, 3))
    assert np.ptp(level) < np.ptp(random)
    assert sum(level) == pytest.approx(demand.total_rate)


def test_rank_grouped_workers_have_one_rank() -> None:
    """Rank-aware placement taken to its end."""
    demand = demand_of(np.full(40, 0.3), rank=np.tile([8, 32], 20))
    packing = RIVALS["rank_grouped"](demand, [vllm_kind()])
    assert all(len(set(demand.rank[list(one.rows)])) == 1 for one in packing.workers)
    assert packing.strain <= 1.0
