"""The cost of HTTP, NATS and scheduling: the whole mesh beside its engine alone.

    mesh     client -> HTTP -> gateway -> NATS -> scheduler -> worker, every service its own process, as `motet up` starts them
    engine   the worker's engine in a process of its own, called directly with the same requests

Both sides have the same cores, threads and options, take turns, and start from the same prompts, which no earlier lap
has seen. Figures are medians over the laps. Streams ask for the base model, or each for an adapter of its own (ranks 8, 16, 32
and 64 in turn).
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.mesh_parts import BASE, Lap, engine_alone, prompts, stream, wait_for
from bench.models import ADAPTERS, RANKS, SHAPES, adapter_modules, write_adapter, write_model
from bench.watch import Watch
from motet.cli.stack import Stack, StackOptions, read_facts

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` streams at once, each with the next of `adapters` adapters; 0: the base model."""

    streams: int
    adapters: int
    laps: int

    @property
    def name(self) -> str:
        return f"{self.streams} streams" + (f", {self.adapters} adapters" if self.adapters else "")


LOADS = (Load(1, 0, 3), Load(8, 0, 3), Load(64, 0, 5), Load(ADAPTERS, ADAPTERS, 7))
QUICK = (Load(1, 0, 1), Load(2, 0, 1), Load(8, 0, 1), Load(4, 4, 1))

START_S, LAP_S = 120.0, 600.0

spawn = multiprocessing.get_context("spawn")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    threads = len(os.sched_getaffinity(0))
    os.environ |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}  # for both sides
    output_tokens = 16 if args.quick else OUTPUT_TOKENS
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:
        model, data = Path(directory) / "bench", Path(directory) / "data"
        shape = SHAPES["XS" if args.quick else "S"]
        write_model(model, shape, dtype=args.dtype)
        adapters = [Path(directory) / "adapters" / f"lora-{i:02}" for i in range(ADAPTERS)]
        for i, path in enumerate(adapters):
            write_adapter(path, shape, rank=RANKS[i % len(RANKS)], modules=adapter_modules(i), seed=i + 1)
        options = StackOptions(
            model=str(model), served_model_name=BASE, adapters_dir=str(adapters[0].parent), data_dir=data, port=0, drain_s=2.0
        )
        with _engine(str(model), list(map(str, adapters)), threads) as engine, asyncio.Runner() as runner:
            stack = Stack(options, _Quiet())
            try:
                runner.run(stack.start())
                port = int(stack.urls[0].rsplit(":", 1)[1])
                names = [path.name for path in adapters]
                wait_for(port, names)
                bench = Bench(port, data, engine, names, output_tokens, args.watch)
                measured = {load: bench.laps(load, load.laps) for load in (QUICK if args.quick else LOADS)}
            finally:
                runner.run(stack.stop())
    return {"dtype": args.dtype} | _figures(measured)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the model's weights")


class _Quiet:
    """Receives state changes of the stack's services and reports failures only."""

    def changed(self, name: str, state: str, note: str) -> None:
        if state in ("restarting", "failed"):
            print(f"{name}: {state} {note}")


@contextmanager
def _engine(model: str, adapters: list[str], threads: int) -> Iterator[Any]:
    """A context with the process of the engine alone; yields the pipe to it and its process id."""
    here, there = spawn.Pipe()
    process = spawn.Process(target=engine_alone, args=(there, model, adapters, threads))
    process.start()
    try:
        if not here.poll(START_S):
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
    """The laps of one contestant at one number of streams."""

    def __init__(self) -> None:
        self.laps: list[Lap] = []
        self.engine_share: list[float] = []  # of the wall time, inside engine steps
        self.cpu_s: dict[str, float] = defaultdict(float)  # by process kind, over all laps

    def add(self, lap: Lap, cpu_s: dict[str, float], engine_share: float = 1.0) -> None:
        """Add a lap."""
        self.laps.append(lap)
        self.engine_share.append(engine_share)
        for kind, used_s in cpu_s.items():
            self.cpu_s[kind] += used_s

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


