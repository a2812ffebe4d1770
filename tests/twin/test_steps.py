from __future__ import annotations

import random

import pytest

from motet.twin.events import ARRIVAL, STEP, Events, to_ps
from motet.twin.steps import A10_BGMV, A10_MBGMV, Batch, MeasuredSteps, PerfSteps, elapsed_ps, steps_within
from tests.twin.support import STEPS


def test_the_steps_within_a_time_are_counted_as_one_would_by_walking_them() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        first, growth = draw.randint(1, 10**11), draw.choice([0, 1, draw.randint(1, 10**9)])
        steps = draw.randint(0, 2000)
        end = elapsed_ps(first, growth, steps)
        assert end == sum(first + i * growth for i in range(steps))
        assert steps_within(first, growth, end) == steps
        assert steps_within(first, growth, end + first - 1) == steps
        if steps:
            assert steps_within(first, growth, end - 1) == steps - 1


@pytest.mark.parametrize(("perf", "load"), [(A10_BGMV, 3 * 64), (A10_MBGMV, 8 + 16 + 64)])
def test_a_decode_step_costs_what_the_kernels_model_says(perf, load) -> None:
    batch = Batch(decode_rows=3, decode_rank_sum=8 + 16 + 64, decode_max_rank=64)
    expected = perf.decode_base_ms + 3 * perf.decode_row_ms + perf.decode_lora_ms * load
    assert PerfSteps(perf).fixed_ps(batch) == to_ps(expected)


def test_the_default_profile_has_the_latencies_that_the_paper_gives() -> None:
    """CaraServe section 2.3: 24 requests of rank 32, and 16 of rank 64."""
    for perf, few, many in ((A10_BGMV, 35.8, 34.8), (A10_MBGMV, 35.9, 35.3)):
        steps = PerfSteps(perf)
        assert steps.fixed_ps(Batch(decode_rows=24, decode_rank_sum=24 * 32, decode_max_rank=32)) == to_ps(many)
        assert steps.fixed_ps(Batch(decode_rows=16, decode_rank_sum=16 * 64, decode_max_rank=64)) == to_ps(few)


def test_prefill_loads_and_waiting_requests_add_up() -> None:
    steps = PerfSteps(A10_MBGMV, schedule_ms=0.5, waiting_ms=0.25)
    batch = Batch(prefill_requests=1, prefill_tokens=100, prefill_rank_sum=8, prefill_max_rank=8, waiting=4, loads=(1 << 20,))
    perf = A10_MBGMV
    prefill = perf.prefill_base_ms + 100 * perf.prefill_token_ms + 8 * perf.prefill_lora_ms
    assert steps.fixed_ps(batch) == to_ps(0.5 + 1.0 + prefill + perf.load_base_ms + perf.load_ms_per_mib)


def test_a_measured_step_costs_its_pass_and_all_that_it_reads_and_computes() -> None:
    steps = MeasuredSteps(STEPS, A10_MBGMV)
    assert steps.context_token_ps == to_ps(STEPS.context_token_ms) and steps.longest_token_ps == to_ps(STEPS.longest_token_ms)
    batch = Batch(
        prefill_requests=2,
        prefill_tokens=30,
        decode_rows=10,
        sampled=11,
        adapter_bytes=3 << 20,
        row_rank_sum=500,
        prefill_pairs=900,
        loads=(1 << 20,),
    )
    expected = 30.5 + 24 / 48 * 7.5  # 40 rows
    expected += 0.1 * 11 + 0.7 * 2 + 0.01 * 3 + 0.0003 * 500 + 0.00001 * 900
    expected += A10_MBGMV.load_base_ms + A10_MBGMV.load_ms_per_mib
    assert steps.fixed_ps(batch) == pytest.approx(to_ps(expected), abs=2)


def test_a_step_with_prefills_takes_its_chance_in_the_spread_and_decodes_do_not() -> None:
    steps = MeasuredSteps(STEPS, A10_MBGMV)
    usual = 30.0 + 0.7
    for chance, factor in ((0.0, 0.8), (0.25, 0.9), (0.5, 1.0), (0.75, 1.2), (1.0, 1.4)):
        batch = Batch(prefill_requests=1, prefill_tokens=1, chance=chance)
        assert steps.fixed_ps(batch) == pytest.approx(to_ps(factor * usual), abs=2)
        assert steps.fixed_ps(Batch(decode_rows=1, chance=chance)) == to_ps(30.0)


@pytest.mark.parametrize(("rows", "expected"), [(1, 30.0), (16, 30.5), (64, 38.0), (512, 150.0), (960, 262.0)])
def test_a_pass_is_a_line_between_its_points_and_beyond_the_last(rows: int, expected: float) -> None:
    assert MeasuredSteps(STEPS, A10_MBGMV).fixed_ps(Batch(decode_rows=rows)) == pytest.approx(to_ps(expected), abs=2)


def test_events_happen_by_time_then_priority_then_order_of_asking() -> None:
    events, seen = Events(), []
    for time, priority, name in ((5, STEP, "e"), (3, ARRIVAL, "b"), (3, STEP, "a"), (3, ARRIVAL, "c"), (4, STEP, "d")):
        events.at(time, priority, seen.append, name)
    events.run(until_ps=4)
    assert seen == ["a", "b", "c", "d"] and events.now_ps == 4
    events.run()
    assert seen == ["a", "b", "c", "d", "e"] and events.now_ps == 5 and not len(events)
