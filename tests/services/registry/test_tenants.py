"""Promise: a tenant's adapters are its own: two tenants may use one name, and no other tenant sees or changes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.services.registry import claims as registry_store
from motet.services.registry.service import RegistryService
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.audit import Audit
from motet.shared.errors import AdapterExists, AdapterNotFound, BadRequest, Conflict
from motet.shared.wire.registry import AdapterInfo, AliasAdapter, DeleteAdapter, ListAdapters, RegisterAdapter
from tests.services.registry.conftest import Client, StartRegistry
from tests.support import eventually
from tests.support_adapters import write_adapter


async def register(client: Client, name: str, location: Path, tenant: str = "", **how: object) -> AdapterInfo:
    message = RegisterAdapter(name=name, kind="path", location=str(location), tenant=tenant, **how)
    return (await client.ask("register", message))[0]


@pytest.fixture
async def watch(client: Client) -> AdapterWatch:
    watch = AdapterWatch(client.bus)
    await watch.start()
    return watch


async def test_two_tenants_have_an_adapter_of_the_same_name_and_each_gets_its_own(
    client: Client, roots: Path, watch: AdapterWatch
):
    acme = await register(client, "sql", write_adapter(roots / "a", seed=1), "acme")
    globex = await register(client, "sql", write_adapter(roots / "b", seed=2), "globex")
    assert acme.entry.digest != globex.entry.digest and (acme.entry.version, globex.entry.version) == (1, 1)
    await eventually(lambda: watch.names() == 2)
    assert watch.resolve("sql", "acme").entry.digest == acme.entry.digest
    assert watch.resolve("sql", "globex").entry.digest == globex.entry.digest
    assert watch.resolve("sql", "initech") is None and watch.resolve("sql") is None
    assert watch.visible("initech") == []
    with pytest.raises(AdapterExists):
        await register(client, "sql", roots / "b", "acme")


async def test_every_tenant_gets_the_shared_adapter_unless_it_has_its_own_of_that_name(
    client: Client, roots: Path, watch: AdapterWatch
):
    shared = await register(client, "team/sql.v1", write_adapter(roots / "a", seed=1))
    own = await register(client, "team/sql.v1", write_adapter(roots / "b", seed=2), "acme")
    await eventually(lambda: watch.names() == 2)
    assert watch.resolve("team/sql.v1", "globex").entry.digest == shared.entry.digest
    assert watch.resolve("team/sql.v1", "acme").entry.digest == own.entry.digest
    assert [info.entry.tenant for info in watch.visible("acme")] == ["acme"]
    assert [info.entry.tenant for info in watch.visible("globex")] == [""]
    await client.ask("delete", DeleteAdapter(name="team/sql.v1", tenant="acme"))
    await eventually(lambda: watch.resolve("team/sql.v1", "acme").entry.digest == shared.entry.digest)


async def test_a_tenant_neither_deletes_nor_lists_what_is_anothers(client: Client, roots: Path, registry: RegistryService):
    await register(client, "sql", write_adapter(roots / "a", seed=1), "acme")
    for tenant in ("globex", ""):
        with pytest.raises(AdapterNotFound):
            await client.ask("delete", DeleteAdapter(name="sql", tenant=tenant, force=True))
        assert await client.ask("list", ListAdapters(tenant=tenant)) == []
    [listed] = await eventually(lambda: client.ask("list", ListAdapters(tenant="acme")))
    assert listed.entry.name == "sql"


async def test_an_alias_stays_in_its_tenant_and_aims_at_what_the_tenant_means(client: Client, roots: Path):
    shared = await register(client, "base-sql", write_adapter(roots / "a", seed=1))
    await register(client, "sql", write_adapter(roots / "b", seed=2), "acme")
    [alias] = await client.ask("alias", AliasAdapter(name="stable", target="base-sql", tenant="acme"))
    assert (alias.entry.tenant, alias.entry.digest) == ("acme", shared.entry.digest)
    for tenant in ("globex", ""):
        with pytest.raises(AdapterNotFound):
            await client.ask("alias", AliasAdapter(name="stable", target="sql", tenant=tenant))


async def test_equal_content_of_two_tenants_is_stored_once_and_kept_until_the_last_deletes_it(
    client: Client, roots: Path, monkeypatch: pytest.MonkeyPatch, registry: RegistryService
):
    location = write_adapter(roots / "a", seed=1)
    digest = (await register(client, "mine", location, "acme")).entry.digest
    await register(client, "mine", location, "globex")
    await client.ask("delete", DeleteAdapter(name="mine", tenant="acme"))
    monkeypatch.setattr(registry_store, "LOST_HOLD_S", -1.0)  # every claim is old enough to be looked at
    await registry.store.sweep()
    assert await client.blobs() == {digest}, "the sweep finds the other tenant's entry"
    await client.ask("delete", DeleteAdapter(name="mine", tenant="globex"))
    assert await client.blobs() == set() and await client.keys() == set()


async def test_a_tenants_names_have_a_limit_of_their_own(start_registry: StartRegistry, roots: Path):
    registry = await start_registry(max_tenant_adapters=1)
    location = write_adapter(roots / "a", seed=1)
    ask = RegisterAdapter(name="one", kind="path", location=str(location), tenant="acme")
    await registry.register(ask)
    await eventually(lambda: registry.adapters.owned("acme") == 1)
    with pytest.raises(Conflict, match="this tenant has 1"):
        await registry.register(RegisterAdapter(name="two", kind="path", location=str(location), tenant="acme"))
    await registry.register(RegisterAdapter(name="two", kind="path", location=str(location), tenant="globex"))


MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


async def test_what_is_stored_has_a_limit_for_all_and_one_for_each_tenant(start_registry: StartRegistry, roots: Path):
    registry = await start_registry(max_stored_mib=3, max_tenant_stored_mib=1)
    places = [write_adapter(roots / str(seed), seed=seed, rank=64, modules=MODULES) for seed in range(16)]

    async def fill(tenant: str) -> list[str]:
        """Names registered until one is refused."""
        names: list[str] = []
        for place in places:
            name = f"{tenant or 'all'}-{len(names)}"
            await registry.register(RegisterAdapter(name=name, kind="path", location=str(place), tenant=tenant))
            names.append(name)
            await eventually(lambda: registry.adapters.owned(tenant) == len(names))
        return names

    with pytest.raises(Conflict, match="this tenant's adapters would take more than 1 MiB"):
        await fill("acme")
    size = registry.adapters.versions()[0].size_bytes
    assert registry.adapters.owned_bytes("acme") == (1 << 20) // size * size
    with pytest.raises(Conflict, match="the stored adapters would take more than 3 MiB"):
        await fill("")


@pytest.mark.parametrize("tenant", ["a.b", "*", ">", "a b", "x" * 65])
async def test_a_tenant_that_is_no_token_of_a_subject_is_refused(client: Client, roots: Path, tenant: str):
    with pytest.raises(BadRequest, match="tenant"):
        await register(client, "sql", write_adapter(roots / "a", seed=1), tenant)
    with pytest.raises(BadRequest, match="tenant"):
        await client.ask("delete", DeleteAdapter(name="sql", tenant=tenant))


async def test_the_audit_log_says_who_changed_what(client: Client, roots: Path):
    old, new = write_adapter(roots / "a", seed=1), write_adapter(roots / "b", seed=2)
    first = await register(client, "sql", old, "acme", actor="key-1")
    await register(client, "sql", old, "acme", actor="key-1", replace=True)  # changes nothing
    await register(client, "sql", new, "acme", actor="key-2", replace=True)
    await client.ask("alias", AliasAdapter(name="best", target="sql", tenant="acme", actor="key-2"))
    await client.ask("delete", DeleteAdapter(name="best", tenant="acme", actor="key-3"))
    events = await Audit(client.bus).latest(10)
    assert [(event.action, event.object, event.tenant, event.actor) for event in events] == [
        ("adapter.deleted", "best", "acme", "key-3"),
        ("adapter.aliased", "best", "acme", "key-2"),
        ("adapter.replaced", "sql", "acme", "key-2"),
        ("adapter.registered", "sql", "acme", "key-1"),
    ]
    assert events[-1].at_unix_ms > 0 and first.entry.digest[:12] in events[-1].detail
    assert len(await Audit(client.bus).latest(2)) == 2
