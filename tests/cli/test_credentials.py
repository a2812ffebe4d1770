"""Subject permissions on a real server: every user can do its own work and nothing else."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import nats
import pytest
from nats.js import errors as js_errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from motet.cli import credentials
from motet.cli.nats_server import NatsServer, binary
from motet.services.gateway.owner.picture_files import PictureFiles
from motet.shared import subjects
from motet.shared.audit import Audit, AuditEvent
from motet.shared.bus import Bus, encode
from motet.shared.config import BusConfig
from motet.shared.errors import Unavailable
from motet.shared.keys import KeyStore
from motet.shared.leases import LeaseHolder, LeaseWatch
from motet.shared.provision import provision
from motet.shared.telemetry import BUS_REFUSED
from motet.shared.wire.registry import DeleteAdapter, RegistryOk
from motet.shared.wire.request import Control, Drain
from tests.support import eventually, reading

TENANTS = ("default", "acme")


class Ping(msgspec.Struct):
    text: str = "ping"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    directory = tmp_path_factory.mktemp("stack")
    server = NatsServer(directory / "nats", config_text=credentials.authorization(directory / "credentials", TENANTS))
    asyncio.run(server.start())

    async def prepare() -> None:
        registry = await connect_as(server, "registry")
        await provision(registry, tenants=TENANTS, tenant_bytes=64 << 20, picture_ttl_s=3600.0)
        await registry.close()

    asyncio.run(prepare())
    yield server
    server.stop()


async def connect_as(server: NatsServer, user: str) -> Bus:
    secret = credentials.password_file(server.data_dir.parent / "credentials", user)
    config = BusConfig(nats_url=server.url, nats_user=user, nats_password_file=str(secret))
    return await Bus.connect(config, user, inbox=user)


@pytest.fixture
async def bus_of(server: NatsServer) -> AsyncIterator[Callable[[str], Awaitable[Bus]]]:
    """Opens buses under a user's own credentials; `bus.refusals` lists what the server refused."""
    opened: list[Bus] = []

    async def open_bus(user: str) -> Bus:
        opened.append(await connect_as(server, user))
        return opened[-1]

    yield open_bus
    for bus in opened:
        await bus.close()


async def refusals(server: NatsServer, user: str, verb: str, subject: str) -> list[str]:
    """What the server refuses when `user` publishes or subscribes to `subject`."""
    said: list[str] = []

    async def on_error(error: Exception) -> None:
        said.append(str(error))

    secret = credentials.password_file(server.data_dir.parent / "credentials", user).read_text().strip()
    client = await nats.connect(server.url, user=user, password=secret, error_cb=on_error)
    try:
        if verb == "publish":
            await client.publish(subject, b"")
        else:
            await client.subscribe(subject)
        await client.flush()
        await client.flush()  # the refusal is handled in a task of its own
        await asyncio.sleep(0)
    finally:
        await client.close()
    return [line for line in said if "permissions violation" in line.lower()]


