"""ROCK (heterogeneous queues, three layers) and its rivals beside Motet, in its evaluation's fleet (section 6.1).

64 GPUs of four kinds on 16 machines, 200 adapters, the recorded trace of pictures (`--trace`, and for how long loads take
`--load-latency` and `--base-latency`; without them all are drawn with the same statistics). The paper gives neither the load
nor the room for adapters. Both are those with which its own baselines come closest to table 3 and to its latencies on the first
two fifths of the trace (`--fit` repeats the search). Everything else is of the rest, with other seeds.

The fleet: `bench.rock_fleet`. ROCK's decisions: `bench.rivals.rock`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import log, sqrt
from pathlib import Path
from typing import Any

from bench import report
from bench.rock_fleet import jobs, machines, systems
from bench.rock_fleet.fleet import System, Worker
from bench.rock_fleet.measure import Outcome, Setting, measure

LOAD, ROOM_MB = 0.35, 200.0
"""Found with `--fit`. The room is the least that holds the largest adapter."""
LOADS, ROOMS_MB = (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5), (200.0, 300.0, 500.0, 1000.0)
FITTED = 0.4
"""Share of the trace that is used for the search."""
LOAD_WEIGHT = 24.0
"""On the first part, the least of 1, 2, 4, 8, 16, 24 and 32 with which Motet's hit rate is above that of both forms of ROCK."""
FIT_SEEDS, SEEDS = (11,), (1, 2)
ONE = Worker(mixed=False, rows=1, launch=0.1)
"""One request at a time: pictures that fill the GPU."""
BESIDE = replace(ONE, mixed=True)
"""The same, where adapters of waiting requests load beside the steps."""
ALIKE, MIXED = Worker(mixed=False, rows=8, launch=0.79), Worker(mixed=True, rows=8, launch=0.79)
"""Small pictures, of whose steps launches are the largest part: batches of one adapter, of any."""
PAPER = {
    "RROD": (1.0, 0.0, 61.0),
    "LRUMS": (0.746 / 0.739, 0.392, 45.0),
    "Proactive": (0.746 / 0.834, 0.662, 25.0),
    "ROCK": (0.746, 0.841, 14.0),
}
"""Mean latency over RROD's, hit rate, updates (section 6.2 and table 3)."""
BASELINES: Mapping[str, Callable[[], System]] = {
    "RROD": systems.rrod,
    "LRUMS": systems.lrums,
    "Proactive": systems.proactive,
}
COMPARED: Mapping[str, Callable[[], System]] = {
    **BASELINES,
    "ROCK": systems.rock,
    "ROCK, bound for 90 s": partial(systems.rock, bound=True),
    "ROCK, matched every 10 s": partial(systems.rock, every_s=10.0),
    "Proactive, knows the GPUs": partial(systems.proactive, speeds=True),
    "RROD, blind to base models": systems.blind,
    "Motet": systems.motet,
    f"Motet, loads count {LOAD_WEIGHT:.0f} times": partial(systems.motet, load_weight=LOAD_WEIGHT),
    "bound": systems.bound,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--trace", type=Path, help="recorded requests (GenTD26): CSV, gzip; default: drawn ones")
    parser.add_argument("--load-latency", type=Path, help="recorded load times of adapters: CSV, gzip; default: drawn ones")
    parser.add_argument("--base-latency", type=Path, help="recorded load times of base models: CSV, gzip; default: 22 s")
    parser.add_argument("--fit", action="store_true", help="search the two constants on the first part instead; not recorded")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything, print the tables, return the figures."""
    setting = _setting(args)
    if args.fit:
        return _fit(setting)
    found = _table("One request at a time on each GPU", COMPARED, setting)
    figures = _figures(found)
    workers = {
        "beside": ("Adapters load beside the steps", BESIDE),
        "alike": ("Small pictures, batches of one adapter", ALIKE),
        "mixed": ("Small pictures, batches of any adapters", MIXED),
    }
    for name, (title, worker) in workers.items():
        names = ("Motet", "bound") if worker.mixed else ("RROD", "LRUMS", "Proactive", "ROCK", "Motet", "bound")
        some = {one: COMPARED[one] for one in names}
        figures[name] = {one: _row(its) for one, its in _table(title, some, replace(setting, worker=worker)).items()}
    figures["ablation"] = _ablation(setting, found)
    return {**figures, "recorded": args.trace is not None, "load": setting.load, "room_mb": setting.room_mb}


def _setting(args: argparse.Namespace) -> Setting:
    asked = jobs.recorded(args.trace) if args.trace is not None else jobs.drawn(800 if args.quick else 9000, 5)
    first = round(FITTED * len(asked))
    names = sorted({one.adapter for one in asked})
    loads = (
        machines.recorded_loads(names, args.load_latency, args.base_latency)
        if args.load_latency
        else machines.drawn_loads(names, 6)
    )
    return Setting(
        earlier=asked[:first], asked=asked[first:], loads=loads, load=LOAD, room_mb=ROOM_MB, worker=ONE,
        seeds=SEEDS[:1] if args.quick else SEEDS,
    )  # fmt: skip


def _fit(setting: Setting) -> dict[str, Any]:
    """The baselines' distance from table 3 for each pair of constants, on the first part."""
    rows: list[tuple[Any, ...]] = []
    for load in LOADS:
        for room_mb in ROOMS_MB:
            here = replace(setting, asked=setting.earlier, load=load, room_mb=room_mb, seeds=FIT_SEEDS)
            found = {name: measure(make, here) for name, make in BASELINES.items()}
            three = [x for one in found.values() for x in (one.mean_s, one.hit_rate, one.updates)]
            rows.append((f"{load}, {room_mb:.0f} MB", distance(found), *three))
    rows.sort(key=lambda row: row[1])
    columns = ["load, room", "distance", *(f"{name} {what}" for name in BASELINES for what in ("s", "hits", "updates"))]
    print(report.table("Distance from the paper's baselines", columns, rows))
    return {"best": rows[0][0], "distance": rows[0][1]}


def distance(found: Mapping[str, Outcome]) -> float:
    """Root mean square of the baselines' differences from the paper: hit rates, log of updates, log of latency over RROD's."""
    apart = []
    for name, (latency, hits, updates) in PAPER.items():
        if name in found:
            one = found[name]
            apart += [one.hit_rate - hits, log(one.updates / updates), log(one.mean_s / found["RROD"].mean_s / latency)]
    return sqrt(sum(x * x for x in apart) / len(apart))


def _table(title: str, make: Mapping[str, Callable[[], System]], setting: Setting) -> dict[str, Outcome]:
    found = {name: measure(one, setting) for name, one in make.items()}
    columns = ["", "mean s", "p99 s", "over RROD", "hit rate", "updates", "ahead", "s per load"]
    first = next(iter(found.values()))
    rows = [
        [name, one.mean_s, one.p99_s, one.mean_s / first.mean_s, one.hit_rate, one.updates, one.ahead, one.update_s]
        for name, one in found.items()
    ]
    print(report.table(f"\n{title}", columns, rows), flush=True)
    return found


def _row(one: Outcome) -> dict[str, Any]:
    return {
        "mean_s": round(one.mean_s, 2),
        "p99_s": round(one.p99_s, 1),
        "hit_rate": round(one.hit_rate, 3),
        "updates": round(one.updates, 1),
        "by_task_s": [round(mean_s, 1) for mean_s in one.per_kind_s],
    }


def _figures(found: Mapping[str, Outcome]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    shown = {"ROCK": "", "Motet": "motet_", f"Motet, loads count {LOAD_WEIGHT:.0f} times": "motet_weighted_", "bound": "bound_"}
    for name, prefix in shown.items():
        one = found[name]
        figures |= {
            f"{prefix}latency_vs_{rival.lower()}": round(one.mean_s / found[rival].mean_s - 1.0, 3) for rival in BASELINES
        }
        figures |= {f"{prefix}hit_rate": round(one.hit_rate, 3), f"{prefix}updates": round(one.updates, 1)}
    figures["distance"] = round(distance(found), 3)
    figures["systems"] = {name: _row(one) for name, one in found.items()}
    return figures


def _ablation(setting: Setting, found: Mapping[str, Outcome]) -> dict[str, Any]:
    without = _table("ROCK without one of its parts", {"ROCK": systems.rock, **systems.without()}, setting)
    inside = _table("Motet with one of ROCK's parts", {"Motet": systems.motet, **systems.with_parts()}, setting)
    return {
        "without": {name: _row(one) for name, one in without.items()},
        "inside": {n: _row(one) for n, one in inside.items()},
    }
