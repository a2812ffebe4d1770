"""Promise: the online estimate follows the engine's steps, predicts what it has seen, and is never negative or far-fetched."""

from __future__ import annotations

import random

import msgspec
import pytest
from msgspec.structs import replace

from motet.policies.times.step_record import Step
from motet.policies.times.step_times import StepTimes
from motet.services.worker.engines.start_perf import START_PERF


def test_step_times_are_learned_from_steps_and_never_go_negative():
    random_ = random.Random(1)
    times = StepTimes(START_PERF)
    for _ in range(400):
        rows, ranks = random_.randrange(1, 64), random_.randrange(0, 512)
        decode_ms = 3.0 + 0.2 * rows + 0.004 * ranks
        times.observe(Step(time_ms=decode_ms * random_.uniform(0.95, 1.05), decode_rows=rows, decode_rank_sum=ranks))
        tokens, rank = random_.randrange(16, 512), random_.choice([0, 8, 64])
        prefill_ms = 6.0 + 0.05 * tokens + 0.03 * rank
        stats = Step(prefill_requests=1, prefill_tokens=tokens, prefill_rank_sum=rank)
        times.observe(replace(stats, time_ms=prefill_ms * random_.uniform(0.95, 1.05)))
    model = times.model
    assert model.decode_base_ms == pytest.approx(3.0, rel=0.2)
    assert model.decode_row_ms == pytest.approx(0.2, rel=0.1)
    assert model.decode_lora_ms == pytest.approx(0.004, rel=0.2)
    assert model.prefill_token_ms == pytest.approx(0.05, rel=0.1)
    assert model.prefill_lora_ms == pytest.approx(0.03, rel=0.3)
    for _ in range(200):
        times.observe(Step(time_ms=0.0, decode_rows=8, decode_rank_sum=64))
    assert min(v for v in msgspec.structs.asdict(times.model).values() if isinstance(v, float)) >= 0.0


def test_a_batch_that_never_changes_still_gives_a_right_prediction_for_itself():
    times = StepTimes(START_PERF)
    for _ in range(5000):
        times.observe(Step(time_ms=40.0, decode_rows=16, decode_rank_sum=128))
    model = times.model
    assert model.decode_base_ms + 16 * model.decode_row_ms + 128 * model.decode_lora_ms == pytest.approx(40.0, rel=0.05)
    times.observe(Step(time_ms=10.0, decode_rows=1))
    assert times.model.decode_base_ms < 100.0


def test_coefficients_that_the_batches_cannot_tell_apart_do_not_wander_off():
    """With one rank for all adapters the LoRA load is rows times rank, so the steps do not tell the two coefficients apart."""
    random_ = random.Random(3)
    times = StepTimes(START_PERF)
    for _ in range(5000):
        rows = random_.randrange(1, 4)
        times.observe(
            Step(time_ms=(2.0 + 2.5 * rows) * random_.uniform(0.8, 1.25), decode_rows=rows, decode_rank_sum=128 * rows)
        )
    model = times.model
    for rows in (1, 2, 3):
        predicted = model.decode_base_ms + (model.decode_row_ms + 128 * model.decode_lora_ms) * rows
        assert predicted == pytest.approx(2.0 + 2.5 * rows, rel=0.08)
    assert model.decode_base_ms < 3.0 and model.decode_row_ms <= 2.7 and model.decode_lora_ms <= 2.7 / 128


def test_a_worker_whose_steps_slow_down_for_other_reasons_still_says_that_a_row_costs_something():
    """Batches are small while other processes take the cores, and large while they do not, so rows seem to cost nothing."""
    random_ = random.Random(4)
    times = StepTimes(START_PERF)
    for _ in range(2000):
        rows = random_.randrange(4, 40)
        times.observe(Step(time_ms=12.0 - 0.1 * rows, decode_rows=rows, decode_rank_sum=8 * rows))
    model = times.model
    assert model.decode_base_ms + 20 * model.decode_row_ms + 160 * model.decode_lora_ms == pytest.approx(10.0, rel=0.2)
    assert model.decode_row_ms > 0.02, "else everything is sent to this worker"


def test_steps_that_stood_still_do_not_make_a_worker_look_slow():
    times = StepTimes(START_PERF)
    stats = Step(prefill_requests=1, prefill_tokens=50, prefill_rank_sum=8)
    for number in range(200):
        times.observe(replace(stats, time_ms=400.0 if number % 20 == 0 else 8.0))
    model = times.model
    assert model.prefill_base_ms + 50 * model.prefill_token_ms + 8 * model.prefill_lora_ms < 12.0
    for _ in range(500):
        times.observe(replace(stats, time_ms=40.0))
    model = times.model
    assert model.prefill_base_ms + 50 * model.prefill_token_ms + 8 * model.prefill_lora_ms == pytest.approx(40.0, rel=0.3), (
        "a worker that did become slow says so"
    )


def test_drift_tells_how_far_steps_are_from_the_profile_while_the_estimate_follows():
    times = StepTimes(START_PERF)
    for _ in range(400):
        rows = 8
        profiled_ms = START_PERF.decode_base_ms + START_PERF.decode_row_ms * rows + START_PERF.decode_lora_ms * 64
        times.observe(Step(time_ms=1.5 * profiled_ms, decode_rows=rows, decode_rank_sum=64))
        prefill_ms = START_PERF.prefill_base_ms + START_PERF.prefill_token_ms * 100 + START_PERF.prefill_lora_ms * 8
        times.observe(Step(time_ms=prefill_ms, prefill_requests=1, prefill_tokens=100, prefill_rank_sum=8))
    assert times.drift["decode"] == pytest.approx(0.5, abs=0.01)
    assert times.drift["prefill"] == pytest.approx(0.0, abs=0.01)
    model = times.model
    assert model.decode_base_ms + 8 * model.decode_row_ms + 64 * model.decode_lora_ms == pytest.approx(
        1.5 * profiled_ms, rel=0.02
    )


def test_the_padded_kernel_learns_from_rows_times_largest_rank_and_from_a_start_of_zero():
    random_ = random.Random(2)
    times = StepTimes(replace(START_PERF, kernel="bgmv", decode_row_ms=0.0))
    for _ in range(2000):
        rows, largest = random_.randrange(1, 33), random_.choice([8, 64])
        stats = Step(decode_rows=rows, decode_rank_sum=8 * rows, decode_max_rank=largest)
        times.observe(replace(stats, time_ms=4.0 + 0.1 * rows + 0.002 * rows * largest))
    assert times.model.decode_lora_ms == pytest.approx(0.002, rel=0.1)
    assert times.model.decode_row_ms == pytest.approx(0.1, rel=0.1)


def test_the_time_to_decode_a_picture_follows_the_steps_that_decode_and_begins_with_the_profiles():
    times = StepTimes(replace(START_PERF, finish_ms=30.0))
    assert times.model.finish_ms == 30.0
    times.finished(4.0, 400.0)
    assert times.model.finish_ms == pytest.approx(30.0 + 0.1 * 70.0)
    fresh = StepTimes(START_PERF)
    fresh.finished(0.25, 5.0)
    assert fresh.model.finish_ms == pytest.approx(20.0)
