"""Promise: over HTTP and over NATS no other tenant sees, uses, replaces or deletes what belongs to a tenant.

A real registry and a real gateway with keys; the workers are scripted.
"""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from motet.services.gateway import metrics
from motet.services.gateway.edge import uploads
from motet.services.gateway.owner import observe
from motet.services.registry.config import RegistryConfig
from motet.services.registry.service import RegistryService
from motet.shared import subjects
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import assigned, running_gateway
from tests.services.gateway.test_keys import Door
from tests.support import eventually
from tests.support_adapters import write_adapter, write_base

KEYS = {
    "admin": "ops admin",
    "acme": "acme adapters",
    "acme-user": "acme use",
    "globex": "globex adapters",
}


class Tenants(Door):
    """The gateway's callers, by the names in KEYS, and adapters to upload."""

    roots: Path
    mesh: Mesh

    def archive(self, seed: int) -> bytes:
        directory = self.roots / f"seed-{seed}"
        if not directory.exists():
            write_adapter(directory, seed=seed)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for file in sorted(directory.iterdir()):
                archive.add(file, arcname=file.name)
        return packed.getvalue()

    async def upload(self, key: str, name: str, seed: int, **fields: str) -> tuple[int, Any]:
        form = aiohttp.FormData({"name": name} | fields)
        form.add_field("file", self.archive(seed), filename="a.tar")
        return await self.ask("POST", "/v1/adapters", key, data=form)

    async def names(self, key: str, query: str = "") -> list[str]:
        """The names that a caller finds in both lists."""
        adapters = [one["name"] for one in (await self.ask("GET", f"/v1/adapters{query}", key))[1]["data"]]
        models = [one["id"] for one in (await self.ask("GET", "/v1/models", key))[1]["data"] if one["parent"]]
        assert query or adapters == models
        return adapters

    async def complete(self, key: str, model: str) -> int:
        return (await self.ask("POST", "/v1/completions", key, json={"model": model, "prompt": "x"}))[0]

    async def load(self, key: str, verb: str, name: str, **more: str) -> int:
        return (await self.ask("POST", f"/v1/{verb}_lora_adapter", key, json={"lora_name": name} | more))[0]


@pytest.fixture
async def door(mesh: Mesh, http: aiohttp.ClientSession, nats_url: str, tmp_path: Path) -> AsyncIterator[Tenants]:
    roots, keys = tmp_path / "adapters", tmp_path / "keys"
    roots.mkdir()
    keys.write_text("".join(f"{key} {rest}\n" for key, rest in KEYS.items()))
    config = RegistryConfig.of(
        model=str(write_base(tmp_path / "tiny-base")),
        served_model_name="demo",
        adapter_roots=str(roots),
        nats_url=nats_url,
        tenants="acme,globex",
    )
    registry = RegistryService(config)
    mesh.say("x")
    try:
        await registry.start()
        async with running_gateway(nats_url, tmp_path, instance_id="g2", api_keys_file=str(keys)) as gateway:
            await eventually(lambda: not gateway.not_ready())
            tenants = Tenants(gateway, http)
            tenants.roots, tenants.mesh = roots, mesh
            yield tenants
    finally:
        await registry.stop()


