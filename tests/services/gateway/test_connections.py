"""Promise: a connection that sends no request, or a request without end, costs little memory and a bounded time."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import aiohttp
import pytest

from motet.services.gateway.edge import connections
from motet.services.gateway.edge import http as http_parts
from motet.shared.clock import now_s
from motet.shared.wire.request import unpack_tokens
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import running_gateway
from tests.support import eventually

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def connect_to(port: int, first: bytes = b"") -> Streams:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first)
    return reader, writer


async def status_and_end(streams: Streams) -> int:
    """The status of the one answer that comes before the connection ends."""
    reader, writer = streams
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert b"connection: close" in answer
    return int(answer.split()[1])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def looks(count: int) -> None:
    """Wait until the connections have been checked this many times."""
    until_s = now_s() + count * connections.LOOK_S * 1.2
    await eventually(lambda: now_s() > until_s)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limits with shorter times."""
    for name, value in (("HEAD_S", 0.3), ("BODY_S", 0.3), ("LOOK_S", 0.05)):
        monkeypatch.setattr(connections, name, value)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/comp",
        HEAD + b"x-half: ",
        HEAD + b"content-length: 100\r\n\r\n{",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{",
    ],
    ids=["silent", "half a line", "half a head", "half a body", "half a chunk"],
)
async def test_a_connection_that_does_not_finish_a_request_gets_an_error_and_is_closed(
    hurried: None, mesh: Mesh, sent: bytes
) -> None:
    assert await status_and_end(await connect_to(mesh.gateway.port, sent)) == 408
    assert not mesh.first.assigned


async def test_a_connection_that_sends_a_byte_now_and_then_is_closed_too(hurried: None, mesh: Mesh) -> None:
    for first in (HEAD, HEAD + b"content-length: 100000\r\n\r\n"):
        streams = await connect_to(mesh.gateway.port, first)
        answer = asyncio.ensure_future(status_and_end(streams))

        async def drip(writer: asyncio.StreamWriter = streams[1], answer: asyncio.Future[int] = answer) -> bool:
            writer.write(b"x")
            return answer.done()

        await eventually(drip, every_s=0.05)
        assert await answer == 408


async def test_an_answer_may_take_longer_than_a_request(hurried: None, mesh: Mesh, http: aiohttp.ClientSession) -> None:
    asking = asyncio.ensure_future(http.post(f"{mesh.url}/v1/completions", json={"prompt": "x"}))
    request = await eventually(lambda: mesh.first.assigned and mesh.first.assigned[0])
    await looks(10)  # longer than every limit on requests
    await mesh.first.emit(request, 0, [40], "length")
    async with await asking as answer:
        assert answer.status == 200
    await looks(10)
    async with http.get(f"{mesh.url}/health") as answer:  # on the connection that was kept alive meanwhile
        assert answer.status == 200


@pytest.mark.parametrize("header", [b"x-long: " + b"y" * (1 << 20), b"\r\n".join(b"x-%d: y" % i for i in range(200))])
async def test_headers_beyond_their_limits_are_a_431(mesh: Mesh, header: bytes) -> None:
    assert await status_and_end(await connect_to(mesh.gateway.port, HEAD + header + b"\r\n\r\n")) == 431


async def test_a_header_without_end_is_refused_on_the_way(mesh: Mesh) -> None:
    _, writer = await connect_to(mesh.gateway.port, HEAD + b"x-long: ")
    sent = 0
    try:
        while sent < 300 << 20:
            writer.write(b"y" * (1 << 18))
            await writer.drain()
            sent += 1 << 18
    except ConnectionError:
        pass
    writer.close()
    assert sent < 50 << 20


async def test_a_long_path_is_refused_and_bytes_that_are_no_request_are_a_400(mesh: Mesh) -> None:
    long = b"GET /" + b"x" * (1 << 18) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    assert await status_and_end(await connect_to(mesh.gateway.port, long)) == 431
    assert await status_and_end(await connect_to(mesh.gateway.port, b"\x16\x03\x01\x02\x00\x01\r\n\r\n")) == 400


async def test_a_body_that_is_not_awaited_does_not_continue_for_ever(mesh: Mesh) -> None:
    head = b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    reader, writer = await connect_to(mesh.gateway.port, head)
    assert b" 404 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    sent = 0
    try:
        while sent < 300 << 20:
            writer.write(b"40000\r\n" + b"y" * (1 << 18) + b"\r\n")
            await writer.drain()
            sent += 1 << 18
    except ConnectionError:
        pass
    writer.close()
    assert sent < 100 << 20


