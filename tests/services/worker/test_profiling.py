"""Promise: the time of a profile's step ends when the next step begins, and no step waited for an adapter. A slow worker's
profile ends in time. Models that decode nothing are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motet.services.worker import profiling
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.request import StepOutput, StepReport, StepStats
from motet.services.worker.profiling import measure, timed_steps
from motet.shared.config import ConfigError


def report(began_ms: float, time_ms: float = 0.0, *, running: int = 1, loaded: int = 0) -> StepReport:
    """The report of a step; without a time, of events between two steps."""
    stats = StepStats(time_ms=time_ms, decode_rows=bool(time_ms), running=running, adapters_loaded=loaded)
    return StepReport(
        step=0,
        began_s=began_ms / 1000,
        output=StepOutput(stats=stats),
        failures=0,
        kv_blocks_free=0,
        adapter_bytes_free=0,
    )


def times_ms(*reports: StepReport) -> list[float]:
    return [step.time_ms for step in timed_steps(reports)]


def test_a_step_lasts_until_the_next_one_begins() -> None:
    assert times_ms(report(0, 8), report(10, 8), report(25, 8)) == pytest.approx([10, 15])


def test_a_step_after_which_nothing_ran_is_left_out() -> None:
    assert times_ms(report(0, 8), report(10, 8, running=0), report(90, 8), report(100, 8)) == pytest.approx([10, 10])


def test_a_report_between_two_steps_is_no_step() -> None:
    assert times_ms(report(0, 8), report(4), report(10, 8), report(12), report(13), report(20, 8)) == pytest.approx([10, 10])


@pytest.mark.parametrize("told", [[report(25, loaded=1), report(30, 8)], [report(30, 8, loaded=1)]])
def test_the_steps_beside_which_an_adapter_came_are_left_out(told: list[StepReport]) -> None:
    first = [report(0, 8), report(10, 8), report(20, 8)]
    later = [report(40, 8), report(51, 8), report(62, 8)]
    assert times_ms(*first, *told, *later) == pytest.approx([10, 10, 11, 11])


def test_reports_without_a_step_give_nothing() -> None:
    assert times_ms() == times_ms(report(0), report(1, loaded=1)) == times_ms(report(0, 8)) == []


async def test_a_pooling_model_is_refused_by_name_and_its_worker_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    life: list[str] = []

    class Pooling:
        view = SimpleNamespace(limits=SimpleNamespace(capabilities=("embeddings",)))

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        async def start(self) -> None:
            life.append("started")

        async def stop(self) -> None:
            life.append("stopped")

    monkeypatch.setattr(profiling, "WorkerService", Pooling)
    with pytest.raises(ConfigError, match="--model: a pooling model decodes nothing"):
        await measure(WorkerConfig.of(model="pooling"), Path(), seconds=1.0)
    assert life == ["started", "stopped"]


class Clock:
    """A worker for which every batch takes the same time. It records what is done with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batches: int, batch_s: float) -> None:
        self.now_s, self.batches, self.moments = 100.0, 0, list[int]()
        clock = self

        class Idle:
            view = SimpleNamespace(limits=SimpleNamespace(capabilities=()))

            def __init__(self, *_: Any, **__: Any) -> None:
                self.bus = object()

            async def start(self) -> None:
                pass

            async def stop(self) -> None:
                pass

        class Profiler:
            measured = object()

            def __init__(self, *_: Any) -> None:
                pass

            async def publish(self) -> None:
                pass

            def batches(self) -> list[int]:
                return list(range(batches))

            async def run(self, batch: int, *, tell: bool) -> None:
                clock.batches += 1
                clock.now_s += batch_s

            async def link_times(self, moment: int) -> None:
                clock.moments.append(moment)

            async def hop_times(self) -> None:
                pass

        monkeypatch.setattr(profiling, "WorkerService", Idle)
        monkeypatch.setattr(profiling, "Profiler", Profiler)
        monkeypatch.setattr(profiling, "now_s", lambda: self.now_s)

    async def measured_s(self, seconds: float) -> float:
        began_s = self.now_s
        await measure(WorkerConfig.of(model="any"), Path(), seconds=seconds)
        return self.now_s - began_s


async def test_a_fast_workers_profile_repeats_its_batches_for_as_long_as_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, batches=100, batch_s=0.25)
    assert await clock.measured_s(60) == pytest.approx(60, abs=1)
    assert clock.moments == list(range(profiling.MOMENTS))


async def test_every_batch_is_measured_once_where_that_takes_somewhat_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, batches=100, batch_s=1)
    assert await clock.measured_s(60) == pytest.approx(100, abs=2)
    assert clock.batches >= 100
    assert clock.moments == list(range(profiling.MOMENTS))


async def test_a_slow_workers_profile_ends_after_a_few_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, batches=100, batch_s=10)
    assert await clock.measured_s(60) == pytest.approx(60 * profiling.LONGEST_TIMES, abs=20)
    assert clock.moments == list(range(profiling.MOMENTS)), "transfers and hops are measured all the same"


async def test_transfers_are_measured_at_every_moment_even_if_one_batch_takes_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, batches=100, batch_s=1000)
    await clock.measured_s(60)
    assert clock.moments == list(range(profiling.MOMENTS))
