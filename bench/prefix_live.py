"""Chats on live workers, with schedulers that know what is cached and without: four workers of the demo, in turns.

64 chats of 6 turns on the demo's 16 adapters, each adapter with a system prompt. A turn begins a moment after the answer to
the one before. A worker's step takes STEP_MS and TOKEN_MS for each token of a prompt (`bench.paced`), as on a device of its
own: two cores cannot carry four workers at a speed at which prompts matter. Chats, messages and pauses are the same in every
run.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench import paced, report
from bench.rig.answers import wait_for
from bench.rig.mesh import Mesh, demo_mesh
from bench.watch import Watch
from motet.cli.client import Client
from motet.examples.demo import TOOL_CALLER
from motet.examples.demo.tasks import TASKS

ADAPTERS = sorted(task.adapter for task in TASKS if task.adapter != TOOL_CALLER)
WORKERS, SEATS = 4, 16
STEP_MS, TOKEN_MS = 10.0, 0.25
SYSTEM, MESSAGE, ANSWER = 500, 60, 40  # tokens
PAUSE_S = 1.0  # on average
KEY = "key-bench"
VARIABLES = {
    "MOTET_MAX_RUNNING": str(SEATS),
    "MOTET_ADMISSION": "room",
    "MOTET_REBALANCE": "off",
    **paced.Pace(step_ms=STEP_MS, token_ms=TOKEN_MS).variables(),
}


@dataclass
class Seen:
    """What the clients of one run saw."""

    ttft_ms: list[float] = field(default_factory=list)
    prompt: int = 0  # tokens
    cached: int = 0
    failed: int = 0

    def row(self) -> dict[str, float]:
        """The figures."""
        p50, p99 = (float(np.quantile(self.ttft_ms, q)) for q in (0.5, 0.99))
        mean = float(np.mean(self.ttft_ms))
        return {
            "ttft_p50_ms": round(p50, 1),
            "ttft_mean_ms": round(mean, 1),
            "ttft_p99_ms": round(p99, 1),
            "cached": round(self.cached / self.prompt, 3),
            "failed": self.failed,
        }


def measure(watch: Watch, *, quick: bool) -> dict[str, Any]:
    """The figures; prints a table."""
    chats, turns, rounds = (8, 3, 1) if quick else (64, 6, 3)
    rows: list[dict[str, Any]] = []
    for number in watch.rounds(rounds):
        for aware in ("false", "true"):
            with demo_mesh(
                VARIABLES | {"MOTET_PREFIX_AWARE": aware}, f"{KEY} bench admin\n", workers=WORKERS, module="bench.paced"
            ) as mesh:
                seen = asyncio.run(_chats(mesh, chats, turns))
            rows.append({"aware": aware == "true", "round": number} | seen.row())
    columns = list(rows[0])
    print(
        report.table(
            f"{chats} chats of {turns} turns on {len(ADAPTERS)} adapters, {WORKERS} live workers",
            columns,
            [[*row.values()] for row in rows],
        )
    )
    medians = {
        aware: np.median([[row["ttft_p50_ms"], row["ttft_mean_ms"]] for row in rows if row["aware"] is aware], axis=0)
        for aware in (True, False)
    }
    p50, mean = (medians[True] / medians[False]).tolist()
    return {"live_ttft_p50_vs_today": round(p50, 3), "live_ttft_mean_vs_today": round(mean, 3), "live_runs": rows}


async def _chats(mesh: Mesh, chats: int, turns: int) -> Seen:
    wait_for(mesh.port, ADAPTERS, {"authorization": f"Bearer {KEY}"})
    seen = Seen()
    async with Client(mesh.url, api_key=KEY) as client:
        await asyncio.gather(*(_chat(client, number, turns, seen) for number in range(chats)))
    return seen


async def _chat(client: Client, number: int, turns: int, seen: Seen) -> None:
    """One chat. Its prompt is the adapter's system prompt, and all messages and answers so far."""
    draw = random.Random(number)
    model = ADAPTERS[number % len(ADAPTERS)]
    prompt = _text(random.Random(model), SYSTEM)
    for turn in range(turns):
        await asyncio.sleep(draw.expovariate(1.0 / PAUSE_S) * (1 + (turn == 0) * turns))
        prompt += _text(draw, MESSAGE)
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": ANSWER,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        began_s, first_s, answer = time.monotonic(), 0.0, list[int]()
        async for event in client.events("/v1/completions", body):
            for choice in event["choices"]:
                answer += choice.get("token_ids") or []
            first_s = first_s or (time.monotonic() if answer else 0.0)
            if usage := event.get("usage"):
                seen.prompt += usage["prompt_tokens"]
                seen.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        seen.failed += len(answer) != ANSWER
        if first_s:
            seen.ttft_ms.append(1000.0 * (first_s - began_s))
        prompt = prompt + answer


def _text(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(32, 256) for _ in range(tokens)]
