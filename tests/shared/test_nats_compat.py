"""A test for each detail of nats-py and its server that `shared.nats_compat` depends on. Each fails when the detail changes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from nats import errors as nats_errors
from nats.aio.client import Client as LibraryClient
from nats.aio.msg import Msg
from nats.js import errors as js_errors
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig
from nats.micro.service import Service, ServiceConfig

from motet.cli.nats_server import NatsServer
from motet.shared import nats_compat
from motet.shared.clock import now_s
from tests.chaos.mesh import ROUTE_PINGS, free_ports
from tests.shared.relay import recorded
from tests.support import eventually


async def _silent(_: Exception) -> None:
    """Errors are part of these tests."""


@contextlib.asynccontextmanager
async def connected(client: LibraryClient, *urls: str, **options: object) -> AsyncIterator[LibraryClient]:
    try:
        await client.connect(list(urls), error_cb=_silent, reconnect_time_wait=0.05, max_reconnect_attempts=-1, **options)
        yield client
    finally:
        if client._transport is not None and not client.is_connected:  # private: a failed connect leaves its socket open
            client._transport.close()  # private: it leaves it open
        await client.close()


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# ---- the connection


async def test_only_our_client_refuses_to_send_a_password_over_a_connection_without_tls(nats_url: str) -> None:
    for client in (LibraryClient(), nats_compat.NatsClient()):
        async with recorded(nats_url) as (url, sent):
            options = {"user": "u", "password": "secret", "tls": ssl.create_default_context(), "allow_reconnect": False}
            with contextlib.suppress(nats_errors.Error, OSError, TimeoutError):
                async with asyncio.timeout(3), connected(client, url, **options):
                    pass
            assert (b"CONNECT" in sent) == (type(client) is LibraryClient)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[list[NatsServer]]:
    """Two servers that are not connected to each other."""
    servers = [NatsServer(tmp_path / name) for name in ("one", "two")]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        server.stop()


async def test_a_frozen_server_is_left_for_another_one_without_waiting_for_its_greeting(pair: list[NatsServer]) -> None:
    """There are eight clients: if they chose at random, half of them would try the frozen server first, and wait two seconds
    for its greeting.
    """
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(8):
            client = nats_compat.NatsClient()
            options = {"ping_interval": 0.1, "max_outstanding_pings": 2, "dont_randomize": True}
            handler = client.next_server
            urls = (pair[0].url, pair[1].url)
            await stack.enter_async_context(connected(client, *urls, reconnect_to_server_handler=handler, **options))
            clients.append(client)
        assert {client.connected_url.netloc for client in clients} == {pair[0].url.removeprefix("nats://")}
        began = now_s()
        with frozen(pair[0].pid):
            there = pair[1].url.removeprefix("nats://")
            await eventually(lambda: all(c.connected_url and c.connected_url.netloc == there for c in clients), within_s=5)
            assert now_s() - began < 1.5
            assert nats_compat.RETRY_S < 2.0 == clients[0].options["connect_timeout"]


async def test_one_server_is_asked_again_at_intervals(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client, tried = nats_compat.NatsClient(), []
    async with connected(client, nats_server.url, reconnect_to_server_handler=client.next_server):
        connect = client._connect_to_server  # private: the library counts no attempts

        async def counted(server: object) -> None:
            tried.append(now_s())
            await connect(server)

        monkeypatch.setattr(client, "_connect_to_server", counted)  # private: the library counts no attempts
        nats_server.kill()
        await eventually(lambda: len(tried) == 4)
        assert min(b - a for a, b in itertools.pairwise(tried)) > nats_compat.RETRY_S / 2
        await nats_server.start()
        await eventually(lambda: client.is_connected)


async def _stuck() -> tuple[asyncio.Server, list[asyncio.StreamWriter]]:
    """A server that greets, answers one PING, and never reads again."""
    taken: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        writer.write(b'INFO {"server_id":"x","version":"2.15.0","headers":true,"max_payload":8388608}\r\n')
        while not (await reader.readline()).startswith(b"PING"):
            pass
        writer.write(b"PONG\r\n")
        writer.transport.pause_reading()

    return await asyncio.start_server(serve, "127.0.0.1", 0, limit=1024), taken


@pytest.mark.parametrize("client", [LibraryClient(), nats_compat.NatsClient()], ids=["library", "ours"])
async def test_a_connection_with_unsent_data_is_lost_only_when_it_is_aborted(client: LibraryClient, nats_url: str) -> None:
    stuck, taken = await _stuck()
    options = {"ping_interval": 0.2, "max_outstanding_pings": 2, "dont_randomize": True, "pending_size": 1 << 30}
    url = f"nats://127.0.0.1:{stuck.sockets[0].getsockname()[1]}"
    if isinstance(client, nats_compat.NatsClient):
        options["reconnect_to_server_handler"] = client.next_server
    await client.connect([url, nats_url], error_cb=_silent, max_reconnect_attempts=-1, **options)
    for _ in range(16):  # more than the sockets' buffers take
        await client.publish("t.any", b"x" * (4 << 20))
    back = asyncio.ensure_future(eventually(lambda: client.is_connected and client.stats["reconnects"] == 1, within_s=3))
    if isinstance(client, nats_compat.NatsClient):
        await back
        await client.close()
    else:
        with pytest.raises((AssertionError, TimeoutError)):
            await back
    for writer in taken:
        writer.transport.abort()
    stuck.close()
    with contextlib.suppress(OSError):
        await client.close()


@pytest.mark.parametrize("client", [LibraryClient(), nats_compat.NatsClient()], ids=["library", "ours"])
async def test_only_our_client_closes_its_socket_when_the_last_bytes_cannot_be_written(
    client: LibraryClient, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise ConnectionResetError

    async def later(**_: object) -> None:
        """The message waits to be sent."""

    await client.connect([nats_url], error_cb=_silent)
    writer = client._transport._bare_io_writer  # private: the library shows no socket
    before = asyncio.all_tasks()
    monkeypatch.setattr(client, "_flush_pending", later)  # private: the library sends at once otherwise
    await client.publish("t.any", b"x")
    monkeypatch.setattr(client._transport, "drain", broken)  # private: a socket that breaks now
    await client._process_err("'Maximum Payload Violation'")  # private: as the server would say now
    (closing,) = asyncio.all_tasks() - before
    await asyncio.wait([closing])
    if type(client) is LibraryClient:
        assert isinstance(closing.exception(), ConnectionResetError) and not writer.transport.is_closing()
        writer.close()
    else:
        assert closing.exception() is None and writer.transport.is_closing()


@pytest.mark.parametrize("client", [LibraryClient(), nats_compat.NatsClient()], ids=["library", "ours"])
async def test_only_our_client_closes_a_connection_whose_login_failed_before_it_opens_another(
    client: LibraryClient, nats_url: str
) -> None:
    async with connected(client, nats_url):
        first = client._transport._bare_io_writer  # private: the library shows no socket
        await client._connect_to_server(client._current_server)  # private: as after a refused login
        assert first.transport.is_closing() == (type(client) is not LibraryClient)
        first.close()


async def test_a_reconnection_that_fails_in_an_unforeseen_way_is_noticed(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: object) -> None:
        raise ValueError("an unexpected error")

    client = nats_compat.NatsClient()
    async with connected(client, nats_server.url, reconnect_to_server_handler=client.next_server):
        assert nats_compat.gave_up(client) is None
        monkeypatch.setattr(client, "_connect_to_server", broken)  # private: the library fails so at no time of our choice
        nats_server.kill()
        await eventually(lambda: isinstance(nats_compat.gave_up(client), ValueError))
        assert client.is_reconnecting, "the library says so although it has stopped"


# ---- what is sent


@pytest.mark.parametrize("ours", [False, True], ids=["library", "ours"])
async def test_only_our_flush_includes_a_subscription_that_is_still_buffered(nats_url: str, ours: bool) -> None:
    async with recorded(nats_url) as (url, sent), connected(nats_compat.NatsClient(), url) as client:
        await client.subscribe("t.new", cb=_ignore)
        await (nats_compat.flush(client) if ours else client.flush())
        assert (0 <= sent.rfind(b"SUB t.new") < sent.rfind(b"PING")) == ours


async def _ignore(_: Msg) -> None:
    """A handler for messages whose arrival does not matter."""


async def test_the_library_buffers_without_limit_for_a_server_that_is_connected(nats_server: NatsServer) -> None:
    limit = 1 << 20
    async with connected(nats_compat.NatsClient(), nats_server.url, pending_size=1 << 30, ping_interval=60) as client:
        with frozen(nats_server.pid):
            for _ in range(64):  # more than the sockets' buffers take
                await client.publish("t.any", b"x" * limit)
            await eventually(lambda: nats_compat.outbox_full(client, limit))
            assert client.is_connected
        await eventually(lambda: not nats_compat.outbox_full(client, limit))


async def test_the_library_lets_headers_make_a_message_too_large(nats_url: str) -> None:
    async with connected(nats_compat.NatsClient(), nats_url, allow_reconnect=False) as client:
        data, headers = b"x" * client.max_payload, {"and": "a header"}
        assert nats_compat.stored_bytes(data, headers) > client.max_payload
        await client.publish("t.any", data, headers=headers)
        await eventually(lambda: "maximum payload" in str(client.last_error).lower())


async def test_the_size_of_a_message_with_headers_is_the_servers(nats_url: str) -> None:
    async with connected(nats_compat.NatsClient(), nats_url, allow_reconnect=False) as client:
        headers = {"Nats-Msg-Id": "one", "Motet-Reason": "z\u00fcrich"}
        fits = client.max_payload - nats_compat.stored_bytes(b"", headers)
        await client.publish("t.any", b"x" * fits, headers=headers)
        await nats_compat.flush(client)
        await client.publish("t.any", b"x" * (fits + 1), headers=headers)
        await eventually(lambda: client.is_closed)


# ---- queue groups and micro services


async def _served(client: LibraryClient, handled: list[str], gate: asyncio.Event) -> Service:
    service = Service(client, ServiceConfig(name="late", version="1.0.0"))
    await service.start()

    async def answer(request) -> None:
        assert nats_compat.message_of(request).reply and nats_compat.message_of(request).data == request.data
        handled.append(request.data.decode())
        await gate.wait()
        await request.respond(b"done")

    await service.add_endpoint(name="late", subject="t.late", queue_group="q", handler=answer)
    await nats_compat.flush(client)
    return service


@pytest.mark.parametrize("ours", [False, True], ids=["library", "ours"])
async def test_only_our_way_of_leaving_a_queue_group_handles_what_has_arrived(nats_url: str, ours: bool) -> None:
    handled: list[str] = []
    gate = asyncio.Event()
    async with connected(nats_compat.NatsClient(), nats_url) as server, connected(nats_compat.NatsClient(), nats_url) as asker:
        service = await _served(server, handled, gate)
        for number in range(3):
            await asker.publish("t.late", str(number).encode(), reply="t.answers")
        await eventually(lambda: handled == ["0"])  # two more wait for the first

        async def leave() -> None:
            if ours:
                await nats_compat.leave(server, nats_compat.take_endpoints(service))
            await service.stop()

        leaving = asyncio.ensure_future(leave())
        await asyncio.sleep(2 * nats_compat.LINGER_S)  # time: longer than leaving lingers
        gate.set()
        await asyncio.wait_for(leaving, 5)
        assert handled == (["0", "1", "2"] if ours else ["0"])
        with pytest.raises(nats_errors.NoRespondersError):
            await asker.request("t.late", b"too late", timeout=2)


async def test_the_server_still_sends_what_it_chose_a_member_for(nats_url: str) -> None:
    """Between UNSUB and the removal of the subscription, the client still delivers messages to it."""
    async with connected(nats_compat.NatsClient(), nats_url) as client:
        heard: list[bytes] = []

        async def keep(msg: Msg) -> None:
            heard.append(msg.data)

        subscription = await client.subscribe("t.q", queue="q", cb=keep)
        await nats_compat.flush(client)
        leaving = asyncio.ensure_future(nats_compat.leave(client, [subscription]))
        await client.publish("t.q", b"just before")  # written before the UNSUB: the task above has not run yet
        await leaving
        await eventually(lambda: heard == [b"just before"])
        assert subscription._id not in client._subs  # private: the library lists no subscriptions


# ---- streams


async def test_the_library_finds_one_stream_of_a_subject_and_the_server_lists_all(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(nats_compat.NatsClient(), nats_url) as client:
        js = client.jetstream()
        for name in ("a", "b", "c"):
            await js.add_stream(StreamConfig(name=name, subjects=[f"t.requests.{name}"]))
        assert isinstance(await js.find_stream_name_by_subject("t.requests.*"), str)
        assert sorted(await nats_compat.stream_names(client, "t.requests.*")) == ["a", "b", "c"]
        assert await nats_compat.stream_names(client, "t.nothing") == []


async def test_more_streams_than_one_answer_lists_are_all_found(nats_url: str) -> None:
    async with connected(nats_compat.NatsClient(), nats_url) as client:
        js = client.jetstream(timeout=30)
        count = nats_compat.NAMES_PAGE + 2
        made = (js.add_stream(StreamConfig(name=f"s{i}", subjects=[f"t.many.{i}"], storage="memory")) for i in range(count))
        await asyncio.gather(*made)
        assert len(set(await nats_compat.stream_names(client, "t.many.*"))) == count


async def test_flow_control_and_heartbeats_are_told_from_messages_and_losses_are_seen(nats_url: str) -> None:
    async with connected(nats_compat.NatsClient(), nats_url) as client:
        js = client.jetstream()
        await js.add_stream(StreamConfig(name="objects", subjects=["t.o"]))
        for _ in range(24):
            await js.publish("t.o", b"x" * (1 << 20), headers={"Status": "100"})  # a publisher may choose this header
        inbox = client.new_inbox()
        inlet = await client.subscribe(inbox)
        await js.add_consumer(
            "objects",
            ConsumerConfig(
                deliver_subject=inbox, ack_policy=AckPolicy.NONE, flow_control=True, idle_heartbeat=0.2, mem_storage=True
            ),
        )
        messages = control = 0
        began = now_s()
        while messages < 24:
            msg = await inlet.next_msg(timeout=5)
            if await nats_compat.answered_control(client, msg, messages):
                control += 1
            else:
                messages += 1
        assert control >= 2, "the server asks for an answer before it sends on"
        assert now_s() - began < 2.0, "answered at once, not at the next heartbeat"
        with pytest.raises(js_errors.Error, match="1 messages lost"):
            while True:
                await nats_compat.answered_control(client, await inlet.next_msg(timeout=5), 23)


def test_one_name_covers_every_error_of_the_library() -> None:
    for error in (js_errors.APIError, js_errors.NoStreamResponseError, js_errors.FetchTimeoutError, nats_errors.TimeoutError):
        assert issubclass(error, nats_compat.FAILURES)
    assert issubclass(asyncio.TimeoutError, nats_compat.FAILURES) and issubclass(socket.gaierror, nats_compat.FAILURES)


# ---- a cluster


async def _answer(msg: Msg) -> None:
    await msg.respond(b"here")


async def test_nodes_with_pinged_routes_send_no_requests_to_a_frozen_node(tmp_path: Path) -> None:
    """The requester is on the first node.

    One member of the queue group is on the second, another one moves there from the frozen third.
    """
    ports = free_ports(3)
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for number, port in enumerate(ports):
            cluster = f'name: c, listen: "127.0.0.1:{port}", routes: [{routes}], no_advertise: true, {ROUTE_PINGS}'
            nodes.append(NatsServer(tmp_path / str(number), config_text=f"server_name: n{number}\ncluster {{ {cluster} }}\n"))
            stack.callback(nodes[-1].stop)
        await asyncio.gather(*(node.start() for node in nodes))
        clients = []
        for urls in ((nodes[0].url,), (nodes[1].url,), (nodes[2].url, nodes[1].url)):
            client = nats_compat.NatsClient()
            options = {"ping_interval": 0.2, "dont_randomize": True, "reconnect_to_server_handler": client.next_server}
            clients.append(await stack.enter_async_context(connected(client, *urls, **options)))
        asker, *members = clients
        for member in members:
            await member.subscribe("t.q", queue="q", cb=_answer)
            await nats_compat.flush(member)

        async def answered() -> bool:
            asked = (asker.request("t.q", b"", timeout=0.5) for _ in range(32))
            return all(isinstance(reply, Msg) for reply in await asyncio.gather(*asked, return_exceptions=True))

        await eventually(answered)
        with frozen(nodes[2].pid):
            began = now_s()
            await eventually(lambda: members[1].stats["reconnects"] == 1)
            await eventually(answered)
            assert now_s() - began < 5.0
