"""Promise: a pinned or placed adapter is on its workers without a request, from their start on, until it is released."""

from __future__ import annotations

import msgspec

from motet.shared import subjects
from motet.shared.bus import encode
from motet.shared.kv import Bucket
from motet.shared.model import AdapterEntry, AdapterRef, AdapterVersion, Pin
from motet.shared.placement import Placement
from motet.shared.wire.refusal import Refused
from tests.services.worker.support_service import Mesh, Running, generate, latest
from tests.support import eventually


async def pin(mesh: Mesh, ref: AdapterRef, *workers: str, version: int = 1, name: str = "") -> None:
    """Write what the registry writes for a pin; without workers the name is unpinned."""
    kv = await mesh.bus.key_value(subjects.KV_ADAPTERS)
    pinned = Pin(workers=workers, since_unix_ms=1) if workers else None
    entry = AdapterEntry(name=name or ref.name, digest=ref.digest, version=version, updated_unix_ms=0, pin=pinned)
    await kv.put(f"name.{entry.name}", msgspec.json.encode(entry))


def tiers(worker: Running) -> dict[str, str]:
    return {held.digest: held.tier for held in latest(worker).adapters}


async def on_device(worker: Running, ref: AdapterRef) -> None:
    await eventually(lambda: worker.mesh.states and tiers(worker).get(ref.digest) == "device")


async def test_a_pinned_adapter_stays_while_others_come_and_go(start, adapters):
    worker = await start(max_loras=2)
    pinned, *others = [await worker.mesh.publish_adapter(adapter) for adapter in adapters[:4]]
    await pin(worker.mesh, pinned, "*")
    await on_device(worker, pinned)
    for ref in (*others, *others):
        request = generate([1, 2], adapter=ref)
        await worker.accepted(request)
        await worker.mesh.ended(request.request_id)
        await on_device(worker, ref)
        assert tiers(worker)[pinned.digest] == "device"
    await pin(worker.mesh, pinned)
    for ref in others[:2]:
        request = generate([1, 2], adapter=ref)
        await worker.accepted(request)
        await worker.mesh.ended(request.request_id)
    await eventually(lambda: tiers(worker)[pinned.digest] == "host")


async def test_a_pin_displaces_idle_adapters_and_one_for_another_worker_nothing(start, adapters):
    worker = await start(max_loras=2)
    first, second, pinned, elsewhere = [await worker.mesh.publish_adapter(adapter) for adapter in adapters[:4]]
    for ref in (first, second):
        request = generate([1, 2], adapter=ref)
        await worker.accepted(request)
        await worker.mesh.ended(request.request_id)
    await pin(worker.mesh, elsewhere, "another")
    await pin(worker.mesh, pinned, "another", worker.service.worker_id)
    await on_device(worker, pinned)
    assert sorted(tiers(worker).values()) == ["device", "device", "host"] and elsewhere.digest not in tiers(worker)


async def test_a_restarted_worker_loads_what_is_pinned_to_it(start, adapters, tmp_path):
    first = await start(instance_id="w1")
    ref = await first.mesh.publish_adapter(adapters[0])
    await pin(first.mesh, ref, "w1")
    await on_device(first, ref)
    await first.service.stop()
    second = await start(instance_id="w1")
    await on_device(second, ref)


async def test_the_pin_of_a_replaced_adapter_holds_for_the_new_version(start, adapters):
    worker = await start(max_loras=2)  # one of them may be pinned
    old = await worker.mesh.publish_adapter(adapters[0])
    new = await worker.mesh.publish_adapter(adapters[1])
    await pin(worker.mesh, old, "*")
    await on_device(worker, old)
    await pin(worker.mesh, new, "*", version=2, name=old.name)
    await on_device(worker, new)
    assert list(worker.service.core.host.pinned) == [new.digest]


async def test_a_request_for_another_adapter_never_waits_for_a_pin_and_the_pinned_one_comes_back(start, adapters):
    worker = await start(max_loras=2)
    refs = [await worker.mesh.publish_adapter(adapter) for adapter in adapters[:3]]
    await pin(worker.mesh, refs[0], "*")
    await on_device(worker, refs[0])
    running = [generate([1, 2], adapter=ref, max_tokens=30) for ref in refs[1:]]
    worker.slow_down(0.02)
    await worker.accepted(*running)
    await eventually(lambda: tiers(worker)[refs[0].digest] == "host")
    for request in running:
        await worker.mesh.ended(request.request_id)
    await on_device(worker, refs[0])
    worker.engine.check()


# ---- placed by a scheduler


async def place(mesh: Mesh, worker_id: str, *refs: AdapterRef) -> None:
    """Write a placement as the planning scheduler does; without adapters its placement is deleted."""
    bucket = await Bucket.open(mesh.bus, subjects.KV_PLACEMENT)
    if refs:
        digests = tuple(ref.digest for ref in refs)
        await bucket.put(worker_id, encode(Placement(owner="s1", digests=digests, since_unix_ms=1)))
    else:
        await bucket.delete(worker_id)


async def test_a_placed_adapter_is_loaded_and_leaves_like_all_others(start, adapters):
    worker = await start(max_loras=2)
    placed, *others = [await worker.mesh.publish_adapter(adapter) for adapter in adapters[:4]]
    await place(worker.mesh, "another", others[0])
    await place(worker.mesh, worker.service.worker_id, placed)
    await on_device(worker, placed)
    assert not worker.service.core.host.pinned, "a home is no pin"
    for ref in (*others, *others):
        request = generate([1, 2], adapter=ref)
        await worker.accepted(request)
        await worker.mesh.ended(request.request_id)
    await eventually(lambda: tiers(worker)[placed.digest] == "host")


async def test_a_pin_comes_before_what_is_placed_and_an_unknown_adapter_is_passed_over(start, adapters):
    worker = await start(max_loras=2)
    pinned, placed = [await worker.mesh.publish_adapter(adapter) for adapter in adapters[:2]]
    unknown = AdapterRef(name="x", digest="unknown", rank=8, size_bytes=1)
    await place(worker.mesh, worker.service.worker_id, unknown, placed)
    await on_device(worker, placed)
    await pin(worker.mesh, pinned, "*")
    await on_device(worker, pinned)
    assert list(worker.service.core.host.pinned) == [pinned.digest]


async def test_an_adapter_whose_layers_the_engine_cannot_change_is_neither_loaded_nor_served(start, adapters):
    """It is pinned to all workers and at home here: a native worker would fail to read its files, again and again."""
    worker = await start(max_loras=2)
    outer, ordinary = [await worker.mesh.publish_adapter(adapter) for adapter in adapters[:2]]
    kv = await worker.mesh.bus.key_value(subjects.KV_ADAPTERS)
    version = msgspec.json.decode((await kv.get(f"version.{outer.digest}")).value, type=AdapterVersion)
    version = msgspec.structs.replace(version, targets=("model.layers.*.mlp.fc1",))
    await kv.put(f"version.{outer.digest}", msgspec.json.encode(version))
    await pin(worker.mesh, outer, "*")
    await pin(worker.mesh, ordinary, "*")
    await on_device(worker, ordinary)
    assert outer.digest not in tiers(worker)
    reply = await worker.assign(generate([1, 2], adapter=outer))
    assert isinstance(reply, Refused) and "changes model.layers.*.mlp.fc1" in reply.error.message
