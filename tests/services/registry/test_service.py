"""Promise: what is registered is valid, stored once and seen by all; what is refused leaves no trace."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from motet.services.registry import claims as registry_store
from motet.services.registry import service as registry_service
from motet.services.registry.hub import HubSource
from motet.services.registry.store import check_name
from motet.shared import subjects
from motet.shared.adapter_blob import digest_of, read_index
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.errors import AdapterExists, AdapterInUse, AdapterNotFound, BadRequest, Conflict, InvalidAdapter, MotetError
from motet.shared.model import TensorDigest
from motet.shared.objects import Objects
from motet.shared.wire.worker_state import WorkerDelta
from tests.services.registry.conftest import Client, brief, snapshot
from tests.support import eventually
from tests.support_adapters import random_tensors, write_adapter


async def test_a_registered_adapter_is_published_with_everything_known_of_it(client: Client, roots: Path):
    write_adapter(roots / "upper", modules=["q_proj", "down_proj"], rank=8, alpha=16, dtype="F16")
    info = await client.register("team/upper.v1", roots / "upper")
    assert (info.entry.name, info.entry.version, info.entry.alias_of) == ("team/upper.v1", 1, None)
    version = info.version
    assert (version.rank, version.modules, version.layers, version.dtype) == (8, ("q_proj", "down_proj"), 2, "F16")
    assert version.base_model == "tiny-base" and version.source == "path:upper"

    store = await client.bus.object_store(subjects.BLOBS)
    blob = (await store.get(version.digest)).data
    assert digest_of(blob) == version.digest == info.entry.digest and len(blob) == version.size_bytes
    assert {scale for part in read_index(blob, len(blob)).parts for scale in part.scales} == {2.0}


async def test_equal_content_is_stored_once_under_any_number_of_names(client: Client, roots: Path):
    first = await client.register("one", write_adapter(roots / "a", seed=1))
    second = await client.register("two", write_adapter(roots / "b", seed=1))
    third = await client.register("three", write_adapter(roots / "c", seed=2))
    assert first.entry.digest == second.entry.digest != third.entry.digest
    assert await client.blobs() == {first.entry.digest, third.entry.digest}
    await client.delete("one")
    assert first.entry.digest in await client.blobs()
    await client.delete("two")
    assert await client.blobs() == {third.entry.digest}
    assert await client.keys() == {f"{kind}.{third.entry.digest}" for kind in ("holds", "version")} | {"name.three"}


async def test_a_taken_name_is_refused_and_a_replacement_is_version_two(client: Client, roots: Path):
    old, new = write_adapter(roots / "old", seed=1), write_adapter(roots / "new", seed=2)
    first = await client.register("mine", old)
    error = await client.refused("mine", new)
    assert isinstance(error, AdapterExists) and error.param == "name"
    second = await client.register("mine", new, replace=True)
    assert (first.entry.version, second.entry.version) == (1, 2) and first.entry.digest != second.entry.digest
    again = await client.register("mine", new, replace=True)
    assert again.entry == second.entry  # equal content is no new version
    assert first.entry.digest in await client.blobs()  # running requests finish on it


async def test_a_replaced_version_is_removed_once_it_is_old_and_unused(
    start_registry, connect, roots: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry_store, "UNUSED_S", 0.05)
    registry = await start_registry(older_versions=0)
    client = Client(await connect("gateway"), roots)
    first = await client.register("mine", write_adapter(roots / "old", seed=1))
    second = await client.register("mine", write_adapter(roots / "new", seed=2), replace=True)
    digest, store = first.entry.digest, registry.store
    monkeypatch.setattr(registry.usage, "idle", lambda asked, now_s: asked != digest)
    await eventually(lambda: not store.claims(digest))
    await asyncio.sleep(0.1)  # time: it becomes older than UNUSED_S
    assert await store.sweep() == 0 and digest in await client.blobs()
    monkeypatch.setattr(registry.usage, "idle", lambda *_: True)
    assert await store.sweep() == 1
    assert await client.blobs() == {second.entry.digest}


async def test_an_alias_points_at_what_its_target_was_and_keeps_the_weights_alive(client: Client, roots: Path):
    first = await client.register("stable-1", write_adapter(roots / "a", seed=1))
    second = await client.register("stable-2", write_adapter(roots / "b", seed=2))
    alias = await client.alias("current", "stable-1")
    assert (alias.entry.digest, alias.entry.alias_of, alias.entry.version) == (first.entry.digest, "stable-1", 1)
    moved = await client.alias("current", "stable-2")
    assert (moved.entry.digest, moved.entry.version) == (second.entry.digest, 2)
    assert (await client.alias("current", "stable-2")).entry == moved.entry
    await client.delete("stable-2")
    assert second.entry.digest in await client.blobs()
    await client.delete("current")
    assert await client.blobs() == {first.entry.digest}
    for name, target, error in (
        ("stable-1", "stable-1", BadRequest),
        ("tiny-base", "stable-1", BadRequest),
        ("x", "nobody", AdapterNotFound),
    ):
        with pytest.raises(error):
            await client.alias(name, target)
    await client.register("other", write_adapter(roots / "c", seed=3))
    with pytest.raises(AdapterExists):
        await client.alias("other", "stable-1")


async def test_modules_without_effect_are_told_with_the_adapter_and_its_aliases(client: Client, roots: Path):
    write_adapter(roots / "part", exclude_modules=["v_proj"])
    left_out = tuple(f"model.layers.{layer}.self_attn.v_proj" for layer in range(2))
    info = await client.register("part", roots / "part")
    assert info.version.modules == ("q_proj",) and info.entry.left_out == left_out
    assert (await client.alias("other", "part")).entry.left_out == left_out


async def test_a_copy_of_the_embeddings_is_compared_with_what_a_worker_told_of_its_checkpoint(client: Client, roots: Path):
    copy = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    tensors = random_tensors() | {"base_model.model.model.embed_tokens.weight": copy}
    error = await client.refused("early", write_adapter(roots / "early", tensors=tensors))
    assert "cannot be compared" in error.message
    told = TensorDigest(dtype="F32", shape=copy.shape, sha256=hashlib.sha256(copy.tobytes()).hexdigest())
    state = snapshot()
    state.limits = msgspec.structs.replace(state.limits, base_tensors={"embed_tokens": told})
    await client.bus.publish(subjects.state("w1"), state)

    async def registered() -> bool:
        try:
            info = await client.register("copied", roots / "early")
        except InvalidAdapter:
            return False
        return info.entry.left_out == ("embed_tokens: an unchanged copy of the base model's",)

    await eventually(registered)


async def test_delete_in_use_is_refused_unless_forced_or_another_name_keeps_the_weights(client: Client, roots: Path):
    info = await client.register("busy", write_adapter(roots / "busy"))
    digest = info.entry.digest
    await client.bus.publish(subjects.state("w1"), snapshot(brief("r1", digest), brief("r2", digest), brief("r3", "")))

    async def in_use() -> str:
        try:
            await client.alias("second", "busy")
            await client.delete("second")  # not the last name: nothing is lost
            await client.delete("busy")
        except AdapterInUse as error:
            return error.message
        raise AssertionError("deleted")

    assert await eventually(in_use) == "2 requests run on adapter 'busy'; force deletes it anyway"
    assert await client.blobs() == {digest}
    delta = WorkerDelta(
        worker_id="w1",
        incarnation="first",
        seq=2,
        kv_blocks_free=64,
        adapter_bytes_free=1,
        draining=False,
        changed=[brief("r4", digest)],
        removed=["r1", "r2"],
    )
    await client.bus.publish(subjects.state("w1"), delta)
    await eventually(lambda: _refusal(client, "busy", "1 requests"))
    assert (await client.delete("busy", force=True)).entry.name == "busy"
    assert await client.names() == []
    assert await client.blobs() == {digest}  # the request may still need it, also on another worker
    with pytest.raises(AdapterNotFound):
        await client.delete("busy")


async def _refusal(client: Client, name: str, text: str) -> bool:
    try:
        await client.delete(name)
    except AdapterInUse as error:
        return text in error.message
    raise AssertionError("deleted")


async def test_bad_adapters_are_refused_with_the_reason_and_leave_no_trace(client: Client, roots: Path, tmp_path: Path):
    good = await client.register("good", write_adapter(roots / "good"))
    before = (await client.keys(), await client.blobs())
    nan = random_tensors()
    next(iter(nan.values()))[0, 0] = np.nan
    pickled = write_adapter(roots / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    cut = write_adapter(roots / "cut")
    (cut / "adapter_model.safetensors").write_bytes((cut / "adapter_model.safetensors").read_bytes()[:-1])
    outside = write_adapter(tmp_path / "outside")
    (roots / "escape").symlink_to(outside)
    renamed = {key.replace("self_attn.v_proj", "attention.v_proj"): value for key, value in random_tensors().items()}
    wide = {key: np.pad(value, ((0, 0), (0, 1))) if "lora_A" in key else value for key, value in random_tensors().items()}
    cases: list[tuple[str, Path | str, str]] = [
        ("shapes", write_adapter(roots / "shapes", tensors=wide), "the base model's layer has 32 inputs"),
        ("modules", write_adapter(roots / "modules", tensors=renamed), "not a LoRA matrix"),
        ("nan", write_adapter(roots / "nan", tensors=nan), "NaN or infinity"),
        ("pickle", pickled, "never opened"),
        ("outside", outside, "outside the allowed roots"),
        ("dots", f"{roots}/../outside", "outside the allowed roots"),
        ("link", roots / "escape", "outside the allowed roots"),
        ("rank", write_adapter(roots / "rank", rank=257), "rank 257 is over the limit of 256"),
        ("truncated", cut, "pass the end"),
        ("dora", write_adapter(roots / "dora", use_dora=True), "use_dora"),
        ("missing", roots / "missing", "No such file"),
    ]
    for name, location, reason in cases:
        error = await client.refused(name, location)
        assert isinstance(error, BadRequest) and error.status == 400 and reason in error.message, name
    assert (await client.keys(), await client.blobs()) == before
    assert await client.names() == ["good"]
    assert (await client.register("good", roots / "good", replace=True)).entry == good.entry


@pytest.mark.parametrize(
    "name", ["", "tiny-base", "a b", "ünï", "../x", "a//b", "a/", ".a", "a..b", "a.", "a*", "a>", "base:a", "x" * 129, "a\n"]
)
async def test_bad_names_are_refused(client: Client, roots: Path, name: str):
    error = await client.refused(name, write_adapter(roots / "a"))
    assert isinstance(error, BadRequest) and error.param == "name"
    assert await client.keys() == set()


def test_good_names_are_accepted():
    for name in ("a", "A9", "team/adapter-v1.2_x", "0", "x" * 128):
        check_name(name, "tiny-base")


async def test_an_unknown_kind_and_an_unwanted_hub_are_refused(start_registry, connect, roots: Path):
    await start_registry(hub_allowed=False)
    client = Client(await connect("gateway"), roots)
    error = await client.refused("a", "x", kind="ftp")
    assert isinstance(error, BadRequest) and error.param == "kind"
    error = await client.refused("a", "some/adapter", kind="hub")
    assert isinstance(error, BadRequest) and "no adapters from the hub" in error.message


async def test_what_may_be_a_path_or_a_hub_id_is_a_path_when_there_is_one(
    client: Client, roots: Path, monkeypatch: pytest.MonkeyPatch
):
    write_adapter(roots / "team" / "mine")
    assert (await client.register("a", "team/mine", kind="any")).version.source == "path:team/mine"
    monkeypatch.chdir(roots / "team")
    assert (await client.register("b", "./mine", kind="any")).version.source == "path:team/mine"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "cannot get team/other from the Hugging Face hub" in (await client.refused("c", "team/other", kind="any")).message


async def test_the_number_of_adapters_is_limited(start_registry, connect, roots: Path):
    registry = await start_registry(max_adapters=2)
    client = Client(await connect("gateway"), roots)
    for n in range(2):
        await client.register(f"a{n}", write_adapter(roots / f"a{n}", seed=n))
    await eventually(lambda: registry.adapters.names() == 2)
    error = await client.refused("a2", write_adapter(roots / "a2", seed=2))
    assert isinstance(error, Conflict) and "which is the limit" in error.message
    await client.register("a1", roots / "a2", replace=True)
    with pytest.raises(Conflict, match="which is the limit"):
        await client.alias("a3", "a1")


async def test_an_uploaded_archive_is_registered_and_removed_afterwards(client: Client, roots: Path):
    packed = io.BytesIO()
    adapter = write_adapter(roots / "a")
    with zipfile.ZipFile(packed, "w") as archive:
        for path in adapter.iterdir():
            archive.write(path, f"adapter/{path.name}")
    uploads = await client.bus.object_store(subjects.UPLOADS)
    await uploads.put("u-1", packed.getvalue())
    await uploads.put("u-2", b"no archive")
    info = await client.register("uploaded", "u-1", kind="upload")
    assert info.version.source == "upload:u-1"
    assert info.entry.digest == (await client.register("local", adapter)).entry.digest
    for upload, reason in (("u-1", "no upload"), ("u-2", "not a readable zip or tar"), ("u-3", "no upload")):
        assert reason in (await client.refused("other", upload, kind="upload")).message


async def test_names_are_listed_in_pages(client: Client, roots: Path, registry):
    adapter = write_adapter(roots / "a")
    for name in ("c", "a", "b/x", "d"):
        await client.register(name, adapter)
    await eventually(lambda: registry.adapters.names() == 4)
    assert await client.names() == ["a", "b/x", "c", "d"]
    assert await client.names(limit=2) == ["a", "b/x"]
    assert await client.names(limit=2, after="b/x") == ["c", "d"]


async def test_of_two_registries_exactly_one_wins_a_name(start_registry, connect, roots: Path):
    for _ in range(2):
        await start_registry()
    client = Client(await connect("gateway"), roots)
    for n in range(8):
        write_adapter(roots / f"a{n}", seed=n)
    tries = [client.register(f"name{n % 2}", roots / f"a{n}") for n in range(8)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    winners = [r for r in results if not isinstance(r, BaseException)]
    assert sorted(w.entry.name for w in winners) == ["name0", "name1"]
    assert all(isinstance(r, AdapterExists) for r in results if isinstance(r, BaseException))
    digests = {w.entry.digest for w in winners}
    assert digests <= await client.blobs()


async def test_registering_and_deleting_equal_content_at_once_never_leaves_a_name_without_its_blob(
    start_registry, connect, roots: Path
):
    for _ in range(2):
        await start_registry()
    client = Client(await connect("gateway"), roots)
    adapter = write_adapter(roots / "same")

    async def churn(name: str) -> None:
        for _ in range(6):
            try:
                await client.register(name, adapter, replace=True)
                await client.delete(name)
            except AdapterNotFound:
                continue

    watch = AdapterWatch(client.bus)
    await watch.start()
    await asyncio.gather(*(churn(f"n{n % 3}") for n in range(6)))
    left = await client.keys()
    assert not any(key.startswith("name.") for key in left)
    await client.register("last", adapter)
    info = await eventually(lambda: watch.resolve("last"))
    store = await client.bus.object_store(subjects.BLOBS)
    assert digest_of((await store.get(info.entry.digest)).data) == info.entry.digest


async def test_a_deletion_that_crashed_half_way_is_finished_by_the_next_registration(
    client: Client, roots: Path, monkeypatch: pytest.MonkeyPatch
):
    adapter = write_adapter(roots / "a")
    digest = (await client.register("mine", adapter)).entry.digest

    async def dies(*_: object) -> None:
        raise OSError("power failure")

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "delete", dies)
        with pytest.raises(MotetError):
            await client.delete("mine")
    assert f"holds.{digest}" in await client.keys() and f"version.{digest}" not in await client.keys()
    monkeypatch.setattr(registry_store, "DELETING_S", 0.2)
    info = await client.register("mine", adapter)
    assert info.entry.digest == digest and digest in await client.blobs()
    assert await client.keys() == {f"{kind}.{digest}" for kind in ("holds", "version")} | {"name.mine"}


async def test_a_claim_whose_registration_crashed_is_dropped_when_it_is_old(
    client: Client, roots: Path, registry, monkeypatch: pytest.MonkeyPatch
):
    info = await client.register("mine", write_adapter(roots / "a"))
    await client.claim(info.entry.digest, "mine")
    await eventually(lambda: len(registry.store.claims(info.entry.digest)) == 2)
    await registry.store.sweep()
    assert len(await client.claims(info.entry.digest)) == 2
    monkeypatch.setattr(registry_store, "LOST_HOLD_S", 0.0)
    await registry.store.sweep()
    assert list(await client.claims(info.entry.digest)) == [info.entry.hold]


async def test_chunks_of_an_upload_that_a_crash_cut_short_are_freed_and_no_others(
    client: Client, roots: Path, registry, monkeypatch: pytest.MonkeyPatch
):
    info = await client.register("mine", write_adapter(roots / "a"))
    await client.bus.js.publish(f"$O.{subjects.BLOBS}.C.CUTSHORT", b"x" * 1000)
    assert await registry.store.sweep_orphans() == 0  # it may still be under way
    monkeypatch.setattr(registry_store, "LOST_HOLD_S", 0.0)
    assert await registry.store.sweep_orphans() == 1
    store = await client.bus.object_store(subjects.BLOBS)
    assert digest_of((await store.get(info.entry.digest)).data) == info.entry.digest


async def test_a_restarted_registry_and_broker_know_everything_again_and_watchers_follow(
    start_registry, connect, roots: Path, nats_server
):
    first = await start_registry()
    client = Client(await connect("gateway"), roots)
    watch = AdapterWatch(client.bus)
    await watch.start()
    kept = await client.register("kept", write_adapter(roots / "a", seed=1))
    await client.register("gone", write_adapter(roots / "b", seed=2))
    await eventually(lambda: len(watch.all()) == 2)
    await first.drain()
    await first.stop()
    nats_server.kill()
    await eventually(lambda: not watch.live)
    await nats_server.start()
    await start_registry()
    await eventually(lambda: watch.live)
    await client.delete("gone")
    added = await client.register("added", write_adapter(roots / "c", seed=3))
    await eventually(lambda: watch.all() == sorted([added, kept], key=lambda info: info.entry.name))
    assert await client.blobs() == {kept.entry.digest, added.entry.digest}
    assert isinstance(await client.refused("kept", roots / "c"), AdapterExists)


async def test_a_registry_survives_the_broker_and_refuses_while_it_is_away(client: Client, roots: Path, registry, nats_server):
    await client.register("before", write_adapter(roots / "a", seed=1))
    nats_server.kill()
    await eventually(lambda: registry.not_ready() == ["NATS is not reachable"])
    await nats_server.start()
    await eventually(lambda: not registry.not_ready() and client.bus.connected)

    async def registered() -> bool:
        try:
            await client.register("after", write_adapter(roots / "b", seed=2), replace=True)
        except MotetError:
            return False
        return True

    await eventually(registered, within_s=20)
    await eventually(lambda: registry.adapters.names() == 2)
    assert await client.names() == ["after", "before"]


async def test_the_adapters_directory_is_registered_at_start_and_again_when_it_changed(start_registry, connect, roots: Path):
    for name in ("one", "two", "deep/three"):
        write_adapter(roots / name, seed=len(name))
    write_adapter(roots / "bad", rank=300)
    first = await start_registry(adapters_dir=str(roots), adapter_roots="")
    await eventually(lambda: not first.not_ready())
    client = Client(await connect("gateway"), roots)
    await eventually(lambda: first.adapters.names() == 3)
    assert await client.names() == ["deep/three", "one", "two"]
    assert "no allowed roots" in (await client.refused("x", roots / "one")).message
    await first.stop()

    write_adapter(roots / "one", seed=77)
    second = await start_registry(adapters_dir=str(roots))
    await eventually(lambda: not second.not_ready())
    await eventually(lambda: second.adapters.resolve("one").entry.version == 2)
    assert second.adapters.resolve("two").entry.version == 1
    await client.register("two", write_adapter(roots.parent / "adapters" / "elsewhere", seed=5), replace=True)
    await second.stop()
    third = await start_registry(adapters_dir=str(roots))
    await eventually(lambda: not third.not_ready())
    assert third.adapters.resolve("two").version.source == "path:elsewhere"  # a name that a client has replaced is kept


async def test_a_stuck_hub_does_not_hold_up_local_adapters(client: Client, roots: Path, monkeypatch: pytest.MonkeyPatch):
    release = asyncio.Event()

    async def hang(*_: object, **__: object) -> None:
        await release.wait()

    monkeypatch.setattr(HubSource, "fetch", hang)
    stuck = [asyncio.ensure_future(client.refused(f"hub{n}", "some/adapter", kind="hub")) for n in range(4)]
    try:
        await asyncio.wait_for(client.register("local", write_adapter(roots / "a")), timeout=5)
    finally:
        release.set()
        for task in stuck:
            task.cancel()


async def test_more_registrations_than_can_wait_are_refused_at_once(
    client: Client, roots: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry_service, "MAX_WAITING", 1)
    adapter = write_adapter(roots / "a")
    results = await asyncio.gather(*(client.register(f"n{n}", adapter) for n in range(6)), return_exceptions=True)
    refused = [r for r in results if isinstance(r, MotetError)]
    assert refused and {r.code for r in refused} == {"overloaded"} and all(r.retry_after_s for r in refused)
    assert len(refused) < 6


async def test_refused_adapters_of_the_directory_are_published_with_reasons_until_they_are_mended(
    start_registry, connect, roots: Path
):
    write_adapter(roots / "good")
    write_adapter(roots / "large", rank=300)
    write_adapter(roots / "with space")
    first = await start_registry(adapters_dir=str(roots))
    await eventually(lambda: not first.not_ready())
    await eventually(lambda: first.adapters.refused.total == 2)
    assert [one.name for one in first.adapters.refused.adapters] == ["large", "with space"]
    assert "rank 300" in (first.adapters.refused.reason("large") or "")
    assert str(roots) not in str(first.adapters.refused), "paths of the server stay private"

    client = Client(await connect("gateway"), roots)
    await client.register("large", write_adapter(roots / "mended"))
    await eventually(lambda: [one.name for one in first.adapters.refused.adapters] == ["with space"])
    await first.stop()

    second = await start_registry(adapters_dir="")
    await eventually(lambda: second.adapters.refused.total == 0)  # nothing of that directory is refused any more


async def test_a_broken_new_version_in_the_directory_is_reported_while_the_old_one_is_served(start_registry, roots: Path):
    write_adapter(roots / "one")
    first = await start_registry(adapters_dir=str(roots))
    await eventually(lambda: not first.not_ready())
    await first.stop()
    (roots / "one" / "adapter_model.safetensors").write_bytes(b"cut")
    second = await start_registry(adapters_dir=str(roots))
    await eventually(lambda: second.adapters.refused.total == 1)
    assert "its earlier version 1 is still served" in (second.adapters.refused.reason("one") or "")
    assert second.adapters.resolve("one") is not None
