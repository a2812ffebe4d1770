"""`python -m bench start`: seconds from the start of a process to its first token, by part of the work.

A process imports what a worker imports, assembles the engine as a worker does and answers one prompt of 64 tokens. The weights
are bf16, are rounded to int8 or int4 at the start, were rounded before by `motet quantize`, or were packed by an earlier start
("kept", `--packed-weights-dir`). Files are in the system's page cache. NATS and the other services are not part of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench import ROOT, report
from bench.models import SHAPES, model_and_adapters
from motet.shared.malloc import uncollected

ROUNDS, QUICK_ROUNDS = 5, 1
WIDTHS = {"bf16": "none", "int8": "int8", "int4": "int4"}
PROMPT_TOKENS = 64
PARTS = ("python", "torch", "motet", "load", "warm-up", "first token")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--model", choices=SHAPES, default="M", help="its shape (default M)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    from motet.services.worker.native.quantize import quantize

    directory, _ = model_and_adapters(args.model)
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as home:
        starts = {name: (directory, width, "") for name, width in WIDTHS.items()}
        for bits in (8, 4):
            out = Path(home) / f"int{bits}"
            quantize(directory, out, bits)
            starts[f"int{bits} from a file"] = (out, "none", "")
        for name, width in WIDTHS.items():
            starts[f"{name} kept"] = (directory, width, f"{home}/packed")
            _start(*starts[f"{name} kept"])  # it packs them
        found: dict[str, list[list[float]]] = defaultdict(list)
        for _ in args.watch.rounds(QUICK_ROUNDS if args.quick else ROUNDS, "rounds"):
            for name, start in starts.items():
                found[name].append(_start(*start))
    middle = {name: [statistics.median(part) for part in zip(*rounds, strict=True)] for name, rounds in found.items()}
    rows = [[name, sum(parts), *parts] for name, parts in middle.items()]
    print(report.table(f"{args.model}: seconds from the start of a process to its first token", ["", "all", *PARTS], rows))
    figures: dict[str, Any] = {"model": args.model}
    for name, parts in middle.items():
        key = name.replace(" from a", "").replace(" ", "_")
        figures[f"start_{key}_s"] = round(sum(parts), 2)
        figures[f"parts_{key}_s"] = dict(zip(PARTS, (round(part, 3) for part in parts), strict=True))
    return figures


def _start(model: Path, quantization: str, packed: str) -> list[float]:
    """Seconds of each part of one start."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "bench.start", str(model), quantization, packed, repr(time.monotonic())]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"the process failed: {done.stderr[-2000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _child(model: str, quantization: str, packed: str, began: str) -> None:
    marks = [float(began), time.monotonic()]
    with uncollected():
        import torch  # noqa: F401

        marks.append(time.monotonic())
        from bench.rig.engine import run_engine
        from motet.policies.times.step_times import StepTimes
        from motet.services.worker.config import WorkerConfig
        from motet.services.worker.engines.start_perf import START_PERF
        from motet.services.worker.native import assemble as assembling

    marks.append(time.monotonic())
    options = {"model": model, "quantization": quantization, "packed_weights_dir": packed}
    config = WorkerConfig.of(**options, kv_memory_gib=0.5, lora_memory_mib=256)
    warm_up = assembling._warm_up

    def timed(engine: Any, limits: Any, vocab_size: int, times: Any) -> None:
        marks.append(time.monotonic())
        warm_up(engine, limits, vocab_size, times)

    assembling._warm_up = timed
    assembly = assembling.assemble(config, Path(model), StepTimes(START_PERF))
    marks.append(time.monotonic())
    first = next(run_engine(assembly.engine, [list(range(2, 2 + PROMPT_TOKENS))], 1, [None]))
    assert first
    marks.append(time.monotonic())
    print(json.dumps([after - before for before, after in itertools.pairwise(marks)]))


if __name__ == "__main__":
    _child(*sys.argv[1:])