MAY = [
    ("gateway", "publish", "motet.v1.submit"),
    ("gateway", "publish", "motet.v1.worker.w1.control"),
    ("gateway", "publish", "motet.v1.registry.register"),
    ("gateway", "publish", "$KV.motet_leases.gateway.g1"),
    ("gateway", "publish", "$KV.motet_intake.MOTET_REQUESTS.1"),
    ("gateway", "publish", "$KV.motet_keys.key_1"),
    ("gateway", "publish", "motet.v1.audit.key"),
    ("gateway", "subscribe", "motet.v1.stream.g1"),
    ("gateway", "subscribe", "motet.v1.worker.*.state"),
    ("scheduler", "publish", "motet.v1.worker.w1.assign"),
    ("scheduler", "publish", "motet.v1.predict"),
    ("scheduler", "subscribe", "motet.v1.submit"),
    ("predictor", "subscribe", "motet.v1.predict"),
    ("predictor", "subscribe", "motet.v1.outcome"),
    ("registry", "publish", "$KV.motet_adapters.name.upper"),
    ("registry", "publish", "motet.v1.audit.adapter"),
    ("registry", "publish", "$O.motet_blobs.M.abc"),
    ("registry", "subscribe", "motet.v1.registry.register"),
    ("worker", "publish", "motet.v1.stream.g1"),
    ("worker", "publish", "motet.v1.worker.w1.state"),
    ("worker", "publish", "$KV.motet_leases.worker.w1"),
    ("worker", "subscribe", "motet.v1.worker.w1.assign"),
    ("upstream", "publish", "motet.v1.requests.default"),
    ("upstream", "subscribe", "motet.v1.results.default.r1"),
    ("upstream", "subscribe", "motet.v1.tokens.default.r1"),
    ("upstream", "subscribe", "motet.v1.dead.default"),
    ("upstream-acme", "publish", "motet.v1.requests.acme"),
    ("operator", "publish", "motet.v1.worker.w1.control"),
    ("operator", "subscribe", ">"),
]

MAY_NOT = [
    ("gateway", "publish", "motet.v1.worker.w1.assign"),
    ("gateway", "publish", "motet.v1.stream.g2"),
    ("gateway", "publish", "$KV.motet_adapters.name.upper"),
    ("gateway", "publish", "$O.motet_blobs.M.abc"),
    ("gateway", "publish", "$KV.motet_leases.worker.w1"),
    ("gateway", "publish", "$JS.API.CONSUMER.DURABLE.CREATE.MOTET_REQUESTS.mine"),
    ("gateway", "publish", "$JS.API.STREAM.PURGE.MOTET_RESULTS"),
    ("gateway", "publish", "motet.v1.audit.adapter"),
    ("gateway", "publish", "$JS.API.STREAM.PURGE.MOTET_AUDIT"),
    ("gateway", "subscribe", "motet.v1.submit"),
    ("gateway", "subscribe", ">"),
    *((user, "publish", "$KV.motet_keys.key_1") for user in ("scheduler", "predictor", "registry", "worker", "upstream")),
    *((user, "publish", "$JS.API.DIRECT.GET.KV_motet_keys") for user in ("scheduler", "registry", "worker", "upstream")),
    *((user, "publish", "motet.v1.audit.key") for user in ("scheduler", "registry", "worker", "upstream")),
    ("scheduler", "publish", "motet.v1.stream.g1"),
    ("scheduler", "publish", "$KV.motet_leases.worker.w1"),
    ("scheduler", "publish", "$KV.motet_adapters.name.upper"),
    ("scheduler", "publish", "motet.v1.registry.delete"),
    ("predictor", "publish", "$KV.motet_adapters.name.upper"),
    ("predictor", "publish", "$JS.API.STREAM.MSG.GET.KV_motet_adapters"),
    ("predictor", "publish", "motet.v1.worker.w1.control"),
    ("predictor", "subscribe", "$KV.motet_adapters.>"),
    ("predictor", "subscribe", "motet.v1.stream.g1"),
    ("registry", "publish", "motet.v1.worker.w1.assign"),
    ("registry", "publish", "motet.v1.stream.g1"),
    ("registry", "publish", "$JS.API.STREAM.DELETE.MOTET_REQUESTS"),
    ("worker", "publish", "$KV.motet_adapters.name.upper"),
    ("worker", "publish", "$O.motet_blobs.M.abc"),
    ("worker", "publish", "$KV.motet_leases.gateway.g1"),
    ("worker", "publish", "motet.v1.submit"),
    ("worker", "publish", "motet.v1.results.default.r1"),
    ("worker", "subscribe", "motet.v1.stream.g1"),
    ("upstream", "publish", "motet.v1.requests.acme"),
    ("upstream", "publish", "motet.v1.submit"),
    ("upstream", "publish", "motet.v1.registry.delete"),
    ("upstream", "publish", "$JS.API.CONSUMER.CREATE.MOTET_RESULTS"),
    ("upstream", "publish", "$JS.API.DIRECT.GET.MOTET_RESULTS"),
    ("upstream", "publish", "$JS.API.DIRECT.GET.MOTET_RESULTS.motet.v1.results.acme.r1"),
    ("upstream", "publish", "$JS.API.DIRECT.GET.MOTET_RESULTS_acme.motet.v1.results.acme.r1"),
    ("upstream", "publish", "$JS.API.STREAM.PURGE.MOTET_RESULTS_acme"),
    ("upstream", "publish", "$JS.API.STREAM.PURGE.MOTET_REQUESTS"),
    ("upstream-acme", "publish", "$JS.API.STREAM.PURGE.MOTET_RESULTS"),
    ("upstream", "publish", "$KV.motet_adapters.name.upper"),
    ("upstream", "subscribe", "motet.v1.results.acme.r1"),
    ("upstream", "subscribe", "motet.v1.requests.default"),
    ("upstream", "subscribe", "motet.v1.stream.g1"),
    ("upstream", "subscribe", "_INBOX_upstream-acme.>"),
    ("upstream-acme", "publish", "motet.v1.requests.default"),
    *((user, "publish", "$JS.API.STREAM.DELETE.KV_motet_adapters") for user in ("gateway", "scheduler", "worker")),
    *(("upstream", "publish", f"_INBOX_{user}.one") for user in credentials.SERVICES),
    *((user, "publish", "_INBOX_operator.one") for user in (*credentials.SERVICES, "upstream")),
    ("gateway", "publish", "_INBOX_registry.one"),
    *((user, "subscribe", "_INBOX_operator.>") for user in (*credentials.SERVICES, "upstream")),
]


