"""`motet up` for a user: one stack per directory, an external NATS, no orphans. test_wheel.py has its start and its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.cli import credentials
from motet.cli.client import Client
from motet.cli.nats_server import NatsServer
from tests.e2e.asking import answer
from tests.e2e.live import LiveStack, alive
from tests.support import eventually


@pytest.fixture
def own(tmp_path: Path) -> Iterator[LiveStack]:
    """A stack of this test's own, not started yet."""
    live = LiveStack(tmp_path)
    yield live
    if live.process is not None:
        live.stop()


async def test_no_orphans_when_the_supervisor_is_killed(own: LiveStack) -> None:
    own.launch()
    await eventually(lambda: own.facts().services["worker-1"]["pid"], within_s=30)
    pids = [pid for pid in own.pids() if pid]
    assert len(pids) >= 3 and all(map(alive, pids))
    own.signal(signal.SIGKILL)
    await eventually(lambda: not any(map(alive, pids)))


async def test_a_stack_with_several_copies_on_an_external_nats(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "bus", config_text=credentials.authorization(tmp_path / "credentials"))
    url = await server.start()
    live = LiveStack(
        tmp_path,
        *("--nats-url", url, "--credentials", str(tmp_path / "credentials"), "--gateways", "2", "--schedulers", "2"),
    )
    live.launch()
    try:
        facts = await asyncio.to_thread(live.wait_ready)
        assert "nats" not in facts.services and len(facts.urls) == 2
        for gateway in facts.urls:
            async with Client(gateway) as client:
                assert await answer(client, "upper-case", "hello there") == "HELLO THERE"
        assert await asyncio.to_thread(live.stop) == 0
        assert server.running
    finally:
        await asyncio.to_thread(live.stop)
        server.stop()
    assert "ermissions Violation" not in server.log_path.read_text()


def test_no_secret_stands_in_a_command_line_or_an_environment(stack: LiveStack) -> None:
    secrets = [path.read_bytes().strip() for path in Path(stack.facts().credentials_dir).glob("*.password")]
    assert len(secrets) >= 7
    for pid in [stack.facts().pid, *stack.pids()]:
        shown = b"".join((Path("/proc") / str(pid) / part).read_bytes() for part in ("cmdline", "environ"))
        assert shown and not any(secret in shown for secret in secrets)


def test_a_second_stack_in_the_same_directory_is_refused(stack: LiveStack, tmp_path: Path) -> None:
    second = LiveStack(tmp_path)
    second.argv += ["--data-dir", str(stack.data_dir)]
    second.launch()
    assert second.process is not None and second.process.wait(30) == 1
    assert "already runs" in second.output.read_text()
    assert str(stack.facts().pid) in second.output.read_text()
    assert stack.facts().ready


def test_a_port_that_is_taken_is_refused_at_once(stack: LiveStack, tmp_path: Path) -> None:
    second = LiveStack(tmp_path, "--port", stack.facts().urls[0].rsplit(":", 1)[1])
    second.launch()
    assert second.process is not None and second.process.wait(30) == 1
    assert "--port" in second.output.read_text()
