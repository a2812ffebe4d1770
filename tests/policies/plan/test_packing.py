"""Packings place every adapter once, within the limits, always alike; splitting; reasons where there is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motet.policies.plan.bound import bound
from motet.policies.plan.capacity import Limits, judge
from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import Adapters, CannotServe, Kind, Packing
from motet.policies.plan.level import level
from motet.policies.plan.packing import Procedure, pack, pack_onto
from motet.policies.plan.prefixes import by_prefixes, longest, zigzag
from tests.policies.plan.support import MIB, demand_of, demands, native_kind, served, vllm_kind

slow = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PROCEDURES: tuple[Procedure, ...] = ("bisect", "guided", "best")


def holds(packing: Packing, demand: Demand, kinds: list[Kind]) -> None:
    """Every worker is within its limits by the law, judged anew from its own adapters."""
    for worker in packing.workers:
        kind, asked = kinds[worker.kind], worker.demand(demand)
        verdict = judge(asked, kind.settings, kind.limits)
        assert verdict.strain[worker.setting] == pytest.approx(worker.strain, rel=1e-6)
        assert worker.strain <= 1.0 + 1e-9
        assert asked.rank.max() <= kind.settings.max_rank[worker.setting]
        assert verdict.adapters_in_use[worker.setting] <= kind.settings.slots[worker.setting]
        assert (asked.size_bytes <= kind.settings.adapter_bytes[worker.setting]).all()


@slow
@given(demands(), st.sampled_from(PROCEDURES))
def test_each_adapter_is_on_one_worker_and_no_worker_is_beyond_its_limits(demand: Demand, procedure: Procedure) -> None:
    """The promise of a packing by the law."""
    kinds = [vllm_kind()]
    packing = pack(demand, kinds, procedure=procedure)
    assert sorted(row for worker in packing.workers for row in worker.rows) == list(range(len(demand)))
    holds(packing, demand, kinds)


@slow
@given(demands(adapters=40))
def test_the_same_demand_is_packed_alike(demand: Demand) -> None:
    """A plan can be made again."""
    assert pack(demand, [vllm_kind()]) == pack(demand, [vllm_kind()])


@slow
@given(demands())
def test_the_best_packing_costs_no_more_than_each_procedure(demand: Demand) -> None:
    """The default takes the cheaper of both."""
    costs = {procedure: pack(demand, [vllm_kind()], procedure=procedure).cost for procedure in PROCEDURES}
    assert costs["best"] <= min(costs.values())


def test_the_points_of_the_bound_can_save_a_worker() -> None:
    """The zigzag mixes rates that the bound keeps apart."""
    rate = np.random.default_rng(0).choice([2.4, 1.2, 0.6, 0.3, 0.15], 100)
    workers = [len(pack(demand_of(rate, rank=32), [vllm_kind()], procedure=one).workers) for one in PROCEDURES]
    assert workers == [4, 3, 3]


def test_an_order_whose_last_worker_costs_too_much_is_given_up() -> None:
    """Adapters that are hardly ever asked for need a worker, although next to nothing by the bound."""
    demand = demand_of([1e-9, 1e-9])
    with pytest.raises(CannotServe, match="do not suffice in this order"):
        by_prefixes(Adapters(demand, [vllm_kind()]), zigzag(demand), below=0.5, needs=np.zeros(2))


def test_an_order_is_given_up_as_soon_as_the_rest_needs_too_much() -> None:
    """Promise: a further order costs little where the bound proves that it gains nothing."""
    demand = demand_of(np.full(200, 1.0))
    adapters = Adapters(demand, [vllm_kind()])
    needs = bound(demand, [vllm_kind()]).needs
    every = by_prefixes(adapters, zigzag(demand), below=needs.sum() + 1.0, needs=needs)
    assert sorted(row for worker in every for row in worker.rows) == list(range(200))
    adapters.best = lambda kind, loads: pytest.fail("nothing needs to be judged")  # type: ignore[method-assign]
    with pytest.raises(CannotServe, match="do not suffice in this order"):
        by_prefixes(adapters, zigzag(demand), below=needs.sum() - 0.1, needs=needs)


@slow
@given(demands(adapters=40))
def test_kinds_together_cost_no_more_than_the_dearest_alone(demand: Demand) -> None:
    """A further kind is used where it is cheaper, and limits of each kind hold."""
    kinds = [vllm_kind(cost=3.0), native_kind(cost=1.0, most=2)]
    packing = pack(demand, kinds, procedure="bisect")
    assert served(packing, len(demand)) == pytest.approx(np.ones(len(demand)))
    assert sum(worker.kind == 1 for worker in packing.workers) <= 2
    assert packing.cost == sum(kinds[worker.kind].cost for worker in packing.workers)
    holds(packing, demand, kinds)


def test_an_adapter_too_hot_for_a_worker_becomes_equal_copies_on_different_workers() -> None:
    """The paper's greedy cannot serve it."""
    kinds = [vllm_kind()]
    demand = demand_of([120.0, 0.5, 0.5])
    packing = pack(demand, kinds)
    homes = [(worker.shares[worker.rows.index(0)], worker.rows.count(0)) for worker in packing.workers if 0 in worker.rows]
    assert len(homes) >= 2
    assert homes == [(pytest.approx(1.0 / len(homes)), 1)] * len(homes)
    assert served(packing, 3) == pytest.approx(np.ones(3))
    holds(packing, demand, kinds)


