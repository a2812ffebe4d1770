"""The law of a worker: what it says about capacity, slots, memory and latencies, in the simplest cases that show it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.policies.plan.capacity import LIMITS, Limits, Mix, Settings, judge
from motet.policies.plan.demand import Demand, Floats


@dataclass(frozen=True)
class Simple:
    """A step takes 20 ms, 0.1 ms per row and per prompt token, and 1 ms per adapter."""

    stalls: bool = True
    copy: float = 0.0

    def step_ms(self, mix: Mix) -> Floats:
        prompt = 0.0 if mix.prompt_tokens is None else mix.prompt_tokens
        return np.asarray(20.0 + 0.1 * mix.rows + 0.1 * prompt + mix.distinct)

    def copy_ms(self, demand: Demand) -> Floats:
        return np.full((1, len(demand)), self.copy)


def settings(*slots: float, kv_tokens: float = 1e6, seats: float = 100, steps: Simple = Simple(), **more: float) -> Settings:
    n = len(slots)
    return Settings(
        steps=steps,
        slots=np.array(slots),
        adapter_bytes=np.full(n, more.get("adapter_bytes", np.inf)),
        max_rank=np.full(n, 64.0),
        kv_tokens=np.full(n, kv_tokens),
        seats=seats,
        step_tokens=more.get("step_tokens", np.inf),
    )


def base(rate: float = 1.0, **more: float) -> Demand:
    return Demand.of(rate, rank=0, prompt_tokens=100, output_tokens=200, **more)


def adapters(n: int, rate: float, **more: float) -> Demand:
    return Demand.of(np.full(n, rate), rank=8, size_bytes=1e6, prompt_tokens=100, output_tokens=200, **more)


def test_the_capacity_is_that_of_the_largest_batch():
    """100 seats, 200 tokens: a step that ends 0.5 requests and prefills 50 tokens takes 20 + 10 + 5 ms."""
    verdict = judge(base(), settings(8))
    assert verdict.batch_most[0] == 100
    assert verdict.capacity[0] == pytest.approx(100 / 200 / 35e-3, rel=0.01)


def test_a_batch_is_as_large_as_the_load_needs():
    """At B requests a step takes 20 + 0.15 B ms, and 200 steps serve them: 10 requests/s need B = 57."""
    verdict = judge(base(10.0), settings(8))
    assert verdict.batch[0] == pytest.approx(10 * 200 * 20e-3 / (1 - 10 * 200 * 0.15e-3), rel=0.02)
    assert verdict.busy[0] == pytest.approx(10.0 / verdict.capacity[0])


def test_kv_tokens_of_running_requests_limit_the_batch():
    """A running request holds 100 of its prompt, 200 of its output (exponential lengths) and half a block."""
    verdict = judge(base(), settings(8, kv_tokens=3180))
    assert verdict.batch_most[0] == pytest.approx((3180 - 100) / 308)
    assert verdict.limit(0) == "KV"


def test_tokens_of_a_step_limit_the_batch():
    assert judge(base(), settings(8, step_tokens=30)).batch_most[0] == pytest.approx(20)


def test_adapters_that_are_seldom_in_use_fit_into_fewer_slots_and_those_always_in_use_do_not():
    seldom, busy = judge(adapters(100, 0.002), settings(16)), judge(adapters(100, 0.1), settings(16, seats=1000))
    assert seldom.adapters_in_use[0] < 4
    assert seldom.strain[0] <= 1
    assert busy.limit(0) == "slots"
    assert busy.strain[0] > 1


def test_as_many_slots_as_adapters_are_always_enough():
    verdict = judge(adapters(16, 0.3), settings(16, seats=1000), Limits(z=5.0))
    assert verdict.strains[0, LIMITS.index("slots")] <= 1
    assert verdict.miss_share[0] == 0


def test_bytes_limit_adapters_where_slots_do_not():
    few, many = (judge(adapters(50, 0.1), settings(np.inf, seats=1000, adapter_bytes=size)) for size in (5e6, 50e6))
    assert few.limit(0) == "adapter memory"
    assert few.strain[0] > 1
    assert many.strain[0] <= 1


def test_every_request_misses_where_adapters_come_round_seldom_and_slots_are_few():
    """Che's approximation: with one slot of 100 equal adapters about 99 of 100 requests find another adapter there."""
    assert judge(adapters(100, 0.001), settings(1)).miss_share[0] == pytest.approx(0.99, abs=0.01)
    assert judge(adapters(100, 0.001), settings(50)).miss_share[0] == pytest.approx(0.5, abs=0.01)