async def test_requests_of_one_connection_follow_each_other(mesh: Mesh) -> None:
    reader, writer = await connect_to(mesh.gateway.port)
    one = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    bad = b'{"prompt": 7}'
    other = HEAD + b"content-length: %d\r\n\r\n" % len(bad) + bad
    writer.write(one + other + one + one)
    statuses = []
    for _ in range(4):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        statuses.append(int(head.split()[1]))
        length = next(int(line.split()[1]) for line in head.lower().splitlines() if line.startswith(b"content-length"))
        await reader.readexactly(length)
    writer.close()
    assert statuses == [200, 400, 200, 200]


@pytest.mark.parametrize("pieces", [1, 7, 64])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_request_that_offers_another_protocol_is_answered_over_this_one_with_its_body(
    mesh: Mesh, pieces: int, chunked: bool
) -> None:
    mesh.say("hello world")
    body = b'{"prompt": "many adapters", "max_tokens": 4}'
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    offers = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n",  # Java, curl --http2
        b"connection: keep-alive, upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n",
    )
    sent = b"".join(
        HEAD + offer + length + b"\r\n\r\n" + (b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body)
        for offer in offers
    )
    reader, writer = await connect_to(mesh.gateway.port)
    for at in range(0, len(sent), len(sent) // pieces):
        writer.write(sent[at : at + len(sent) // pieces])
        await asyncio.sleep(0)
    for _ in offers:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        answer = await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        assert b" 200 " in head and b"hello" in answer, answer
    prompts = [unpack_tokens(request.prompt) for worker in mesh.workers for request in worker.assigned]
    assert prompts == 2 * [mesh.gateway.prompts.tokenizer.encode("many adapters").ids]
    writer.write(b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert b" 200 " not in await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
    writer.close()


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_parts, "BODIES_BYTES_MAX", 700_000)


async def test_bodies_under_way_have_one_budget_and_give_it_back(small_budget: None, mesh: Mesh) -> None:
    mesh.say("hello")

    async def begin(body: bytes, size: int = 300_000) -> Streams:
        streams = await connect_to(mesh.gateway.port, HEAD + b"content-length: %d\r\n\r\n" % size + body)
        await asyncio.wait_for(streams[1].drain(), 10)
        return streams

    half = b'{"prompt": "x", "max_tokens": 1, "user": "' + b"x" * 250_000
    held, other = await begin(half), await begin(half)
    reader, writer = await begin(half)
    assert b" 429 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    for stream in (writer, other[1]):
        stream.close()
        await stream.wait_closed()
    held[1].write((b"x" * 300_000)[: 300_000 - len(half) - 2] + b'"}')
    assert b" 200 " in await asyncio.wait_for(held[0].readuntil(b"\r\n\r\n"), 10)
    for _ in range(3):  # of those that are answered and those whose clients are gone nothing is left
        gone = await begin(half)
        gone[1].close()
        await gone[1].wait_closed()

        async def has_room() -> bool:
            reader, writer = await begin(half + b" " * (300_000 - len(half) - 2) + b'"}')
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            writer.close()
            return b" 200 " in head

        await eventually(has_room)
    held[1].close()


async def test_beyond_their_limit_connections_are_refused_and_the_others_stay(
    mesh: Mesh, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.GuardedProtocol, "max_connections", 0)  # put back afterwards
    async with running_gateway(nats_url, tmp_path, instance_id="g2", max_connections=3) as gateway:
        kept = [await connect_to(gateway.port) for _ in range(3)]
        for _ in range(3):
            assert await status_and_end(await connect_to(gateway.port)) == 429
        reader, writer = kept[0]
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        for _, writer in kept:
            writer.close()

        async def room() -> bool:
            get = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            reader, writer = await connect_to(gateway.port, get)
            answer = await reader.read()
            writer.close()
            return b" 200 " in answer

        await eventually(room)


async def test_thousands_of_idle_connections_fit_a_memory_bound_and_disturb_no_request(
    mesh: Mesh, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 600.0)  # else a busy machine loses the first ones before the last one is there
    mesh.say("hello world")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, (hard - 600) // 2)  # both ends are in this process
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before = resident_bytes()
    loop = asyncio.get_running_loop()
    held: list[asyncio.Transport] = []
    try:
        for _ in range(count):
            transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", mesh.gateway.port)
            transport.write(b"GET /health HTTP/1.1\r\nhost: ")
            held.append(transport)
        server = mesh.gateway._server  # private: nothing else counts connections
        assert server is not None
        await eventually(lambda: len(server.server_state.connections) >= count, within_s=90)
        async with http.post(f"{mesh.url}/v1/completions", json={"prompt": "x"}) as answer:
            assert answer.status == 200
        assert resident_bytes() - before < 60_000 * count, "bytes per connection, both ends"
    finally:
        for transport in held:
            transport.abort()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
