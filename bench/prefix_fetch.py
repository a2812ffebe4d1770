"""A prompt that another live worker has cached: its time to the first token, with blocks that are fetched and without.

    lender   has answered the prompt; two other requests run there
    worker   gets the same prompt: computes it, or fetches its blocks

Both workers are processes with one thread. Prompts that are fetched and computed take turns, each with content of its own. The
pauses between tokens of the lender's other requests say what lending costs them.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from bench import report
from bench.models import model_and_adapters
from bench.rebalance_kv import Client, fresh, send
from bench.rig.workers import Workers
from motet.shared import subjects
from motet.shared.clock import now_s
from motet.shared.model import KvOffer
from motet.shared.wire.request import Cancel, GenerateRequest

MODEL, QUICK_MODEL = "S", "XS"
PROMPT, QUICK_PROMPT = 1800, 400
PAIRS, QUICK_PAIRS = 6, 1
OTHERS = 2  # requests that run on the lender
ANSWER = 8


def measure(*, quick: bool) -> dict[str, Any]:
    """The figures; prints a table."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:
        found = asyncio.run(_measure(Path(directory), quick))
    print(report.table("a prompt that another live worker has cached", list(found), [list(found.values())]))
    return {f"fetch.{name}": value for name, value in found.items()}


async def _measure(directory: Path, quick: bool) -> dict[str, Any]:
    model, _ = model_and_adapters(QUICK_MODEL if quick else MODEL)
    tokens, pairs = (QUICK_PROMPT, QUICK_PAIRS) if quick else (PROMPT, PAIRS)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    draw, client = np.random.default_rng(5), Client()
    both = {name: {"threads": "1"} for name in ("lender", "worker")}
    ttft_ms: dict[bool, list[float]] = defaultdict(list)
    pause_ms: dict[bool, list[float]] = defaultdict(list)
    changed = 0
    async with Workers(model, directory, both, client.hear, end_s=0.0) as workers:
        for number in range(pairs + 1):  # the first pair warms up
            for fetches in (True, False) if number % 2 else (False, True):
                request = fresh(draw.integers(2, vocabulary, size=tokens).tolist(), ANSWER)
                await send(workers, "lender", request)
                told = await client.tokens(request.request_id, 0, ANSWER)
                others = [fresh(draw.integers(2, vocabulary, size=64).tolist(), 1900) for _ in range(OTHERS)]
                for other in others:
                    await send(workers, "lender", other)
                for other in others:
                    await client.tokens(other.request_id, 0, 4)
                began_s = now_s()
                first_s, said = await _again(workers, client, request, tokens, fetches=fetches)
                changed += said != told
                for other in others:
                    await workers.bus.publish(subjects.control("lender"), Cancel(request_id=other.request_id, epoch=0))
                if number:
                    ttft_ms[fetches].append(1000.0 * (first_s - began_s))
                    pause_ms[fetches].append(max(client.pause_ms(other.request_id, began_s, first_s) for other in others))
    return {
        "prompt_tokens": tokens,
        "ttft_ms_computed": round(median(ttft_ms[False]), 1),
        "ttft_ms_fetched": round(median(ttft_ms[True]), 1),
        "gain": round(median(ttft_ms[False]) / median(ttft_ms[True]), 2),
        "lender_longest_pause_ms_computed": round(median(pause_ms[False]), 1),
        "lender_longest_pause_ms_fetched": round(median(pause_ms[True]), 1),
        "changed": changed,
    }


async def _again(
    workers: Workers, client: Client, request: GenerateRequest, tokens: int, *, fetches: bool
) -> tuple[float, list[int]]:
    """The same request on the other worker: when its first token came, and its tokens."""
    offer = KvOffer(worker_id="lender", to_tokens=tokens // 64 * 64) if fetches else None
    again = msgspec.structs.replace(request, request_id=request.request_id + "-again", kv=offer)
    await send(workers, "worker", again)
    said = await client.tokens(again.request_id, 0, ANSWER)
    return client.first_s(again.request_id, 0), said
