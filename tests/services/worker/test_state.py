"""Promise: whoever applies a worker's deltas in order knows what its next snapshot will say."""

from __future__ import annotations

import random

import msgspec
import pytest

from motet.services.worker.engine.request import StepStats
from motet.services.worker.state import START_PERF, StepTimes, WorkerView
from motet.shared.messages import WorkerDelta, WorkerSnapshot
from motet.shared.model import Residency
from tests.support_worker import brief_of, generate_request, worker_limits


def apply(known: WorkerSnapshot, delta: WorkerDelta) -> WorkerSnapshot:
    """A receiver, written from the message's description alone."""
    assert (delta.worker_id, delta.incarnation, delta.seq) == (known.worker_id, known.incarnation, known.seq + 1)
    requests = {brief.request_id: brief for brief in known.requests}
    adapters = {held.digest: held for held in known.adapters}
    for request_id in delta.removed:
        requests.pop(request_id, None)
    requests |= {brief.request_id: brief for brief in delta.changed}
    for digest in delta.evicted:
        adapters.pop(digest, None)
    adapters |= {held.digest: held for held in delta.resident}
    return msgspec.structs.replace(
        known,
        seq=delta.seq,
        draining=delta.draining,
        kv_blocks_free=delta.kv_blocks_free,
        adapter_bytes_free=delta.adapter_bytes_free,
        requests=list(requests.values()),
        adapters=list(adapters.values()),
    )


def as_sets(snapshot: WorkerSnapshot) -> tuple[object, ...]:
    return (
        {brief.request_id: brief for brief in snapshot.requests},
        {held.digest: held for held in snapshot.adapters},
        snapshot.draining,
        snapshot.kv_blocks_free,
        snapshot.seq,
    )


@pytest.mark.parametrize("seed", range(20))
def test_deltas_rebuild_the_next_snapshot_whatever_happens(seed):
    random_ = random.Random(seed)
    view = WorkerView("w1", "first", worker_limits())
    known = view.snapshot(START_PERF, 0)
    for _ in range(60):
        for _ in range(random_.randrange(4)):
            request_id, digest = f"r{random_.randrange(6)}", f"d{random_.randrange(5)}"
            match random_.randrange(5):
                case 0 | 1:
                    phase = random_.choice(["loading", "waiting", "running"])
                    view.put(brief_of(generate_request(request_id, epoch=random_.randrange(3)), phase))
                case 2:
                    view.remove(request_id)
                case 3:
                    view.place(digest, Residency(digest, 8, 1024, random_.choice(["disk", "host", "device"])))
                case 4:
                    view.place(digest, None)
        view.kv_blocks_free = random_.randrange(512)
        view.draining = view.draining or random_.random() < 0.02
        if random_.random() < 0.2:
            known = view.snapshot(START_PERF, 0)
        elif view.changed:
            known = apply(known, view.delta(0))
    if view.changed:
        known = apply(known, view.delta(0))
    known = msgspec.structs.replace(known, seq=known.seq + 1, kv_blocks_free=view.kv_blocks_free)
    assert as_sets(known) == as_sets(view.snapshot(START_PERF, 0))


def test_what_comes_and_goes_between_two_deltas_is_reported_as_gone():
    view = WorkerView("w1", "first", worker_limits())
    view.snapshot(START_PERF, 0)
    view.put(brief_of(generate_request("r1")))
    view.remove("r1")
    delta = view.delta(0)
    assert delta.changed == [] and delta.removed == ["r1"]
    assert not view.changed


def test_token_progress_rides_on_snapshots_without_a_delta_of_its_own():
    view = WorkerView("w1", "first", worker_limits())
    view.put(brief_of(generate_request("r1"), "running"))
    view.snapshot(START_PERF, 0)
    view.progress("r1", 7)
    view.progress("unknown", 7)
    assert not view.changed
    assert view.snapshot(START_PERF, 0).requests[0].output_tokens == 7


def test_step_times_are_learned_from_steps_and_never_go_negative():
    random_ = random.Random(1)
    times = StepTimes(START_PERF)
    for _ in range(400):
        rows, ranks = random_.randrange(1, 64), random_.randrange(0, 512)
        decode_ms = 3.0 + 0.2 * rows + 0.004 * ranks
        times.observe(decode_ms * random_.uniform(0.95, 1.05), StepStats(decode_rows=rows, rank_sum=ranks))
        tokens, rank = random_.randrange(16, 512), random_.choice([0, 8, 64])
        prefill_ms = 6.0 + 0.05 * tokens + 0.03 * rank
        stats = StepStats(prefill_requests=1, prefill_tokens=tokens, rank_sum=rank)
        times.observe(prefill_ms * random_.uniform(0.95, 1.05), stats)
    model = times.model
    assert model.decode_base_ms == pytest.approx(3.0, rel=0.2)
    assert model.decode_row_ms == pytest.approx(0.2, rel=0.1)
    assert model.decode_lora_ms == pytest.approx(0.004, rel=0.2)
    assert model.prefill_token_ms == pytest.approx(0.05, rel=0.1)
    assert model.prefill_lora_ms == pytest.approx(0.03, rel=0.3)
    for _ in range(200):
        times.observe(0.0, StepStats(decode_rows=8, rank_sum=64))
    assert min(v for v in msgspec.structs.asdict(times.model).values() if isinstance(v, float)) >= 0.0


