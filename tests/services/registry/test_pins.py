"""Promise: a pin belongs to a name, is kept where the name is, and is refused where it could not be kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from motet.services.registry.service import RegistryService
from motet.shared import subjects
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.audit import Audit
from motet.shared.clock import now_s
from motet.shared.errors import AdapterNotFound, BadRequest, Conflict
from motet.shared.wire.registry import AliasAdapter, DeleteAdapter, PinAdapter
from tests.services.registry.conftest import Client, StartRegistry, snapshot
from tests.services.registry.test_tenants import register
from tests.support import eventually
from tests.support_adapters import write_adapter


async def worker(client: Client, registry: RegistryService, worker_id: str = "w1", **limits: int) -> None:
    """A worker with room for `limits` pins, reported to the registry."""
    said = snapshot(worker=worker_id)
    limits = {"pin_slots": 2, "pin_bytes": 1 << 20} | limits
    said.limits = msgspec.structs.replace(said.limits, **limits)
    await client.bus.publish(subjects.state(worker_id), said)
    await eventually(lambda: worker_id in registry.usage.workers(now_s()))


async def pin(client: Client, name: str, *workers: str, tenant: str = "") -> object:
    (info,) = await client.ask("pin", PinAdapter(name=name, workers=workers, tenant=tenant, actor="k1"))
    return info.entry.pin.workers if info.entry.pin is not None else None


async def test_a_pin_stays_with_its_name_over_new_versions_and_ends_with_it(
    client: Client, roots: Path, registry: RegistryService
):
    await worker(client, registry)
    first = await register(client, "sql", write_adapter(roots / "a", seed=1))
    assert await pin(client, "sql", "w1") == ("w1",)
    watch = AdapterWatch(client.bus)
    await watch.start()
    second = await register(client, "sql", write_adapter(roots / "b", seed=2), replace=True)
    assert second.entry.digest != first.entry.digest and second.entry.pin is not None
    await eventually(lambda: [info.entry.digest for info in watch.pinned()] == [second.entry.digest])
    assert await pin(client, "sql", "*") == ("*",) and await pin(client, "sql") is None
    await eventually(lambda: not watch.pinned())
    await pin(client, "sql", "*")
    await client.ask("delete", DeleteAdapter(name="sql"))
    again = await register(client, "sql", roots / "a")
    assert again.entry.pin is None


async def test_an_alias_has_a_pin_of_its_own_that_moves_when_it_is_aimed_elsewhere(
    client: Client, roots: Path, registry: RegistryService
):
    await worker(client, registry)
    for seed, name in enumerate(("blue", "green")):
        await register(client, name, write_adapter(roots / name, seed=seed))
    await client.ask("alias", AliasAdapter(name="live", target="blue"))
    await pin(client, "live", "*")
    (moved,) = await client.ask("alias", AliasAdapter(name="live", target="green"))
    assert moved.entry.alias_of == "green" and moved.entry.pin is not None
    assert registry.adapters.exactly("green", "").entry.pin is None


async def test_an_unknown_worker_or_adapter_is_refused_by_the_name_of_the_field(
    client: Client, roots: Path, registry: RegistryService
):
    await worker(client, registry)
    await register(client, "sql", write_adapter(roots / "a"))
    with pytest.raises(BadRequest, match="'w9' not found; there are: w1") as refused:
        await pin(client, "sql", "w1", "w9")
    assert refused.value.param == "workers"
    for name, workers in (("nobody", ("w1",)), ("nobody", ()), ("a/pin", ("w1",))):
        with pytest.raises(AdapterNotFound) as missing:
            await pin(client, name, *workers)
        assert missing.value.param == "name"
    with pytest.raises(BadRequest, match="/pin"):
        await register(client, "sql/pin", roots / "a")


async def test_pins_have_half_of_a_worker_at_most_and_no_more_are_taken(client: Client, roots: Path, registry: RegistryService):
    await worker(client, registry, "w1", pin_slots=1)
    await worker(client, registry, "w2", pin_slots=2)
    for seed, name in enumerate("abc"):
        await register(client, name, write_adapter(roots / name, seed=seed))
    await pin(client, "a", "*")
    with pytest.raises(Conflict, match="w1 has room for 1 pins") as refused:
        await pin(client, "b", "*")
    assert refused.value.param == "workers"
    assert await pin(client, "b", "w2") == ("w2",)
    with pytest.raises(Conflict, match="w2 has room"):
        await pin(client, "c", "w2")
    await pin(client, "a", "w1")
    assert await pin(client, "c", "w2") == ("w2",)
    await worker(client, registry, "w3", pin_bytes=10)
    with pytest.raises(Conflict, match="of 10 bytes"):
        await pin(client, "c", "w3")


async def test_a_tenant_pins_so_many_of_its_adapters(start_registry: StartRegistry, connect, roots: Path):
    registry = await start_registry(max_tenant_pins=1)
    client = Client(await connect("gateway"), roots)
    await worker(client, registry)
    for seed, (name, tenant) in enumerate((("a", "acme"), ("b", "acme"), ("a", "globex"))):
        await register(client, name, write_adapter(roots / f"{tenant}-{name}", seed=seed), tenant)
    await pin(client, "a", "*", tenant="acme")
    assert await pin(client, "a", "w1", tenant="acme") == ("w1",), "the same name may be pinned elsewhere"
    with pytest.raises(Conflict, match="this tenant has 1 pinned adapters") as refused:
        await pin(client, "b", "*", tenant="acme")
    assert refused.value.param == "name"
    assert await pin(client, "a", "*", tenant="globex") == ("*",)


async def test_pins_are_in_the_audit_log_once(client: Client, roots: Path, registry: RegistryService):
    await worker(client, registry)
    await register(client, "sql", write_adapter(roots / "a"))
    for workers in (("w1",), ("w1",), (), ()):
        await pin(client, "sql", *workers)
    found = await Audit(client.bus).latest(10)
    assert [(one.action, one.actor) for one in found[:3]] == [
        ("adapter.unpinned", "k1"),
        ("adapter.pinned", "k1"),
        ("adapter.registered", ""),
    ]
    assert found[1].detail.startswith("workers w1; version 1")
