"""Promise: the gateway's copy of the workers' state contains live workers only, in their newest incarnation."""

from __future__ import annotations

from motet.policies.cluster.worker_book import Shelf
from motet.policies.worker.worker_view import View
from motet.services.gateway.owner.fleet import Fleet
from motet.services.worker.engines.start_perf import START_PERF
from tests.support import eventually
from tests.support_worker import brief_of, generate_request, worker_limits


async def test_a_late_delta_of_a_worker_that_was_restarted_does_not_change_the_new_one(bus, connect) -> None:
    fleet = Fleet(await connect("gateway"), "demo")
    await fleet.start()
    old, new = (View("w1", incarnation, worker_limits()) for incarnation in ("first", "second"))
    new.put(brief_of(generate_request("kept")))
    subject = "motet.v1.worker.w1.state"
    await bus.publish(subject, old.snapshot(START_PERF))
    await bus.publish(subject, new.snapshot(START_PERF))
    old.put(brief_of(generate_request("late")))
    old.draining = True
    await bus.publish(subject, old.delta())
    new.kv_blocks_free = 7
    await bus.publish(subject, new.delta())
    await eventually(lambda: any(known.kv_blocks_free == 7 for known in fleet.workers()))
    (known,) = fleet.workers()
    assert not known.draining and set(fleet.held("w1").requests) == {"kept"}
    assert fleet.held("w2").requests == Shelf().of("w2").requests == {}