@pytest.mark.parametrize(("user", "verb", "subject"), MAY)
async def test_allowed(server: NatsServer, user: str, verb: str, subject: str) -> None:
    assert await refusals(server, user, verb, subject) == []


@pytest.mark.parametrize(("user", "verb", "subject"), MAY_NOT)
async def test_refused(server: NatsServer, user: str, verb: str, subject: str) -> None:
    assert len(await refusals(server, user, verb, subject)) == 1


async def test_no_user_connects_without_a_password(server: NatsServer) -> None:
    for given in ({}, {"user": "gateway", "password": "wrong"}):
        client = nats.NATS()
        with pytest.raises(nats.errors.Error):
            await client.connect(server.url, allow_reconnect=False, **given)
        client._transport.close()  # private: the library leaves the socket of a failed connect open


@pytest.mark.parametrize(
    ("asks", "answers", "subject"),
    [
        ("gateway", "scheduler", subjects.SUBMIT),
        ("gateway", "registry", subjects.registry("list")),
        ("scheduler", "predictor", subjects.PREDICT),
        ("scheduler", "worker", subjects.assign("w1")),
    ],
)
async def test_request_and_answer(bus_of: Callable[[str], Awaitable[Bus]], asks: str, answers: str, subject: str) -> None:
    server, client = await bus_of(answers), await bus_of(asks)

    async def pong(_: Ping) -> Ping:
        return Ping("pong")

    await server.serve("it", subject, Ping, pong, queue="q")
    assert (await client.request(subject, Ping(), Ping, timeout_s=2)).text == "pong"


async def test_an_answer_arrives_although_its_service_was_disconnected_meanwhile(
    bus_of: Callable[[str], Awaitable[Bus]],
) -> None:
    registry, gateway = await bus_of("registry"), await bus_of("gateway")

    async def pong(_: Ping) -> Ping:
        before = registry.nc.stats["reconnects"]
        registry.nc._transport._io_writer.transport.abort()  # private: the library loses no connection on demand
        await eventually(lambda: registry.nc.stats["reconnects"] > before and registry.connected)
        return Ping("pong")

    await registry.serve("it", subjects.registry("register"), Ping, pong, queue="q")
    assert (await gateway.request(subjects.registry("register"), Ping(), Ping, timeout_s=5)).text == "pong"


