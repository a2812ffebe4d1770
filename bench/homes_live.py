"""Homes on live workers: how cold is a worker that comes while requests are served (`python -m bench homes --live`)?

`motet up --demo --workers 2` with requests for its adapters by a power law. After `LEARN_S` a third worker is started. Counted
from its readiness on, for `SERVE_S`: the times to the first token of all requests, and how often the new worker had to load an
adapter for a request that waited. Meshes with `--placement on` and `off` take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from typing import Any, Literal

import numpy as np

from bench import report
from bench.rig.answers import metric
from motet.cli.client import Client
from motet.cli.process import ServiceProcess
from motet.cli.stack import Stack
from motet.cli.supervisor import State
from motet.cli.up import up
from motet.cli.up_options import stack_options
from motet.examples.demo.tasks import TASKS
from motet.shared.clock import now_s

ADAPTERS = tuple(task.adapter for task in TASKS)
ROUNDS, CLIENTS, TOKENS, PAUSE_S = 3, 6, 16, 0.1
LEARN_S, SERVE_S = 40.0, 10.0
"""The first homes are decided within half a minute."""
COLD = "motet_worker_cold_starts_total"
COLUMNS = ("placement", "cold starts on the new worker", "TTFT p50 ms", "TTFT p99 ms")
Setting = Literal["on", "off"]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table, return the figures."""
    rounds, learn_s, serve_s = (1, 3.0, 2.0) if args.quick else (ROUNDS, LEARN_S, SERVE_S)
    found: dict[Setting, list[tuple[float, float, float]]] = {"off": [], "on": []}
    for _ in args.watch.rounds(rounds):
        for setting in found:
            found[setting].append(asyncio.run(_one(setting, learn_s, serve_s)))
    medians = {setting: [statistics.median(column) for column in zip(*rows, strict=True)] for setting, rows in found.items()}
    title = f"A third worker comes; medians of {rounds} meshes each"
    print(report.table(title, COLUMNS, [[setting, *row] for setting, row in medians.items()]))
    names = ("cold_starts", "ttft_p50_ms", "ttft_p99_ms")
    return {f"live_{name}_{setting}": round(row[at], 2) for setting, row in medians.items() for at, name in enumerate(names)}


NEW = "worker-3"


class _Told:
    """Hears of the stack's processes."""

    def __init__(self) -> None:
        self.came = asyncio.Event()

    def changed(self, name: str, state: State, note: str) -> None:
        """A process has another state."""
        if (name, state) == (NEW, "ready"):
            self.came.set()


async def _one(setting: Setting, learn_s: float, serve_s: float) -> tuple[float, float, float]:
    """(cold starts on the new worker, p50 and p99 of the times to the first token in milliseconds) of one mesh."""
    with tempfile.TemporaryDirectory() as directory:
        words = ["--demo", "--port", "0", "--data-dir", directory, "--threads", "1", "--workers", "2..3", "--scale", "act"]
        told = _Told()
        stack = Stack(stack_options(up.make_context("up", [*words, "--placement", setting]).params), told)
        first: list[tuple[float, float]] = []  # when it was asked, and the milliseconds to its first token
        try:
            await stack.start()
            clients = [asyncio.create_task(_ask(stack.urls[0], number, first)) for number in range(CLIENTS)]
            await asyncio.sleep(learn_s)
            await stack.grow(3)
            await told.came.wait()
            since_s = now_s()
            await asyncio.sleep(serve_s)
            for one in clients:
                one.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            (url,) = (one.ops_url for one in stack.children if isinstance(one, ServiceProcess) and one.name == NEW)
            cold = await asyncio.to_thread(metric, url, COLD)
        finally:
            await stack.stop()
    times = [ms for at_s, ms in first if at_s >= since_s]
    return cold, float(np.quantile(times, 0.5)), float(np.quantile(times, 0.99))


async def _ask(url: str, number: int, first: list[tuple[float, float]]) -> None:
    """Ask for adapters by a power law, one request after the other, until it is cancelled."""
    draw = random.Random(number)
    weights = [1.0 / place for place in range(1, len(ADAPTERS) + 1)]
    async with Client(url) as client:
        while True:
            (adapter,) = draw.choices(ADAPTERS, weights)
            body = {"model": adapter, "prompt": f"Ylq {draw.random()}", "max_tokens": TOKENS, "ignore_eos": True}
            began_s, seen = now_s(), False
            async for _ in client.events("/v1/completions", body):
                if not seen:
                    seen = True
                    first.append((began_s, 1e3 * (now_s() - began_s)))
            await asyncio.sleep(PAUSE_S)
