"""A client that only watches: `python -m tests.fuzz.watcher URL`.

For each line on its standard input it prints what it has seen since the last one, as JSON (`Watched`).
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import msgspec

from motet.shared.clock import now_s

STREAMS = 8


class Watched(msgspec.Struct):
    """The slowest answer of /health, the worst gap between two tokens of a stream, both in ms, and what went wrong."""

    stall_ms: float = 0.0
    gap_ms: float = 0.0
    broken: list[str] = []


async def _ask_for_health(session: aiohttp.ClientSession, watched: Watched) -> None:
    while True:
        began_s = now_s()
        async with session.get("/health") as answer:
            await answer.read()
        watched.stall_ms = max(watched.stall_ms, 1000 * (now_s() - began_s))
        await asyncio.sleep(0.01)  # time: between two questions


async def _stream(session: aiohttp.ClientSession, watched: Watched, number: int) -> None:
    body = {"model": "reverse", "prompt": f"abc {number}\n", "max_tokens": 400, "ignore_eos": True, "stream": True}
    while True:
        last_s = 0.0
        async with session.post("/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    now = now_s()
                    watched.gap_ms = max(watched.gap_ms, 1000 * (now - last_s)) if last_s else watched.gap_ms
                    last_s = now
                    if b'"error"' in line:
                        watched.broken.append(f"a stream of another client ended: {line[:200].decode()}")
        await asyncio.sleep(0.05)  # time: between two streams


async def watch(url: str) -> None:
    """Watch until the standard input ends."""
    watched, loop = Watched(), asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:

        async def kept(watching: object) -> None:
            try:
                await watching  # type: ignore[misc]
            except (aiohttp.ClientError, TimeoutError) as error:
                watched.broken.append(f"a client that only watches: {type(error).__name__} {error}")

        tasks = [asyncio.create_task(kept(_ask_for_health(session, watched)))]
        tasks += [asyncio.create_task(kept(_stream(session, watched, i))) for i in range(STREAMS)]
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(msgspec.json.encode(watched).decode(), flush=True)
            watched.stall_ms = watched.gap_ms = 0.0
            watched.broken = []
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(watch(sys.argv[1]))
