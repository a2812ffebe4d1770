"""The short version of `make chaos`: processes die under load, and every answer equals that of the quiet run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import kill, moves
from tests.chaos.mesh import MeshOptions
from tests.chaos.run import LoadOptions, run_phase


@pytest.mark.timeout(300)
async def test_answers_do_not_change_when_workers_and_a_scheduler_die_and_requests_move(tmp_path: Path) -> None:
    load = LoadOptions(streams=12, max_tokens=80, questions=25, durable_each=1, settle_s=1.0)
    options = MeshOptions(workers=3, gateways=1)
    faults = [kill("worker-1", "scheduler-1", "worker-2"), moves("worker-1")]
    phase = await run_phase(tmp_path, options, load, faults, print)
    assert not phase.trouble, phase.trouble[:5]
    assert not phase.refused
    assert phase.asked > load.streams and phase.durable >= 3
    assert phase.rows[0].resumed, "no stream was on a worker that was killed"

    log = next(tmp_path.rglob("gateway-1.log")).read_text()
    assert log.count("moving request_id=") > load.streams, "requests moved"
    workers = [path.read_text() for path in tmp_path.rglob("worker-*.log")]
    assert any("KV blocks fetched" in text for text in workers), "some with their KV blocks"
