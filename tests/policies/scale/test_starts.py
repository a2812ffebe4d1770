"""Promise: the lead is what nine of ten workers took to start, and a usual time before one was seen."""

from __future__ import annotations

from motet.policies.scale.starts import KEPT, USUAL_S, Starts


def test_the_lead_is_measured_from_the_notice_to_the_first_look_at_which_the_worker_serves() -> None:
    starts = Starts()
    assert starts.lead_s == USUAL_S
    starts.look(100.0, {"a": 90.0, "b": 95.0}, [])
    assert starts.lead_s == USUAL_S, "none has started yet"
    starts.look(115.0, {"b": 95.0}, ["a"])
    assert starts.lead_s == 25.0
    starts.look(130.0, {}, ["a", "b"])
    assert starts.lead_s == 35.0
    starts.look(145.0, {}, ["a", "b"])
    assert starts.lead_s == 35.0, "a worker that goes on serving starts no more"


def test_a_start_that_failed_is_none() -> None:
    starts = Starts()
    starts.look(0.0, {"a": 0.0}, [])
    starts.look(15.0, {}, [])
    assert starts.lead_s == USUAL_S


def test_one_slow_start_in_twenty_does_not_count_and_old_ones_are_forgotten() -> None:
    starts, at_s = Starts(), 0.0
    for number in range(3 * KEPT):
        took_s = 500.0 if number % 20 == 0 and number < KEPT else 10.0
        starts.look(at_s, {"w": at_s}, [])
        at_s += took_s
        starts.look(at_s, {}, ["w"])
    assert starts.lead_s == 10.0
