"""A bench stops repeating when its time is over, and reports when the machine's speed changed meanwhile."""

from __future__ import annotations

import time

from bench import watch
from bench.watch import Watch


def test_without_haste_every_round_is_made() -> None:
    watching = Watch()
    assert list(watching.rounds(5)) == [0, 1, 2, 3, 4]
    assert watching.figures()["cut_short"] == []


def test_a_round_that_would_not_end_in_time_is_left_out_and_said_so() -> None:
    watching = Watch(limit_s=2.0)
    done = []
    for number in watching.rounds(20, "laps"):
        time.sleep(0.3)  # time: a round takes so long
        done.append(number)
    assert 1 <= len(done) < 8
    assert watching.figures()["cut_short"] == [f"{len(done)} of 20 laps"]
    assert "laps" in watching.says() and watching.left_s > 0


def test_what_is_needed_is_measured_even_when_time_is_over() -> None:
    watching = Watch(limit_s=0.0)
    assert list(watching.rounds(9, at_least=3)) == [0, 1, 2]


def test_parts_share_the_time() -> None:
    watching = Watch(limit_s=1000.0)
    watching.began_s -= 600.0
    assert list(watching.rounds(3, within=0.5)) == [0]
    assert list(watching.rounds(3, within=0.7)) == [0, 1, 2]


def test_a_machine_that_slows_down_is_noticed(monkeypatch) -> None:
    times_ms = iter([(1.0, 1.0)] * 20)
    monkeypatch.setattr(watch, "work_ms", lambda: next(times_ms))
    monkeypatch.setattr(watch, "QUIET_CORES", 1000.0)
    still = Watch()
    still.mark()
    assert still.figures()["held_still"] and "did NOT" not in still.says()
    monkeypatch.setattr(watch, "work_ms", lambda: (1.2, 1.0))
    still.mark()
    assert still.figures()["calibration_spread"] == 0.2
    assert not still.figures()["held_still"] and "did NOT hold still" in still.says()
