"""A worker that dies or freezes is detected long before its lease ends, and a live one is never declared lost."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motet.cli.nats_server import NatsServer
from motet.services.gateway.owner import pings
from motet.services.gateway.owner.detokenize import Detokenizer
from motet.services.gateway.owner.fleet import Fleet
from motet.services.gateway.owner.owner import Owner
from motet.services.gateway.owner.stream import Stream
from motet.shared import leases, subjects
from motet.shared.bus import Bus
from motet.shared.errors import DeadlineExceeded, MotetError
from tests.services.gateway.support import Connect, FakeScheduler, assigned, start_workers
from tests.services.gateway.test_owner import TOKENIZER, TOKENS, Mesh, job, read, speak, tokens_of
from tests.support import eventually


@pytest.fixture
async def mesh(connect: Connect, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    """The mesh of the owner's tests with leases that never end, so that only pings can notice a dead worker."""
    monkeypatch.setattr(leases, "EXPIRY_S", 600.0)
    monkeypatch.setattr(pings, "GRACE_S", 0.2)
    monkeypatch.setattr(pings, "STRANGER_EVERY_S", 0.1)
    workers = await start_workers(connect, "w1", "w2")
    scheduler = FakeScheduler(await connect("scheduler"), ["w1", "w2"])
    await scheduler.start()
    gateway_bus = await connect("g1")
    fleet = Fleet(gateway_bus, "demo")
    await fleet.start()
    owner = Owner(
        gateway_bus, fleet, Detokenizer(TOKENIZER), gateway_id="g1", base_model="demo", max_inflight=64, stream_buffer_tokens=64
    )
    await owner.start()
    await eventually(lambda: len(fleet.workers()) == 2)
    yield Mesh(owner, scheduler, workers, bus)
    await owner.stop()


async def begun(mesh: Mesh) -> Stream:
    """A stream with two tokens from the first worker, which has already answered a ping."""
    stream = await mesh.owner.open(job())
    await speak(mesh.first, await assigned(mesh.first), until=2)
    await eventually(lambda: len(stream.tokens) == 2 and mesh.first.pings >= 2)
    return stream


async def finished_elsewhere(mesh: Mesh, stream: Stream) -> None:
    resumed = await assigned(mesh.second)
    assert (resumed.epoch, resumed.exclude_workers) == (1, ("w1",))
    await speak(mesh.second, resumed)
    assert tokens_of(await read(stream)) == TOKENS


async def test_a_dead_worker_is_noticed_although_its_lease_still_holds(mesh: Mesh) -> None:
    stream = await begun(mesh)
    await mesh.first.die()
    await finished_elsewhere(mesh, stream)


async def test_a_frozen_worker_is_noticed_although_it_is_connected(mesh: Mesh) -> None:
    stream = await begun(mesh)
    mesh.first.frozen = True
    await finished_elsewhere(mesh, stream)


async def test_a_worker_whose_connection_breaks_for_a_moment_keeps_its_requests(mesh: Mesh) -> None:
    stream = await begun(mesh)
    pings = mesh.first.pings
    mesh.first.bus.nc._transport.close()  # private: the library offers no way to lose a connection
    await eventually(lambda: mesh.first.pings >= pings + 3)
    assert (stream.worker_id, stream.epoch) == ("w1", 0)
    stream.cancel()


async def test_a_worker_that_never_answered_is_left_to_its_lease(
    mesh: Mesh, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,) = await start_workers(connect, "w0", pings=False)
    mesh.scheduler.workers = ["w0", "w1"]
    stream = await mesh.owner.open(job())
    await assigned(old)
    unanswered: list[MotetError] = []
    request = Bus.request

    async def counted(bus: Bus, subject: str, *asked: Any, **how: Any) -> Any:
        try:
            return await request(bus, subject, *asked, **how)
        except MotetError as error:
            if subject == subjects.ping("w0"):
                unanswered.append(error)
            raise

    monkeypatch.setattr(Bus, "request", counted)
    await eventually(lambda: len(unanswered) >= 4 * pings.ABSENCES)
    assert (stream.worker_id, stream.epoch) == ("w0", 0)
    stream.cancel()


async def test_a_frozen_broker_is_not_taken_for_frozen_workers(
    mesh: Mesh, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await begun(mesh)
    answers: list[MotetError] = []
    request = Bus.request

    async def watched(bus: Bus, subject: str, *asked: Any, **how: Any) -> Any:
        try:
            return await request(bus, subject, *asked, **how)
        except MotetError as error:
            if subject == subjects.ping(pings.NOBODY):
                answers.append(error)
            raise

    monkeypatch.setattr(Bus, "request", watched)
    os.kill(nats_server.pid, signal.SIGSTOP)
    try:
        await eventually(lambda: answers)
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)
    before = mesh.first.pings
    await eventually(lambda: mesh.first.pings >= before + 2)
    assert [type(answer) for answer in answers] == [DeadlineExceeded], "the broker was doubted, once"
    assert (stream.worker_id, stream.epoch) == ("w1", 0)
    stream.cancel()
