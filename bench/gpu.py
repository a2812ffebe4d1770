"""`python -m bench gpu`: all measurements that need a GPU, in stages of some minutes that can be interrupted and continued.

    python -m bench gpu --stage 3 --out results             one stage, on the first GPU
    python -m bench gpu --dry-run                           every stage on the CPU, with tiny shapes

A stage is a list of measurement points, the most valuable first (bench/gpu_stages). Each completed point is written at once as
a line of `<out>/stage-<n>.jsonl`. A point that is in this file already, or in a file of the same name under --have, is skipped.
If a point fails, its traceback is written and the next one runs. If one hangs, its process is ended at the time limit. The run
stops itself after --budget-s seconds and says what is left. docs/gpu.md describes the stages, their goals and what they need.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_stages import figures
from bench.gpu_stages.results import Results
from bench.gpu_stages.supervisor import serve, supervise

RECORDED = False  # results are the stages' own files
STAGES = {number: stage.title for number, stage in figures.STAGES.items()}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--stage", type=int, choices=sorted(STAGES), help="which stage")
    parser.add_argument("--out", type=Path, help="directory of the results")
    parser.add_argument("--have", type=Path, help="directory of earlier results: their points are not measured again")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds after which it stops by itself")
    parser.add_argument("--only", default="", help="points whose names contain this, or one of several parts like a|b")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny shapes, Triton's interpreter; all stages")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run one stage, or try all of them without a GPU. Returns the figures."""
    if args.child:
        serve(lambda: _points(args.stage, dry=False, only=args.only), healthy=_healthy)
        sys.exit(0)
    if args.dry_run:
        return dry_run([args.stage] if args.stage else sorted(STAGES), args.only)
    if args.stage is None or args.out is None:
        raise SystemExit("python -m bench gpu: --stage and --out are needed, or --dry-run")
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out, args.stage, have=args.have)
    command = [sys.executable, "-m", "bench", "gpu", "--child", "--stage", str(args.stage), "--only", args.only]
    left = supervise(command, results, budget_s=args.budget_s, log=args.out / f"stage-{args.stage}.log")
    print(f"stage {args.stage}, {STAGES[args.stage]}: {len(results.done)} points there, {len(left)} left: {', '.join(left)}")
    for name, error in results.failed.items():
        print(f"failed: {name}: {error.strip().splitlines()[-1]}")
    return {"stage": args.stage, "left": len(left), "failed": len(results.failed)} | figures.STAGES[args.stage].figures(
        results.lines
    )


def dry_run(stages: list[int], only: str = "") -> dict[str, Any]:
    """Run every point of these stages in this process. A stage counts as failed if one of its points fails."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
    failed = []
    with tempfile.TemporaryDirectory(prefix="motet-gpu-") as directory:
        for number in stages:
            began_s = time.monotonic()
            results = Results(Path(directory), number)
            for point in _points(number, dry=True, only=only):
                results.measure(point)
            took_s = time.monotonic() - began_s
            said = figures.STAGES[number].figures(results.lines)
            print(f"stage {number}, {STAGES[number]}: {len(results.done)} points in {took_s:.1f} s, {said}", flush=True)
            for name, error in results.failed.items():
                print(f"{name}:\n{error}", file=sys.stderr)
            wrong = [line for line in results.lines if not line.get("good", True)]
            for line in wrong:
                print(line, file=sys.stderr)
            if results.failed or wrong:
                failed.append(number)
    return {"stages": len(stages), "stages_failed": len(failed)}


def _points(stage: int, *, dry: bool, only: str) -> list[Any]:
    from bench.gpu_stages.bed import Bed
    from bench.gpu_stages.stages import points

    return [point for point in points(stage, Bed(dry=dry)) if any(part in point.name for part in only.split("|"))]


def _healthy() -> bool:
    """Whether the GPU still answers. After some errors a process's context is lost."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True