@pytest.mark.parametrize("kind", ["worker", "gateway"])
@pytest.mark.parametrize("watcher", ["gateway", "scheduler"])
async def test_a_lease_is_held_and_watched(bus_of: Callable[[str], Awaitable[Bus]], kind: str, watcher: str) -> None:
    lost: list[str] = []
    holder = LeaseHolder(await bus_of(kind), kind, f"{kind}-{watcher}", "one")
    await holder.start()
    watch = LeaseWatch(await bus_of(watcher), kind, lost.append)
    await watch.start()
    await eventually(lambda: watch.alive(f"{kind}-{watcher}"))
    await holder.release()
    await eventually(lambda: f"{kind}-{watcher}" in lost)


async def test_the_registry_publishes_adapters_and_the_others_read_them(bus_of: Callable[[str], Awaitable[Bus]]) -> None:
    registry = await bus_of("registry")
    adapters, blobs = await registry.key_value(subjects.KV_ADAPTERS), await registry.object_store(subjects.BLOBS)
    await adapters.put("name.upper", b"entry")
    await blobs.put("digest", b"x" * 300_000)
    for reader in ("gateway", "worker"):
        bus = await bus_of(reader)
        bucket = await bus.key_value(subjects.KV_ADAPTERS)
        assert (await bucket.get("name.upper")).value == b"entry"
        watcher = await bucket.watchall()
        entry = await watcher.updates() or await watcher.updates()  # None: "that is all", which may come first
        assert entry is not None and entry.key == "name.upper" and entry.delta == 0, "it is the only one"
        await watcher.stop()
    store = await (await bus_of("worker")).object_store(subjects.BLOBS)
    assert (await store.get("digest")).data == b"x" * 300_000
    await blobs.delete("digest")
    await adapters.delete("name.upper")
    await adapters.purge("name.upper")


async def test_an_upload_goes_from_a_gateway_to_the_registry(bus_of: Callable[[str], Awaitable[Bus]]) -> None:
    there = await (await bus_of("gateway")).object_store(subjects.UPLOADS)
    await there.put("upload-1", b"y" * 200_000)
    here = await (await bus_of("registry")).object_store(subjects.UPLOADS)
    assert (await here.get("upload-1")).data == b"y" * 200_000
    await here.delete("upload-1")


async def test_a_gateway_keeps_pictures_which_other_gateways_serve(bus_of: Callable[[str], Awaitable[Bus]]) -> None:
    here, there = PictureFiles(await bus_of("gateway")), PictureFiles(await bus_of("gateway"))
    for use in ("url", "res"):
        kept = await here.keep("acme", use, b"z" * 300_000, "png")
        assert (await there.read("acme", kept)).data == b"z" * 300_000


@pytest.mark.parametrize("tenant", TENANTS)
async def test_a_durable_request_travels_under_the_upstreams_own_rights(
    bus_of: Callable[[str], Awaitable[Bus]], tenant: str
) -> None:
    upstream, gateway = await bus_of(credentials.upstream_user(tenant)), await bus_of("gateway")
    result, stream = subjects.results(tenant, "r1"), subjects.results_stream(tenant)
    heard = await upstream.nc.subscribe(result)
    ack = await upstream.js.publish(subjects.requests(tenant), b"{}", headers={"Nats-Msg-Id": "r1"})
    assert not ack.duplicate, "an equal id of another tenant is another request"
    requests = subjects.requests_stream(tenant)
    assert ack.stream == requests and requests in await gateway.stream_names(subjects.requests("*"))
    intake = await gateway.js.pull_subscribe_bind(subjects.CONSUMER_INTAKE, requests)
    (request,) = await intake.fetch(1, timeout=2)
    assert (await gateway.js.stream_info(stream)).state.messages == 0
    await (await gateway.key_value(subjects.KV_INTAKE)).put(f"{requests}.1", b"1")
    await gateway.js.publish(result, b"the result")
    await request.ack_sync()
    await intake.unsubscribe()
    assert (await heard.next_msg(timeout=2)).data == b"the result"
    for reader in (upstream, gateway):
        assert (await reader.js.get_msg(stream, subject=result, direct=True)).data == b"the result"
    await upstream.nc.jetstream(prefix=subjects.TENANT_API).purge_stream(stream, subject=result)
    assert (await gateway.js.stream_info(stream)).state.messages == 0
    with pytest.raises((js_errors.Error, nats.errors.Error, TimeoutError)):
        await upstream.nc.jetstream(timeout=0.3).pull_subscribe("", durable="mine", stream=subjects.STREAM_RESULTS)