def test_an_adapter_gets_no_more_copies_than_it_needs_and_no_fewer() -> None:
    """Without objectives the law is strained in proportion to the load."""
    kinds = [vllm_kind()]
    for rate in (20.0, 40.0, 60.0):
        one = demand_of([rate], slo=False)
        copies = len(pack(one, kinds).workers)
        strains = [float(judge(one.faster(1.0 / n), kinds[0].settings).strain.min()) for n in (copies, max(1, copies - 1))]
        assert strains[0] <= 1.0
        assert copies == 1 or strains[1] > 1.0


def test_adapters_without_requests_are_placed_too() -> None:
    """A registered adapter needs a home although nobody asks for it."""
    packing = pack(demand_of([0.0, 0.0, 1.0]), [vllm_kind()])
    assert [worker.rows for worker in packing.workers] == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        (demand_of([1.0], rank=64), r"an adapter has rank 64; the largest that a worker holds is 32"),
        (
            replace(demand_of([1.0]), tpot_slo_ms=np.array([5.0])),
            r"an idle worker needs 1\d\.\d ms per token; the objective is 5",
        ),
        (
            replace(demand_of([1.0]), ttft_slo_ms=np.array([9.0])),
            r"an idle worker needs \d+\.\d ms to the first token; .* is 9",
        ),
        (demand_of([1.0], prompt=500_000.0), r"requests of 500150 tokens leave room for 0\.0 at a time on a worker \(KV\)"),
    ],
)
def test_what_no_worker_can_serve_is_said_in_a_sentence_with_numbers(demand: Demand, reason: str) -> None:
    """The command ends with this sentence."""
    with pytest.raises(CannotServe, match=reason):
        pack(demand, [vllm_kind()])


def test_an_adapter_larger_than_the_memory_for_adapters_is_refused_with_both_sizes() -> None:
    """Bytes limit native workers."""
    with pytest.raises(CannotServe, match="an adapter takes 4096 MiB; a worker has 2048 MiB for adapters"):
        pack(demand_of([1.0], size_mib=4096), [native_kind()])


def test_too_few_workers_are_said_with_the_load_that_they_serve() -> None:
    """`most` bounds a kind."""
    with pytest.raises(CannotServe, match=r"the 2 workers that are allowed serve \d\d% of the load"):
        pack(demand_of(np.full(60, 3.0)), [vllm_kind(most=2)])