def test_a_batch_that_never_changes_still_gives_a_right_prediction_for_itself():
    times = StepTimes(START_PERF)
    for _ in range(5000):
        times.observe(40.0, StepStats(decode_rows=16, rank_sum=128))
    model = times.model
    assert model.decode_base_ms + 16 * model.decode_row_ms + 128 * model.decode_lora_ms == pytest.approx(40.0, rel=0.05)
    times.observe(10.0, StepStats(decode_rows=1))
    assert times.model.decode_base_ms < 100.0


def test_coefficients_that_the_batches_cannot_tell_apart_do_not_wander_off():
    """Every adapter of one rank: the LoRA load is the rows times it, so one of the two coefficients is anybody's guess."""
    random_ = random.Random(3)
    times = StepTimes(START_PERF)
    for _ in range(5000):
        rows = random_.randrange(1, 4)
        times.observe((2.0 + 2.5 * rows) * random_.uniform(0.8, 1.25), StepStats(decode_rows=rows, rank_sum=128 * rows))
    model = times.model
    for rows in (1, 2, 3):
        predicted = model.decode_base_ms + (model.decode_row_ms + 128 * model.decode_lora_ms) * rows
        assert predicted == pytest.approx(2.0 + 2.5 * rows, rel=0.08)
    assert model.decode_base_ms < 3.0 and model.decode_row_ms <= 2.7 and model.decode_lora_ms <= 2.7 / 128


def test_a_worker_whose_steps_slow_down_for_other_reasons_still_says_that_a_row_costs_something():
    """Small batches while other processes took the cores, large ones while they did not: rows seem to cost nothing."""
    random_ = random.Random(4)
    times = StepTimes(START_PERF)
    for _ in range(2000):
        rows = random_.randrange(4, 40)
        times.observe(12.0 - 0.1 * rows, StepStats(decode_rows=rows, rank_sum=8 * rows))
    model = times.model
    assert model.decode_base_ms + 20 * model.decode_row_ms + 160 * model.decode_lora_ms == pytest.approx(10.0, rel=0.2)
    assert model.decode_row_ms > 0.02, "else everything is sent to this worker"


def test_steps_that_stood_still_do_not_make_a_worker_look_slow():
    times = StepTimes(START_PERF)
    stats = StepStats(prefill_requests=1, prefill_tokens=50, rank_sum=8)
    for number in range(200):
        times.observe(400.0 if number % 20 == 0 else 8.0, stats)
    model = times.model
    assert model.prefill_base_ms + 50 * model.prefill_token_ms + 8 * model.prefill_lora_ms < 12.0
    for _ in range(500):
        times.observe(40.0, stats)
    model = times.model
    assert model.prefill_base_ms + 50 * model.prefill_token_ms + 8 * model.prefill_lora_ms == pytest.approx(40.0, rel=0.3), (
        "a worker that did become slow says so"
    )


def test_drift_tells_how_far_steps_are_from_the_profile_while_the_estimate_follows():
    times = StepTimes(START_PERF)
    for _ in range(400):
        rows = 8
        profiled_ms = START_PERF.decode_base_ms + START_PERF.decode_row_ms * rows + START_PERF.decode_lora_ms * 64
        times.observe(1.5 * profiled_ms, StepStats(decode_rows=rows, rank_sum=64))
        prefill_ms = START_PERF.prefill_base_ms + START_PERF.prefill_token_ms * 100 + START_PERF.prefill_lora_ms * 8
        times.observe(prefill_ms, StepStats(prefill_requests=1, prefill_tokens=100, rank_sum=8))
    assert times.drift["decode"] == pytest.approx(0.5, abs=0.01)
    assert times.drift["prefill"] == pytest.approx(0.0, abs=0.01)
    model = times.model
    assert model.decode_base_ms + 8 * model.decode_row_ms + 64 * model.decode_lora_ms == pytest.approx(
        1.5 * profiled_ms, rel=0.02
    )


def test_the_padded_kernel_learns_from_rows_times_largest_rank_and_from_a_start_of_zero():
    random_ = random.Random(2)
    times = StepTimes(msgspec.structs.replace(START_PERF, kernel="bgmv", decode_row_ms=0.0))
    for _ in range(2000):
        rows, largest = random_.randrange(1, 33), random_.choice([8, 64])
        stats = StepStats(decode_rows=rows, rank_sum=8 * rows, rank_max=largest)
        times.observe(4.0 + 0.1 * rows + 0.002 * rows * largest, stats)
    assert times.model.decode_lora_ms == pytest.approx(0.002, rel=0.1)
    assert times.model.decode_row_ms == pytest.approx(0.1, rel=0.1)
