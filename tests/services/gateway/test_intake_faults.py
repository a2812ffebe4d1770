"""Promise: no durable request ends a gateway, gets lost or costs another tenant, whatever its size and the faults meanwhile.

Every test here covers a way in which an accepted request could be lost, answered twice or never answered.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from nats.js import errors as js_errors
from nats.js.api import DiscardPolicy, RetentionPolicy, StreamConfig

from motet.cli.nats_server import NatsServer
from motet.services.gateway.intake import durable, intake
from motet.services.gateway.openai import texts
from motet.services.gateway.openai.prepare import Origin
from motet.services.gateway.service import GatewayService
from motet.services.registry.config import RegistryConfig
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.config import BusConfig, ConfigError
from motet.shared.errors import AnswerTooLarge, Overloaded
from motet.shared.provision import provision
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import FakeScheduler, put_adapter, running_gateway, start_workers
from tests.services.gateway.test_intake import chat, publish, queue_is_empty, result, results_stored
from tests.support import eventually, reading
from tests.support_worker import FakeWorker

TENANTS = ("acme", "globex")  # with streams of their own


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parked requests try again at once."""
    monkeypatch.setattr(intake, "WAIT_S", (0.01, 0.05))


async def redeliveries(bus: Bus, tenant: str = "acme") -> int:
    return (await bus.js.consumer_info(subjects.requests_stream(tenant), subjects.CONSUMER_INTAKE)).num_redelivered or 0


def again(gateway: GatewayService) -> intake.Intake:
    """The intake of another process, as after a restart."""
    return intake.Intake(gateway.bus, gateway.owner, gateway.preparer, gateway.lanes.durable, gateway.config, gateway.limits)


# ---- large messages


