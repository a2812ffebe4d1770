"""Promise: TLS clients that never finish their handshake are counted, cost a bounded time, and keep nobody out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from motet.cli import certificates
from motet.services.gateway.edge import tls
from motet.services.gateway.edge.connections import FILES_MOST, SPARE_FILES, GuardedProtocol, files_for
from motet.services.gateway.service import GatewayService
from motet.shared.telemetry import REGISTRY
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import running_gateway
from tests.support import eventually

LIMIT = 5
HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tls")
    certificates.write(out)
    return out


@pytest.fixture
async def gateway(
    mesh: Mesh, nats_url: str, tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[GatewayService]:
    monkeypatch.setattr(GuardedProtocol, "max_connections", 0)  # put back afterwards
    cert = {"tls_cert_file": str(made / "gateway.crt"), "tls_key_file": str(made / "gateway.key")}
    async with running_gateway(nats_url, tmp_path, instance_id="g2", max_connections=LIMIT, **cert) as gateway:
        await eventually(lambda: not gateway.not_ready())
        yield gateway


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def silent(gateway: GatewayService, first: bytes = b"") -> Streams:
    """A connection that begins no handshake, or does not go on with it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(first)
    return reader, writer


def whole_hello() -> bytes:
    """The first message of a TLS client."""
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def leave(clients: list[Streams]) -> None:
    for _, writer in clients:
        writer.close()


async def ask(gateway: GatewayService, made: Path, **body: Any) -> int:
    """The status of a request on a connection of its own."""
    trust = ssl.create_default_context(cafile=str(made / "ca.crt"))
    url = f"https://localhost:{gateway.port}/v1/completions"
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session,
        session.post(url, json={"prompt": "x"} | body) as answer,
    ):
        await answer.read()
        return answer.status


def shaking() -> float:
    return REGISTRY.get_sample_value("motet_gateway_tls_handshakes") or 0.0


async def ended(streams: Streams) -> bool:
    reader, writer = streams
    try:
        return await asyncio.wait_for(reader.read(1), 10) == b""
    except ConnectionError:
        return True
    finally:
        writer.close()


async def test_requests_are_answered_over_tls(mesh: Mesh, gateway: GatewayService, made: Path) -> None:
    mesh.say("hello world")
    for stream in (False, True):
        assert await ask(gateway, made, stream=stream) == 200
    assert shaking() == 0


@pytest.mark.parametrize("first", [b"", HALF_A_HELLO], ids=["silent", "half a hello"])
async def test_a_handshake_that_does_not_end_is_counted_and_closed(
    gateway: GatewayService, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_S", 0.5)
    clients = [await silent(gateway, first) for _ in range(3)]
    await eventually(lambda: shaking() == 3)
    assert all([await ended(client) for client in clients])
    await eventually(lambda: shaking() == 0)


@pytest.mark.parametrize("first", [b"", HALF_A_HELLO], ids=["silent", "half a hello"])
async def test_at_the_limit_of_connections_silent_clients_make_room_for_those_of_good_will_at_once(
    mesh: Mesh, gateway: GatewayService, made: Path, first: bytes
) -> None:
    mesh.say("hello world")
    clients = [await silent(gateway, first) for _ in range(LIMIT)]
    await eventually(lambda: shaking() == LIMIT)
    assert await ask(gateway, made) == 200
    assert await ended(clients[0]) and shaking() == LIMIT - 1
    leave(clients)


async def test_while_all_handshakes_go_on_and_are_young_no_more_are_taken(
    mesh: Mesh, gateway: GatewayService, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh.say("hello world")
    clients = [await silent(gateway, whole_hello()) for _ in range(LIMIT)]
    for reader, _ in clients:
        assert await reader.read(1)  # the gateway has answered the hello
    assert await ended(await silent(gateway))
    assert shaking() == LIMIT
    monkeypatch.setattr(tls, "YOUNG_S", 0.0)
    assert await ask(gateway, made) == 200
    leave(clients)


async def test_without_a_file_descriptor_the_listener_waits_and_goes_on(
    mesh: Mesh, gateway: GatewayService, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh.say("hello world")
    accept, failures = socket.socket.accept, 0

    def short(listener: socket.socket) -> Any:
        """As in a process that has no file left, five times."""
        nonlocal failures
        if listener.getsockname()[1] == gateway.port:
            failures += 1
            if failures <= 5:
                raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", short)
    assert await ask(gateway, made) == 200
    assert failures > 5


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert files_for(16) == 16
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, FILES_MOST)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_some_files_are_kept_for_nats_and_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 512))
    assert files_for(16_384) == 512 - SPARE_FILES
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert files_for(16_384) == 16_384
