"""Promise: lost gateways, failing engines, drains and a lost NATS end only the affected requests, with a clear error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from motet.services.worker.engines import thread as engine_thread
from motet.shared.leases import LeaseHolder, LeaseWatch
from motet.shared.wire.request import Drain
from tests.services.worker.support_service import generate, latest
from tests.support import eventually


async def test_a_lost_gateways_requests_are_cancelled_and_the_others_continue(start, connect):
    worker = await start()
    worker.slow_down(0.03)
    leases = {name: LeaseHolder(await connect(f"gateway-{name}"), "gateway", name, "first") for name in ("g1", "g2")}
    for lease in leases.values():
        await lease.start()
    lost, kept = generate([1], max_tokens=200, gateway_id="g1"), generate([1], max_tokens=30, gateway_id="g2")
    await worker.accepted(lost, kept)
    await eventually(lambda: worker.mesh.tokens(lost.request_id))
    await leases["g1"].release()
    assert (await worker.mesh.ended(lost.request_id)).finish == "cancelled"
    assert (await worker.mesh.ended(kept.request_id)).finish == "length"


async def test_draining_finishes_what_runs_refuses_what_comes_and_gives_the_lease_back(start, connect):
    worker = await start()
    worker.slow_down(0.02)
    lost: list[str] = []
    watch = LeaseWatch(await connect("scheduler"), "worker", lost.append)
    await watch.start()
    request = generate([1], max_tokens=20)
    await worker.accepted(request)
    draining = asyncio.ensure_future(worker.service.drain())
    await eventually(lambda: latest(worker).draining)
    assert (await worker.refusal(generate([1]))).code == "unavailable"
    assert worker.service.not_ready() == ["draining"]
    await draining
    assert (await worker.mesh.ended(request.request_id)).finish == "length"
    assert lost == []
    await worker.service.stop()
    await eventually(lambda: lost == [worker.service.worker_id])


async def test_what_is_left_at_the_drains_deadline_is_handed_back_as_worker_lost(start, adapters):
    worker = await start(max_running=1)
    worker.slow_down(0.05)
    ref = await worker.mesh.publish_adapter(adapters[0])
    worker.gate_fetches()
    requests = [generate([1, i], max_tokens=200) for i in range(3)] + [generate([1], adapter=ref)]
    await worker.accepted(*requests)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.service.drain(), 0.3)
    await worker.service.stop()
    for request in requests:
        end = await worker.mesh.ended(request.request_id)
        assert end.finish == "error" and end.error.code == "worker_lost"
    tokens = worker.mesh.tokens(requests[0].request_id)
    assert worker.mesh.end(requests[0].request_id).index == len(tokens) > 0


async def test_a_drain_command_makes_the_process_leave(start):
    worker = await start()
    await worker.control(Drain())
    await eventually(lambda: worker.left)


async def test_a_failing_forward_pass_ends_its_requests_and_later_ones_are_served(start):
    worker = await start()
    forward = worker.engine.runner.forward

    def fail_once(batch: Any) -> Any:
        worker.engine.runner.forward = forward
        raise RuntimeError("device error")

    worker.engine.runner.forward = fail_once
    request = generate([1, 2])
    await worker.accepted(request)
    end = await worker.mesh.ended(request.request_id)
    assert end.finish == "error" and "device error" in end.error.message
    healthy = generate([1, 2])
    await worker.accepted(healthy)
    assert (await worker.mesh.ended(healthy.request_id)).finish == "length"
    assert worker.service.not_ready() == []


async def test_an_engine_that_keeps_failing_gives_its_requests_back_and_leaves(start):
    worker = await start()

    def fail(batch: Any) -> Any:
        raise RuntimeError("device lost")

    worker.engine.runner.forward = fail
    for i in range(3):
        request = generate([1, i])
        await worker.accepted(request)
        await worker.mesh.ended(request.request_id)
    await eventually(lambda: worker.left)
    assert any("3 steps in a row" in reason for reason in worker.service.not_ready())
    assert (await worker.refusal(generate([1]))).code == "unavailable"
    await eventually(lambda: latest(worker).draining)


async def test_losing_nats_stops_neither_the_engine_nor_the_worker(start, nats_server):
    worker = await start()
    worker.slow_down(0.03)
    request = generate([1, 2, 3], max_tokens=60)
    await worker.accepted(request)
    await eventually(lambda: worker.mesh.tokens(request.request_id))
    nats_server.kill()
    await eventually(lambda: not worker.service.bus.connected and not worker.mesh.bus.connected)
    assert worker.service.not_ready() == ["NATS is not connected"]
    await nats_server.start()
    await eventually(lambda: worker.service.bus.connected and worker.mesh.bus.connected, within_s=15)
    await eventually(lambda: not len(worker.service.core))
    after = generate([1])
    await worker.accepted(after)
    assert (await worker.mesh.ended(after.request_id)).finish == "length"
    assert worker.service.not_ready() == []


async def test_requests_whose_frames_could_not_be_sent_are_cancelled_and_their_gateway_is_told(start, nats_server, monkeypatch):
    worker = await start()
    worker.slow_down(0.03)
    request = generate([1, 2, 3], max_tokens=200)
    await worker.accepted(request)
    await eventually(lambda: worker.mesh.tokens(request.request_id))
    worker.service.bus.nc._max_pending_size = 1  # private: from now on the library has no room to wait
    nats_server.kill()
    await eventually(lambda: not len(worker.service.core))
    await nats_server.start()
    await eventually(lambda: worker.service.bus.connected and worker.mesh.bus.connected, within_s=15)
    after = generate([1])
    await worker.accepted(after)
    await worker.mesh.ended(after.request_id)
    ends = [item for item in worker.mesh.items(request.request_id) if item.finish]
    assert [end.error.code for end in ends] == ["worker_lost"]


@pytest.mark.parametrize("with_adapter", [False, True])
async def test_a_request_the_engine_has_no_room_for_is_refused_leaves_nothing_and_does_not_hang_the_drain(
    start, adapters, monkeypatch, with_adapter: bool
):
    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[0]) if with_adapter else None
    monkeypatch.setattr(engine_thread, "MAX_COMMANDS", 0)
    request = generate([1, 2], adapter=ref)
    if with_adapter:  # taken before its adapter was there
        await worker.accepted(request)
        end = await worker.mesh.ended(request.request_id)
        assert end.finish == "error" and end.error.code == "overloaded"
        assert worker.service.core.host.holders(ref.digest) == 0
    else:
        assert (await worker.refusal(request)).code == "overloaded"
    await eventually(lambda: latest(worker).requests == [])
    assert not len(worker.service.core)
    monkeypatch.undo()
    again = generate([1, 2], adapter=ref)
    await worker.accepted(again)
    assert (await worker.mesh.ended(again.request_id)).finish == "length"
    await asyncio.wait_for(worker.service.drain(), 5)
