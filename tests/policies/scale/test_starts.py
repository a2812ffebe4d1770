"""Promise: the lead is what nine of ten workers took to start, and a usual time before one was seen."""

from __future__ import annotations

from motet.policies.scale.starts import KEPT, USUAL_S, Starts


def test_the_lead_is_measured_from_the_notice_to_the_first_look_at_which_the_worker_serves() -> None:
    starts = Starts()
    starts.begun("a", 90.0)
    starts.begun("b", 95.0)
    starts.look(100.0, [])
    assert starts.lead_s == USUAL_S, "none has started yet"
    starts.look(115.0, ["a"])
    assert starts.lead_s == 25.0
    starts.look(130.0, ["a", "b"])
    assert starts.lead_s == 35.0
    starts.look(145.0, ["a", "b"])
    assert starts.lead_s == 35.0, "a worker that goes on serving starts no more"


def test_a_start_that_failed_is_none_and_one_that_was_repeated_counts_from_its_last_beginning() -> None:
    starts = Starts()
    starts.begun("fails", 0.0)
    starts.ended("fails")
    starts.look(15.0, ["fails"])
    assert starts.lead_s == USUAL_S
    for at_s in (20.0, 30.0):
        starts.begun("again", at_s)
    starts.look(34.0, ["again"])
    assert starts.lead_s == 4.0


def test_one_slow_start_in_twenty_does_not_count_and_old_ones_are_forgotten() -> None:
    starts, at_s = Starts(), 0.0
    for number in range(3 * KEPT):
        starts.begun("w", at_s)
        at_s += 500.0 if number % 20 == 0 and number < KEPT else 10.0
        starts.look(at_s, ["w"])
    assert starts.lead_s == 10.0


def test_workers_that_never_serve_take_no_memory() -> None:
    starts = Starts()
    for number in range(3 * KEPT):
        starts.begun(str(number), float(number))
    starts.look(1000.0, ["0", str(3 * KEPT - 1)])
    assert starts.lead_s == 1000.0 - (3 * KEPT - 1), "the oldest are forgotten"
