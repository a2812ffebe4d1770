"""Promise: an embedded NATS that keeps the write error of a full disk is restarted once the disk has room, and not before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from motet.cli import nats_health, nats_server
from motet.cli.nats_health import has_room, keep_writable
from motet.cli.nats_server import NatsServer
from motet.cli.process import NatsProcess
from motet.cli.supervisor import State, Supervisor
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.config import BusConfig
from motet.shared.errors import Unavailable
from motet.shared.provision import provision
from tests.shared.test_stores import fill_disk
from tests.support import eventually


class Stage:
    """A supervised NATS whose health is looked at, and what is said about it."""

    def __init__(self, directory: Path) -> None:
        self.server = self.process = NatsProcess(directory / "nats")
        self.supervisor = Supervisor([self.process], self)
        self.said: list[str] = []

    def changed(self, name: str, state: State, note: str) -> None:
        """The supervisor's reports are not looked at."""


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(nats_health, "LOOK_S", 0.1)
    stage = Stage(tmp_path)
    await stage.supervisor.start()
    health = asyncio.create_task(keep_writable(stage.server, stage.process.signal, stage.said.append))
    yield stage
    health.cancel()
    await stage.supervisor.stop(drain_s=1.0)


@pytest.fixture
async def bus(stage: Stage) -> AsyncIterator[Bus]:
    bus = await Bus.connect(BusConfig(nats_url=stage.server.url), "test")
    await provision(bus)
    yield bus
    await bus.close()


async def refused(bus: Bus, number: int) -> None:
    """A result that is not stored."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            with pytest.raises(Unavailable):
                await bus.store(subjects.results("default", f"r{number}"), b"no", {})


async def test_it_is_restarted_when_the_disk_has_room_and_has_everything_that_it_acknowledged(
    stage: Stage, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = False
    monkeypatch.setattr(nats_health, "has_room", lambda _: room)
    for number in range(5):
        await bus.store(subjects.results("default", f"r{number}"), b"yes", {})
    first = stage.server.pid
    fill_disk(stage.server)
    await refused(bus, 5)
    await eventually(lambda: stage.said)
    assert stage.said[0].startswith("MOTET_RESULTS: nothing is stored") and "restarted when 16 MiB are free" in stage.said[0]
    await refused(bus, 6)
    assert len(stage.said) == 1 and stage.server.pid == first, "said once, and not restarted on a full disk"
    room = True
    await eventually(lambda: stage.server.pid != first and bus.connected, within_s=20)
    assert await eventually(lambda: bus.store(subjects.results("default", "r7"), b"yes", {}))
    stored = await bus.js.stream_info(subjects.results_stream("default"), subjects_filter=">")
    assert set(stored.state.subjects or {}) == {subjects.results("default", f"r{number}") for number in (0, 1, 2, 3, 4, 7)}


def test_room_is_what_can_be_written(tmp_path: Path) -> None:
    assert has_room(tmp_path)
    assert not has_room(tmp_path, 1 << 60)
    assert not list(tmp_path.iterdir())


async def test_a_restart_on_a_disk_with_much_data_and_little_room_stores_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own limit leaves out what it stores already."""
    server = NatsServer(tmp_path / "nats")
    await server.start()
    bus = await Bus.connect(BusConfig(nats_url=server.url), "test")
    await provision(bus)
    store = await bus.object_store(subjects.BLOBS)
    await store.put("blob", b"x" * (8 << 20))
    server.stop()
    monkeypatch.setattr(nats_server.shutil, "disk_usage", lambda _: SimpleNamespace(free=4 << 20))
    server = NatsServer(tmp_path / "nats", port=server.port)
    await server.start()
    await eventually(lambda: bus.connected)
    await store.put("small", b"x" * (1 << 20))
    await bus.close()
    server.stop()
