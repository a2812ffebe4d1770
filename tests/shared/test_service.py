"""Promise: a service process that can never work again says so on /health and ends, so that it is started again."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest

from motet.cli.nats_server import NatsServer
from motet.cli.process import free_port
from motet.services.predictor.config import PredictorConfig
from motet.services.predictor.service import PredictorService
from motet.shared import bus as bus_module
from motet.shared import service as service_module
from tests.support import eventually

ACCOUNT = 'authorization {{ users: [{{ user: "predictor", password: "{}" }}] }}'


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server that wants a password."""
    server = NatsServer(tmp_path / "guarded", config_text=ACCOUNT.format("first"), port=free_port())
    await server.start()
    yield server
    server.stop()


async def health(port: int) -> tuple[int, dict[str, object]] | None:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/health") as answer:
            return answer.status, await answer.json()
    except aiohttp.ClientError:
        return None


async def test_health_is_503_with_the_reason_once_the_connection_is_gone_for_good(nats_url: str):
    predictor = PredictorService(PredictorConfig.of(nats_url=nats_url))
    ops = service_module.OpsServer(predictor, "127.0.0.1", 0)
    port = await ops.start()
    try:
        await predictor.start()
        assert await health(port) == (200, {"status": "ok", "service": "predictor"})
        bus = predictor._bus  # private: only its own connection can be ended for good
        assert bus is not None
        await bus.nc.publish("t.any", b"x" * bus.max_payload, headers={"and": "a header"})
        await eventually(lambda: predictor.failure())
        answer = await health(port)
        assert answer is not None and answer[0] == 503 and "maximum payload" in str(answer[1]["reasons"])
    finally:
        await predictor.stop()
        await ops.stop()


@pytest.fixture
async def started(guarded: NatsServer, tmp_path: Path) -> AsyncIterator[Callable[[], asyncio.subprocess.Process]]:
    """A predictor process with the right password; `started()` is the process."""
    secret = tmp_path / "password"
    secret.write_text("first")
    port = free_port()
    argv = ["--nats-url", guarded.url, "--nats-user", "predictor", "--nats-password-file", str(secret), "--ops-port", str(port)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "motet", "predictor", *argv)
    await eventually(lambda: health(port), within_s=30)

    async def ready() -> bool:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/ready") as answer:
            return answer.status == 200

    await eventually(ready)
    yield lambda: process
    if process.returncode is None:
        process.kill()
        await process.wait()


async def test_a_process_whose_connection_the_server_ended_ends_with_a_failure_status(
    guarded: NatsServer, started: Callable[[], asyncio.subprocess.Process]
):
    config = guarded.data_dir / "nats.conf"
    config.write_text(config.read_text().replace('"first"', '"second"'))
    os.kill(guarded.pid, signal.SIGHUP)  # the server reads its users again and ends what they do not cover
    assert await asyncio.wait_for(started().wait(), 30) == 1


async def test_a_process_whose_credentials_are_refused_on_its_return_ends_too(
    guarded: NatsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(bus_module, "REFUSED_S", 0.5)
    secret = tmp_path / "password"
    secret.write_text("first")
    config = PredictorConfig.of(nats_url=guarded.url, nats_user="predictor", nats_password_file=str(secret))
    predictor = PredictorService(config)
    await predictor.start()
    try:
        guarded.kill()
        guarded.config_text = ACCOUNT.format("second")
        await guarded.start()
        await eventually(lambda: "refuses the credentials" in predictor.failure(), within_s=20)
    finally:
        await predictor.stop()


async def test_a_server_that_is_only_away_is_no_failure(guarded: NatsServer, tmp_path: Path):
    secret = tmp_path / "password"
    secret.write_text("first")
    config = PredictorConfig.of(nats_url=guarded.url, nats_user="predictor", nats_password_file=str(secret))
    predictor = PredictorService(config)
    await predictor.start()
    try:
        for stop in (guarded.kill, guarded.stop):
            stop()
            await eventually(predictor.not_ready)
            assert predictor.failure() == ""
            await guarded.start()
            await eventually(lambda: not predictor.not_ready(), within_s=20)
        assert predictor.failure() == ""
    finally:
        await predictor.stop()


async def test_a_signal_during_the_start_ends_the_process_at_once():
    class Waiting:
        """A service whose start never ends."""

        name = "waiting"
        events: ClassVar[list[str]] = []

        async def start(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

        def not_ready(self) -> list[str]:
            return ["waiting"]

        def failure(self) -> str:
            return ""

        async def drain(self) -> None:
            self.events.append("drained")

        async def stop(self) -> None:
            self.events.append("stopped")

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert await asyncio.wait_for(service_module.live(Waiting(), PredictorConfig.of()), 10) == 0
    finally:
        for number in before:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, before[number])
    assert Waiting.events == ["stopped"]


class Brief:
    """A service that has failed as soon as it has started. `frozen`: the objects that are then out of the collector's sight."""

    name = "brief"

    def __init__(self) -> None:
        self.frozen = 0

    async def start(self) -> None:
        pass

    def not_ready(self) -> list[str]:
        return []

    def failure(self) -> str:
        self.frozen = self.frozen or gc.get_freeze_count()
        return "its time is over"

    async def drain(self) -> None:
        pass

    async def stop(self) -> None:
        pass


async def test_what_is_there_once_a_service_has_started_is_no_work_for_the_garbage_collector():
    lives_on, brief = [[] for _ in range(1000)], Brief()
    before = gc.get_freeze_count()
    assert await service_module.live(brief, PredictorConfig.of(ops_port=0)) == 1
    assert brief.frozen >= before + len(lives_on)