@dataclass(frozen=True, slots=True)
class Bench:
    """Both contestants while they run."""

    port: int
    data: Path  # the stack's
    engine: Any  # pipe, process id
    adapters: list[str]
    output_tokens: int
    watch: Watch

    def laps(self, load: Load, laps: int) -> tuple[Side, Side]:
        """The laps of (mesh, engine), in turns. The first lap of each warms up and is not counted."""
        mesh, alone = Side(), Side()
        chosen = [i % load.adapters if load.adapters else -1 for i in range(load.streams)]
        for number in self.watch.rounds(laps + 1, f"laps of {load.name}", at_least=2):
            asked = prompts(load.streams, PROMPT_TOKENS, seed=1000 * load.streams + number)
            if number % 2:
                of_mesh, of_engine = self._in_mesh(asked, chosen), self._in_engine(asked, chosen)
            else:
                of_engine, of_mesh = self._in_engine(asked, chosen), self._in_mesh(asked, chosen)
            if number:
                mesh.add(*of_mesh)
                alone.add(*of_engine)
        return mesh, alone

    def _in_mesh(self, asked: list[list[int]], chosen: list[int]) -> tuple[Lap, dict[str, float], float]:
        engine_before, before = _engine_s(self.data), _mesh_cpu_s(self.data)
        models = [BASE if number < 0 else self.adapters[number] for number in chosen]
        lap = stream(self.port, asked, self.output_tokens, models)
        after = _mesh_cpu_s(self.data)
        share = (_engine_s(self.data) - engine_before) / max(lap.last_s)
        return lap, {kind: after[kind] - before[kind] for kind in after}, share

    def _in_engine(self, asked: list[list[int]], chosen: list[int]) -> tuple[Lap, dict[str, float]]:
        pipe, pid = self.engine
        before = report.cpu_s(pid)
        pipe.send((asked, self.output_tokens, chosen))
        if not pipe.poll(LAP_S):
            raise RuntimeError("the engine hangs")
        return pipe.recv(), {"engine": report.cpu_s(pid) - before}


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


def _figures(measured: dict[Load, tuple[Side, Side]]) -> dict[str, Any]:
    rows: list[list[Any]] = []
    for load, (mesh, alone) in measured.items():
        outside = 1 - statistics.median(mesh.engine_share)
        for name, side in (("mesh", mesh), ("engine", alone)):
            times = [side.ttft_ms(0.5), side.ttft_ms(0.99), side.tpot_ms(0.5), side.tpot_ms(0.99)]
            facts = [f"{_ratio(mesh, alone):.3f}", f"{outside:.1%}"] if name == "mesh" else ["", ""]
            rows.append([f"{name}, {load.name}", side.tokens_per_s, *times, *facts])
    columns = ["", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "mesh / engine", "outside engine"]
    print(report.table(f"{PROMPT_TOKENS} prompt tokens, greedy", columns, rows))
    kinds = ["worker", "gateway", "nats", "scheduler", "predictor", "registry", "client"]
    cpu_rows = [
        [load.name, alone.cpu_us_per_token("engine"), *(mesh.cpu_us_per_token(kind) for kind in kinds)]
        for load, (mesh, alone) in measured.items()
    ]
    print(report.table("CPU microseconds per token", ["", "engine alone", *kinds], cpu_rows))
    alone_, _, most, with_adapters = measured.values()
    figures: dict[str, Any] = {
        "mesh_vs_engine": round(_ratio(*most), 3),
        "mesh_vs_engine_32": round(_ratio(*with_adapters), 3),
        "ttft_p50_ms": round(alone_[0].ttft_ms(0.5), 2),
    }
    for load, (mesh, alone) in measured.items():
        name = f"{load.streams}" + ("_adapters" if load.adapters else "")
        figures[f"mesh_tokens_per_s_{name}"] = round(mesh.tokens_per_s, 1)
        figures[f"engine_tokens_per_s_{name}"] = round(alone.tokens_per_s, 1)
        figures[f"outside_engine_{name}"] = round(1 - statistics.median(mesh.engine_share), 4)
        services = mesh.cpu_us_per_token(*(kind for kind in mesh.cpu_s if kind not in ("worker", "client")))
        figures[f"cpu_us_per_token_{name}"] = {
            "engine": round(alone.cpu_us_per_token("engine")),
            "worker": round(mesh.cpu_us_per_token("worker")),
            "services": round(services),
        }
    return figures


def _ratio(mesh: Side, alone: Side) -> float:
    """Tokens per second of the mesh over the engine's."""
    return mesh.tokens_per_s / alone.tokens_per_s
