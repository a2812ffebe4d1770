"""Promise: what a worker's probe condemned stays so for everybody, until it is released or registered again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from motet.services.registry.service import RegistryService
from motet.shared import subjects
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.errors import AdapterNotFound
from motet.shared.kv import Bucket
from motet.shared.wire.registry import DeleteAdapter, QuarantineAdapter, ReleaseAdapter
from tests.services.registry.conftest import Client
from tests.services.registry.test_tenants import register
from tests.support import eventually
from tests.support_adapters import write_adapter


async def condemn(client: Client, digest: str) -> None:
    facts = {"verdict": "other", "reason": "its answers differ", "worker_id": "w1"}
    await client.ask("quarantine", QuarantineAdapter(digest=digest, name="sql", **facts))
    bucket = await Bucket.open(client.bus, subjects.KV_PROBES)
    await bucket.put(digest, b"{}")


async def test_every_watcher_sees_a_quarantine_and_its_end_and_the_reference_goes_with_it(
    client: Client, roots: Path, registry: RegistryService
):
    info = await register(client, "sql", write_adapter(roots / "a", seed=1))
    digest = info.entry.digest
    watch = AdapterWatch(client.bus)
    await watch.start()
    await condemn(client, digest)
    found = await eventually(lambda: watch.quarantined.get(digest))
    assert (found.verdict, found.reason, found.worker_id) == ("other", "its answers differ", "w1")
    late = AdapterWatch(client.bus)
    await late.start()
    assert late.quarantined == {digest: found}
    await client.ask("release", ReleaseAdapter(name="sql", actor="k1"))
    await eventually(lambda: not watch.quarantined and not late.quarantined)
    assert await (await Bucket.open(client.bus, subjects.KV_PROBES)).get(digest) is None
    await (await Bucket.open(client.bus, subjects.KV_PROBES)).put(digest, b"{}")
    await client.ask("release", ReleaseAdapter(name="sql", actor="k1"))
    assert await (await Bucket.open(client.bus, subjects.KV_PROBES)).get(digest) is None, "also of one that was not quarantined"


async def test_registering_the_same_content_again_ends_a_quarantine(client: Client, roots: Path, registry: RegistryService):
    path = write_adapter(roots / "a", seed=1)
    info = await register(client, "sql", path)
    await condemn(client, info.entry.digest)
    await eventually(lambda: registry.adapters.quarantined)
    await register(client, "sql", path, replace=True)
    await eventually(lambda: not registry.adapters.quarantined)


async def test_the_first_report_counts_and_unknown_versions_and_names_are_refused(
    client: Client, roots: Path, registry: RegistryService
):
    info = await register(client, "sql", write_adapter(roots / "a", seed=1))
    await condemn(client, info.entry.digest)
    first = await eventually(lambda: registry.adapters.quarantined.get(info.entry.digest))
    facts = {"verdict": "partial", "reason": "later", "worker_id": "w2"}
    await client.ask("quarantine", QuarantineAdapter(digest=info.entry.digest, name="sql", **facts))
    assert registry.adapters.quarantined[info.entry.digest] == first
    with pytest.raises(AdapterNotFound):
        await client.ask("quarantine", QuarantineAdapter(digest="f" * 64, name="x", **facts))
    with pytest.raises(AdapterNotFound):
        await client.ask("release", ReleaseAdapter(name="nobody"))


async def test_a_version_that_goes_takes_its_quarantine_and_its_reference_along(
    client: Client, roots: Path, registry: RegistryService, monkeypatch
):
    info = await register(client, "sql", write_adapter(roots / "a", seed=1))
    await condemn(client, info.entry.digest)
    await client.ask("delete", DeleteAdapter(name="sql"))
    bucket = await Bucket.open(client.bus, subjects.KV_PROBES)

    async def gone() -> bool:
        await registry.store.sweep()
        return not registry.adapters.versions() and not registry.adapters.quarantined

    monkeypatch.setattr("motet.services.registry.claims.UNUSED_S", 0.0)
    monkeypatch.setattr(registry.usage, "idle", lambda *_: True)
    await eventually(gone)
    assert await bucket.get(info.entry.digest) is None


def test_an_adapter_cannot_be_called_like_a_quarantine():
    from motet.shared.model import is_adapter_name

    assert not is_adapter_name("sql/quarantine") and is_adapter_name("quarantine")
    assert msgspec.json.encode(QuarantineAdapter(digest="d", name="n", verdict="other", reason="r", worker_id="w"))
