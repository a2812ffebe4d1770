"""Promise: an adapter is fetched once, is what its digest says, delays only its own requests and leaves when deleted."""

from __future__ import annotations

import msgspec

from motet.shared import subjects
from motet.shared.wire.request import Cancel
from tests.services.worker.support_service import generate, latest
from tests.support import eventually
from tests.support_models import random_prompts


async def test_twenty_requests_for_a_new_adapter_fetch_it_once_and_block_no_other(start, adapters):
    worker = await start(max_running=32, max_waiting=32)
    ref = await worker.mesh.publish_adapter(adapters[2])
    gate = worker.gate_fetches()
    waiting = [generate([1, 2, 3 + i], adapter=ref) for i in range(20)]
    await worker.accepted(*waiting)
    base = generate([1, 2, 3])
    await worker.accepted(base)
    assert (await worker.mesh.ended(base.request_id)).finish == "length"
    await eventually(lambda: [b.phase for b in latest(worker).requests].count("loading") == 20)
    assert worker.mesh.items(waiting[0].request_id) == []
    gate.set()
    for request in waiting:
        assert (await worker.mesh.ended(request.request_id)).finish == "length"
    assert worker.fetches == [ref.digest]


async def test_a_cancel_or_a_newer_epoch_reaches_a_request_that_is_still_loading(start, adapters):
    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[0])
    gate = worker.gate_fetches()
    first, second = generate([1], adapter=ref), generate([2], adapter=ref)
    await worker.accepted(first, second)
    await worker.control(Cancel(request_id=first.request_id, epoch=0))
    assert (await worker.mesh.ended(first.request_id)).finish == "cancelled"
    await worker.accepted(msgspec.structs.replace(second, epoch=1))
    assert (await worker.mesh.ended(second.request_id, 0)).finish == "cancelled"
    gate.set()
    assert (await worker.mesh.ended(second.request_id, 1)).finish == "length"
    await eventually(lambda: worker.service.core.host.holders(ref.digest) == 0)


async def test_an_adapter_that_cannot_be_fetched_fails_its_own_requests_and_is_tried_again(start, adapters):
    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[0])
    store = await worker.mesh.bus.object_store(subjects.BLOBS)
    await store.delete(ref.digest)
    broken, healthy = generate([1], adapter=ref), generate([1])
    await worker.accepted(broken, healthy)
    end = await worker.mesh.ended(broken.request_id)
    assert end.finish == "error" and end.error.code == "adapter_not_found" and adapters[0].name in end.error.message
    assert (await worker.mesh.ended(healthy.request_id)).finish == "length"
    await worker.mesh.publish_adapter(adapters[0])
    again = generate([1], adapter=ref)
    await worker.accepted(again)
    assert (await worker.mesh.ended(again.request_id)).finish == "length"


async def test_a_corrupted_cache_is_healed_while_serving(start, adapters, oracle, tmp_path):
    first = await start()
    ref = await first.mesh.publish_adapter(adapters[1])
    path = tmp_path / "adapters" / f"{ref.digest}.safetensors"
    path.write_bytes(adapters[1].blob[:-4] + b"\1\2\3\4")
    worker = await start()
    await eventually(lambda: any(held.tier == "disk" for held in latest(worker).adapters))
    [prompt] = random_prompts(1)
    request = generate(prompt, adapter=ref)
    await worker.accepted(request)
    await worker.mesh.ended(request.request_id)
    assert worker.mesh.tokens(request.request_id) == oracle.greedy(prompt, 8, adapters[1])
    assert path.read_bytes() == adapters[1].blob


async def test_a_deleted_adapter_leaves_every_tier_once_its_running_request_is_done(start, adapters, tmp_path):
    worker = await start()
    worker.slow_down(0.03)
    ref = await worker.mesh.publish_adapter(adapters[1])
    request = generate([1, 2, 3], adapter=ref, max_tokens=40)
    await worker.accepted(request)
    await eventually(lambda: [held.tier for held in latest(worker).adapters] == ["device"])
    await worker.mesh.delete_adapter(ref)

    async def forgotten() -> bool:
        return (await worker.refusal(generate([1], adapter=ref, max_tokens=1))).code == "adapter_not_found"

    await eventually(forgotten)
    assert [held.digest for held in latest(worker).adapters] == [ref.digest]
    assert (await worker.mesh.ended(request.request_id)).finish == "length"
    assert len(worker.mesh.tokens(request.request_id)) == 40
    await eventually(lambda: latest(worker).adapters == [])
    assert list((tmp_path / "adapters").iterdir()) == []
    assert worker.engine.residency() == []
