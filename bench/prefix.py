"""Placement by prefix: what it gains that schedulers know the KV blocks that each worker has cached.

On the twin, with workers like an H100 that serves Llama-3-8B (`bench.prefix_parts`): recorded conversations of Mooncake
(`--data DIR` or MOTET_DATA), and chats of 8 turns on 64 adapters, each with a system prompt of 1,000 tokens. Motet's policy
with and without knowledge of the caches ("today"), round-robin, sticky sessions, the approximate tree of SGLang's gateway,
Dynamo's cost, and an oracle: Motet's policy that looks into every cache. All take every request (`--admission room`); another
row has Motet's own admission by objectives. Load 1.0 is the rate up to which the oracle keeps 90% of the objectives.

    goodput   requests per second that keep their objectives: 2 s to the first token, 40 ms per token
    reused    prompt tokens that were not computed, of all

`bench.prefix_index` measures the index itself: bytes per block and the time of a decision. `bench.prefix_live` has chats on
live workers. Nothing was tuned on these runs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench import prefix_index, prefix_live, report
from bench.prefix_parts import Outcome, chats, mooncake, play
from motet.twin.workload import Workload

MOONCAKE = "mooncake_conversation.jsonl.gz"
LOADS = (0.3, 0.5, 0.7, 0.85, 0.95)
RIVALS = ("round-robin", "sticky", "cache-aware-tree", "dynamo")
OURS, TODAY, ORACLE, ADMITS = "motet", "today", "oracle", "motet, own admission"
SYSTEMS = (OURS, TODAY, *RIVALS, ORACLE, ADMITS)
KEPT = 0.9  # attainment at load 1.0
SEARCH = 7  # halvings


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--data", type=Path, default=os.environ.get("MOTET_DATA"), help=f"directory of {MOONCAKE}")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    loads = LOADS[2:3] if args.quick else LOADS
    seconds = 10.0 if args.quick else 120.0
    figures: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for name, workers, make in _cases(args, seconds):
            one = 5.0 * workers if args.quick else _capacity(make, workers)
            asked = [(load, system) for load in loads for system in SYSTEMS]
            jobs = {(load, system): pool.submit(_play, make(load * one), workers, system) for load, system in asked}
            found = {key: job.result() for key, job in jobs.items()}
            runs += [
                {"case": name, "load": load, "system": system} | _shown(outcome) for (load, system), outcome in found.items()
            ]
            _print(name, one, found)
            figures |= {f"{name}.{key}": value for key, value in _gains(found, loads).items()}
            args.watch.mark()
        alone = partial(chats, seconds=seconds, seed=3, shared=False)
        figures["no_prefix_cost"] = _without_sharing(pool, alone, 8, 5.0 * 8 if args.quick else _capacity(alone, 8))
    figures |= prefix_index.measure(quick=args.quick)
    figures |= prefix_live.measure(args.watch, quick=args.quick)
    for name in ("goodput_vs_best_rival", "tokens_reused_vs_oracle"):
        figures[name] = min(value for key, value in figures.items() if key.endswith(f".{name}"))
    if "mooncake, 8 workers.ttft_mean_vs_today" in figures:
        figures["ttft_mean_vs_today"] = figures["mooncake, 8 workers.ttft_mean_vs_today"]
    return figures | {"runs": runs}


def _cases(args: argparse.Namespace, seconds: float) -> list[tuple[str, int, Callable[[float], Workload]]]:
    """(name, workers, workload of a rate)."""
    cases: list[tuple[str, int, Callable[[float], Workload]]] = []
    for workers in (8,) if args.quick else (8, 60):
        cases.append((f"chats, {workers} workers", workers, partial(chats, seconds=seconds, seed=1)))
        if args.data is not None:
            most = 400 if args.quick else 0
            cases.append((f"mooncake, {workers} workers", workers, partial(mooncake, Path(args.data) / MOONCAKE, most=most)))
    return cases


def _play(workload: Workload, workers: int, system: str) -> Outcome:
    if system == ADMITS:
        return play(workload, workers, OURS, admission="objective")
    return play(workload, workers, OURS if system == TODAY else system, aware=system != TODAY)


def _capacity(make: Callable[[float], Workload], workers: int) -> float:
    """The highest rate at which the oracle keeps `KEPT` of the objectives."""
    low, high = 0.5 * workers, 40.0 * workers
    for _ in range(SEARCH):
        middle = (low * high) ** 0.5
        if play(make(middle), workers, ORACLE).attainment >= KEPT:
            low = middle
        else:
            high = middle
    return low


def _gains(found: dict[tuple[float, str], Outcome], loads: tuple[float, ...]) -> dict[str, float]:
    """Ratios to the others: of the times at load 0.7, of tokens over all loads (the least), of goodput at its best load."""
    at = min(loads, key=lambda load: abs(load - 0.7))
    ours, before = found[at, OURS], found[at, TODAY]
    goodput = {system: max(found[load, system].goodput for load in loads) for system in SYSTEMS}
    return {
        "ttft_mean_vs_today": round(ours.ttft_mean_ms / before.ttft_mean_ms, 3),
        "ttft_p50_vs_today": round(ours.ttft_p50_ms / before.ttft_p50_ms, 3),
        "ttft_mean_vs_oracle": round(ours.ttft_mean_ms / found[at, ORACLE].ttft_mean_ms, 3),
        "ttft_mean_vs_best_rival": round(ours.ttft_mean_ms / min(found[at, rival].ttft_mean_ms for rival in RIVALS), 3),
        "tokens_reused_vs_oracle": round(min(found[one, OURS].reused / found[one, ORACLE].reused for one in loads), 3),
        "goodput_vs_best_rival": round(goodput[OURS] / max(goodput[rival] for rival in RIVALS), 3),
        "goodput_vs_today": round(goodput[OURS] / goodput[TODAY], 3),
        "goodput_own_admission_vs_best_rival": round(goodput[ADMITS] / max(goodput[rival] for rival in RIVALS), 3),
    }


def _without_sharing(pool: ProcessPoolExecutor, make: Callable[[float], Workload], workers: int, rate: float) -> float:
    """Goodput where nothing is shared, with knowledge of caches and without, at load 0.95."""
    jobs = [pool.submit(_play, make(0.95 * rate), workers, system) for system in (OURS, TODAY)]
    ours, before = (job.result().goodput for job in jobs)
    return round(ours / before, 4)


def _shown(outcome: Outcome) -> dict[str, float]:
    return {
        "ttft_mean_ms": round(outcome.ttft_mean_ms, 1),
        "ttft_p50_ms": round(outcome.ttft_p50_ms, 1),
        "ttft_p99_ms": round(outcome.ttft_p99_ms, 1),
        "tpot_mean_ms": round(outcome.tpot_mean_ms, 2),
        "attainment": round(outcome.attainment, 4),
        "goodput": round(outcome.goodput, 2),
        "reused": round(outcome.reused_share, 4),
        "refused": outcome.refused,
    }


def _print(name: str, capacity: float, found: dict[tuple[float, str], Outcome]) -> None:
    columns = ["load, system", "TTFT mean ms", "p50", "p99", "TPOT ms", "objectives kept", "goodput/s", "reused", "refused"]
    rows = [[f"{load:.2f}  {system}", *_shown(outcome).values()] for (load, system), outcome in found.items()]
    print(report.table(f"{name}; load 1.0 is {capacity:.1f} requests/s", columns, rows))
