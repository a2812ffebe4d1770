"""`motet restart` replaces every process of a stack under load, and no client gets an error."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.cli.client import Client
from tests.e2e.asking import answer, long_request
from tests.e2e.live import ROOT, LiveStack, alive
from tests.support import eventually


@pytest.fixture
def own(tmp_path: Path) -> Iterator[LiveStack]:
    """The smallest stack: one process of each service, so that none can take over for another."""
    live = LiveStack(tmp_path)
    live.launch()
    live.wait_ready()
    yield live
    live.stop()


def restart(data_dir: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "motet", "restart", "--data-dir", str(data_dir)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=150)


async def stream(client: Client, seed: int) -> str:
    events = [event async for event in client.events("/v1/completions", long_request(seed))]
    assert any(choice["finish_reason"] == "length" for event in events for choice in event["choices"])
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def test_everything_is_replaced_under_load_without_an_error(own: LiveStack) -> None:
    before = {name: int(service["pid"]) for name, service in own.facts().services.items()}
    done = asyncio.Event()
    answered = 0

    async def newcomers() -> None:
        """Clients that open a new connection for each request."""
        nonlocal answered
        while not done.is_set():
            async with Client(own.facts().urls[0], timeout_s=60) as client:
                assert await answer(client, "upper-case", "hello there") == "HELLO THERE"
                answered += 1
            await asyncio.sleep(0.05)  # time: a process takes far longer to be replaced

    async with Client(own.facts().urls[0], timeout_s=120) as client:
        calm = [await stream(client, seed) for seed in range(3)]

        async def regulars(seed: int) -> None:
            """A client that keeps its connection and asks for one long answer after another."""
            while not done.is_set():
                assert await stream(client, seed) == calm[seed]

        load = [asyncio.create_task(work) for work in (newcomers(), newcomers(), *(regulars(seed) for seed in range(3)))]
        await eventually(lambda: answered >= 2, within_s=60)
        told = await asyncio.to_thread(restart, own.data_dir)
        done.set()
        await asyncio.gather(*load)
    assert told.returncode == 0, told.stdout + told.stderr
    after = {name: int(service["pid"]) for name, service in own.facts().services.items()}
    assert after.keys() == before.keys() and not set(after.values()) & set(before.values())
    await eventually(lambda: not any(map(alive, before.values())), within_s=60)
    assert all(map(alive, after.values()))


def test_where_no_stack_runs_there_is_nothing_to_restart(tmp_path: Path) -> None:
    told = restart(tmp_path)
    assert told.returncode == 1 and "no stack runs" in told.stderr
