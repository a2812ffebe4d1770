"""Promise: a quarantined adapter is shown with its reason and refused with it, until an administrator releases it."""

from __future__ import annotations

import aiohttp
import msgspec
import pytest

from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.model import Quarantine
from motet.shared.wire.registry import RegistryOk, ReleaseAdapter
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import put_adapter
from tests.support import eventually

REASON = "missing on the device: layers.0.v_proj"


class Releasing:
    """A registry that ends quarantines and does nothing else."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.asked: list[ReleaseAdapter] = []

    async def start(self) -> None:
        await self.bus.serve("release", subjects.registry("release"), ReleaseAdapter, self._release, queue="registry")

    async def _release(self, ask: ReleaseAdapter) -> RegistryOk:
        self.asked.append(ask)
        info = await put_adapter(self.bus, ask.name)
        await (await self.bus.key_value(subjects.KV_ADAPTERS)).delete(f"quarantine.{info.entry.digest}")
        return RegistryOk(adapters=[info])


@pytest.fixture
async def condemned(mesh: Mesh, bus: Bus) -> str:
    """The name of a quarantined adapter."""
    info = await put_adapter(bus, "sql")
    why = Quarantine(
        digest=info.entry.digest, verdict="partial", reason=REASON, worker_id="w1", since_unix_ms=1_700_000_000_000
    )
    await (await bus.key_value(subjects.KV_ADAPTERS)).put(f"quarantine.{info.entry.digest}", msgspec.json.encode(why))
    await eventually(lambda: mesh.gateway.adapters.quarantined)
    return "sql"


async def test_it_is_refused_with_the_reason_before_any_worker_is_asked(
    mesh: Mesh, http: aiohttp.ClientSession, condemned: str
) -> None:
    async with http.post(f"{mesh.url}/v1/completions", json={"model": condemned, "prompt": "hello"}) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["param"]) == (409, "adapter_quarantined", "model")
    assert error["message"] == f"adapter 'sql' is quarantined: {REASON}"
    assert not any(worker.assigned for worker in mesh.workers)


async def test_it_is_shown_until_it_is_released(mesh: Mesh, http: aiohttp.ClientSession, condemned: str, bus: Bus) -> None:
    shown = {"verdict": "partial", "reason": REASON, "worker_id": "w1", "since": 1_700_000_000}
    async with http.get(f"{mesh.url}/v1/adapters") as answer:
        found = {one["name"]: one["quarantine"] for one in (await answer.json())["data"]}
    assert found == {"upper": None, "sql": shown}
    registry = Releasing(bus)
    await registry.start()
    async with http.delete(f"{mesh.url}/v1/adapters/{condemned}/quarantine") as answer:
        card = await answer.json()
        assert (answer.status, card["name"], card["quarantine"]) == (200, "sql", None)
    assert [one.name for one in registry.asked] == ["sql"]
