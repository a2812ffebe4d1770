"""Clients that connect and send nothing, or a byte at a time: they cost little memory and a bounded time.

    idle            connected, silent                 closed after `HEAD_S`
    half a head     a header line, then a byte a second    the same: the clock runs from the first byte
    half a body     a head, then a byte a second      closed after `BODY_S`

Meanwhile the mesh answers other clients as usual.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from motet.services.gateway.edge.connections import BODY_S, HEAD_S
from tests.fuzz.mesh import FuzzMesh
from tests.support import eventually

BYTES_EACH = 32 << 10  # of the gateway's memory per connection
SPARE_BYTES = 64 << 20  # for what the requests in between leave in caches
CONNECTING = 200  # at once
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LATE_S = 15.0  # a busy machine


@dataclass
class Seen:
    """The results of the attack."""

    connections: int
    grown_bytes: int
    open_afterwards: int
    trouble: str


class _Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.closed = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def eof_received(self) -> bool:
        return False


async def fuzz(mesh: FuzzMesh, idle: int, slow: int) -> Seen:
    """`idle` silent connections and `slow` of each slow kind, on one gateway."""
    before = mesh.resident_bytes("gateway-1")
    turn = asyncio.Semaphore(CONNECTING)
    loop = asyncio.get_running_loop()
    opened: list[tuple[asyncio.Transport, _Client, bytes]] = []

    async def connect(first: bytes, drop: bytes) -> None:
        async with turn:
            transport, client = await loop.create_connection(_Client, *mesh.host_and_port)
        transport.write(first)
        opened.append((transport, client, drop))

    body = HEAD + b"content-length: 100000\r\n\r\n{"
    wanted = [(b"", b"")] * idle + [(HEAD + b"x-slow: ", b"a")] * slow + [(body, b" ")] * slow
    await asyncio.gather(*(connect(first, drop) for first, drop in wanted))
    dripping = asyncio.create_task(_drip(opened))
    try:
        grown, trouble = mesh.resident_bytes("gateway-1") - before, await mesh.trouble(within_s=10)
        grown = max(grown, mesh.resident_bytes("gateway-1") - before)
        if grown > SPARE_BYTES + BYTES_EACH * len(opened):
            trouble += f"; {len(opened)} connections cost {grown >> 20} MiB"
        with contextlib.suppress(AssertionError):
            limit_s = max(HEAD_S, BODY_S) + LATE_S
            await eventually(lambda: all(client.closed for _, client, _ in opened), within_s=limit_s, every_s=0.2)
        left = sum(not client.closed for _, client, _ in opened)
        if left:
            trouble += f"; {left} connections are still open"
        return Seen(len(opened), grown, left, trouble or await mesh.trouble())
    finally:
        dripping.cancel()
        for transport, _, _ in opened:
            transport.abort()


async def _drip(opened: list[tuple[asyncio.Transport, _Client, bytes]]) -> None:
    """Send one more byte per second on each slow connection."""
    while True:
        await asyncio.sleep(1.0)  # time: the slow client's rate
        for transport, client, drop in opened:
            if drop and not client.closed:
                transport.write(drop)