def test_a_count_above_one_is_refused() -> None:
    """Rows of a packing are adapters."""
    with pytest.raises(ValueError, match="one row for each adapter"):
        pack(replace(demand_of([1.0]), count=np.array([2.0])), [vllm_kind()])


def test_workers_are_strained_alike() -> None:
    """Levelling: headroom is even, and no worker is left nearly empty."""
    packing = pack(demand_of(np.full(70, 0.8)), [vllm_kind()])
    strains = [worker.strain for worker in packing.workers]
    assert len(strains) > 1
    assert max(strains) - min(strains) < 0.1


def test_levelling_moves_adapters_from_a_full_worker_to_an_empty_one() -> None:
    """Two workers with 50 and 5 of 55 equal adapters."""
    adapters = Adapters(demand_of(np.full(55, 0.5)), [vllm_kind()])
    workers = [adapters.worker(0, range(50)), adapters.worker(0, range(50, 55))]
    level(adapters, workers, 20)
    assert sorted(row for worker in workers for row in worker.rows) == list(range(55))
    assert abs(workers[0].strain - workers[1].strain) < 0.1


def test_more_workers_than_needed_are_all_used_and_less_strained() -> None:
    """The objective "latency"."""
    demand = demand_of(np.full(70, 0.8))
    fewest = pack(demand, [vllm_kind()])
    wide = pack_onto(demand, [vllm_kind()], [len(fewest.workers) + 2])
    assert len(wide.workers) == len(fewest.workers) + 2
    assert wide.strain < 0.85 * fewest.strain
    assert served(wide, 70) == pytest.approx(np.ones(70))


def test_tighter_limits_for_a_setting_bind_all_settings_of_its_largest_rank_and_no_others() -> None:
    """A worker that missed keeps its limits when it is packed again."""
    kind = vllm_kind()
    tight = kind.tightened(0, Limits(busy=0.5, z=4.0, latency=0.8))
    of_rank_8 = kind.settings.max_rank == 8
    assert np.array_equal(tight.limits.busy, np.where(of_rank_8, 0.5, kind.limits.busy))
    assert np.array_equal(tight.limits.z, np.where(of_rank_8, 4.0, kind.limits.z))
    loose = tight.tightened(0, Limits(busy=0.9, z=1.0, latency=1.0))
    assert np.array_equal(loose.limits.busy, tight.limits.busy)
    demand = demand_of(np.full(60, 0.8))
    assert max(worker.busy for worker in pack(demand, [tight]).workers) <= 0.5


def test_a_zigzag_goes_by_rank_then_high_and_low_rates_in_turn() -> None:
    """Section 7 of the paper: PRIORITYSORTING."""
    demand = demand_of([1.0, 5.0, 3.0, 4.0, 2.0, 9.0], rank=[8, 8, 8, 8, 8, 16])
    assert zigzag(demand).tolist() == [5, 1, 0, 3, 4, 2]
    without = replace(demand, tpot_slo_ms=np.full(6, np.inf), ttft_slo_ms=np.full(6, np.inf))
    assert zigzag(without).tolist() == [5, 1, 0, 3, 4, 2]


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 60))
def test_the_longest_length_is_found_from_any_guess(enough: int, end: int, guess: int) -> None:
    """Doubling and bisection."""
    assert longest(lambda lengths: lengths <= enough, end, guess) == min(enough, end)


def test_bytes_of_adapters_bind_native_workers() -> None:
    """Never over bytes: what is in use and its deviation fit into the memory for adapters."""
    kinds = [native_kind(adapter_mib=512.0)]
    demand = demand_of(np.full(80, 0.05), size_mib=128)
    packing = pack(demand, kinds)
    assert {worker.limit for worker in packing.workers} == {"adapter memory"}
    assert len(packing.workers) > len(pack(replace(demand, size_bytes=np.full(80, 1.0 * MIB)), kinds).workers)
    holds(packing, demand, kinds)
