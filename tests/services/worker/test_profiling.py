"""Promise: the time of a profile's step ends when the next step begins, and no step waited for an adapter. Models that decode
nothing are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motet.services.worker import profiling
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engine.request import StepOutput, StepStats
from motet.services.worker.engine_thread import StepReport
from motet.services.worker.profiling import measure, timed_steps
from motet.shared.config import ConfigError


def report(began_ms: float, time_ms: float = 0.0, *, running: int = 1, loaded: int = 0) -> StepReport:
    """Of a step; without a time, of what happened between two steps."""
    stats = StepStats(time_ms=time_ms, decode_rows=bool(time_ms), running=running, adapters_loaded=loaded)
    return StepReport(
        step=0,
        began_s=began_ms / 1000,
        output=StepOutput(stats=stats),
        failures=0,
        kv_blocks_free=0,
        adapter_bytes_free=0,
        prefill_tokens_waiting=0,
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
