"""The cost of HTTP, NATS and scheduling: the whole mesh beside its engine alone.

    mesh     client -> HTTP -> gateway -> NATS -> scheduler -> worker, every service its own process, as `motet up` starts them
    engine   the worker's engine in a process of its own, called directly with the same requests

Both sides have the same cores, threads and options, take turns, and start from the same prompts, which no earlier lap
has seen. Figures are medians over the laps.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.mesh_parts import Lap, engine_alone, prompts, stream
from bench.models import SHAPES, write_model
from motet.cli.stack import Stack, StackOptions, read_facts

STREAMS = (1, 8, 64)
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 128
LAPS = {1: 3, 8: 3, 64: 5}

spawn = multiprocessing.get_context("spawn")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    threads = len(os.sched_getaffinity(0))
    os.environ |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}  # for both sides
    output_tokens = 32 if args.quick else OUTPUT_TOKENS
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:
        model, data = Path(directory) / "bench", Path(directory) / "data"
        write_model(model, SHAPES["S"])
        with _engine(str(model), threads) as engine, asyncio.Runner() as runner:
            stack = Stack(
                StackOptions(model=str(model), served_model_name="bench", data_dir=data, port=0, drain_s=2.0), _Quiet()
            )
            try:
                runner.run(stack.start())
                measured = {n: _laps(n, 1 if args.quick else LAPS[n], output_tokens, stack, data, engine) for n in STREAMS}
            finally:
                runner.run(stack.stop())
    return _figures(measured)


class _Quiet:
    """Hears of state changes of the stack's services and only passes on trouble."""

    def changed(self, name: str, state: str, note: str) -> None:
        if state in ("restarting", "failed"):
            print(f"{name}: {state} {note}")


@contextmanager
def _engine(model: str, threads: int) -> Iterator[Any]:
    """The rival's process; yields the pipe to it and its process id."""
    here, there = spawn.Pipe()
    process = spawn.Process(target=engine_alone, args=(there, model, threads))
    process.start()
    try:
        if not here.poll(120):
            raise RuntimeError("the engine did not start")
        here.recv()
        yield here, process.pid
    finally:
        if process.is_alive():
            here.send(None)
        process.join(10)
        if process.is_alive():
            process.kill()


class Side:
    """One contestant's laps at one number of streams."""

    def __init__(self) -> None:
        self.laps: list[Lap] = []
        self.engine_share: list[float] = []  # of the wall time, inside engine steps
        self.cpu_s: dict[str, float] = defaultdict(float)  # by process kind, over all laps

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(lap.tokens_per_s for lap in self.laps)

    @property
    def tokens(self) -> int:
        return sum(len(lap.last_s) * lap.tokens for lap in self.laps)

    def cpu_us_per_token(self, *kinds: str) -> float:
        return sum(self.cpu_s[kind] for kind in kinds) / self.tokens * 1e6

    def ttft_ms(self, quantile: float) -> float:
        return float(np.quantile([value for lap in self.laps for value in lap.first_s], quantile)) * 1000

    def tpot_ms(self, quantile: float) -> float:
        return float(np.quantile([value for lap in self.laps for value in lap.tpot_s], quantile)) * 1000