def test_copies_take_time_from_the_steps_only_where_steps_wait_for_them():
    demand = adapters(100, 0.05)
    free, waits, beside = (
        judge(demand, settings(50, steps=Simple(stalls=stalls, copy=copy)))
        for stalls, copy in ((True, 0), (True, 40), (False, 40))
    )
    assert waits.capacity[0] < 0.95 * free.capacity[0]
    assert beside.capacity[0] == free.capacity[0]
    assert beside.ttft_ms[0] == pytest.approx(free.ttft_ms[0] + 40)


def test_an_objective_that_an_idle_worker_misses_strains_it():
    verdict = judge(base(0.0001, tpot_slo_ms=15.0), settings(8))
    assert verdict.limit(0) == "TPOT"
    assert verdict.strain[0] == pytest.approx(20 / 15, rel=0.02)


def test_a_rank_above_the_largest_cannot_be_served():
    demand = Demand.of(0.1, rank=128, prompt_tokens=10, output_tokens=10)
    assert np.isinf(judge(demand, settings(8)).strain[0])


def test_bursty_arrivals_need_more_seats():
    """The deviation of the batch grows with the root of the peakedness, and with what the batch adds to a step."""
    calm, bursty = (judge(base(10.0, peakedness=c), settings(8)).strains[0, LIMITS.index("seats")] for c in (1.0, 4.0))
    batch = judge(base(10.0), settings(8)).batch[0]
    stiffness = 20 / (20 + 0.15 * batch)
    assert (bursty - calm) * 100 == pytest.approx(Limits().z * np.sqrt(batch / stiffness), rel=0.02)


def test_requests_wait_where_seats_are_nearly_all_taken():
    """TTFT at 95% of the capacity is far above that at 50%; without an objective it strains nothing."""
    capacity = judge(base(), settings(8)).capacity[0]
    half, nearly = (judge(base(share * capacity, ttft_slo_ms=1000.0), settings(8)) for share in (0.5, 0.97))
    assert half.ttft_ms[0] < 150
    assert nearly.ttft_ms[0] > 1000
    assert nearly.limit(0) == "TTFT"
    assert judge(base(0.97 * capacity), settings(8)).strains[0, LIMITS.index("TTFT")] == 0


def test_requests_wait_for_slots_before_all_of_them_are_taken():
    few, many = (judge(adapters(200, 0.004, ttft_slo_ms=500.0), settings(slots)) for slots in (8, 16))
    assert few.adapters_in_use[0] < 5, "on average"
    assert few.ttft_ms[0] > 500 > many.ttft_ms[0]


def test_long_prompts_are_in_the_latencies_of_all():
    short, long = (
        judge(Demand.of(5.0, rank=0, prompt_tokens=prompt, output_tokens=100, tpot_slo_ms=100), settings(8, seats=1000))
        for prompt in (10, 1000)
    )
    assert long.ttft_ms[0] > short.ttft_ms[0] + 0.1 * 4 * 1000, "the 99th percentile of exponential prompts is 4.6 means"
    assert long.tpot_ms[0] > 1.5 * short.tpot_ms[0]


def test_equal_adapters_may_be_one_row_with_a_count():
    each, counted = judge(adapters(30, 0.02), settings(8, 16)), judge(adapters(1, 0.02, count=30), settings(8, 16))
    np.testing.assert_allclose(each.strains, counted.strains)


def test_the_best_setting_has_the_least_strain():
    verdict = judge(adapters(60, 0.02), settings(4, 16, 64))
    assert verdict.best == int(verdict.strain.argmin())
    assert verdict.strain[verdict.best] < verdict.strain[0]


@given(
    rates=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=30),
    factor=st.floats(1.05, 5.0),
    slots=st.integers(1, 64),
    kv_tokens=st.floats(2000, 1e6),
)
def test_more_load_never_strains_less(rates: list[float], factor: float, slots: int, kv_tokens: float):
    demand = Demand.of(np.array(rates), rank=8, prompt_tokens=100, output_tokens=200, tpot_slo_ms=100, ttft_slo_ms=1000)
    less, more = (judge(one, settings(float(slots), kv_tokens=kv_tokens)) for one in (demand, demand.faster(factor)))
    assert more.strain[0] >= less.strain[0] * (1 - 0.01)
