"""Promise: requests move from pressed workers to idle ones, one scheduler at a time says which, and none is lost by it."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from motet.policies.cluster.migration_plan import Moved, Plan
from motet.services.scheduler import planner
from motet.services.scheduler.planner import Turn
from motet.shared import subjects
from motet.shared.kv import Bucket
from motet.shared.leases import EXPIRY_S
from motet.shared.wire.admin import StatusReply, StatusRequest
from motet.shared.wire.request import Assigned, Move, pack_tokens
from tests.services.scheduler.support import knows, submit
from tests.support import eventually
from tests.support_worker import PERF, brief_of, generate_request, worker_limits

LIMITS = worker_limits(max_running=2, max_waiting=200)


def requests(count: int):
    return [brief_of(generate_request(f"r{number}", epoch=number % 3)) for number in range(count)]


async def moves(bus) -> list[Move]:
    heard: list[Move] = []
    await bus.subscribe(subjects.MOVE, Move, heard.append)
    await bus.flush()
    return heard


@pytest.mark.parametrize("rebalance", ["auto", "on"])
async def test_a_queue_moves_to_an_idle_worker(bus, schedule, hire, rebalance):
    heard = await moves(bus)

    def busy(worker) -> None:
        worker.requests = {brief.request_id: brief for brief in requests(20)}

    await hire("w1", limits=LIMITS, prepare=busy)
    await hire("w2", limits=LIMITS)
    await schedule(rebalance=rebalance)
    await eventually(lambda: len(heard) >= (4 if rebalance == "auto" else 5))
    assert {move.to for move in heard} == {"w2"}
    status = await bus.request(subjects.SCHEDULER_STATUS, StatusRequest(), StatusReply, timeout_s=5)
    assert status.rebalance.state == ("waiting" if rebalance == "auto" else "on"), "no moved request has run yet"
    assert max(Counter(move.request_id for move in heard).values()) == 1, "nothing moves twice in a row"
    assert all(move.epoch == int(move.request_id[1:]) % 3 for move in heard)


async def test_blocks_travel_with_running_requests_unless_kv_travel_is_off(bus, schedule, hire):
    limits = msgspec.structs.replace(LIMITS, kv_format="x", kv_token_bytes=64)
    perf = msgspec.structs.replace(PERF, kv_base_ms=1.0, kv_ms_per_mib=10.0)
    running = brief_of(generate_request("runs", prompt=range(200), predicted_tokens=500), "running")
    waiting = brief_of(generate_request("waits", prompt=range(200), predicted_tokens=500))

    def busy(worker) -> None:
        worker.requests = {brief.request_id: brief for brief in (running, waiting)}

    await hire("w1", limits=limits, perf=perf, prepare=busy)
    await hire("w2", limits=limits, perf=perf)
    plan = Plan(moves=tuple(Moved(name, "", "w1", "w2") for name in ("runs", "waits")))
    for kv_travel in ("on", "off"):
        service = await schedule(rebalance="on", kv_travel=kv_travel)
        await knows(service, "w1", "w2")
        sent = {move.request_id: move.kv for move in service.rebalancer.messages(plan)}
        assert sent == {"runs": kv_travel == "on", "waits": False}


async def test_nothing_moves_while_rebalancing_is_off(bus, schedule, hire):
    heard = await moves(bus)

    def busy(worker) -> None:
        worker.requests = {brief.request_id: brief for brief in requests(20)}

    await hire("w1", limits=LIMITS, prepare=busy)
    await hire("w2", limits=LIMITS)
    await schedule(rebalance="off")
    await asyncio.sleep(1.0)  # time: a plan would have been made by then
    assert not heard


async def test_of_several_schedulers_one_plans_and_another_takes_over(bus, schedule, hire):
    await hire("w1")
    first = await schedule(rebalance="on", instance_id="s1")
    second = await schedule(rebalance="on", instance_id="s2")

    def turns() -> list[bool]:
        return [one.planner is not None and one.planner.mine for one in (first, second)]

    await eventually(lambda: any(turns()))
    for _ in range(10):
        await asyncio.sleep(0.1)  # time: over several renewals
        assert sum(turns()) <= 1
    holder, other = (first, second) if turns()[0] else (second, first)
    await holder.stop()
    await eventually(lambda: other.planner.mine, within_s=2.0)


async def test_a_turn_whose_holder_is_silent_goes_to_another_one_and_not_before(bus, monkeypatch):
    bucket = await Bucket.open(bus, subjects.KV_LEASES)
    one, other = (Turn(bucket, "planner.test", name) for name in ("one", "other"))
    clock = [100.0]
    monkeypatch.setattr(planner, "now_s", lambda: clock[0])
    await one.renew()
    await other.renew()
    assert one.mine and not other.mine
    clock[0] += EXPIRY_S - 0.1
    await other.renew()
    assert not one.mine and not other.mine, "the holder stops before another one begins"
    clock[0] += 0.2
    await other.renew()
    assert other.mine
    await one.renew()
    assert not one.mine


async def test_a_submitted_request_goes_to_the_worker_that_a_move_names(bus, schedule, hire):
    idle, named = await hire("a"), await hire("b", limits=LIMITS)
    service = await schedule()
    await knows(service, "a", "b")
    request = generate_request("r1", epoch=1, output=pack_tokens(range(8)), move_to="b")
    assert (await submit(bus, request)) == Assigned(worker_id="b", predicted_tokens=64)
    assert named.assigned[0].move_to == "" and not idle.assigned


async def test_a_named_worker_that_is_away_or_refuses_does_not_stop_a_move(bus, schedule, hire):
    idle = await hire("a")
    await schedule()
    request = generate_request("r1", epoch=1, move_to="gone")
    assert (await submit(bus, request)).worker_id == "a"
    assert [one.request_id for one in idle.assigned] == ["r1"]


async def test_a_dry_run_says_what_would_move_and_moves_nothing(bus, schedule, hire):
    heard = await moves(bus)

    def busy(worker) -> None:
        worker.requests = {brief.request_id: brief for brief in requests(20)}

    await hire("w1", limits=LIMITS, prepare=busy)
    await hire("w2", limits=LIMITS)
    service = await schedule(rebalance="off")
    await knows(service, "w1", "w2")
    status = await bus.request(subjects.SCHEDULER_STATUS, StatusRequest(plan=True), StatusReply, timeout_s=15)
    (plan,) = status.plans
    assert plan.base_model == LIMITS.base_model and plan.most_wait_ms > plan.least_wait_ms == 0
    assert plan.after_ms < plan.before_ms and {move.to for move in plan.moves} == {"w2"}
    assert status.rebalance is None
    assert not heard and not (await bus.request(subjects.SCHEDULER_STATUS, StatusRequest(), StatusReply, timeout_s=5)).plans
