"""Promise: a name's earlier versions are kept and can be made current again, and an alias that follows goes with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.services.registry import claims as registry_store
from motet.services.registry import service as registry_service
from motet.shared import subjects
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.clock import now_s
from motet.shared.errors import AdapterInUse, AdapterNotFound, BadRequest
from motet.shared.wire.registry import DeleteAdapter, RegistryOk
from tests.services.registry.conftest import Client, brief, snapshot
from tests.support import eventually
from tests.support_adapters import write_adapter


async def test_an_earlier_version_becomes_current_again_with_its_number_and_weights(client: Client, roots: Path):
    digests = {}
    for number in (1, 2, 3):
        info = await client.register("mine", write_adapter(roots / str(number), seed=number), replace=number > 1)
        digests[number] = info.entry.digest
    assert [(one.version, one.digest) for one in info.entry.older] == [(2, digests[2]), (1, digests[1])]

    back = await client.rollback("mine")
    assert (back.entry.version, back.entry.digest) == (2, digests[2])
    assert await client.rollback("mine", 2) == back  # it is current already
    first = await client.rollback("mine", 1)
    assert (first.entry.version, first.entry.digest, first.version.digest) == (1, digests[1], digests[1])
    assert {one.version for one in first.entry.older} == {2, 3}
    with pytest.raises(AdapterNotFound, match="version 1 and no version before it; kept older versions: 2, 3"):
        await client.rollback("mine")
    with pytest.raises(AdapterNotFound, match="no version 9"):
        await client.rollback("mine", 9)

    fourth = await client.register("mine", write_adapter(roots / "4", seed=4), replace=True)
    assert fourth.entry.version == 4  # numbers are not used twice
    assert await client.blobs() == {*digests.values(), fourth.entry.digest}
    await client.delete("mine")
    assert await client.blobs() == set()


async def test_as_many_earlier_versions_are_kept_as_the_option_says_and_the_last_current_ones_first(
    start_registry, connect, roots: Path, monkeypatch: pytest.MonkeyPatch
):
    registry = await start_registry(older_versions=1)
    client = Client(await connect("gateway"), roots)
    monkeypatch.setattr(registry_store, "UNUSED_S", 0.0)
    first = await client.register("mine", write_adapter(roots / "1", seed=1))
    second = await client.register("mine", write_adapter(roots / "2", seed=2), replace=True)
    await client.rollback("mine")  # the second was bad
    third = await client.register("mine", write_adapter(roots / "3", seed=3), replace=True)
    assert [one.digest for one in third.entry.older] == [first.entry.digest]
    await eventually(lambda: not registry.store.claims(second.entry.digest))
    monkeypatch.setattr(registry.usage, "idle", lambda *_: True)

    async def swept() -> bool:
        await registry.store.sweep()
        return await client.blobs() == {first.entry.digest, third.entry.digest}

    await eventually(swept)


async def test_claims_of_kept_versions_are_not_taken_for_those_of_a_crash(
    client: Client, roots: Path, registry, monkeypatch: pytest.MonkeyPatch
):
    first = await client.register("mine", write_adapter(roots / "1", seed=1))
    await client.register("mine", write_adapter(roots / "2", seed=2), replace=True)
    await eventually(lambda: registry.store.claims(first.entry.digest))
    monkeypatch.setattr(registry_store, "LOST_HOLD_S", 0.0)
    await registry.store.sweep()
    assert (await client.rollback("mine")).entry.digest == first.entry.digest


async def test_an_alias_follows_its_target_to_new_versions_and_back_and_a_kept_one_does_not(
    client: Client, connect, registry, roots: Path
):
    first = await client.register("mine", write_adapter(roots / "1", seed=1))
    assert (await client.alias("stable", "mine")).entry.follows is False
    assert (await client.alias("latest", "mine", follows=True)).entry.follows is True
    await client.alias("newest", "latest", follows=True)  # an alias of an alias
    watch = registry.adapters
    await eventually(lambda: len(watch.following()) == 2)

    def digests() -> dict[str, str]:
        return {info.entry.name: info.entry.digest for info in watch.all()}

    one, second = first.entry.digest, await client.register("mine", write_adapter(roots / "2", seed=2), replace=True)
    two = second.entry.digest
    await eventually(lambda: digests() == {"mine": two, "latest": two, "newest": two, "stable": one})
    await client.rollback("mine")
    await eventually(lambda: digests() == {"mine": one, "latest": one, "newest": one, "stable": one})
    with pytest.raises(BadRequest, match="'latest' is an alias of 'mine', which has the versions"):
        await client.rollback("latest")
    await client.delete("mine")  # the aliases keep what they had
    await registry.followers.sweep()
    await eventually(lambda: digests() == {"latest": one, "newest": one, "stable": one})


async def test_an_alias_that_a_crash_left_behind_is_moved_by_the_sweep(
    client: Client, roots: Path, registry, monkeypatch: pytest.MonkeyPatch
):
    await client.register("mine", write_adapter(roots / "1", seed=1))
    await client.alias("latest", "mine", follows=True)
    watch: AdapterWatch = registry.adapters

    async def crash(name: str) -> None:
        pass

    monkeypatch.setattr(registry.followers, "after", crash)
    second = await client.register("mine", write_adapter(roots / "2", seed=2), replace=True)
    await eventually(lambda: watch.exactly("mine", "").entry.digest == second.entry.digest)
    assert watch.exactly("latest", "").entry.digest != second.entry.digest
    await registry.followers.sweep()
    await eventually(lambda: watch.exactly("latest", "").entry.digest == second.entry.digest)


async def test_a_removed_adapter_of_the_directory_says_that_it_returns_and_stays_away_when_forgotten(
    start_registry, connect, roots: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry_service, "SETTLE_S", 0.1)
    for name, seed in (("kept", 1), ("gone", 2)):
        write_adapter(roots / name, seed=seed)
    first = await start_registry(adapters_dir=str(roots))
    client = Client(await connect("gateway"), roots)
    await eventually(lambda: not first.not_ready())

    async def delete(name: str, **how: bool) -> RegistryOk:
        return await client.bus.request("motet.v1.registry.delete", DeleteAdapter(name=name, **how), RegistryOk, timeout_s=30)

    assert (await delete("kept")).returns is True
    assert (await delete("gone")).returns is True
    assert (await delete("gone", forget=True)).returns is False  # also after it was removed
    await first.stop()
    second = await start_registry(adapters_dir=str(roots))
    await eventually(lambda: not second.not_ready())
    assert await client.names() == ["kept"]
    await client.register("gone", roots / "gone")  # whoever registers it wants it
    await second.stop()
    await start_registry(adapters_dir=str(roots))
    await eventually(lambda: client.names())
    assert await client.names() == ["gone", "kept"]


async def test_an_adapter_whose_removal_is_refused_is_not_forgotten(start_registry, connect, roots: Path):
    write_adapter(roots / "busy", seed=1)
    registry = await start_registry(adapters_dir=str(roots))
    client = Client(await connect("gateway"), roots)
    await eventually(lambda: not registry.not_ready())
    digest = registry.adapters.exactly("busy", "").entry.digest
    await client.bus.publish(subjects.state("w1"), snapshot(brief("r1", digest)))
    await eventually(lambda: registry.usage.requests(digest, now_s()))
    with pytest.raises(AdapterInUse):
        await client.ask("delete", DeleteAdapter(name="busy", forget=True))
    assert await registry.store.forgotten() == frozenset()