def test_password_files_are_private_and_kept(tmp_path: Path) -> None:
    first = credentials.authorization(tmp_path / "credentials")
    files = {path.name: path.read_text() for path in (tmp_path / "credentials").iterdir()}
    assert sorted(files) == sorted(f"{user}.password" for user in credentials.grants())
    assert len(set(files.values())) == len(files)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "credentials").iterdir())
    assert credentials.authorization(tmp_path / "credentials") == first


def test_a_server_elsewhere_accepts_the_written_configuration(tmp_path: Path) -> None:
    config = credentials.write_server_config(
        tmp_path / "out", store_dir=str(tmp_path / "js"), listen="127.0.0.1:4222", monitor="127.0.0.1:8222"
    )
    assert config.stat().st_mode & 0o777 == 0o600
    subprocess.run([binary(), "-t", "-c", str(config)], check=True, capture_output=True)


@pytest.mark.parametrize("tenant", ["a.b", "*", ">", "", "x y"])
def test_a_tenant_name_must_be_one_token_of_a_subject(tenant: str) -> None:
    with pytest.raises(ValueError, match="tenant"):
        credentials.grants([tenant])


async def test_keys_and_audit_log_work_under_the_services_own_rights(bus_of: Callable[[str], Awaitable[Bus]]) -> None:
    gateway, registry = await bus_of("gateway"), await bus_of("registry")
    store = KeyStore(gateway)
    await store.start()
    made, text = await store.create(tenant="acme")
    fresh, _ = await store.rotate(made.id, overlap_s=60)
    assert store.find(text) is not None
    await store.revoke(fresh.id)
    await Audit(registry).record(AuditEvent(action="adapter.deleted", actor="", object="sql"))
    await Audit(gateway).record(AuditEvent(action="key.created", actor="", object=made.id))
    assert [event.action for event in await Audit(gateway).latest(2)] == ["key.created", "adapter.deleted"]
    with pytest.raises(Unavailable):
        await Audit(registry).latest(1)


async def answered_elsewhere(bus_of: Callable[[str], Awaitable[Bus]], publish: str, reply: str) -> None:
    """The upstream of acme publishes with a reply subject that it may not publish to.

    Returns when the server has the message.
    """
    upstream = await bus_of("upstream-acme")
    await upstream.nc.publish(publish, b"{}", reply=reply)
    await upstream.js.publish(subjects.requests("acme"), b"{}")  # answered in order, after the one before


