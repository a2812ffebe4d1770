"""Attacks on the entrance of gateways that use API keys and TLS. They have a stack of their own, with two gateways.

    keys    one administrator rotates a key while another revokes it at another gateway; a key is rotated twice
    tls     clients that begin no handshake, or do not go on with it, more of them than connections are allowed

No revoked key works, and clients of good will are answered all the time.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from motet.cli import certificates
from motet.services.gateway.edge.tls import HANDSHAKE_S
from motet.shared.clock import now_s
from tests.e2e.live import LiveStack
from tests.support import eventually

ADMIN = "mtt_admin-of-the-fuzzer"
LIMIT = 1_000  # connections of a gateway
HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
BYTES_EACH = 32 << 10  # of the gateway's memory per connection, as without TLS
GOOD_S = 3.0  # the longest time of a good request, on a busy machine
LATE_S = 10.0


@dataclass
class Seen:
    """What the attacks found."""

    cases: int
    alive: int = 0
    short_lived: int = 0
    slowest_s: float = 0.0
    grown_bytes: int = 0
    trouble: str = ""


class Doors:
    """The stack under attack."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        certificates.write(directory)
        keys = directory / "keys"
        keys.write_text(f"{ADMIN} default admin\n")
        tls = ("--tls-cert-file", str(directory / "gateway.crt"), "--tls-key-file", str(directory / "gateway.key"))
        flags = ("--gateways", "2", "--api-keys", "required", "--api-keys-file", str(keys), *tls)
        self.live = LiveStack(directory, *flags, env={"MOTET_MAX_CONNECTIONS": str(LIMIT)})
        self._trust = ssl.create_default_context(cafile=str(directory / "ca.crt"))

    async def __aenter__(self) -> Doors:
        self.live.launch()
        self.urls = [url.replace("127.0.0.1", "localhost") for url in self.live.wait_ready().urls]
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._trust, force_close=True))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        self.live.stop()

    async def call(self, method: str, url: str, key: str = ADMIN, **more: Any) -> tuple[int, Any]:
        async with self._http.request(method, url, headers={"authorization": f"Bearer {key}"}, **more) as answer:
            return answer.status, await answer.json()

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.live.pid('gateway-1')}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()


async def fuzz(directory: Path, rounds: int, clients: int) -> Seen:
    """`rounds` races for a key, then `clients` silent TLS clients."""
    async with Doors(directory) as doors:
        seen = Seen(rounds + clients)
        for number in range(rounds):
            await _race(doors, number, seen)
        await _twice(doors, seen)
        await _silent(doors, clients, seen)
    if seen.alive:
        seen.trouble += f"; {seen.alive} revoked keys work"
    if seen.short_lived:
        seen.trouble += f"; {seen.short_lived} successors of a key without end have one"
    if seen.slowest_s > GOOD_S:
        seen.trouble += f"; a good request took {seen.slowest_s:.1f} s"
    if seen.grown_bytes > BYTES_EACH * clients:
        seen.trouble += f"; {clients} silent TLS clients cost {seen.grown_bytes >> 20} MiB"
    return seen


async def _race(doors: Doors, number: int, seen: Seen) -> None:
    one, other = doors.urls

    async def later(delay_s: float, *args: Any) -> tuple[int, Any]:
        await asyncio.sleep(delay_s)  # time: at another moment of the other request
        return await doors.call(*args)

    _, key = await doors.call("POST", f"{one}/v1/keys", json={"tenant": "acme"})
    rotating = doors.call("POST", f"{one}/v1/keys/{key['id']}/rotate", json={"overlap_s": 600})
    revoking = later(0.002 * (number % 8), "DELETE", f"{other}/v1/keys/{key['id']}")
    (_, fresh), (status, _) = await asyncio.gather(rotating, revoking)
    await asyncio.sleep(0.1)  # time: a change reaches every gateway by then
    works = [(await doors.call("GET", f"{url}/v1/models", key["key"]))[0] == 200 for url in doors.urls]
    seen.alive += status == 200 and any(works)
    await doors.call("DELETE", f"{one}/v1/keys/{key['id']}")
    await doors.call("DELETE", f"{one}/v1/keys/{fresh.get('id', 'none')}")


async def _twice(doors: Doors, seen: Seen) -> None:
    one, _ = doors.urls
    _, key = await doors.call("POST", f"{one}/v1/keys", json={"tenant": "acme"})
    for _ in range(3):
        _, fresh = await doors.call("POST", f"{one}/v1/keys/{key['id']}/rotate", json={"overlap_s": 60})
        seen.short_lived += fresh["expires"] is not None


async def _silent(doors: Doors, clients: int, seen: Seen) -> None:
    one, _ = doors.urls
    host, port = "127.0.0.1", int(one.rsplit(":", 1)[1])
    before = doors.resident_bytes()
    held: list[asyncio.Transport] = []
    closed = 0

    class Silent(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            nonlocal closed
            closed += 1

    async def good() -> None:
        began_s = now_s()
        status, _ = await doors.call("GET", f"{one}/v1/models")
        assert status == 200
        seen.slowest_s = max(seen.slowest_s, now_s() - began_s)

    loop = asyncio.get_running_loop()
    try:
        for number in range(clients):
            transport, _ = await loop.create_connection(Silent, host, port)
            if number % 2:
                transport.write(HALF_A_HELLO)
            held.append(transport)
            if number % 100 == 0:
                await good()
        for _ in range(5):
            await good()
        seen.grown_bytes = doors.resident_bytes() - before
        await eventually(lambda: closed >= clients, within_s=HANDSHAKE_S + LATE_S, every_s=0.2)
        await good()
    except (AssertionError, aiohttp.ClientError) as error:
        seen.trouble += f"; silent TLS clients: {error!r}"
    finally:
        for transport in held:
            transport.abort()
