"""Promise: one scheduler decides how many workers there should be, all of them know it, and it starts and stops none."""

from __future__ import annotations

import asyncio

import pytest

import motet.services.scheduler.service as scheduler_service
from motet.services.scheduler import sizer
from motet.services.scheduler.service import SchedulerService
from motet.shared import subjects
from motet.shared.clock import now_s
from motet.shared.wire.admin import StatusReply, StatusRequest
from motet.shared.wire.demand import AdapterDemand, BaseDemand, DemandReport
from motet.shared.wire.scale import Decision, Sized, Wake
from motet.shared.wire.worker_state import WorkerNotice
from tests.services.scheduler.support import knows
from tests.support import eventually
from tests.support_worker import worker_limits

BASE = worker_limits().base_model


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizer, "LOOK_S", 0.1)


def last(service: SchedulerService) -> Sized | None:
    assert service.sizer is not None
    found = service.sizer.decisions.get(BASE)
    return found[-1] if found else None


def decision(service: SchedulerService) -> Decision | None:
    sized = last(service)
    return sized.decision if sized is not None else None


async def test_every_scheduler_tells_what_the_one_that_plans_has_decided(bus, schedule, hire):
    await hire("w1")
    services = [await schedule(scale="advise", instance_id=name) for name in ("s1", "s2")]
    await eventually(lambda: all(decision(one) for one in services))
    assert len({last(one).scheduler_id for one in services}) == 1
    status = await bus.request(subjects.SCHEDULER_STATUS, StatusRequest(scale=True), StatusReply, timeout_s=5)
    ((*_, shown),) = status.scale
    assert (shown.base_model, shown.decision.desired, shown.decision.current, shown.decision.reason) == (BASE, 1, 1, "steady")
    plain = await bus.request(subjects.SCHEDULER_STATUS, StatusRequest(), StatusReply, timeout_s=5)
    assert plain.scale == []


async def test_when_the_one_that_plans_is_gone_another_one_goes_on(bus, schedule, hire):
    await hire("w1")
    services = {name: await schedule(scale="advise", rebalance="off", instance_id=name) for name in ("s1", "s2")}
    await eventually(lambda: all(decision(one) for one in services.values()))
    planner = last(services["s1"]).scheduler_id
    await services.pop(planner).stop()
    (other,) = services.values()
    await eventually(lambda: last(other).scheduler_id != planner, within_s=5.0)


async def test_load_that_is_coming_raises_the_number_at_once_and_what_starts_counts(bus, schedule, hire):
    await hire("w1", limits=worker_limits(max_running=8))
    service = await schedule(scale="advise")
    await knows(service, "w1")

    async def demand(requests: int) -> None:
        """What a scheduler tells that was asked for so many requests."""
        each = AdapterDemand(requests, 0, 100 * requests, 100 * requests, 8, 1 << 20)
        await bus.publish(
            subjects.DEMAND, DemandReport(scheduler_id="far", seconds=0.0, bases={BASE: BaseDemand(adapters={"a": each})})
        )

    async def rises() -> bool:
        await demand(1)
        return (found := decision(service)) is not None and found.reason == "up"

    await eventually(rises)
    up = decision(service)
    assert up.desired == up.needed > 1 == up.current and up.limit
    for number in range(up.desired):
        notice = WorkerNotice(worker_id=f"new{number}", incarnation="1", base_model=BASE, event="starting")
        await bus.publish(subjects.notice(f"new{number}"), notice)
    await eventually(lambda: decision(service).starting == up.desired)
    assert decision(service).reason in ("steady", "settling") and decision(service).desired == up.desired + 1


async def test_with_a_schedulers_reports_missing_nothing_changes_and_it_is_said(bus, schedule, hire):
    await hire("w1")
    service = await schedule(scale="advise")
    service.demand.hear(DemandReport(scheduler_id="silent", seconds=5.0), now_s() - 30.0)
    await eventually(lambda: (found := decision(service)) is not None and found.reason == "doubt")
    assert decision(service).missing == ("the reports of silent",) and decision(service).desired == 1


