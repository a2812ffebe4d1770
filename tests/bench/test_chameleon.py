"""The bounds of the Chameleon bench: evictions that know the future, and a scheduler with foresight for all workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from bench.chameleon_fleet import measure_fleet, measure_foreseeing_fleet
from bench.chameleon_parts import TIGHT_GIB, Case, Policy, informed, measure
from bench.chameleon_queues import measure_order
from motet.twin.workload import Workload


def asked(*order: int) -> Workload:
    """Four adapters, requested in this order at 0, 1, ... seconds."""
    ones, four = np.ones(len(order), np.int64), np.ones(4, np.int64)
    return Workload(
        arrival_s=np.arange(float(len(order))),
        adapter=np.array(order),
        prompt_tokens=ones,
        output_tokens=ones,
        ranks=four,
        adapter_bytes=four,
    )


def test_with_the_future_known_the_adapter_that_is_asked_for_last_is_evicted() -> None:
    load = asked(0, 1, 2, 1, 0)
    eviction = informed(Case(policy=Policy(eviction="lru", knows="future")), load)
    for ref in load.adapters:
        eviction.release(ref.digest)
    eviction.now_s = 2.0
    assert list(eviction) == [load.adapters[index].digest for index in (2, 3, 0, 1)], "2 and 3 are not asked for again"


@pytest.mark.parametrize("knows", ["future", "popularity"])
def test_with_knowledge_fewer_requests_need_a_copy(knows: Literal["future", "popularity"]) -> None:
    case = Case(policy=Policy(eviction="lru"), seconds=60.0, adapters=500, rate=5.0, memory_gib=TIGHT_GIB)
    knowing = replace(case, policy=Policy(eviction="lru", knows=knows))
    assert measure(knowing).hit_rate > measure(case).hit_rate + 0.02


def test_a_scheduler_brings_adapters_that_are_asked_for_at_intervals() -> None:
    case = Case(
        policy=Policy(eviction="gdsf", prefetch=0), popularity="periodic", seconds=60.0, adapters=200, rate=12.0, memory_gib=4.0
    )
    assert measure_fleet(case).foreseen == 0.0 < measure_foreseeing_fleet(case).foreseen


def test_where_memory_binds_no_request_waits_much_longer_for_chameleons_queues_than_in_turn() -> None:
    """With quotas that are scaled down to memory, the P99 TTFT was twice that of first come, first served, and more."""
    case = Case(policy=Policy(eviction="score"), memory_gib=7.0, rate=8.0, seconds=150.0)
    first, ours = measure(case), measure(replace(case, policy=Policy(eviction="score", queues="chameleon")))
    assert first.ttft_p99 > 2 * case.slo_s, "it does bind"
    assert ours.ttft_p99 < 1.1 * first.ttft_p99 and ours.ttft_p50 < 1.1 * first.ttft_p50


def test_the_largest_requests_that_come_last_wait_longest() -> None:
    case = Case(policy=Policy(eviction="score"), memory_gib=7.0, rate=8.0, seconds=60.0)
    (first, peak), (last, _) = (
        measure_order(replace(case, policy=Policy(eviction="score", queues=name))) for name in ("fcfs", "largest last")
    )
    assert 0.9 < peak <= 1.0
    assert last.ttft_p50 < first.ttft_p50 and last.ttft_max > first.ttft_max