@pytest.mark.parametrize(
    "publish",
    [subjects.requests("acme"), f"$JS.API.DIRECT.GET.{subjects.STREAM_DEAD}.{subjects.dead('acme')}"],
    ids=["acknowledgement", "dead letter"],
)
async def test_a_tenant_cannot_make_jetstream_answer_to_others(bus_of: Callable[[str], Awaitable[Bus]], publish: str) -> None:
    registry, gateway, operator = await bus_of("registry"), await bus_of("gateway"), await bus_of("operator")
    deleted: list[DeleteAdapter] = []

    async def delete(message: DeleteAdapter) -> RegistryOk:
        deleted.append(message)
        return RegistryOk(adapters=[])

    await registry.serve("delete", subjects.registry("delete"), DeleteAdapter, delete, queue="registry")
    adapters = await registry.key_value(subjects.KV_ADAPTERS)
    await adapters.put("name.victim", b"entry")
    # what the tenant sent is no JSON, so that it lies verbatim among its dead letters
    await gateway.js.publish(subjects.dead("acme"), encode(DeleteAdapter(name="victim", force=True)))
    keys = f"KV_{subjects.KV_KEYS}"
    stored = (await operator.js.stream_info(keys)).state.messages
    for reply in (
        subjects.registry("delete"),
        "$KV.motet_adapters.name.victim",
        "$KV.motet_keys.key_mine",
        "$JS.API.STREAM.PURGE.KV_motet_adapters",
    ):
        await answered_elsewhere(bus_of, publish, reply)
    assert (await adapters.get("name.victim")).value == b"entry"
    assert (await operator.js.stream_info(keys)).state.messages == stored
    assert deleted == []
    await adapters.purge("name.victim")


async def test_streams_of_before_there_were_accounts_are_kept(tmp_path: Path) -> None:
    before = NatsServer(tmp_path / "nats")
    await before.start()
    bus = await Bus.connect(BusConfig(nats_url=before.url), "old")
    await provision(bus)
    await (await bus.key_value(subjects.KV_ADAPTERS)).put("name.old", b"entry")
    await bus.close()
    before.stop()

    credentials.adopt_streams(tmp_path / "nats" / "jetstream")
    after = NatsServer(tmp_path / "nats", config_text=credentials.authorization(tmp_path / "credentials"))
    await after.start()
    bus = await connect_as(after, "registry")
    await provision(bus)
    assert (await (await bus.key_value(subjects.KV_ADAPTERS)).get("name.old")).value == b"entry"
    await bus.close()
    after.stop()
    credentials.adopt_streams(tmp_path / "nats" / "jetstream")  # nothing is left to do


async def test_a_service_cannot_make_jetstream_publish_where_it_may_not(bus_of: Callable[[str], Awaitable[Bus]]) -> None:
    """A worker stores an order where it may, and lets a consumer deliver it where it may not publish."""
    victim, worker = await bus_of("worker"), await bus_of("worker")
    heard: list[object] = []
    await victim.subscribe(subjects.control("victim"), Control, heard.append)
    await worker.nc.publish("$KV.motet_leases.worker.evil", encode(Drain()))
    await worker.flush()
    before = reading(BUS_REFUSED.labels("stored"))
    order = ConsumerConfig(
        deliver_subject=subjects.control("victim"),
        deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
        ack_policy=AckPolicy.NONE,
        filter_subject="$KV.motet_leases.worker.evil",
        mem_storage=True,
        num_replicas=1,
        inactive_threshold=5.0,
    )
    await worker.js.add_consumer(f"KV_{subjects.KV_LEASES}", order)
    await eventually(lambda: reading(BUS_REFUSED.labels("stored")) == before + 1)
    assert heard == []
    await (await bus_of("registry")).publish(subjects.control("victim"), Drain())
    await eventually(lambda: len(heard) == 1)


async def test_an_order_that_asks_for_no_answer_is_not_carried_out(bus_of: Callable[[str], Awaitable[Bus]]) -> None:
    registry, gateway = await bus_of("registry"), await bus_of("gateway")
    heard: list[Ping] = []

    async def pong(ping: Ping) -> Ping:
        heard.append(ping)
        return ping

    await registry.serve("list", subjects.registry("list"), Ping, pong, queue="registry")
    await gateway.publish(subjects.registry("list"), Ping("no reply subject"))
    await gateway.request(subjects.registry("list"), Ping("with one"), Ping, timeout_s=2)
    assert [ping.text for ping in heard] == ["with one"]
