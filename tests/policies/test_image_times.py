"""Promise: the knee is the smallest number of rows at which the time per row is within 5% of its least."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.policies.times.image_times import NEAR, REFRESH, START_MS, Bucket, ImageTimes

SMALL, LARGE = Bucket(8, 8), Bucket(32, 32)


def measured(bucket: Bucket, times_ms: dict[int, float]) -> ImageTimes:
    times = ImageTimes()
    for rows, took_ms in times_ms.items():
        times.observe(bucket, rows, took_ms)
    return times


def test_steps_bound_by_launches_have_a_high_knee_and_steps_bound_by_products_a_low_one() -> None:
    assert measured(SMALL, {1: 30.0, 2: 30.5, 4: 31.0, 8: 32.0}).knee(SMALL, 32) > 16
    assert measured(LARGE, {1: 100.0, 2: 199.0, 4: 396.0, 8: 800.0}).knee(LARGE, 32) == 1
    assert measured(LARGE, {1: 30.0, 2: 32.0, 4: 40.0, 8: 80.0, 16: 160.0}).knee(LARGE, 16) == 4


@given(
    st.dictionaries(st.integers(1, 32), st.floats(0.1, 1e4), min_size=2, max_size=8),
    st.integers(1, 40),
)
def test_the_knee_is_what_the_times_say(points: dict[int, float], most: int) -> None:
    times = measured(SMALL, points)
    each = [times.step_ms(SMALL, rows) / rows for rows in range(1, most + 1)]
    knee = times.knee(SMALL, most)
    assert each[knee - 1] <= (1 + NEAR) * min(each)
    assert all(ms > (1 + NEAR) * min(each) for ms in each[: knee - 1])
    steps = [times.step_ms(SMALL, rows) for rows in range(1, most + 1)]
    assert all(after >= before * (1 - 1e-9) for before, after in pairwise(steps)), "a step with more rows takes no less"


def test_times_between_measured_rows_are_interpolated_and_go_on_beyond_the_last() -> None:
    times = measured(SMALL, {2: 20.0, 4: 30.0})
    assert [times.step_ms(SMALL, rows) for rows in (1, 2, 3, 4, 6)] == [20.0, 20.0, 25.0, 30.0, 40.0]


def test_a_size_that_was_never_measured_has_the_times_of_the_nearest_one_by_its_pixels() -> None:
    times = measured(SMALL, {1: 11.0, 2: 12.0, 4: 14.0})  # 10 ms, and 1 for each row
    assert times.step_ms(LARGE, 2) == pytest.approx(10.0 + 2 * 16.0)
    assert times.knee(LARGE, 32) < times.knee(SMALL, 32)
    times.observe(LARGE, 1, 50.0)  # one measured number of rows tells nothing about others
    assert times.knee(LARGE, 32) < times.knee(SMALL, 32)


def test_without_any_measurement_a_step_takes_what_it_gets() -> None:
    assert (ImageTimes().knee(SMALL, 7), ImageTimes().step_ms(SMALL, 3)) == (7, START_MS)


def test_steps_move_the_times_and_times_that_cannot_be_are_ignored() -> None:
    times = measured(SMALL, {1: 10.0, 2: 11.0})
    for _ in range(100):
        times.observe(SMALL, 2, 20.0)
        times.observe(SMALL, 2, 0.0)
        times.observe(SMALL, 2, float("nan"))
    assert times.step_ms(SMALL, 2) == pytest.approx(20.0, rel=0.01)
    assert times.knee(SMALL, 2) == 1


def test_a_request_alone_takes_its_encoding_its_steps_and_the_decoding_of_its_pixels() -> None:
    times = measured(SMALL, {1: 11.0, 2: 12.0, 4: 14.0})
    times.observe_encode(4, 20.0)
    times.observe_decode(SMALL, 2, 6.0)
    assert times.decode_ms(SMALL) == pytest.approx(3.0) and times.decode_ms(LARGE) == pytest.approx(48.0)
    assert times.own_ms(SMALL, 2, 10) == pytest.approx(5.0 + 10 * 12.0 + 3.0)
    assert times.own_ms(SMALL, 2, 10, pictures=3, together=2) == pytest.approx(5.0 + 10 * (14.0 + 12.0) + 9.0)


def test_times_of_encoding_and_decoding_follow_the_steps_and_ignore_what_cannot_be() -> None:
    times = measured(SMALL, {1: 1.0, 2: 1.0})
    for _ in range(100):
        times.observe_encode(1, 8.0)
        times.observe_encode(1, 0.0)
        times.observe_decode(SMALL, 1, 2.0)
        times.observe_decode(SMALL, 1, float("nan"))
    times.observe_encode(1, 18.0)  # the latest one counts a tenth
    assert times.own_ms(SMALL, 1, 1) == pytest.approx(9.0 + 1.0 + 2.0)


def test_a_knee_that_was_measured_on_a_busy_machine_is_found_to_be_too_low() -> None:
    times = measured(SMALL, {1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0})  # the truth is a little more than 10 ms, whatever the rows
    assert times.knee(SMALL, 8) == 1
    taken = []
    for _ in range(40 * REFRESH):
        rows = times.rows(SMALL, 8)
        taken.append(rows)
        times.observe(SMALL, rows, 10.0 + rows / 10.0)
    assert times.knee(SMALL, 8) == 8 and taken[-1] == 8
    assert taken[: REFRESH - 4] == [1] * (REFRESH - 5) + [2], "it looks seldom"


def test_looking_beyond_the_knee_finds_that_it_was_right() -> None:
    times = measured(LARGE, {1: 100.0, 2: 199.0, 4: 396.0})
    taken = []
    for _ in range(10 * REFRESH):
        rows = times.rows(LARGE, 8)
        taken.append(rows)
        times.observe(LARGE, rows, 99.0 * rows + 1.0)
    assert (taken.count(1), taken.count(2)) == (10 * REFRESH - 10, 10)