async def test_the_first_waiting_request_is_looked_at_at_once(bus, schedule, monkeypatch):
    monkeypatch.setattr(sizer, "LOOK_S", 60.0)
    service = await schedule(scale="act", scale_min=0)
    await eventually(lambda: service.planner.mine)
    asked_s = now_s()
    await bus.publish(subjects.WAKE, Wake(base_model=BASE, gateway_id="g1", waiting=3))
    await eventually(lambda: (found := decision(service)) is not None and found.reason == "woken")
    assert decision(service).desired == 1 and now_s() - asked_s < 5.0


async def test_a_waiting_request_is_seen_also_when_the_one_that_plans_is_gone(bus, schedule, monkeypatch):
    monkeypatch.setattr(sizer, "LOOK_S", 60.0)
    services = {name: await schedule(scale="act", scale_min=0, instance_id=name) for name in ("s1", "s2")}
    await eventually(lambda: any(one.planner.mine for one in services.values()))
    (planner,) = (name for name, one in services.items() if one.planner.mine)
    await services.pop(planner).stop()
    (other,) = services.values()

    async def decided() -> bool:
        await bus.publish(subjects.WAKE, Wake(base_model=BASE, gateway_id="g1", waiting=1))
        return (found := decision(other)) is not None and found.desired == 1

    await eventually(decided, within_s=10.0)
    assert decision(other).reason == "woken"


async def test_a_base_that_nobody_asks_for_needs_no_worker_until_a_request_waits(bus, schedule, hire, monkeypatch):
    monkeypatch.setattr(sizer, "WOKEN_S", 0.5)
    await hire("w1")
    service = await schedule(scale="act", scale_min=0, scale_idle_s=0.2)
    await eventually(lambda: (found := decision(service)) is not None and found.reason == "idle")
    assert (decision(service).desired, decision(service).leaves) == (0, "w1")
    await bus.publish(subjects.WAKE, Wake(base_model=BASE, gateway_id="g1", waiting=1))
    await eventually(lambda: decision(service).desired == 1)
    await eventually(lambda: decision(service).reason == "idle")


async def test_workers_that_die_are_expected_back_and_one_that_stopped_is_not(bus, schedule, hire):
    workers = [await hire(name) for name in ("w1", "w2", "w3")]
    service = await schedule(scale="advise")
    await eventually(lambda: (found := decision(service)) is not None and found.current == 3)
    await workers[0].die()
    await eventually(lambda: not service.cluster.knows("w1"), within_s=10.0)
    await asyncio.sleep(0.3)  # time: several looks
    assert (decision(service).desired, decision(service).current) == (3, 3)
    stopped = WorkerNotice(worker_id="w1", incarnation="1", base_model=BASE, event="stopped")
    await bus.publish(subjects.notice("w1"), stopped)
    await eventually(lambda: decision(service).current == 2)


async def test_workers_that_draw_pictures_are_left_as_they_are(bus, schedule, hire):
    await hire("w1", limits=worker_limits(capabilities=("draws",)))
    service = await schedule(scale="advise")
    await eventually(lambda: (found := decision(service)) is not None and found.reason == "doubt")
    assert decision(service).missing == (sizer.NO_LAW,) and decision(service).desired == 1


async def test_without_the_option_nobody_decides(bus, schedule, hire, monkeypatch):
    monkeypatch.setattr(scheduler_service, "REPORT_S", 0.05)
    await hire("w1")
    service = await schedule(scale="off")
    heard: list[Sized] = []
    await bus.subscribe(subjects.SCALE, Sized, heard.append)
    await eventually(lambda: service.demand.schedulers(now_s()))
    await asyncio.sleep(0.5)  # time: several looks
    assert service.sizer is None and not heard
