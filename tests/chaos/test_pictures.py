"""The short version of `make chaos-pictures`: workers die under way, and every picture is that of the quiet run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from motet.examples.demo_images import DEMO_IMAGES
from tests.chaos.faults import kill, moves
from tests.chaos.mesh import MeshOptions
from tests.chaos.picture_load import Steps
from tests.chaos.pictures import DIFFERENCE_MAX, PictureOptions, demo_images, run_pictures


@pytest.mark.timeout(300)
async def test_pictures_do_not_change_when_workers_and_a_scheduler_die_and_requests_move(tmp_path: Path) -> None:
    options = PictureOptions(each=5, asks=5, steps=Steps(200, 220), under_way_s=0.2)  # a picture takes seconds
    mesh = MeshOptions(workers=2, gateways=1, served=demo_images(Path(os.environ.get("MOTET_DEMO_IMAGES", DEMO_IMAGES))))
    found = await run_pictures(tmp_path, mesh, options, [moves(), kill("worker-1", "scheduler-1", "worker-2")], print)
    assert not found.trouble, found.trouble[:5]
    assert found.max_difference <= DIFFERENCE_MAX
    assert found.pictures == 10 and sum(row.in_flight for row in found.rows) >= 6
    assert found.rows[1].resumed, "no picture was on a worker that was killed"
    assert 0 < found.repeated < found.steps, "less was repeated than was drawn"
    assert "moving request_id=img-" in next(tmp_path.rglob("gateway-1.log")).read_text(), "pictures moved"
