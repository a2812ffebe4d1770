"""Promise: a gateway whose connection NATS closed for good ends, instead of staying up and looking healthy."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import aiohttp

from motet.services.gateway.config import GatewayConfig
from motet.services.gateway.service import GatewayService
from motet.shared import service
from motet.shared.bus import Bus
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, FakeScheduler, assigned, put_adapter, start_workers
from tests.services.gateway.support_tokenizers import write_model_dir
from tests.support import eventually


async def close_for_good(bus: Bus) -> None:
    """Close the connection as an `-ERR` of the server does: the client never reconnects after it."""
    with contextlib.suppress(Exception):
        await bus.nc.publish("t.any", b"x" * bus.max_payload, headers={"and": "a header"})


async def test_health_of_the_main_port_says_why(mesh: Mesh, http: aiohttp.ClientSession):
    async def health() -> tuple[int, dict[str, object]]:
        async with http.get(f"{mesh.url}/health") as answer:
            return answer.status, await answer.json()

    assert await health() == (200, {"status": "ok", "service": "gateway"})
    await close_for_good(mesh.gateway.bus)
    await eventually(lambda: mesh.gateway.failure())
    status, body = await health()
    assert status == 503 and "maximum payload" in str(body["reasons"])


async def test_the_process_ends_with_a_failure_status_also_with_streams_open(
    connect: Connect, bus: Bus, nats_url: str, tmp_path: Path, http: aiohttp.ClientSession
):
    [worker] = await start_workers(connect, "w1")
    await FakeScheduler(await connect("scheduler"), ["w1"]).start()
    await put_adapter(bus, "upper")
    write_model_dir(tmp_path / "demo")
    config = GatewayConfig.of(nats_url=nats_url, model=str(tmp_path / "demo"), port=0)
    gateway = GatewayService(config)
    living = asyncio.ensure_future(service.live(gateway, config))
    try:
        await eventually(lambda: not gateway.not_ready() and gateway.adapters.resolve("upper"))
        body = {"model": "upper", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        asking = asyncio.ensure_future(http.post(f"http://127.0.0.1:{gateway.port}/v1/chat/completions", json=body))
        await assigned(worker)
        await close_for_good(gateway.bus)
        assert await asyncio.wait_for(living, 30) == 1
        async with await asking as answer:
            assert '"error"' in await answer.text(), "the client is told, and does not take it for the end of the answer"
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
