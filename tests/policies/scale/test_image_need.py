"""Promise: workers that draw pictures are counted by their steps: full batches up to the knee, and few requests that wait."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from motet.policies.scale.fleet_demand import AdapterShare
from motet.policies.scale.image_need import USUAL, image_times, image_workers, pictures_s
from motet.policies.scale.need import Asked, Objective, Packed
from motet.policies.scale.rate_forecast import Rates
from motet.policies.scale.sizing import Need
from motet.policies.times.image_times import ImageTimes
from tests.support_worker import PERF, worker_limits

STEPS = 25.0
SLOW = replace(PERF, decode_base_ms=80.0, decode_row_ms=20.0, decode_lora_ms=1.0)


def times(*points: tuple[int, float]) -> ImageTimes:
    found = ImageTimes()
    for rows, ms in points:
        found.observe(USUAL, rows, ms)
    return found


def test_a_worker_draws_as_many_pictures_as_steps_at_the_knee_allow() -> None:
    """At 4 rows a row takes 25 ms, at 8 as long: 4 pictures of 25 steps of 100 ms are 1.6 a second."""
    assert pictures_s(times((1, 70.0), (2, 80.0), (4, 100.0), (8, 200.0)), STEPS, 8) == pytest.approx(1.6)


def test_reported_step_times_are_taken_at_numbers_of_rows_up_to_the_most() -> None:
    found = image_times(SLOW, 12)
    assert [found.step_ms(USUAL, rows) for rows in (1, 2, 4, 8, 12)] == pytest.approx([100.0, 120.0, 160.0, 240.0, 320.0])


def waits_s(rate: float, places: int, stay_s: float, seed: int = 0) -> np.ndarray:
    """Waits of Poisson arrivals for one of some places, each taken for so long: first come, first served."""
    chance = np.random.default_rng(seed)
    free_s, found, now_s = np.zeros(places), [], 0.0
    for gap_s in chance.exponential(1.0 / rate, 20_000):
        now_s += gap_s
        place = int(free_s.argmin())
        found.append(max(0.0, free_s[place] - now_s))
        free_s[place] = max(now_s, free_s[place]) + stay_s
    return np.array(found)


@pytest.mark.parametrize("rate", [1.0, 5.0, 20.0])
def test_so_many_workers_keep_waits_short_and_far_fewer_do_not(rate: float) -> None:
    """Beside a simulation of the places of all workers. Half as many cannot even draw all pictures."""
    steps, most, slo_ms = times((1, 70.0), (2, 80.0), (4, 100.0), (8, 200.0)), 8, 1000.0
    workers = image_workers(steps, rate, STEPS, most, ttft_slo_ms=slo_ms, share=0.99)
    assert np.mean(waits_s(rate, 4 * workers, 2.5) <= slo_ms / 1e3) >= 0.99
    fewer = workers - 2 if rate > 4.0 else workers - 1
    assert fewer * 1.6 < rate or np.mean(waits_s(rate, 4 * fewer, 2.5) <= slo_ms / 1e3) < 0.99


def test_a_load_of_pictures_is_answered_for_by_the_sizers_law() -> None:
    """10 pictures/s of 24 tokens are 10 x 24 x T(K) / K of a worker's time."""
    needs = Packed(Objective(ttft_slo_ms=5000.0, tpot_slo_ms=1.0))
    rows = [AdapterShare(1.0, 8, 1 << 20)]
    asked = Asked(requests_s=10.0, prompt_tokens_s=770.0, output_tokens_s=240.0, rows=rows)
    limits = worker_limits(max_running=16, capabilities=("draws",))
    needs.know(asked, (limits, SLOW), 0.0)
    found = needs(Rates(10.0, 1010.0))
    each = pictures_s(image_times(SLOW, 16), 24.0, 16)
    assert 10.0 / each <= found.workers <= 1.3 * 10.0 / each + 1 and found.impossible == ""
    assert needs(Rates(0.0, 0.0)) == Need(1)