async def test_a_request_above_the_limit_is_refused_to_its_publisher(bus: Bus):
    with pytest.raises(js_errors.BadRequestError, match="message size exceeds maximum"):
        await publish(bus, b"x" * (bus.max_payload // 2 + 1))


async def test_a_stored_message_of_nearly_the_largest_size_is_buried_cut_and_the_gateway_lives(mesh: Mesh, bus: Bus):
    stream = (await bus.js.stream_info(subjects.requests_stream("acme"))).config
    await bus.js.update_stream(stream.evolve(max_msg_size=-1))  # as an older version left it
    body = b"{" + b"x" * (bus.max_payload - 200)
    await publish(bus, body, message_id="huge")
    answer = await result(bus, "huge")
    assert answer["error"]["code"] == "request_too_large"
    dead = await bus.js.get_last_msg(subjects.dead_stream("acme"), subjects.dead("acme"))
    assert dead.data == body[: durable.DEAD_BODY_MAX] and dead.headers is not None
    assert dead.headers["Motet-Truncated"] == "true"
    assert dead.headers["Motet-Size"] == str(len(body))
    assert dead.headers["Motet-Sha256"] == hashlib.sha256(body).hexdigest()
    assert mesh.gateway.bus.connected and not mesh.gateway.failure()
    mesh.say("fine")
    await publish(bus, chat(), message_id="next")
    assert (await result(bus, "next"))["status"] == "ok"


async def test_an_answer_too_large_for_a_message_is_an_error_result_and_is_not_generated_again(tmp_path: Path):
    server = NatsServer(tmp_path / "small", config_text="max_payload: 12KB")
    config = BusConfig(nats_url=await server.start())
    buses = [await Bus.connect(config, name) for name in ("test", "w1", "scheduler")]
    bus, worker_bus, scheduler_bus = buses
    try:
        await provision(bus, tenants=("acme",), tenant_bytes=64 << 20)
        await FakeScheduler(scheduler_bus, ["w1"]).start()

        async def connect(_: str) -> Bus:
            return worker_bus

        [worker] = await start_workers(connect, "w1")
        await put_adapter(bus, "upper")
        async with running_gateway(server.url, tmp_path) as gateway:
            await eventually(lambda: not gateway.not_ready() and gateway.adapters.resolve("upper"))
            tokens = gateway.prompts.tokenizer.encode("quite a long answer " * 20).ids[:200]
            worker.speak = lambda _: tokens
            await publish(bus, chat(n=64, max_tokens=200), message_id="long")
            answer = await result(bus, "long")
            assert answer["error"]["code"] == "answer_too_large" and "fewer tokens" in answer["error"]["message"]
            await queue_is_empty(bus)
            assert len(worker.assigned) == 64 and gateway.bus.connected
    finally:
        for opened in buses:
            await opened.close()
        server.stop()


async def test_what_cannot_fit_in_a_result_is_refused_before_anything_runs(mesh: Mesh):
    body = json.dumps(chat(max_tokens=200, min_tokens=200, logprobs=True, top_logprobs=20, n=64)).encode()
    plan = await texts.prepare(mesh.gateway.preparer, durable.protocol.parse(body), Origin())
    durable.check_answer_fits(plan, 64 * 200 * 21 * durable.CHAT_TOKEN_BYTES)
    with pytest.raises(AnswerTooLarge, match="at least"):
        durable.check_answer_fits(plan, 64 * 200 * 21 * durable.CHAT_TOKEN_BYTES - 1)


# ---- waiting, deaths, deadlines


async def test_waiting_for_room_is_no_redelivery_however_long_it_takes(mesh: Mesh, bus: Bus, impatient: None):
    mesh.say("LATER")
    mesh.scheduler.refuse = Overloaded("full")
    await publish(bus, chat(), message_id="patient")
    await eventually(lambda: len(mesh.scheduler.submitted) > intake.MAX_DEATHS + 5)
    assert await redeliveries(bus) == 0 and await results_stored(bus) == 0
    mesh.scheduler.refuse = None
    assert (await result(bus, "patient"))["status"] == "ok"
    await queue_is_empty(bus)


async def test_waiting_ends_at_the_requests_own_deadline_with_an_error_result(mesh: Mesh, bus: Bus, impatient: None):
    mesh.scheduler.refuse = Overloaded("every queue is full")
    await publish(bus, chat(timeout_ms=300), message_id="hasty")
    answer = await result(bus, "hasty")
    assert answer["error"]["code"] == "deadline_exceeded"
    assert "300 ms" in answer["error"]["message"] and "every queue is full" in answer["error"]["message"]
    await queue_is_empty(bus)


async def test_a_request_found_after_its_deadline_is_not_run(mesh: Mesh, bus: Bus):
    await mesh.gateway.intake.stop()
    await publish(bus, chat(timeout_ms=1), message_id="late")
    next_copy = again(mesh.gateway)
    await next_copy.start()
    try:
        assert (await result(bus, "late"))["error"]["code"] == "deadline_exceeded"
        assert mesh.scheduler.submitted == []
    finally:
        await next_copy.stop()


async def test_while_one_request_waits_nothing_more_of_its_tenant_is_pulled_and_other_tenants_continue(
    mesh: Mesh, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(intake, "WAIT_S", (30.0, 30.0))
    mesh.say("OK")
    mesh.scheduler.refuse = Overloaded("full")
    await publish(bus, chat(), message_id="first")
    await eventually(lambda: len(mesh.scheduler.submitted) == 1)
    mesh.scheduler.refuse = None
    await publish(bus, chat(), message_id="second")
    await publish(bus, chat(), message_id="other", tenant="default")
    assert (await result(bus, "other", tenant="default"))["status"] == "ok"
    # an answered request is the sign that there is room: the one that waits longest tries again, and its tenant goes on
    assert (await result(bus, "first"))["status"] == "ok"
    assert (await result(bus, "second"))["status"] == "ok"


async def test_copies_that_leave_in_order_are_no_deaths(mesh: Mesh, bus: Bus, monkeypatch: pytest.MonkeyPatch, impatient: None):
    monkeypatch.setattr(intake, "MAX_DEATHS", 1)
    mesh.scheduler.refuse = Overloaded("full")
    await publish(bus, chat(), message_id="handed-on")
    copy = mesh.gateway.intake
    for _ in range(5):
        count = len(mesh.scheduler.submitted)
        await eventually(lambda count=count: len(mesh.scheduler.submitted) > count)
        await copy.drain()
        copy = again(mesh.gateway)
        await copy.start()
    mesh.say("STILL HERE")
    mesh.scheduler.refuse = None
    try:
        assert (await result(bus, "handed-on"))["status"] == "ok"
    finally:
        await copy.stop()


async def test_a_request_that_processes_keep_dying_with_is_poison(mesh: Mesh, bus: Bus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(intake, "MAX_DEATHS", 2)
    await mesh.gateway.intake.stop()
    await publish(bus, chat(), message_id="deadly")
    pulls = await bus.js.pull_subscribe_bind(subjects.CONSUMER_INTAKE, subjects.requests_stream("acme"))
    for _ in range(3):
        [message] = await pulls.fetch(1, timeout=5)
        await message.nak()  # for the server the same as a delivery that is never heard of again, only sooner
    await pulls.unsubscribe()
    copy = again(mesh.gateway)
    await copy.start()
    try:
        answer = await result(bus, "deadly")
        assert "3 processes ended with this request" in answer["error"]["message"]
        assert mesh.scheduler.submitted == []
    finally:
        await copy.stop()


# ---- tenants


async def test_an_equal_message_id_of_another_tenant_is_another_request(mesh: Mesh, bus: Bus):
    mesh.say("MINE")
    for tenant in ("acme", "default"):
        await publish(bus, chat(), message_id="job-1", tenant=tenant)
    for tenant in ("acme", "default"):
        assert (await result(bus, "job-1", tenant=tenant))["status"] == "ok"
    assert {request.tenant for request in mesh.first.assigned} == {"acme", "default"}


async def test_a_publisher_of_an_unnamed_tenant_gets_an_error_at_once(bus: Bus):
    with pytest.raises(js_errors.NoStreamResponseError):
        await publish(bus, chat(), tenant="stranger")
    assert RegistryConfig.of(model="m", tenants="default, acme").publishers.names == ("default", "acme")
    with pytest.raises(ConfigError, match=r"--tenants: 'a\.b'"):
        _ = RegistryConfig.of(model="m", tenants="a.b").publishers.names


async def test_a_tenant_provisioned_later_is_served_without_a_restart(mesh: Mesh, bus: Bus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(intake, "TENANTS_EVERY_S", 0.05)
    await mesh.gateway.intake.stop()
    copy = again(mesh.gateway)
    await copy.start()
    try:
        mesh.say("WELCOME")
        await provision(bus, tenants=("newcomer",), tenant_bytes=64 << 20)
        await publish(bus, chat(), message_id="hello", tenant="newcomer")
        assert (await result(bus, "hello", tenant="newcomer"))["status"] == "ok"
    finally:
        await copy.stop()


async def test_a_tenant_whose_results_are_full_waits_loses_none_and_delays_no_other(
    mesh: Mesh, bus: Bus, impatient: None, monkeypatch: pytest.MonkeyPatch
):
    stream = subjects.results_stream("acme")
    config = (await bus.js.stream_info(stream)).config
    await bus.js.update_stream(config.evolve(max_bytes=2048))
    mesh.say("SOMETHING TO KEEP")
    for i in range(12):
        await publish(bus, chat(), message_id=f"r{i}")

    async def full() -> bool:
        info = await bus.js.stream_info(stream)
        return reading(intake.RUNNING) > 0 and info.state.bytes > 1024

    await eventually(full)
    await publish(bus, chat(), message_id="other", tenant="default")
    assert (await result(bus, "other", tenant="default"))["status"] == "ok"
    read: set[str] = set()

    async def read_and_purge() -> bool:
        for i in range(12):
            subject = subjects.results("acme", f"r{i}")
            try:
                message = await bus.js.get_last_msg(stream, subject, direct=True)
            except js_errors.NotFoundError:
                continue
            assert json.loads(message.data or b"")["status"] == "ok"
            assert subject not in read, "a result came twice"
            read.add(subject)
            await bus.js.purge_stream(stream, subject=subject)
        return len(read) == 12

    await eventually(read_and_purge, within_s=30)
    await queue_is_empty(bus)
    assert len([r for r in mesh.first.assigned + mesh.second.assigned if r.tenant == "acme"]) == 12, "each ran once"


async def test_a_second_result_for_a_request_id_is_not_stored(bus: Bus):
    subject = subjects.results("acme", "once")
    assert await bus.store(subject, b"the first", {"Nats-Msg-Id": "a"})
    assert not await bus.store(subject, b"the second", {"Nats-Msg-Id": "b"})
    assert (await bus.js.get_last_msg(subjects.results_stream("acme"), subject, direct=True)).data == b"the first"


# ---- coming from an older version


async def test_requests_and_results_of_an_older_version_are_kept_and_answered(
    connect, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bus = await connect("test")
    js, gib = bus.js, 1 << 30
    await js.add_stream(
        StreamConfig(
            name="MOTET_REQUESTS",
            subjects=["motet.v1.requests.*"],
            retention=RetentionPolicy.WORK_QUEUE,
            discard=DiscardPolicy.NEW,
            max_bytes=gib,
            max_msg_size=8 << 20,
            duplicate_window=600.0,
        )
    )
    await js.add_stream(StreamConfig(name="MOTET_RESULTS", subjects=["motet.v1.results.>"], max_bytes=gib, allow_direct=True))
    await js.add_stream(StreamConfig(name="MOTET_DEAD", subjects=["motet.v1.dead.*"], max_bytes=gib // 4))
    await js.pull_subscribe("motet.v1.requests.*", durable="intake", stream="MOTET_REQUESTS")
    await js.publish(subjects.results("acme", "answered"), b'{"request_id":"answered","status":"ok","response":{}}')
    for tenant, name in (("acme", "answered"), ("acme", "waiting"), ("default", "waiting"), ("odd$name", "x")):
        await publish(bus, chat(), message_id=f"{tenant}-{name}" if name != "answered" else name, tenant=tenant)

    await provision(bus, tenant_bytes=64 << 20)
    for stream in ("MOTET_REQUESTS", "MOTET_RESULTS"):
        config = (await js.stream_info(stream)).config
        assert config.max_bytes == gib, "what was larger stays larger"
        assert config.discard == DiscardPolicy.NEW
    with monkeypatch.context() as patched:
        patched.setattr(js, "update_stream", None)  # the second time there is nothing to update
        await provision(bus, tenant_bytes=64 << 20)

    workers: list[FakeWorker] = await start_workers(connect, "w1")
    await FakeScheduler(await connect("scheduler"), ["w1"]).start()
    await put_adapter(bus, "upper")
    workers[0].speak = lambda _: [10, 11, 12]
    async with running_gateway(nats_url, tmp_path):
        assert (await result(bus, "acme-waiting", tenant="acme"))["status"] == "ok"
        assert (await result(bus, "default-waiting", tenant="default"))["status"] == "ok"
        await queue_is_empty(bus, tenant="default")
        ran = {request.request_id for request in workers[0].assigned}  # one that answers late is assigned once more
        assert len(ran) == 2, "what was answered before is not answered again"
        await publish(bus, chat(), message_id="fresh", tenant="acme")
        assert (await result(bus, "fresh"))["status"] == "ok"
