"""Promise: how many workers a load needs is what the planner's law and packing say, of any number of adapters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from motet.policies.plan.capacity import Limits
from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import Kind, Packing
from motet.policies.plan.packing import pack
from motet.policies.scale import need
from motet.policies.scale.fleet_demand import AdapterShare, BaseRates
from motet.policies.scale.need import ROWS_MAX, Asked, Objective, Packed, kind_of, typical
from motet.policies.scale.rate_forecast import Rates
from motet.policies.scale.sizing import Need
from tests.support_worker import PERF, worker_limits

LIMITS = worker_limits(max_running=32, kv_blocks_total=4096, adapter_bytes_total=256 << 20)
OBJECTIVE = Objective(ttft_slo_ms=2000.0, tpot_slo_ms=200.0)


def asked(adapters: int, requests_s: float, *, prompt: float = 200.0, output: float = 100.0) -> BaseRates:
    """What is asked of some adapters, by a power law."""
    weights = 1.0 / np.arange(1, adapters + 1)
    sizes = [(8, 1 << 20), (64, 8 << 20)]
    shares = {
        str(number): AdapterShare(share, *sizes[number % 2]) for number, share in enumerate((weights / weights.sum()).tolist())
    }
    tokens = {"prompt_tokens_s": prompt * requests_s, "output_tokens_s": output * requests_s}
    return BaseRates(requests_s=requests_s, refused_s=0.0, **tokens, adapters=shares)


def packed(rates: BaseRates, **changes: float) -> Packed:
    found = Packed(Objective(**{"ttft_slo_ms": 2000.0, "tpot_slo_ms": 200.0} | changes))
    found.know(Asked.of(rates), (LIMITS, PERF), 0.0)
    return found


def test_more_load_needs_more_workers() -> None:
    needs = packed(asked(100, 1.0))
    counts = [needs(Rates(requests_s, 300.0 * requests_s)).workers for requests_s in (1.0, 10.0, 50.0, 200.0)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] > 12


@pytest.mark.parametrize(("seats", "requests_s", "saved"), [(32, 50.0, 1.0), (2, 5.0, 2.0)])
def test_the_number_is_the_fewest_that_are_enough_when_requests_are_spread_over_all_of_them(
    seats: int, requests_s: float, saved: float
) -> None:
    limits = replace(LIMITS, max_running=seats)
    needs = Packed(OBJECTIVE)
    needs.know(Asked.of(asked(100, requests_s)), (limits, PERF), 0.0)
    load = Rates(requests_s, 300.0 * requests_s)
    need = needs(load)

    def each(pool: int) -> int:
        kind = kind_of(limits, PERF)
        return len(pack(needs.demand(load), [dataclasses.replace(kind, limits=Limits(pool=pool))], procedure="bisect").workers)

    assert need.limit and each(need.workers) <= need.workers
    assert each(need.workers - 1) > need.workers - 1
    assert each(1) >= saved * need.workers, "workers that share nothing must each have room for chance"


def test_the_rates_ahead_are_those_of_the_load_and_the_lengths_follow_its_tokens() -> None:
    demand = packed(asked(3, 10.0)).demand(Rates(20.0, 20.0 * 600.0))
    assert demand.total_rate == pytest.approx(20.0)
    assert (demand.prompt_tokens[0], demand.output_tokens[0]) == (pytest.approx(400.0), pytest.approx(200.0))


def test_of_many_adapters_the_less_busy_are_grouped_with_their_whole_load_and_all_their_bytes() -> None:
    rates = asked(3000, 50.0)
    demand = packed(rates).demand(Rates(50.0, 50.0 * 300.0))
    assert len(demand) <= ROWS_MAX and demand.total_rate == pytest.approx(50.0)
    assert demand.size_bytes.sum() == sum(one.size_bytes for one in rates.adapters.values())
    assert demand.rank.max() == 64


def test_an_objective_that_an_idle_worker_misses_is_said_and_no_number_of_workers() -> None:
    need = packed(asked(3, 10.0), tpot_slo_ms=5.0)(Rates(10.0, 3000.0))
    assert need.workers == 0 and "idle worker needs" in need.impossible and "5" in need.impossible


def test_without_requests_or_workers_one_is_needed() -> None:
    unknown = Packed(OBJECTIVE)
    assert unknown(Rates(10.0, 3000.0)) == Need(1)
    unknown.know(Asked.of(asked(3, 10.0)), None, 0.0)
    assert unknown(Rates(10.0, 3000.0)) == Need(1)
    assert packed(asked(3, 10.0))(Rates(0.0, 0.0)) == Need(1)


def test_while_nobody_asks_the_lengths_are_the_last_that_were_seen() -> None:
    needs = packed(asked(3, 10.0, prompt=1000.0))
    needs.know(Asked.of(asked(3, 0.0)), (LIMITS, PERF), 15.0)
    assert needs.demand(Rates(10.0, 0.0)).prompt_tokens[0] == pytest.approx(1000.0)


def test_an_answer_counts_for_a_minute_for_loads_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    packings: list[int] = []

    def counted(demand: Demand, kind: Kind) -> Packing:
        packings.append(1)
        return pack(demand, [kind])

    monkeypatch.setattr(need, "_pooled", counted)  # private: how often it packs
    needs = packed(asked(3, 10.0))
    for at_s, requests_s, expected in ((0.0, 10.0, 1), (15.0, 10.1, 1), (30.0, 14.0, 2), (59.0, 10.0, 2), (61.0, 10.0, 3)):
        needs.know(Asked.of(asked(3 + round(at_s), requests_s)), (LIMITS, PERF), at_s)
        needs(Rates(requests_s, 300.0 * requests_s))
        assert len(packings) == expected, at_s


def test_an_answer_counts_for_as_long_as_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Kind] = []

    def counted(demand: Demand, kind: Kind) -> Packing:
        kinds.append(kind)
        return pack(demand, [kind])

    monkeypatch.setattr(need, "_pooled", counted)  # private: how often it packs
    needs, slower = packed(asked(3, 10.0)), replace(PERF, decode_base_ms=50.0)
    for at_s, perf, expected in (
        (900.0, PERF, 1),
        (1800.0, PERF, 1),
        (1801.0, slower, 2),
        (1830.0, PERF, 2),
        (1900.0, PERF, 3),
    ):
        needs.know(Asked.of(asked(3, 10.0)), (LIMITS, perf), at_s)
        needs(Rates(10.0, 3000.0))
        assert len(kinds) == expected, at_s


def test_the_kind_is_the_most_common_one_with_the_middle_step_times() -> None:
    small = replace(LIMITS, max_running=4)
    slow, fast = (replace(PERF, decode_base_ms=ms) for ms in (50.0, 5.0))
    kind = kind_of(*typical([(LIMITS, slow), (small, PERF), (LIMITS, PERF), (LIMITS, fast)]))
    assert kind.settings.seats == 32
    assert kind.settings.steps.perf == PERF  # type: ignore[attr-defined]
    assert len(kind.settings) == 1, "memory that is divided for good has one setting"
    shared = kind_of(replace(LIMITS, kv_block_bytes=1 << 16), PERF)
    assert len(shared.settings) > 1
