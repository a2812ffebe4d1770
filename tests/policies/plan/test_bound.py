"""The bound is below every packing, close to the law where that can be said exactly, and its classes lose nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motet.policies.plan.bound import bound
from motet.policies.plan.bound_cells import Cells, States, first
from motet.policies.plan.capacity import judge
from motet.policies.plan.classes import classes
from motet.policies.plan.demand import Demand
from motet.policies.plan.packing import pack
from tests.policies.plan.support import demand_of, demands, native_kind, vllm_kind

slow = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow
@given(demands())
def test_no_packing_needs_fewer_workers_than_the_bound(demand: Demand) -> None:
    """It is a lower bound of the law."""
    kinds = [vllm_kind()]
    assert bound(demand, kinds).value <= len(pack(demand, kinds).workers) + 1e-9


@slow
@given(demands(adapters=40), st.integers(1, 3))
def test_no_packing_of_several_kinds_costs_less_than_the_bound(demand: Demand, most: int) -> None:
    """Also with a limit on the number of one kind, and bytes for slots."""
    kinds = [vllm_kind(cost=2.5), native_kind(most=most)]
    assert bound(demand, kinds).value <= pack(demand, kinds).cost + 1e-9


@pytest.mark.parametrize("rate", [3.0, 0.6, 0.15])
def test_the_bound_is_close_to_what_the_law_says_of_equal_adapters(rate: float) -> None:
    """With adapters that can be divided, the law itself has an optimum: as many as one worker can serve."""
    kind = vllm_kind()
    one = demand_of([rate])

    def strain(count: float) -> float:
        return float(judge(replace(one, count=np.array([count])), kind.settings).strain.min())

    low, high = 0.1, 1e4
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if strain(middle) <= 1.0 else (low, middle)
    exact = 1000.0 / low
    value = bound(replace(one, count=np.array([1000.0])), [kind]).value
    assert 0.94 * exact <= value <= exact * (1.0 + 1e-6)


@slow
@given(demands(), st.integers(0, 2**32))
def test_no_packing_of_some_adapters_costs_less_than_these_need(demand: Demand, seed: int) -> None:
    """So an order of packing can be given up before its end."""
    kinds = [vllm_kind()]
    some = np.flatnonzero(np.random.default_rng(seed).random(len(demand)) < 0.6)
    needs = bound(demand, kinds).needs
    assert len(needs) == len(demand)
    if len(some):
        assert needs[some].sum() <= pack(demand.take(some), kinds).cost + 1e-9


def test_what_adapters_need_adds_up_to_the_bound() -> None:
    demand = demand_of(np.random.default_rng(0).choice([3.0, 1.0, 0.4], 200), rank=np.repeat([8, 32], 100))
    found = bound(demand, [vllm_kind()])
    assert found.needs.sum() == pytest.approx(found.value)
    assert found.needs.min() > 0


def test_the_points_serve_every_class() -> None:
    """Packing goes by them."""
    found = bound(demand_of(np.full(200, 0.7), rank=np.repeat([8, 32], 100)), [vllm_kind()])
    assert np.sum([point.shares for point in found.points], axis=0) == pytest.approx(np.ones(2))
    assert found.workers == pytest.approx(found.value, rel=0.02)
    assert found.nearest.tolist() == [0] * 100 + [1] * 100


def test_a_kind_of_which_there_are_too_few_is_not_a_bound_of_the_other() -> None:
    """One cheap worker helps by at most what it serves."""
    demand = demand_of(np.full(200, 0.7))
    dear = bound(demand, [vllm_kind(cost=3.0)]).value
    both = bound(demand, [vllm_kind(cost=3.0), vllm_kind(cost=1.0, most=1, name="cheap")]).value
    assert both == pytest.approx(dear - 2.0, rel=0.02)


def test_what_all_allowed_workers_cannot_serve_has_no_bound() -> None:
    """The command then says that there is no plan."""
    assert bound(demand_of(np.full(200, 0.7)), [vllm_kind(most=2)]).value == np.inf


@given(demands(adapters=200), st.integers(16, 64))
def test_classes_keep_the_number_and_the_load_of_the_adapters(demand: Demand, most: int) -> None:
    """Rates between two points of the grid become shares of both."""
    classed = classes(demand, most)
    of, nearest = classed.demand, classed.nearest
    assert of.adapters == pytest.approx(demand.adapters)
    assert of.total_rate == pytest.approx(demand.total_rate)
    assert np.array_equal(of.rank[nearest], demand.rank)
    seconds = np.geomspace(0.01, 1e4, 20)[:, None]
    used = [float(one) for one in (-np.expm1(-seconds * of.rate)) @ of.count]
    assert (np.array(used) <= (-np.expm1(-seconds * demand.rate)).sum(axis=1) * (1.0 + 1e-9)).all()


def test_lengths_of_many_kinds_are_rounded_to_what_is_easier() -> None:
    """Where there are more kinds than classes."""
    chance = np.random.default_rng(0)
    demand = replace(
        demand_of(np.full(300, 0.1)), prompt_tokens=chance.uniform(50, 500, 300), output_tokens=chance.uniform(50, 500, 300)
    )
    classed = classes(demand, 32)
    of, nearest = classed.demand, classed.nearest
    assert len(of) <= 40
    assert (of.prompt_tokens[nearest] <= demand.prompt_tokens * (1 + 1e-9)).all()
    assert (of.output_tokens[nearest] <= demand.output_tokens * (1 + 1e-9)).all()


def test_divided_cells_hold_what_their_parent_held() -> None:
    """Cells are a partition, and none of their parts can do more than the whole."""
    of = demand_of([0.3, 1.0], rank=[8, 32])
    kind = vllm_kind()
    of = replace(of, count=np.array([200.0, 50.0]))
    states = States(of, kind)
    cells = first(of, 0, kind)
    parts, parents = cells.divided()
    for name in ("batch", "used", "adapters"):
        low, high = getattr(cells, name)[parents].T
        part_low, part_high = getattr(parts, name).T
        assert (part_low >= low - 1e-12).all()
        assert (part_high <= high + 1e-12).all()
    whole = states.rows(cells)[parents]
    able = (whole[:, 0] < 1e8) & (states.rows(parts)[:, 0] < 1e8)
    larger = states.rows(parts).max(axis=1) >= whole.max(axis=1) * (1.0 - 0.02)
    assert larger[able].mean() > 0.99
    assert isinstance(cells, Cells)
