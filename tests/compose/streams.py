"""Concurrent SSE streams with known answers: their tokens, the times of these, and their ends."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import orjson

from motet.examples.demo.tasks import TASKS
from tests.support import eventually

TOKENS = 600


class Outcome(msgspec.Struct):
    """One stream. `error`: how its connection failed, empty for a proper end. Gaps in seconds."""

    text: str = ""
    finish: str = ""
    error: str = ""
    chunks: int = 0
    longest_gap_s: float = 0.0


def requests(count: int) -> list[dict[str, Any]]:
    """`count` completions of exactly `TOKENS` tokens over all demo adapters and the base: every second one sampled."""
    models = [*(task.adapter for task in TASKS), "motet-demo"]
    made = []
    for number in range(count):
        sampling = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
        body = {"model": models[number % len(models)], "prompt": TASKS[0].prompt(f"gdud flwi {number}")}
        made.append(body | sampling | {"max_tokens": TOKENS, "ignore_eos": True, "stream": True})
    return made


async def follow(http: aiohttp.ClientSession, url: str, body: dict[str, Any], outcome: Outcome) -> None:
    """Read one stream to its end, also to an end with an error."""
    last = time.monotonic()
    try:
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                outcome.error = f"status {answer.status}: {(await answer.text())[:200]}"
                return
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    outcome.error = event["error"]["message"]
                    return
                now = time.monotonic()
                if outcome.chunks:
                    outcome.longest_gap_s = max(outcome.longest_gap_s, now - last)
                last = now
                outcome.chunks += 1
                for choice in event["choices"]:
                    outcome.text += choice["text"]
                    outcome.finish = choice["finish_reason"] or outcome.finish
        if not outcome.finish:
            outcome.error = "the stream ended without a finish reason"
    except aiohttp.ClientError as error:
        outcome.error = f"{type(error).__name__}: {error}"


async def run(
    urls: Sequence[str],
    bodies: Sequence[dict[str, Any]],
    key: str,
    trust: ssl.SSLContext,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> list[Outcome]:
    """All `bodies` at once, in turns over `urls`. `meanwhile` runs when an eighth of all tokens has arrived."""
    outcomes = [Outcome() for _ in bodies]
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=trust),
        timeout=aiohttp.ClientTimeout(total=300),
        headers={"authorization": f"Bearer {key}", "x-slo-class": "batch"},  # none is refused for being late
    ) as http:
        work = [follow(http, urls[i % len(urls)], body, outcomes[i]) for i, body in enumerate(bodies)]
        running = asyncio.gather(*work)
        if meanwhile is not None:
            await eventually(lambda: sum(one.chunks for one in outcomes) >= len(bodies) * TOKENS / 8, within_s=120)
            await meanwhile()
            assert not running.done(), "the streams were over before anything happened to them"
        await running
    return outcomes
