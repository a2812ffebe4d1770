"""Promise: a full disk, a lost blob, a jumping clock or a dying worker never costs an adapter that is needed."""

from __future__ import annotations

import asyncio
import errno
import math
import tempfile
from pathlib import Path

import pytest
from nats.js.api import ObjectStoreConfig

from motet.services.registry import claims as registry_store
from motet.services.registry import usage
from motet.services.registry.service import RegistryService
from motet.shared import subjects
from motet.shared.adapter_blob import digest_of
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import Unavailable
from tests.services.registry.conftest import Client, StartRegistry, brief, snapshot
from tests.support import eventually
from tests.support_adapters import write_adapter


@pytest.fixture
async def registry(start_registry: StartRegistry) -> RegistryService:
    """A registry that keeps no replaced versions."""
    return await start_registry(older_versions=0)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker counts as silent at once, and versions wait only for requests on their way to another worker."""
    monkeypatch.setattr(registry_store, "UNUSED_S", -1.0)
    monkeypatch.setattr(usage, "STALE_S", -1.0)


def heard(registry: RegistryService, digest: str) -> int:
    """The requests on a version that workers have reported, however long ago."""
    return registry.usage.requests(digest, -math.inf)


async def replaced(client: Client, registry: RegistryService, roots: Path) -> str:
    """A replaced version's digest, with one request that runs on it."""
    first = await client.register("mine", write_adapter(roots / "old", seed=1))
    digest = first.entry.digest
    await client.bus.publish(subjects.state("w1"), snapshot(brief("r1", digest)))
    await eventually(lambda: heard(registry, digest) == 1)
    await client.register("mine", write_adapter(roots / "new", seed=2), replace=True)
    await eventually(lambda: not registry.store.claims(digest))
    return digest


async def test_a_replaced_version_outlives_the_worker_whose_request_must_resume_on_it(
    client: Client, registry: RegistryService, roots: Path, no_waiting: None, monkeypatch: pytest.MonkeyPatch
):
    digest = await replaced(client, registry, roots)
    assert registry.usage.requests(digest, now_s()) == 0, "the worker was not heard again"
    assert await registry.store.sweep() == 0
    assert digest in await client.blobs() and f"version.{digest}" in await client.keys()
    await client.bus.publish(subjects.state("w2"), snapshot(brief("r1", digest), worker="w2"))
    await eventually(lambda: heard(registry, digest) == 2)
    await client.bus.publish(subjects.state("w2"), snapshot(worker="w2", seq=2))
    await eventually(lambda: heard(registry, digest) == 1)
    monkeypatch.setattr(usage, "IDLE_S", -1.0)
    assert await registry.store.sweep() == 1
    assert digest not in await client.blobs()


async def test_a_deleted_adapter_outlives_the_worker_whose_request_must_resume_on_it(
    client: Client, registry: RegistryService, roots: Path, no_waiting: None, monkeypatch: pytest.MonkeyPatch
):
    digest = await replaced(client, registry, roots)
    await client.register("again", roots / "old")
    assert registry.usage.requests(digest, now_s()) == 0, "the worker was not heard again"
    await client.delete("again", force=True)
    assert digest in await client.blobs() and "again" not in await client.names()
    monkeypatch.setattr(usage, "IDLE_S", -1.0)
    await eventually(lambda: not registry.store.claims(digest))
    assert await registry.store.sweep() == 1


async def test_a_clock_that_jumps_ahead_drops_no_claim_and_no_version(
    client: Client, registry: RegistryService, roots: Path, monkeypatch: pytest.MonkeyPatch
):
    digest = await replaced(client, registry, roots)
    under_way = await client.claim("f" * 64, "an-upload-in-progress")
    await eventually(lambda: registry.store.claims("f" * 64))
    future_ms = registry_store.unix_ms() + 86_400_000
    monkeypatch.setattr(registry_store, "unix_ms", lambda: future_ms)
    assert await registry.store.sweep() == 0
    assert await registry.store.sweep_orphans() == 0
    assert digest in await client.blobs()
    assert under_way in await client.claims("f" * 64)
    monkeypatch.setattr(registry_store, "unix_ms", lambda: future_ms - 2 * 86_400_000)
    assert (await client.register("later", write_adapter(roots / "later", seed=5))).entry.version == 1


async def test_a_full_store_refuses_new_adapters_and_keeps_the_others(
    bus: Bus, start_registry: StartRegistry, connect, roots: Path
):
    await bus.js.delete_object_store(subjects.BLOBS)
    await bus.js.create_object_store(subjects.BLOBS, ObjectStoreConfig(bucket=subjects.BLOBS, max_bytes=64 << 10))
    await start_registry()
    client = Client(await connect("gateway"), roots)
    small = await client.register("small", write_adapter(roots / "small"))
    before = (await client.keys(), await client.blobs())
    error = await client.refused("large", write_adapter(roots / "large", rank=200))
    assert isinstance(error, Unavailable) and "the adapter store is full" in error.message and error.retry_after_s
    left = {key for key in await client.keys() if not key.startswith("holds.")}  # an empty one stays for the sweep
    assert left == {key for key in before[0] if not key.startswith("holds.")} and await client.blobs() == before[1]
    stream = await client.bus.js.stream_info(f"OBJ_{subjects.BLOBS}", subjects_filter=f"$O.{subjects.BLOBS}.C.*")
    assert len(stream.state.subjects or {}) == 1, "no chunk of what did not fit takes the others' room"
    assert (await client.delete("small")).entry.digest == small.entry.digest


async def test_a_full_disk_of_the_registry_is_unavailable_and_shows_no_path(
    client: Client, roots: Path, monkeypatch: pytest.MonkeyPatch
):
    uploads = await client.bus.object_store(subjects.UPLOADS)
    await uploads.put("u", b"anything")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/srv/secret/tmp")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    (roots / "archive.zip").write_bytes(b"PK")
    for location, kind in (("u", "upload"), ("archive.zip", "path")):
        error = await client.refused("mine", location, kind=kind)
        assert isinstance(error, Unavailable) and "disk has no room" in error.message and "/srv" not in error.message
    monkeypatch.undo()
    assert await client.register("mine", write_adapter(roots / "mine"))


@pytest.mark.parametrize("lost", ["blob", "chunks"])
async def test_a_blob_that_the_store_lost_is_stored_again_when_the_adapter_is_registered_again(
    client: Client, roots: Path, lost: str
):
    adapter = write_adapter(roots / "mine")
    digest = (await client.register("mine", adapter)).entry.digest
    store = await client.bus.object_store(subjects.BLOBS)
    if lost == "blob":
        await store.delete(digest)
    else:
        nuid = (await store.get_info(digest)).nuid
        await client.bus.js.purge_stream(f"OBJ_{subjects.BLOBS}", subject=f"$O.{subjects.BLOBS}.C.{nuid}")
    await client.register("mine", adapter, replace=True)
    async with asyncio.timeout(5):
        assert digest_of((await store.get(digest)).data) == digest
    again = await client.register("mine", adapter, replace=True)
    assert again.entry.version == 2, "whole, so that nothing changes"


async def test_names_that_no_adapter_can_have_are_not_found_and_long_ones_are_shortened(client: Client):
    for name in ("a b", "*", "a.>", "", "x" * 9000, "\x1b[2J"):
        for ask in (lambda n: client.delete(n), lambda n: client.alias("new", n)):
            with pytest.raises(Exception, match="there is no adapter") as refused:
                await ask(name)
            assert refused.value.status == 404 and len(refused.value.message) < 300
