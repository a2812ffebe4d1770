"""Promise: a replay of the messages that a live scheduler received repeats its decisions and their costs to the bit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

import bench.rivals  # noqa: F401 (adds the names)
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.dispatch import POLICIES, decide
from motet.policies.scale.base_sizer import Seen
from motet.policies.scale.need import Asked
from motet.services.scheduler import sizer
from motet.services.scheduler.config import SchedulerConfig
from motet.services.scheduler.decision_log import DecisionLog, Looked, Setup, records, replay, replay_sizing
from motet.services.scheduler.events import Assigning, AtHome, ClusterEvent, Heard, LeaseLost, Marked, NotTaken, Taken, Tick
from motet.services.scheduler.service import SchedulerService
from motet.shared import subjects
from motet.shared.config import ConfigError
from motet.shared.errors import Overloaded
from motet.shared.scheduler_options import SchedulerOptions
from motet.shared.wire.demand import AdapterDemand, BaseDemand, DemandReport
from motet.shared.wire.request import SubmitReply
from motet.shared.wire.scale import Decision
from tests.services.scheduler.test_cluster import snapshot
from tests.support import eventually
from tests.support_worker import FakeWorker, brief_of, generate_request, worker_limits

REQUESTS = 120
SETUP = Setup(options=SchedulerOptions(admission="room"), drop_s=10.0)


@pytest.mark.parametrize("policy", ["motet", "rank-aware", "round-robin"])
async def test_decisions_of_a_live_scheduler_are_repeated(bus, nats_url, connect, tmp_path, policy):
    path = tmp_path / "decisions"
    scheduler = SchedulerService(SchedulerConfig.of(nats_url=nats_url, policy=policy, decision_log=str(path), stale_s=0.5))
    workers = [
        FakeWorker(await connect(f"worker-{n}"), f"w{n}", limits=worker_limits(max_running=20 + n), heartbeat_s=0.05)
        for n in range(5)
    ]
    for worker in workers:
        await worker.start()
    await scheduler.start()
    try:
        await eventually(lambda: all(scheduler.cluster.knows(worker.worker_id) for worker in workers))
        workers[0].refuse = Overloaded("full")

        async def ask(number: int) -> None:
            request = generate_request(f"r{number}", prompt=range(1, 2 + number % 50), rank=(0, 8, 16, 64)[number % 4])
            await bus.request(subjects.SUBMIT, request, SubmitReply, timeout_s=10.0)

        for first in range(0, REQUESTS, 10):
            await asyncio.gather(*map(ask, range(first, first + 10)))
            one = workers[1 + first // 10 % 4]
            running = [brief_of(request, "running") for request in one.assigned[-3:]]
            await one.delta(changed=running, removed=[request.request_id for request in one.assigned[:-6]])
            if first == 60:
                workers[4].mute()
                await workers[3].goodbye()
                await eventually(lambda: not scheduler.cluster.knows("w3"))
    finally:
        await scheduler.stop()
    repeated = list(replay(path))
    assert len(repeated) >= REQUESTS
    assert {made.worker_id for made, _ in repeated} > {"w1", "w2"}
    for made, again in repeated:
        assert (again.worker_id, again.total_cost) == (made.worker_id, made.total_cost)


async def test_decisions_about_numbers_of_workers_are_repeated(bus, nats_url, connect, tmp_path, monkeypatch):
    monkeypatch.setattr(sizer, "LOOK_S", 0.05)
    path = tmp_path / "decisions"
    scheduler = SchedulerService(SchedulerConfig.of(nats_url=nats_url, decision_log=str(path), scale="advise"))
    worker = FakeWorker(await connect("worker"), "w", limits=worker_limits(max_running=8), heartbeat_s=0.05)
    await worker.start()
    await scheduler.start()

    async def rises() -> bool:
        each = AdapterDemand(2, 0, 200, 200, 8, 1 << 20)
        report = DemandReport(scheduler_id="far", seconds=0.0, bases={"demo": BaseDemand(adapters={"a": each})})
        await bus.publish(subjects.DEMAND, report)
        return {"up", "steady"} <= {one.decision.reason for all_of in scheduler.sizer.decisions.values() for one in all_of}

    try:
        await eventually(rises)
    finally:
        await scheduler.stop()
    repeated = list(replay_sizing(path))
    decided = [again for _, again in repeated if again is not None]
    assert [looked.decision for looked, _ in repeated] == [again for _, again in repeated]
    assert {one.reason for one in decided} >= {"up", "steady"} and max(one.needed for one in decided) > 1
    assert list(replay(path)) == [], "looks are no decisions about requests"


def test_a_replay_of_looks_decides_anew(tmp_path):
    """One that is logged with another decision than the inputs lead to is found."""
    path = tmp_path / "decisions"
    setup = Setup(options=SchedulerOptions(), drop_s=10.0, sizing=SchedulerConfig.of(scale_min=3).sizing)
    log = DecisionLog(path, setup)
    asked = Asked(requests_s=0.0, prompt_tokens_s=0.0, output_tokens_s=0.0, rows=[])
    seen = Seen(now_s=1.0, counted=(0, 0), asked=asked, worker=None, ready={"w": 0.0}, lead_s=60.0)
    wrong = Decision(at_s=1.0, desired=7, reason="up", current=1, starting=0, needed=7)
    log.write(Looked(base_model="demo", seen=seen, decision=wrong))
    log.write(Looked(base_model="demo", seen=replace(seen, now_s=2.0, decides=False), decision=None))
    log.close()
    (first, again), (_, nothing) = replay_sizing(path)
    assert first.decision == wrong and (again.desired, again.reason) == (3, "up") and nothing is None


def test_a_replay_decides_anew_and_does_not_repeat_what_it_reads(tmp_path):
    path = tmp_path / "decisions"
    log, cluster = DecisionLog(path, SETUP), SETUP.cluster()
    heard = Heard(snapshot(1), 1.0)
    log.write(heard)
    cluster.on(heard)
    ask = Ask(base_model="demo", rank=8, tokens=5, tpot_slo_ms=50.0)
    decision = decide(POLICIES["motet"](), cluster.state, ask, 1.5, stale_s=3.0, avg_resp_len=10.0)
    log.decided(ask, 1.5, 10.0, decision)
    log.decided(ask, 99.0, 10.0, decision)  # by then the worker's state is stale, so no worker is a candidate
    log.close()
    (first, again), (_, stale) = replay(path)
    assert first.worker_id == again.worker_id == "w" and stale.worker_id is None


def test_every_event_is_read_as_it_was_written(tmp_path):
    events: list[ClusterEvent] = [
        Heard(snapshot(1, brief_of(generate_request("r"), "running")), 0.1 + 0.2, lease_held=True),
        Assigning("w", brief_of(generate_request("s"), "waiting"), 1.0),
        Taken("w", "s", 2.0),
        NotTaken("w", "s"),
        Marked("w", "full", 3.0),
        AtHome("w", ("d",)),
        LeaseLost("w"),
        Tick(4.0, connected=False),
    ]
    assert {type(event) for event in events} == set(get_args(ClusterEvent))
    log = DecisionLog(tmp_path / "decisions", SETUP)
    for event in events:
        log.write(event)
    log.close()
    assert list(records(tmp_path / "decisions")) == [SETUP, *events]


def test_a_log_that_is_full_ends_and_one_that_is_damaged_is_refused(tmp_path):
    path = tmp_path / "decisions"
    log = DecisionLog(path, SETUP, max_bytes=200)
    for number in range(100):
        log.write(LeaseLost(f"w{number}"))
    log.close()
    assert path.stat().st_size <= 200 and list(replay(path)) == []
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="record"):
        list(replay(path))
    path.write_bytes(b"not a log at all")
    with pytest.raises(ValueError, match="record 1"):
        list(replay(path))


def test_a_log_that_cannot_be_written_stops_the_start_with_the_setting_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="--decision-log"):
        SchedulerService(SchedulerConfig.of(decision_log=str(tmp_path / "none" / "log")))
