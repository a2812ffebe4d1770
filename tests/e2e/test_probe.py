"""Promise: a fault between file and device is answered with its reason in a whole mesh, and a release makes it good again."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.cli.client import ApiError, Client
from motet.examples.demo.tasks import TASKS
from tests.e2e.asking import PROMPT, answered
from tests.e2e.live import ROOT, LiveStack
from tests.e2e.planted_fault import FLAG
from tests.support import eventually

TASK = TASKS[0]


async def test_a_planted_fault_is_quarantined_for_everybody_and_released_by_an_administrator(tmp_path: Path) -> None:
    flag = tmp_path / "fault"
    flag.touch()
    env = {FLAG: str(flag), "PYTHONPATH": str(ROOT)}
    stack = LiveStack(tmp_path, "--plugins", str(ROOT / "tests/e2e/planted_fault.py"), env=env)
    stack.launch()
    try:
        stack.wait_ready()
        async with Client(stack.facts().urls[0], timeout_s=60.0) as client:
            body = {"model": TASK.adapter, "prompt": PROMPT("hello there"), "max_tokens": 4}
            with pytest.raises(ApiError, match=r"missing on the device: layers\.0"):
                await client.call("POST", "/v1/completions", json=body)

            async def shown() -> dict[str, str] | None:
                found = await client.call("GET", "/v1/adapters")
                return next(one["quarantine"] for one in found["data"] if one["name"] == TASK.adapter)

            why = await eventually(shown, within_s=30)
            assert (why["verdict"], why["worker_id"]) == ("partial", "worker-1")
            flag.unlink()
            with pytest.raises(ApiError, match="quarantined"):
                await client.call("POST", "/v1/completions", json=body)
            assert await answered(client, TASKS[1].adapter, "hello there") == TASKS[1].expected("hello there")
            await client.call("DELETE", f"/v1/adapters/{TASK.adapter}/quarantine")

            assert await answered(client, TASK.adapter, "hello there") == TASK.expected("hello there")
    finally:
        stack.stop()
