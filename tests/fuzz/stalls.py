"""Bodies of nearly 4 MiB in every shape of `bodies`, several at once and over the bus, while others use the same gateway.

A gateway has one event loop, and while that is busy it answers nobody. A watcher asks for /health all the time: its slowest
answer is `worst_stall_ms`. Streams of another client show the worst gap between two tokens. The bounds hold for an idle
machine; the watcher's slowest answer before the attack is added to them, because on a busy one everybody waits.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from motet.shared import subjects
from motet.shared.clock import now_s
from tests.fuzz import bodies
from tests.fuzz.mesh import FuzzMesh

STALL_MS, GAP_MS = 250.0, 500.0
QUIET_S = 5.0
AT_ONCE = 12
STREAMS = 8
DURABLE_EVERY = 8  # shapes
SLOW_BODIES, GROWN_BYTES_MAX = 300, 400 << 20
RESULT_S = 60.0
ASK_S = 120.0


@dataclass
class Watched:
    """What other clients saw. Times in ms."""

    stall_ms: float = 0.0
    gap_ms: float = 0.0
    broken: list[str] = field(default_factory=list)

    def clear(self) -> None:
        self.stall_ms = self.gap_ms = 0.0


@dataclass
class Seen:
    """The results of all attacks."""

    cases: int
    worst_stall_ms: float
    worst_gap_ms: float
    quiet_ms: float
    grown_bytes: int
    wrong: list[str]


async def fuzz(mesh: FuzzMesh, every: int, seed: int) -> Seen:
    """Send every `every`-th shape, beginning with the one that `seed` says."""
    chosen = list(itertools.islice(bodies.shapes(), seed % every, None, every))
    wrong: list[str] = []
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    async with aiohttp.ClientSession(mesh.url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        async with _watching(session) as watched:
            await asyncio.sleep(QUIET_S)
            quiet_ms, before = max(watched.stall_ms, watched.gap_ms), mesh.resident_bytes("gateway-1")
            worst = Watched()

            def note(name: str) -> None:
                if watched.stall_ms > STALL_MS + quiet_ms:
                    wrong.append(f"{name}: nobody was answered for {watched.stall_ms:.0f} ms")
                if watched.gap_ms > GAP_MS + quiet_ms:
                    wrong.append(f"{name}: another client's tokens came {watched.gap_ms:.0f} ms apart")
                worst.stall_ms, worst.gap_ms = max(worst.stall_ms, watched.stall_ms), max(worst.gap_ms, watched.gap_ms)
                watched.clear()

            for number, (name, path, body) in enumerate(chosen):
                wrong += await _attack(session, name, path, body)
                note(name)
                if number % DURABLE_EVERY == 0 and path in (bodies.CHAT, bodies.TEXT):
                    wrong += await _durable(mesh, name, body)
                    note(f"{name}, durable")
            for at in range(0, len(chosen), max(1, len(chosen) // 20)):
                together = [chosen[(at + i) % len(chosen)] for i in range(AT_ONCE)]
                found = await asyncio.gather(*(_attack(session, *one) for one in together))
                wrong += [one for each in found for one in each]
                note(f"{AT_ONCE} at once from {together[0][0]!r}")
            answer = {"prompt": "x", "n": 64, "max_tokens": 200, "logprobs": 20, "ignore_eos": True}
            wrong += await _attack(session, "a large answer", bodies.TEXT, json.dumps(answer).encode())
            note("a large answer")
            grown = await _slow_bodies(mesh, before)
            note("slow bodies")
        wrong += watched.broken
    if grown > GROWN_BYTES_MAX:
        wrong.append(f"{SLOW_BODIES} slow bodies cost {grown >> 20} MiB")
    if trouble := await mesh.trouble():
        wrong.append(trouble)
    return Seen(len(chosen), worst.stall_ms, worst.gap_ms, quiet_ms, grown, wrong)


async def _attack(session: aiohttp.ClientSession, name: str, path: str, body: bytes) -> list[str]:
    headers = {"content-type": "application/json"}
    try:
        async with session.post(path, data=body, headers=headers) as answer:
            await answer.read()
            return [f"{name}: {answer.status}"] if answer.status >= 500 and answer.status != 503 else []
    except (aiohttp.ClientError, TimeoutError) as error:
        return [f"{name}: {type(error).__name__} {error}"]


async def _durable(mesh: FuzzMesh, name: str, body: bytes) -> list[str]:
    """Send the body over the bus. A result must come, whatever it is."""
    client = await mesh.connect("upstream")
    told = asyncio.get_running_loop().create_future()
    request_id = f"stall-{abs(hash(name)) % 10**12}-{now_s():.0f}"

    async def take(message: object) -> None:
        if not told.done():
            told.set_result(message)

    try:
        await client.subscribe(subjects.results("default", request_id), cb=take)
        await client.flush()
        await client.publish(subjects.requests("default"), body, headers={"Nats-Msg-Id": request_id})
        await asyncio.wait_for(told, RESULT_S)
    except TimeoutError:
        return [f"{name}: no durable result within {RESULT_S:g} s"]
    finally:
        await client.close()
    return []


async def _slow_bodies(mesh: FuzzMesh, before: int) -> int:
    """How many bytes the gateway grows by many bodies that are sent but for their last byte."""
    size = bodies.SIZE
    head = f"POST {bodies.TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    opened: list[asyncio.StreamWriter] = []

    async def begin() -> None:
        _, writer = await asyncio.open_connection(*mesh.host_and_port)
        opened.append(writer)
        writer.write(head.encode() + b" " * (size - 1))
        try:
            async with asyncio.timeout(10):
                await writer.drain()
        except (OSError, TimeoutError):
            pass

    await asyncio.gather(*(begin() for _ in range(SLOW_BODIES)))
    grown = mesh.resident_bytes("gateway-1") - before
    for writer in opened:
        writer.transport.abort()
    return grown


@asynccontextmanager
async def _watching(session: aiohttp.ClientSession) -> AsyncIterator[Watched]:
    watched = Watched()
    tasks = [asyncio.create_task(_ask_for_health(session, watched))]
    tasks += [asyncio.create_task(_stream(session, watched, i)) for i in range(STREAMS)]
    try:
        yield watched
    finally:
        for task in tasks:
            task.cancel()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(error, Exception):
                watched.broken.append(f"a client that only watched: {type(error).__name__} {error}")


async def _ask_for_health(session: aiohttp.ClientSession, watched: Watched) -> None:
    while True:
        began_s = now_s()
        async with session.get("/health") as answer:
            await answer.read()
        watched.stall_ms = max(watched.stall_ms, 1000 * (now_s() - began_s))
        await asyncio.sleep(0.01)


async def _stream(session: aiohttp.ClientSession, watched: Watched, number: int) -> None:
    body = {"model": "reverse", "prompt": f"abc {number}\n", "max_tokens": 400, "ignore_eos": True, "stream": True}
    while True:
        last_s = 0.0
        async with session.post(bodies.TEXT, json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    now = now_s()
                    watched.gap_ms = max(watched.gap_ms, 1000 * (now - last_s)) if last_s else watched.gap_ms
                    last_s = now
                    if b'"error"' in line:
                        watched.broken.append(f"a stream of another client ended: {line[:200].decode()}")
        await asyncio.sleep(0.05)
