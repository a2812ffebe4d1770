"""The short version of `make chaos`: two deaths under load, and every answer is the one of the quiet run."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.faults import kill
from tests.chaos.mesh import MeshOptions
from tests.chaos.run import LoadOptions, run_phase


async def test_answers_do_not_change_when_a_worker_and_a_scheduler_die(tmp_path: Path) -> None:
    load = LoadOptions(streams=12, max_tokens=80, questions=25, durable_each=1)
    options = MeshOptions(workers=2, gateways=1)
    phase = await run_phase(tmp_path, options, load, [kill("worker-1"), kill("scheduler-1")], print)
    assert not phase.trouble, phase.trouble[:5]
    assert not phase.refused
    assert phase.asked > load.streams and phase.durable >= 3
    assert phase.rows[0].resumed, "no stream was on the worker that was killed"
