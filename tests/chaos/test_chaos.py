"""The short version of `make chaos`: processes die under load, and every answer equals that of the quiet run."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.faults import kill, moves
from tests.chaos.mesh import MeshOptions
from tests.chaos.run import LoadOptions, run_phase


async def test_answers_do_not_change_when_workers_and_a_scheduler_die(tmp_path: Path) -> None:
    load = LoadOptions(streams=12, max_tokens=80, questions=25, durable_each=1)
    options = MeshOptions(workers=2, gateways=1)
    phase = await run_phase(tmp_path, options, load, [kill("worker-1", "scheduler-1"), kill("worker-2")], print)
    assert not phase.trouble, phase.trouble[:5]
    assert not phase.refused
    assert phase.asked > load.streams and phase.durable >= 3
    assert any(row.resumed for row in phase.rows), "no stream was on a worker that was killed"


async def test_answers_do_not_change_when_requests_move_and_a_worker_dies_meanwhile(tmp_path: Path) -> None:
    load = LoadOptions(streams=12, max_tokens=80, questions=25, durable_each=1)
    options = MeshOptions(workers=3, gateways=1)
    phase = await run_phase(tmp_path, options, load, [moves("worker-1")], print)
    assert not phase.trouble, phase.trouble[:5]
    log = next(tmp_path.rglob("gateway-1.log")).read_text()
    assert log.count("moving request_id=") > load.streams, "requests moved"
    workers = [path.read_text() for path in tmp_path.rglob("worker-*.log")]
    assert any("KV blocks fetched" in text for text in workers), "some with their KV blocks"