def _laps(streams: int, laps: int, output_tokens: int, stack: Stack, data: Path, engine: Any) -> tuple[Side, Side]:
    """(mesh, engine), taking turns; the first lap of each warms up and is not counted."""
    mesh, alone = Side(), Side()
    port = int(stack.urls[0].rsplit(":", 1)[1])
    pipe, engine_pid = engine

    def in_mesh(asked: list[list[int]]) -> tuple[Lap, float, dict[str, float]]:
        engine_before, before = _engine_s(data), _mesh_cpu_s(data)
        lap = stream(port, asked, output_tokens)
        after = _mesh_cpu_s(data)
        return lap, (_engine_s(data) - engine_before) / max(lap.last_s), {kind: after[kind] - before[kind] for kind in after}

    def in_engine(asked: list[list[int]]) -> tuple[Lap, float]:
        before = report.cpu_s(engine_pid)
        pipe.send((asked, output_tokens))
        if not pipe.poll(600):
            raise RuntimeError("the engine hangs")
        return pipe.recv(), report.cpu_s(engine_pid) - before

    for number in range(laps + 1):
        asked = prompts(streams, PROMPT_TOKENS, seed=1000 * streams + number)
        if number % 2:
            (mesh_lap, share, mesh_cpu), (alone_lap, alone_cpu) = in_mesh(asked), in_engine(asked)
        else:
            (alone_lap, alone_cpu), (mesh_lap, share, mesh_cpu) = in_engine(asked), in_mesh(asked)
        if number:
            mesh.laps.append(mesh_lap)
            mesh.engine_share.append(share)
            for kind, used in mesh_cpu.items():
                mesh.cpu_s[kind] += used
            alone.laps.append(alone_lap)
            alone.cpu_s["engine"] += alone_cpu
    return mesh, alone


def _mesh_cpu_s(data: Path) -> dict[str, float]:
    """CPU seconds so far of each kind of process of the mesh, and of this one, the client."""
    facts = read_facts(data)
    assert facts is not None, "the stack has started"
    used: dict[str, float] = {"client": time.process_time()}
    for name, service in facts.services.items():
        kind = name.split("-")[0]
        used[kind] = used.get(kind, 0.0) + report.cpu_s(service["pid"])
    return used


def _engine_s(data: Path) -> float:
    """Seconds that the mesh's worker has spent in engine steps."""
    facts = read_facts(data)
    assert facts is not None, "the stack has started"
    with urllib.request.urlopen(f"{facts.services['worker-1']['ops_url']}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("motet_worker_step_seconds_sum"):
                return float(line.split()[1])
    return 0.0


def _figures(measured: dict[int, tuple[Side, Side]]) -> dict[str, Any]:
    rows: list[list[Any]] = []
    for streams, (mesh, alone) in measured.items():
        ratio = mesh.tokens_per_s / alone.tokens_per_s
        outside = 1 - statistics.median(mesh.engine_share)
        for name, side in (("mesh", mesh), ("engine", alone)):
            times = [side.ttft_ms(0.5), side.ttft_ms(0.99), side.tpot_ms(0.5), side.tpot_ms(0.99)]
            facts = [f"{ratio:.3f}", f"{outside:.1%}"] if name == "mesh" else ["", ""]
            rows.append([f"{name}, {streams} streams", side.tokens_per_s, *times, *facts])
    columns = ["", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "mesh / engine", "outside engine"]
    print(report.table(f"{PROMPT_TOKENS} prompt tokens, greedy, no adapters", columns, rows))
    kinds = ["worker", "gateway", "nats", "scheduler", "predictor", "registry", "client"]
    cpu_rows = [
        [f"{streams} streams", alone.cpu_us_per_token("engine"), *(mesh.cpu_us_per_token(kind) for kind in kinds)]
        for streams, (mesh, alone) in measured.items()
    ]
    print(report.table("CPU microseconds per token", ["", "engine alone", *kinds], cpu_rows))
    most = max(measured)
    figures: dict[str, Any] = {"mesh_vs_engine": round(measured[most][0].tokens_per_s / measured[most][1].tokens_per_s, 3)}
    figures["ttft_p50_ms"] = round(measured[1][0].ttft_ms(0.5), 2)
    for streams, (mesh, alone) in measured.items():
        figures[f"mesh_tokens_per_s_{streams}"] = round(mesh.tokens_per_s, 1)
        figures[f"engine_tokens_per_s_{streams}"] = round(alone.tokens_per_s, 1)
        figures[f"outside_engine_{streams}"] = round(1 - statistics.median(mesh.engine_share), 4)
        services = mesh.cpu_us_per_token(*(kind for kind in mesh.cpu_s if kind not in ("worker", "client")))
        figures[f"cpu_us_per_token_{streams}"] = {
            "engine": round(alone.cpu_us_per_token("engine")),
            "worker": round(mesh.cpu_us_per_token("worker")),
            "services": round(services),
        }
    return figures
