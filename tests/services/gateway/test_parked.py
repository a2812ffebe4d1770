"""Promise: requests of a base model that sleeps wait until a worker has started, within bounds, and wake it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from motet.cli.status import status
from motet.services.gateway.edge import sse
from motet.services.gateway.owner import parked
from motet.services.gateway.service import GatewayService
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import unix_ms
from motet.shared.wire.admin import ClusterStatus, StatusRequest
from motet.shared.wire.scale import OLD_MS, Decision, Reason, Sized, Wake
from motet.shared.wire.worker_state import WorkerNotice
from tests.services.gateway.support import Connect, FakeScheduler, running_gateway, start_workers
from tests.support import eventually

START_S = 42.0


class Sleeper:
    """A gateway whose base model has no worker, and a scheduler that will give its requests to w1."""

    def __init__(self, gateway: GatewayService, connect: Connect, bus: Bus) -> None:
        self.gateway, self.connect, self.bus = gateway, connect, bus
        self.wakes: list[Wake] = []
        self.url = f"http://127.0.0.1:{gateway.port}"

    async def decide(self, reason: Reason, base_model: str = "demo") -> None:
        """Tell what the schedulers have decided."""
        await self.bus.publish(subjects.SCALE, decided(reason, base_model))

    async def falls_asleep(self) -> None:
        await self.decide("asleep")
        await eventually(self.gateway.fleet.asleep)

    async def start_worker(self) -> None:
        (worker,) = await start_workers(self.connect, "w1")
        worker.speak = lambda _: self.gateway.prompts.tokenizer.encode("hello").ids

    async def waiting(self, count: int) -> None:
        await eventually(lambda: self.gateway.owner.inflight == count)

    def body(self, **more: object) -> dict[str, object]:
        return {"model": "demo", "prompt": "hi", "max_tokens": 8} | more


def decided(reason: Reason, base_model: str = "demo", *, age_s: float = 0.0) -> Sized:
    decision = Decision(at_s=0.0, desired=0, reason=reason, current=0, starting=0, needed=0)
    return Sized(
        base_model=base_model,
        scheduler_id="s1",
        at_unix_ms=unix_ms() - int(age_s * 1000),
        decision=decision,
        requests_s=0.0,
        forecast_requests_s=0.0,
        lead_s=START_S,
    )


@pytest.fixture
async def sleeper(connect: Connect, bus: Bus, nats_url: str, tmp_path: Path) -> AsyncIterator[Sleeper]:
    scheduler = FakeScheduler(await connect("scheduler"), ["w1"])
    await scheduler.start()
    async with running_gateway(nats_url, tmp_path, park_s=60.0, max_parked=4) as gateway:
        one = Sleeper(gateway, connect, bus)
        await bus.subscribe(subjects.WAKE, Wake, one.wakes.append)
        yield one


async def test_a_request_of_a_sleeping_base_wakes_it_and_is_answered_when_a_worker_serves(sleeper, http):
    await sleeper.falls_asleep()
    asking = asyncio.create_task(http.post(f"{sleeper.url}/v1/completions", json=sleeper.body()))
    await eventually(lambda: sleeper.wakes)
    assert sleeper.wakes[0] == Wake(base_model="demo", gateway_id="g1", waiting=1)
    await sleeper.start_worker()
    async with await asking as answer:
        assert answer.status == 200 and (await answer.json())["choices"][0]["text"] == "hello"


async def test_a_stream_begins_at_once_and_is_kept_alive_by_comments(sleeper, http, monkeypatch):
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    await sleeper.falls_asleep()
    async with http.post(f"{sleeper.url}/v1/completions", json=sleeper.body(stream=True)) as answer:
        assert answer.status == 200
        assert await asyncio.wait_for(answer.content.readline(), 5) == b": keep-alive\n"
        await sleeper.start_worker()
        rest = await asyncio.wait_for(answer.content.read(), 10)
        assert b"hello" in rest and rest.endswith(b"data: [DONE]\n\n")


async def test_who_waits_is_told_again_and_again(sleeper, http, monkeypatch):
    monkeypatch.setattr(parked, "WAKE_S", 0.05)
    await sleeper.falls_asleep()
    asking = [asyncio.create_task(http.post(f"{sleeper.url}/v1/completions", json=sleeper.body())) for _ in range(2)]
    await eventually(lambda: sleeper.wakes and sleeper.wakes[-1].waiting == 2)
    told = len(sleeper.wakes)
    await eventually(lambda: len(sleeper.wakes) > told)
    await sleeper.start_worker()
    for one in await asyncio.gather(*asking):
        one.release()


async def test_a_tenant_alone_parks_half_and_the_next_request_is_told_how_long_a_start_takes(sleeper, http):
    await sleeper.falls_asleep()
    asking = [asyncio.create_task(http.post(f"{sleeper.url}/v1/completions", json=sleeper.body())) for _ in range(2)]
    await sleeper.waiting(2)
    async with http.post(f"{sleeper.url}/v1/completions", json=sleeper.body()) as refused:
        assert (refused.status, refused.headers["retry-after"]) == (503, f"{START_S:.0f}")
        assert "2 requests wait for the one that starts" in (await refused.json())["error"]["message"]
    await sleeper.start_worker()
    for one in await asyncio.gather(*asking):
        assert one.status == 200
        one.release()
    async with http.post(f"{sleeper.url}/v1/completions", json=sleeper.body()) as answer:
        assert answer.status == 200, "the others' room is free again"


async def test_a_gateway_is_ready_while_its_base_sleeps_and_while_it_wakes(sleeper, http):
    async def status() -> int:
        async with http.get(f"{sleeper.url}/ready") as answer:
            return answer.status

    assert await status() == 503, "nothing says that a worker would come"
    await sleeper.falls_asleep()
    assert await status() == 200
    notice = WorkerNotice(worker_id="w1", incarnation="i", base_model="demo", event="starting")
    await sleeper.bus.publish(subjects.notice("w1"), notice)
    await sleeper.decide("steady")
    await eventually(lambda: not sleeper.gateway.fleet.asleep())
    assert await status() == 200, "it loads its model"


@pytest.mark.parametrize("reason", ["up", "doubt", "steady"])
async def test_a_request_is_parked_too_while_the_worker_that_another_one_woke_has_not_said_a_word(sleeper, http, reason):
    """The other client has gone, so nothing waits any more; or a scheduler is away. The start goes on all the same."""
    await sleeper.falls_asleep()
    await sleeper.decide(reason)
    await eventually(lambda: not sleeper.gateway.fleet.asleep())
    async with http.get(f"{sleeper.url}/ready") as ready:
        assert ready.status == 200
    asking = asyncio.create_task(http.post(f"{sleeper.url}/v1/completions", json=sleeper.body()))
    await eventually(lambda: sleeper.gateway.owner.parked and sleeper.wakes)
    await sleeper.start_worker()
    async with await asking as answer:
        assert answer.status == 200


@pytest.mark.parametrize("age_s", [3.0, 300.0])
async def test_a_gateway_that_starts_while_its_base_sleeps_knows_it_at_once(connect, bus, nats_url, tmp_path, age_s):
    async def answer(asked: StatusRequest) -> ClusterStatus:
        return ClusterStatus(scheduler_id="s1", workers=[], scale=[[decided("idle"), decided("asleep", age_s=age_s)]])

    await (await connect("scheduler")).serve("status", subjects.SCHEDULER_STATUS, StatusRequest, answer, queue="scheduler")
    async with running_gateway(nats_url, tmp_path) as gateway:
        if age_s * 1000 < OLD_MS:
            await eventually(lambda: not gateway.not_ready())
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(eventually(gateway.fleet.asleep), 0.5)


async def test_the_status_says_that_a_base_sleeps_and_who_waits(sleeper, http, monkeypatch):
    monkeypatch.delenv("MOTET_API_KEY", raising=False)
    await sleeper.falls_asleep()
    asking = asyncio.create_task(http.post(f"{sleeper.url}/v1/completions", json=sleeper.body()))
    await sleeper.waiting(1)
    shown = await asyncio.to_thread(CliRunner().invoke, status, ["--url", sleeper.url])
    assert "asleep: nobody asks" in shown.output
    assert "1 request at g1 until a first worker serves" in shown.output
    await sleeper.start_worker()
    (await asking).release()


async def test_a_request_is_refused_at_once_where_nobody_starts_a_worker(sleeper, http, monkeypatch):
    monkeypatch.setattr("motet.policies.owner.owner_core.OPEN_PATIENCE_S", 0.1)
    await sleeper.decide("asleep", base_model="another")
    await sleeper.decide("doubt")
    async with http.post(f"{sleeper.url}/v1/completions", json=sleeper.body()) as refused:
        assert refused.status == 503 and not sleeper.wakes


async def test_a_stream_that_no_worker_ever_had_costs_no_tokens_and_frees_its_idempotency_key(
    connect, bus, nats_url, tmp_path, http
):
    scheduler = FakeScheduler(await connect("scheduler"), ["w1"])
    await scheduler.start()
    limits = {"park_s": 0.2, "tenant_tokens_per_min": 1000}
    async with running_gateway(nats_url, tmp_path, **limits) as gateway:
        one = Sleeper(gateway, connect, bus)
        await one.falls_asleep()
        ask = {"json": one.body(stream=True), "headers": {"Idempotency-Key": "k"}}
        for _ in range(2):
            async with http.post(f"{one.url}/v1/completions", **ask) as answer:
                assert (answer.status, b"error" in await answer.read()) == (200, True)
        await one.start_worker()
        async with http.post(f"{one.url}/v1/completions", **ask) as answer:
            assert (answer.status, b"error" in await answer.read()) == (200, False), "a retry runs"
            left = 1000 - int(answer.headers["x-ratelimit-remaining-tokens"])
            assert left < 10, "the prompt of one request, not of three"


async def test_the_clients_that_went_away_leave_no_parked_request(sleeper):
    await sleeper.falls_asleep()
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.post(f"{sleeper.url}/v1/completions", json=sleeper.body()))
        await sleeper.waiting(1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await sleeper.waiting(0)
