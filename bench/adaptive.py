"""Mechanisms that turn themselves on, beside every fixed setting: merging, moves, the queue's order, foresight, CPU processes.

Six workloads on the twin (`bench.adaptive_parts`), each with everything off, each mechanism alone on, all on, and all on
`auto`; three of them also on two live workers (`bench.adaptive_live`). Requests are the same in all settings. Each workload has
one measure, stated in advance: goodput (requests within both objectives per second) where objectives bind, else one over the
mean latency. Loads and constants were chosen on seeds below 10; results are of seeds from 11.

    auto_vs_best_fixed    auto over the best fixed setting, in the worst workload
    auto_vs_off           auto over everything off, in the worst workload
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec

from bench import adaptive_live, report
from bench.adaptive_parts import ALONE, FIXED, LOADS, SETTINGS, VALUE, Case, Outcome, measure

SEEDS = 4
QUICK_SCALE = 0.05
COLUMNS = ("value", "of off", "lowest", "highest", "goodput/s", "latency ms", "TTFT ms", "p99 ms", "TPOT ms", "moves", "merged")


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--seed", type=int, default=11, help="the first of the seeds; below 10 are those of the choices")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many (default {SEEDS})")
    parser.add_argument("--alone", action="store_true", help="each mechanism alone on auto as well")
    parser.add_argument("--part", choices=("twin", "live", "both"), default="both", help="what to run")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    args.watch.limit_s = 900.0
    figures: dict[str, Any] = {}
    if args.part != "live":
        figures |= _twin(args)
        args.watch.mark()
    if args.part != "twin":
        figures |= adaptive_live.measure(args.watch, quick=args.quick)
    return figures


def _twin(args: argparse.Namespace) -> dict[str, Any]:
    seeds = range(args.seed, args.seed + (1 if args.quick else args.seeds))
    scale = QUICK_SCALE if args.quick else 1.0
    names = [*FIXED, "auto", *(ALONE if args.alone else ())]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        runs = {
            (load, name, seed): pool.submit(measure, Case(load=load, setting=SETTINGS[name], seed=seed, scale=scale))
            for load in LOADS
            for name in names
            for seed in seeds
        }
        found: dict[str, Any] = {}
        for load in LOADS:
            outcomes = {name: [runs[load, name, seed].result() for seed in seeds] for name in names}
            found[load] = _workload(load, outcomes)
            print(f"{load}: done", file=sys.stderr, flush=True)
    rows = [
        [load, LOADS[load].measure, one["best_fixed"], one["auto_vs_best_fixed"], one["auto_vs_off"]]
        for load, one in found.items()
    ]
    title = f"twin, {len(seeds)} seeds from {seeds[0]}: auto beside the best fixed setting and beside off"
    print(report.table(title, ("workload", "measure", "best fixed", "auto / best fixed", "auto / off"), rows), flush=True)
    return {
        "auto_vs_best_fixed": min(one["auto_vs_best_fixed"] for one in found.values()),
        "auto_vs_off": min(one["auto_vs_off"] for one in found.values()),
        "worst_workload": min(found, key=lambda load: found[load]["auto_vs_best_fixed"]),
        "seeds": list(seeds),
        "twin": found,
    }


def _workload(load: str, outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Print one workload's table; returns its figures."""
    value = VALUE[LOADS[load].measure]
    each = {name: [value(one) for one in ones] for name, ones in outcomes.items()}
    means = {name: sum(values) / len(values) for name, values in each.items()}
    rows: list[list[object]] = []
    ratios: dict[str, list[float]] = {}
    for name, ones in outcomes.items():
        ratios[name] = [own / off for own, off in zip(each[name], each["off"], strict=True)]
        mean = {field: sum(getattr(one, field) for one in ones) / len(ones) for field in Outcome.__struct_fields__}
        rows.append(
            [name, means[name], means[name] / means["off"], min(ratios[name]), max(ratios[name])]
            + [mean[field] for field in ("goodput", "latency_ms", "ttft_ms", "ttft_p99_ms", "tpot_ms")]
            + [round(mean["moves"]), mean["merged"]]
        )
    print(report.table(f"{load}, measured by {LOADS[load].measure}", ("", *COLUMNS), rows), flush=True)
    best = max(FIXED, key=means.__getitem__)
    return {
        "measure": LOADS[load].measure,
        "best_fixed": best,
        "auto_vs_best_fixed": round(means["auto"] / means[best], 4),
        "auto_vs_off": round(means["auto"] / means["off"], 4),
        "of_off": {name: round(means[name] / means["off"], 4) for name in outcomes},
        "of_off_by_seed": {name: [round(one, 4) for one in ratios[name]] for name in outcomes},
        "outcomes": {name: [msgspec.to_builtins(one) for one in ones] for name, ones in outcomes.items()},
    }
