"""Bodies of nearly 4 MiB in every shape of `bodies`, several at once and over the bus, while others use the same gateway.

A gateway has one event loop, and while that is busy it answers nobody. A watcher asks for /health all the time: its slowest
answer is `worst_stall_ms`. Streams of another client show the worst gap between two tokens. The bounds hold for an idle
machine; the watcher's slowest answer before the attack is added to them, because on a busy one everybody waits.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from motet.shared import subjects
from motet.shared.clock import now_s
from tests.fuzz import bodies
from tests.fuzz.mesh import DEMO, FuzzMesh
from tests.fuzz.watcher import Watched
from tests.support_templates import HOSTILE

STALL_MS, GAP_MS = 250.0, 500.0
QUIET_S = 5.0
AT_ONCE, TOGETHER = 12, 8
DURABLE_EVERY = 8  # shapes
SLOW_BODIES, GROWN_BYTES_MAX = 300, 400 << 20
RESULT_S = 60.0
ADAPTER = DEMO / "adapters" / "upper-case"
ASK_S = 120.0


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
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(mesh.url, timeout=timeout, connector=connector) as session, _watching(mesh.url) as watcher:
        await asyncio.sleep(QUIET_S)  # time: the stalls of a quiet gateway are measured for so long
        before, quiet, worst = mesh.resident_bytes("gateway-1"), await _seen_by(watcher), Watched()
        quiet_ms = max(quiet.stall_ms, quiet.gap_ms)

        async def note(name: str) -> None:
            seen = await _seen_by(watcher)
            if seen.stall_ms > STALL_MS + quiet_ms:
                wrong.append(f"{name}: nobody was answered for {seen.stall_ms:.0f} ms")
            if seen.gap_ms > GAP_MS + quiet_ms:
                wrong.append(f"{name}: another client's tokens came {seen.gap_ms:.0f} ms apart")
            wrong.extend(seen.broken)
            worst.stall_ms, worst.gap_ms = max(worst.stall_ms, seen.stall_ms), max(worst.gap_ms, seen.gap_ms)

        for number, (name, path, body) in enumerate(chosen):
            wrong += await _attack(session, name, path, body)
            await note(name)
            if number % DURABLE_EVERY == 0 and path in (bodies.CHAT, bodies.TEXT):
                wrong += await _durable(mesh, name, body)
                await note(f"{name}, durable")
        for at in range(0, len(chosen), max(1, len(chosen) // TOGETHER)):
            together = [chosen[(at + i) % len(chosen)] for i in range(AT_ONCE)]
            found = await asyncio.gather(*(_attack(session, *one) for one in together))
            wrong += [one for each in found for one in each]
            await note(f"{AT_ONCE} at once from {together[0][0]!r}")
        answer = {"prompt": "x", "n": 64, "max_tokens": 200, "logprobs": 20, "ignore_eos": True}
        wrong += await _attack(session, "a large answer", bodies.TEXT, json.dumps(answer).encode())
        await note("a large answer")
        wrong += await _hostile_templates(session)
        await note("hostile chat templates of adapters")
        grown = await _slow_bodies(mesh, before)
        await note("slow bodies")
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


async def _hostile_templates(session: aiohttp.ClientSession) -> list[str]:
    """Register adapters with hostile chat templates, and chat with those that are accepted, all at once."""
    accepted: list[str] = []
    for number, source in enumerate(HOSTILE):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                archive.write(ADAPTER / file, file)
            archive.writestr("chat_template.jinja", source)
        form = aiohttp.FormData({"name": f"hostile-{number}"})
        form.add_field("file", packed.getvalue(), filename="adapter.zip")
        async with session.post("/v1/adapters", data=form) as answer:
            if answer.status >= 500:
                return [f"a hostile template: {answer.status} {await answer.text()}"]
            accepted += [f"hostile-{number}"] if answer.status < 300 else []
    chats = [{"model": name, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 1} for name in accepted]
    asked = (_attack(session, name, bodies.CHAT, json.dumps(chat).encode()) for name, chat in zip(accepted, chats, strict=True))
    wrong = [one for each in await asyncio.gather(*asked) for one in each]
    for name in accepted:
        async with session.delete(f"/v1/adapters/{name}") as answer:
            wrong += [] if answer.status < 300 else [f"{name} is not deleted: {answer.status}"]
    return wrong if accepted else ["no hostile template was accepted: nothing was tried"]


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
async def _watching(url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that watches: the one that attacks is busy with its own bodies."""
    words = (sys.executable, "-m", "tests.fuzz.watcher", url)
    process = await asyncio.create_subprocess_exec(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def _seen_by(process: asyncio.subprocess.Process) -> Watched:
    """What the watcher saw since the last time."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"\n")
    return msgspec.json.decode(await process.stdout.readline(), type=Watched)