async def test_slow_uploads_of_one_tenant_leave_room_for_another_and_end(
    door: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = (
        b"POST /v1/adapters HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer acme\r\n"
        b"content-type: multipart/form-data; boundary=b\r\ncontent-length: 1000000\r\n\r\n--b\r\n"
    )
    slow = [await asyncio.open_connection("127.0.0.1", door.gateway.port) for _ in range(12)]
    for _, writer in slow:
        writer.write(head)

    async def acme_has_its_share() -> bool:
        return (await door.upload("acme", "one-more", 1))[0] == 429

    await eventually(acme_has_its_share)
    assert (await door.upload("globex", "sql", 2))[0] == 201
    for _, writer in slow:
        writer.close()

    async def acme_has_room() -> bool:
        return (await door.upload("acme", "one-more", 1))[0] == 201

    await eventually(acme_has_room)
    monkeypatch.setattr(uploads, "GRACE_S", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", door.gateway.port)
    writer.write(head)

    reading = asyncio.ensure_future(reader.readuntil(b"\r\n"))

    async def drips_until_it_is_answered() -> bool:
        writer.write(b"x")
        return reading.done()

    await eventually(drips_until_it_is_answered, within_s=20, every_s=0.05)
    assert b" 408 " in await reading
    writer.close()


async def test_one_tenant_cannot_replace_or_unload_anothers_adapter(door: Tenants, mesh: Mesh) -> None:
    assert (await door.upload("acme", "sql", 1))[0] == 201
    assert (await door.upload("globex", "sql", 2, replace="true"))[0] == 201  # a name of its own, not acme's
    for key in ("acme", "globex"):
        assert await door.complete(key, "sql") == 200
    requests = [request for worker in mesh.workers for request in worker.assigned]
    digests = {request.tenant: request.adapter.digest for request in requests}
    assert len(set(digests.values())) == 2, "each got its own weights"
    assert {request.adapter.name for request in requests} == {"acme:sql", "globex:sql"}

    assert await door.load("globex", "unload", "sql") == 200
    assert await door.load("globex", "unload", "sql") == 404
    assert await door.complete("globex", "sql") == 404
    assert await door.complete("acme", "sql") == 200


async def test_a_private_adapter_does_not_exist_for_other_tenants(door: Tenants) -> None:
    await door.upload("acme", "sql", 1)
    assert await door.names("acme-user") == ["sql", "upper"]
    assert await door.names("globex") == ["upper"]
    for path in ("/v1/adapters/sql", "/v1/models/sql", "/v1/models/demo:sql", "/v1/adapters/acme:sql"):
        assert (await door.ask("GET", path, "globex"))[0] == 404, path
    for model in ("sql", "demo:sql", "acme:sql", "acme.sql", "private.acme.sql"):
        assert await door.complete("globex", model) == 404
    assert (await door.ask("DELETE", "/v1/adapters/sql?force=true", "globex"))[0] == 404
    assert (await door.ask("POST", "/v1/adapters", "globex", json={"name": "mine", "alias_of": "sql"}))[0] == 404
    assert await door.complete("acme-user", "demo:sql") == 200


async def test_the_role_use_changes_no_adapter(door: Tenants) -> None:
    await door.upload("acme", "sql", 1)
    assert (await door.upload("acme-user", "more", 2))[0] == 403
    assert (await door.ask("POST", "/v1/adapters", "acme-user", json={"name": "x", "alias_of": "sql"}))[0] == 403
    assert (await door.ask("DELETE", "/v1/adapters/sql", "acme-user"))[0] == 403
    assert await door.load("acme-user", "load", "x", lora_path="org/x") == 403
    assert await door.load("acme-user", "unload", "sql") == 403
    assert await door.names("acme-user") == ["sql", "upper"]


async def test_shared_adapters_are_an_administrators(door: Tenants) -> None:
    assert (await door.upload("admin", "everyones", 1))[1]["tenant"] is None
    for key in ("acme-user", "globex"):
        assert await door.names(key) == ["everyones", "upper"] and await door.complete(key, "everyones") == 200
    assert (await door.ask("DELETE", "/v1/adapters/everyones", "acme"))[0] == 403
    assert await door.load("acme", "unload", "everyones") == 403
    for tenant in ("", "globex"):
        assert (await door.upload("acme", "mine", 2, tenant=tenant))[0] == 403
    assert (await door.ask("DELETE", "/v1/adapters/everyones?tenant=", "acme"))[0] == 403
    assert (await door.ask("DELETE", "/v1/adapters/everyones", "admin"))[0] == 200


async def test_an_owner_pins_its_own_adapters_and_only_an_administrator_shared_ones(door: Tenants) -> None:
    await door.upload("acme", "sql", 1)
    await door.upload("admin", "everyones", 2)
    status, card = await door.ask("POST", "/v1/adapters/sql/pin", "acme")
    assert (status, card.get("pinned_to")) == (409, None) and "w1 has room for 0 pins" in card["error"]["message"]
    for worker in door.mesh.workers:
        worker.limits = msgspec.structs.replace(worker.limits, pin_slots=2, pin_bytes=1 << 20)
        await worker.snapshot()
    for body, pinned in ((None, ["*"]), ({"workers": ["w1"]}, ["w1"]), ({}, ["*"])):
        status, card = await door.ask("POST", "/v1/adapters/sql/pin", "acme", json=body)
        assert (status, card["pinned_to"]) == (200, pinned), card
    assert (await door.ask("GET", "/v1/adapters/sql", "acme-user"))[1]["pinned_to"] == ["*"]
    for key, name, status in (
        ("acme-user", "sql", 403),
        ("globex", "sql", 404),
        ("acme", "everyones", 403),
        ("acme", "nobody", 404),
        ("admin", "everyones", 200),
        ("admin", "sql?tenant=acme", 200),
    ):
        name, _, query = name.partition("?")
        for method in ("POST", "DELETE"):
            assert (await door.ask(method, f"/v1/adapters/{name}/pin?{query}", key))[0] == status, (key, name, method)
    assert (await door.ask("GET", "/v1/adapters/sql", "acme"))[1]["pinned_to"] == []
    for body, param in (({"workers": ["w9"]}, "workers"), ({"workers": []}, "workers"), ({"worker": ["w1"]}, "worker")):
        status, answer = await door.ask("POST", "/v1/adapters/sql/pin", "acme", json=body)
        assert (status, answer["error"]["param"]) == (400, param)
    actions = [one["action"] for one in (await door.ask("GET", "/v1/audit?limit=20", "admin"))[1]["data"]]
    assert "adapter.pinned" in actions and "adapter.unpinned" in actions


async def test_an_administrator_acts_for_a_tenant_by_naming_it(door: Tenants) -> None:
    assert (await door.upload("admin", "sql", 1, tenant="acme"))[1]["tenant"] == "acme"
    assert await door.names("acme") == ["sql", "upper"] and await door.names("admin") == ["upper"]
    assert await door.names("admin", "?tenant=acme") == ["sql", "upper"]
    assert await door.names("admin", "?tenant=*") == ["sql", "upper"]
    assert (await door.ask("GET", "/v1/adapters/sql?tenant=acme", "admin"))[0] == 200
    assert (await door.ask("GET", "/v1/adapters/sql?tenant=acme", "globex"))[0] == 403
    assert (await door.ask("GET", "/v1/adapters?tenant=*", "globex"))[0] == 403
    assert (await door.ask("DELETE", "/v1/adapters/sql?tenant=acme", "admin"))[0] == 200
    assert await door.names("acme") == ["upper"]


async def test_the_servers_directories_and_other_tenants_uploads_stay_unknown(door: Tenants) -> None:
    directory = write_adapter(door.roots / "operators", seed=5)
    body = {"name": "stolen", "path": str(directory)}
    assert (await door.ask("POST", "/v1/adapters", "acme", json=body))[0] == 403
    assert await door.load("acme", "load", "stolen", lora_path=str(directory)) == 403
    assert (await door.ask("POST", "/v1/adapters", "admin", json={"name": "given", "path": str(directory)}))[0] == 201
    for path in ("/v1/adapters/given", "/v1/adapters", "/v1/models", "/v1/models/given", "/v1/models/upper"):
        status, seen = await door.ask("GET", path, "acme-user")
        assert status == 200 and str(door.roots) not in json.dumps(seen) and "/adapters/" not in json.dumps(seen)
    assert (await door.ask("GET", "/v1/adapters/given", "admin"))[1]["source"] == "path:operators"

    _, first = await door.upload("acme", "sql", 1)
    _, same = await door.upload("globex", "sql", 1)
    assert first["digest"] == same["digest"] and first["source"] != same["source"]


async def test_a_durable_request_means_its_own_tenants_adapter(door: Tenants, mesh: Mesh) -> None:
    await door.upload("acme", "sql", 1)
    for tenant in ("acme", "globex"):
        body = {"request_id": "one", "model": "sql", "prompt": "x"}
        await mesh.bus.js.publish(subjects.requests(tenant), json.dumps(body).encode())

    async def result(tenant: str) -> dict[str, Any]:
        message = await mesh.bus.js.get_last_msg(subjects.results_stream(tenant), subjects.results(tenant, "one"))
        return json.loads(message.data)

    async def settled() -> bool:
        streams = [await mesh.bus.js.stream_info(subjects.requests_stream(tenant)) for tenant in ("acme", "globex")]
        return all(stream.state.messages == 0 for stream in streams)

    await eventually(settled)
    assert (await result("globex"))["error"]["code"] == "model_not_found"
    assert (await result("acme"))["status"] == "ok"
    assert (await assigned(mesh.first)).tenant == "acme"


async def test_tenants_are_counted_within_a_bound(door: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics.TENANT_REQUESTS.clear()  # of other tests in this process
    monkeypatch.setattr(observe, "tenants_met", set())
    monkeypatch.setattr(observe, "TENANTS_MAX", 1)
    for key in ("acme-user", "globex", "acme-user"):
        assert await door.complete(key, "upper") == 200
    _, text = await door.ask("GET", "/metrics", "admin")
    counted = [line for line in text.splitlines() if line.startswith("motet_tenant_requests_total")]
    assert sum('tenant="acme"' in line for line in counted) == 1 and sum('tenant="other"' in line for line in counted) == 1
    assert len(counted) == 2
