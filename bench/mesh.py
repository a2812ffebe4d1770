"""The cost of HTTP, NATS and scheduling: the whole mesh beside its engine alone.

    mesh     client -> HTTP -> gateway -> NATS -> scheduler -> worker, every service its own process, as `motet up` starts them
    engine   the worker's engine in a process of its own, called directly with the same requests

Both sides have the same cores, threads and options, take turns, and start from the same prompts, which no earlier lap
has seen. Figures are medians over the laps. Streams ask for the base model, or each for an adapter of its own (ranks 8, 16, 32
and 64 in turn).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import report
from bench.models import ADAPTERS, RANKS, SHAPES, adapter_modules, prompts, write_adapter, write_model
from bench.rig.answers import metric, wait_for
from bench.rig.engine import host_adapters, run_engine
from bench.rig.http import BASE
from bench.rig.laps import Lap, Laps, lap_over_http
from bench.rig.mesh import DRAIN_S, Mesh, started_mesh
from bench.rig.processes import Spawned, cpu_s, spawned
from bench.watch import Watch
from motet.cli.stack import StackOptions
from motet.shared.clock import now_s

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

LAP_S = 600.0


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
            model=str(model),
            served_model_name=BASE,
            adapters_dir=str(adapters[0].parent),
            data_dir=data,
            port=0,
            drain_s=DRAIN_S,
        )
        with spawned(_engine_alone, str(model), list(map(str, adapters)), threads) as engine, started_mesh(options) as running:
            names = [path.name for path in adapters]
            wait_for(running.port, names)
            bench = Bench(running, engine, names, output_tokens, args.watch)
            measured = {load: bench.laps(load, load.laps) for load in (QUICK if args.quick else LOADS)}
    return {"dtype": args.dtype} | _figures(measured)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the model's weights")


class Side:
    """The laps of one contestant at one number of streams."""

    def __init__(self) -> None:
        self.laps = Laps()
        self.engine_share: list[float] = []  # of the wall time, inside engine steps
        self.cpu_s: dict[str, float] = defaultdict(float)  # by process kind, over all laps

    def add(self, lap: Lap, used_s: dict[str, float], engine_share: float = 1.0) -> None:
        """Add a lap."""
        self.laps.append(lap)
        self.engine_share.append(engine_share)
        for kind, own_s in used_s.items():
            self.cpu_s[kind] += own_s

    @property
    def tokens(self) -> int:
        return sum(len(lap.last_s) * lap.tokens for lap in self.laps)

    def cpu_us_per_token(self, *kinds: str) -> float:
        return sum(self.cpu_s[kind] for kind in kinds) / self.tokens * 1e6


@dataclass(frozen=True, slots=True)
class Bench:
    """Both contestants while they run."""

    mesh: Mesh
    engine: Spawned
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
        engine_before_s, before_s = self._engine_s(), self.mesh.cpu_s()
        models = [BASE if number < 0 else self.adapters[number] for number in chosen]
        lap = lap_over_http(self.mesh.port, asked, self.output_tokens, models)
        after_s = self.mesh.cpu_s()
        share = (self._engine_s() - engine_before_s) / max(lap.last_s)
        return lap, {kind: after_s[kind] - before_s[kind] for kind in after_s}, share

    def _in_engine(self, asked: list[list[int]], chosen: list[int]) -> tuple[Lap, dict[str, float]]:
        pid, pipe, _ = self.engine
        before_s = cpu_s(pid)
        pipe.send((asked, self.output_tokens, chosen))
        if not pipe.poll(LAP_S):
            raise RuntimeError("the engine hangs")
        return pipe.recv(), {"engine": cpu_s(pid) - before_s}

    def _engine_s(self) -> float:
        """Seconds that the mesh's worker has spent in engine steps."""
        return metric(self.mesh.facts.services["worker-1"]["ops_url"], "motet_worker_step_seconds_sum")


def _engine_alone(pipe: Connection, model: str, adapters: Sequence[str], threads: int) -> None:
    """Serve laps of the engine over a pipe, until terminated.

    It receives (prompts, max_tokens, adapter of each or -1) and sends a Lap. `adapters` are PEFT directories.
    """
    from motet.policies.times.step_times import StepTimes
    from motet.services.worker.config import WorkerConfig
    from motet.services.worker.engines.start_perf import START_PERF
    from motet.services.worker.native.assemble import assemble

    assembly = assemble(WorkerConfig.of(model=model, threads=threads), Path(model), StepTimes(START_PERF))
    loaded = host_adapters(assembly, Path(model), adapters)
    pipe.send("ready")
    while True:
        prompts, max_tokens, chosen = pipe.recv()
        pipe.send(_engine_lap(assembly.engine, prompts, max_tokens, [None if i < 0 else loaded[i] for i in chosen]))


def _engine_lap(engine: Any, prompts: list[list[int]], max_tokens: int, adapters: Sequence[Any]) -> Lap:
    began_s = now_s()
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for i, _ in run_engine(engine, prompts, max_tokens, adapters):
        last[i] = now_s() - began_s
        first.setdefault(i, last[i])
    return Lap(list(first.values()), list(last.values()), max_tokens)


def _figures(measured: dict[Load, tuple[Side, Side]]) -> dict[str, Any]:
    rows: list[list[Any]] = []
    for load, (mesh, alone) in measured.items():
        outside = 1 - statistics.median(mesh.engine_share)
        for name, side in (("mesh", mesh), ("engine", alone)):
            times = [measure(share) for measure in (side.laps.ttft_ms, side.laps.tpot_ms) for share in (0.5, 0.99)]
            facts = [f"{_ratio(mesh, alone):.3f}", f"{outside:.1%}"] if name == "mesh" else ["", ""]
            rows.append([f"{name}, {load.name}", side.laps.tokens_per_s, *times, *facts])
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
        "ttft_p50_ms": round(alone_[0].laps.ttft_ms(0.5), 2),
    }
    for load, (mesh, alone) in measured.items():
        name = f"{load.streams}" + ("_adapters" if load.adapters else "")
        figures[f"mesh_tokens_per_s_{name}"] = round(mesh.laps.tokens_per_s, 1)
        figures[f"engine_tokens_per_s_{name}"] = round(alone.laps.tokens_per_s, 1)
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
    return mesh.laps.tokens_per_s / alone.laps.tokens_per_s
