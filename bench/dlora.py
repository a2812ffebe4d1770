"""dLoRA's experiments (OSDI 2024, sections 7.3 to 7.5) on the twin: merging, moves between workers, and what they cost.

One worker with 8 adapters, an hour of arrivals: never, always, or as `policies.step.merge_decision` says merged; with the
paper's LoRA (einsum), with kernels like this project's, and without LoRA, the limit of all merging. Then 8 and 32 workers, five
and two minutes: round-robin over preloaded adapters, dispatch by pending time, and moves of requests on top. The same at 0.5 to
1.5 times what the workers can serve (`--capacity` runs only that). Constants were chosen with `--tune` on minutes from 301 of
the recorded day; results are of minutes from 901, and the load before those alone says which adapters are preloaded. `--data
DIR` (or MOTET_DATA) holds the traces; without it a power law with bursts and log-normal lengths are drawn.

The worker and the workloads: `bench.dlora_parts`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import report
from bench.dlora_parts import (
    FAIR,
    INVOCATIONS,
    LENGTHS,
    MERGE,
    PLAN,
    SLO_MS,
    SYSTEMS,
    Case,
    Outcome,
    System,
    capacity,
    measure,
    reachable,
    sustained,
)

TUNING, HELD_BACK = 301, 901  # first minutes
SKEWS = (1, 30, 100)
ALONE_S, TOGETHER_S, LARGE_S = 3600.0, 300.0, 120.0
COLUMNS = ("dlora", "merged-only", "unmerged-only, einsum", "reachable", "no LoRA", "ours, unmerged")
GUESSES = {
    "dlora": 3.9,
    "merged-only": 1.6,
    "unmerged-only, einsum": 3.6,
    "no LoRA": 4.4,
    "ours, unmerged": 4.1,
    "ours, in place": 4.2,
    "ours, shared memory": 4.2,
    "ours, a copy": 4.2,
    "ours, a copy where it pays": 4.2,
}
"""The rate in requests/s at which the search for the rate of the objective begins."""
UNMERGED, SHARED = "ours, unmerged", "ours, shared memory"
MERGING = {"ours, in place": UNMERGED, "ours, a copy": SHARED, "ours, a copy where it pays": SHARED}
"""Our kernels with merging, and the same without: in place as in the paper, which no worker does, and in a copy as a worker's
--merge on and auto, which takes memory that KV blocks and adapters share."""
LIGHT_LOAD = 2.0
ALIKE = ("unmerged-only, einsum", "no LoRA", UNMERGED)
"""Systems whose result does not depend on the skew, because it does not matter which adapter a request is for."""
RIVALS = ("merged-only", "unmerged-only, einsum")
PERFECT, FREE = "perfect balance", "perfect balance, no LoRA"
"""What dispatch and moves cannot go below without merging, and what nothing can."""
TOGETHER = (
    "dlora, moves",
    "round-robin",
    "round-robin, moves",
    "proactive-only",
    "by mode",
    "motet's dispatch",
    "motet's dispatch, moves",
    PERFECT,
    FREE,
)
LOADS = {"small": (2.5, 3.0, 3.5), "large": (3.0, 3.5)}  # requests per second of a worker
LONG_S, LONG_LOADS = 1200.0, (2.5, 3.0)
OF_CAPACITY = (0.5, 0.75, 1.0, 1.25, 1.5)
OTHERS = ("dlora, moves", "round-robin", "round-robin, moves", "proactive-only", "by mode")
SCALES, STRETCHED_LOAD = (0.5, 1.0, 1.5, 2.0), 2.0
LARGE = (32, 128)  # workers, adapters
SMALL = (8, 32)
spawn = multiprocessing.get_context("spawn")


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("MOTET_DATA"), help=f"directory of {INVOCATIONS} and {LENGTHS}"
    )
    parser.add_argument("--tune", action="store_true", help="compare constants on the tuning minutes instead; not recorded")
    parser.add_argument("--capacity", action="store_true", help="only the loads around what the workers can serve")
    parser.add_argument("--seed", type=int, default=1, help="of the draws; 0 is that of the tuning")


class Bench:
    """Runs cases side by side and keeps their outcomes."""

    def __init__(self, args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
        self.pool, self.quick, self.watch = pool, bool(args.quick), args.watch
        self.alone_s = args.seconds or (20.0 if args.quick else ALONE_S)
        self.base = Case(
            system=SYSTEMS["dlora"],
            rate=1.0,
            seconds=args.seconds or (20.0 if args.quick else TOGETHER_S),
            first_minute=HELD_BACK,
            seed=args.seed,
            data=Path(args.data) if args.data is not None else None,
        )

    def case(self, name: str, **more: Any) -> Case:
        """The usual case of a system."""
        return replace(self.base, system=SYSTEMS[name], **more)

    def run(self, **cases: Case) -> dict[str, Outcome]:
        """The outcomes of these cases."""
        runs = {name: self.pool.submit(measure, case) for name, case in cases.items()}
        return {name: run.result() for name, run in runs.items()}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything, print the tables, return the figures."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        bench = Bench(args, pool)
        if args.tune:
            _tune(bench)
            return {}
        figures = {} if args.capacity else _all(bench)
        figures |= _around_capacity(bench)
    return {
        **figures,
        "recorded_workload": args.data is not None,
        "seed": args.seed,
        "seconds": bench.base.seconds,
    }


def _all(bench: Bench) -> dict[str, Any]:
    """The paper's experiments."""
    figures = _alone(bench)
    figures |= _together(bench, *SMALL, "small")
    figures |= _together(bench, *((4, 8) if bench.quick else LARGE), "large")
    figures["stretched"] = _stretched(bench)
    figures["long"] = _long(bench)
    return figures


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- one worker


def _alone(bench: Bench) -> dict[str, Any]:
    skews = (30,) if bench.quick else SKEWS
    last = skews[-1]

    def search(name: str, skew: int) -> Future[tuple[Case, Outcome]]:
        case = bench.case(name, skew=skew, rate=GUESSES[name], seconds=bench.alone_s)
        return bench.pool.submit(sustained, case, tries=2 if bench.quick else 6)

    every = {name: search(name, last) for name in (*ALIKE, SHARED, *MERGING)}
    searches = {(name, skew): search(name, skew) for skew in skews for name in ("dlora", "merged-only")}
    alike = {name: future.result()[0].rate for name, future in every.items()}
    found: dict[str, Any] = {}
    rows = []
    for skew in skews:
        case, own = searches["dlora", skew].result()
        rates = {name: alike[name] for name in ALIKE}
        rates |= {"dlora": case.rate, "merged-only": searches["merged-only", skew].result()[0].rate}
        none = rates["unmerged-only, einsum"]
        rates["reachable"] = none + reachable(case) * (rates["no LoRA"] - none)
        at = bench.run(**{name: bench.case(name, skew=skew, rate=case.rate, seconds=case.seconds) for name in RIVALS})
        at |= {"dlora": own}
        found[str(skew)] = {
            "rates": {name: round(rate, 3) for name, rate in rates.items()},
            "latency_ms": {name: round(one.latency_ms, 1) for name, one in at.items()},
            "p90_ms": {name: round(one.p90_ms, 1) for name, one in at.items()},
            "queue_p99_s": {name: round(one.queue_p99_ms / 1000.0, 1) for name, one in at.items()},
            "merged_share": round(own.merged, 3),
            "switches": own.switches,
            "switch_overhead": round(own.overhead, 4),
        }
        rows.append([f"skew {skew}", *[rates[name] for name in COLUMNS], *[at[name].latency_ms for name in ("dlora", *RIVALS)],
                     own.merged, own.switches])  # fmt: skip
        _say(f"  skew {skew}: {found[str(skew)]}")
    bench.watch.mark()
    latencies = [f"{name}: ms per token" for name in ("dlora", *RIVALS)]
    print(
        report.table(
            f"one worker: requests/s with an average latency of {SLO_MS:.0f} ms per token, and latency at dLoRA's",
            ("", *COLUMNS, *latencies, "merged share", "switches"),
            rows,
        ),
        flush=True,
    )

    def best(measure: str, name: str, *, more: bool) -> float:
        """dLoRA compared with a rival, at the skew that is best for dLoRA, as in the paper's "up to"."""
        pairs = [(one[measure][name], one[measure]["dlora"]) for one in found.values()]
        return round(max(own / other if more else other / own for other, own in pairs), 3)

    limit = alike["no LoRA"]
    return {
        "vs_merged_only": best("rates", "merged-only", more=True),
        "vs_merged_only_limit": round(max(limit / one["rates"]["merged-only"] for one in found.values()), 3),
        "vs_merged_only_reachable": round(
            max(one["rates"]["reachable"] / one["rates"]["merged-only"] for one in found.values()), 3
        ),
        "vs_unmerged_only": best("rates", "unmerged-only, einsum", more=True),
        "vs_unmerged_only_reachable": round(
            max(one["rates"]["reachable"] for one in found.values()) / alike["unmerged-only, einsum"], 3
        ),
        "vs_unmerged_only_limit": round(limit / alike["unmerged-only, einsum"], 3),
        **_ours(bench, last, alike),
        "latency_vs_merged_only": best("latency_ms", "merged-only", more=False),
        "latency_vs_unmerged_only": best("latency_ms", "unmerged-only, einsum", more=False),
        "p90_vs_merged_only": best("p90_ms", "merged-only", more=False),
        "p90_vs_unmerged_only": best("p90_ms", "unmerged-only, einsum", more=False),
        "by_skew": found,
    }


def _ours(bench: Bench, skew: int, rates: Mapping[str, float]) -> dict[str, Any]:
    """Merging with our kernels, in place and in a copy, over not merging: at the rate of the objective, and at a light load."""
    names = (UNMERGED, SHARED, *MERGING)
    light = bench.run(**{name: bench.case(name, skew=skew, rate=LIGHT_LOAD, seconds=bench.alone_s) for name in names})
    bench.watch.mark()
    columns = ("", "requests/s at the objective", "at a light load: ms per token", "TTFT p99 ms", "merged share", "switches")
    rows = [[n, rates[n], light[n].latency_ms, light[n].ttft_p99_ms, light[n].merged, light[n].switches] for n in names]
    print(report.table(f"our kernels, skew {skew}, light load {LIGHT_LOAD} requests/s", columns, rows), flush=True)
    in_place, copy, paying = (round(rates[name] / rates[without], 3) for name, without in MERGING.items())
    return {
        "in_place_vs_our_unmerged": in_place,
        "copy_vs_our_unmerged": copy,
        "paying_copy_vs_our_unmerged": paying,
        "light_load_latency_ms": {name: round(one.latency_ms, 1) for name, one in light.items()},
        "light_load_ttft_p99_ms": {name: round(one.ttft_p99_ms, 1) for name, one in light.items()},
    }


# ---- several workers


# in one piece: a measurement is read from top to bottom, from its cases to its figures
def _together(bench: Bench, workers: int, adapters: int, size: str) -> dict[str, Any]:
    """Waits by system and load. The figures are those of the load at which dLoRA gains most, as in the paper's "up to"."""
    more: dict[str, Any] = {"workers": workers, "adapters": adapters, "skew": 10}
    if size == "large":
        more["seconds"] = min(bench.base.seconds, LARGE_S)
    found: dict[float, dict[str, Outcome]] = {}
    runs = {
        (each, name): bench.pool.submit(measure, bench.case(name, rate=each * workers, **more))
        for each in LOADS[size][: 1 if bench.quick else None]
        for name in TOGETHER
    }
    columns = ("", "queueing ms", "p99", "latency ms/token", "TTFT p99 ms", "moves", "plans", "plan ms", "p99")
    for (each, name), future in runs.items():
        found.setdefault(each, {})[name] = future.result()
    for each, at in found.items():
        rows = [[name, *_waits(one)] for name, one in at.items()]
        print(
            report.table(f"{workers} workers, {adapters} adapters, {each * workers:.1f} requests/s", columns, rows), flush=True
        )
    bench.watch.mark()
    suffix = "" if size == "large" else f"_{workers}"
    kept = [at for at in found.values() if at["dlora, moves"].latency_ms <= SLO_MS] or list(found.values())

    def most(name: str, part: str, over: str = "dlora, moves") -> float:
        return round(max(getattr(at[name], part) / max(getattr(at[over], part), 1e-9) for at in kept), 3)

    figures: dict[str, Any] = {
        f"queueing_vs_rr{suffix}": most("round-robin", "queue_ms"),
        f"queueing_vs_proactive{suffix}": most("proactive-only", "queue_ms"),
        f"latency_vs_rr{suffix}": most("round-robin", "latency_ms"),
        f"latency_vs_proactive{suffix}": most("proactive-only", "latency_ms"),
        f"latency_vs_rr_limit{suffix}": most("round-robin", "latency_ms", over=PERFECT),
        f"latency_vs_proactive_limit{suffix}": most("proactive-only", "latency_ms", over=PERFECT),
        f"rr_vs_rr_with_moves{suffix}": most("round-robin", "queue_ms", over="round-robin, moves"),
        f"overhead{suffix}": round(max(at["dlora, moves"].overhead for at in kept), 5),
        f"by_load{suffix}": {
            str(each): {name: {"queue_ms": round(one.queue_ms, 1), "latency_ms": round(one.latency_ms, 1), "moves": one.moves}
                        for name, one in at.items()}
            for each, at in found.items()
        },
    }  # fmt: skip
    if size == "large":
        planned = [one for at in found.values() for one in at.values() if one.plans]
        figures["plan_ms_32"] = round(
            sum(one.plan_ms * one.plans for one in planned) / max(1, sum(o.plans for o in planned)), 2
        )
        figures["plan_p99_ms_32"] = round(max((one.plan_p99_ms for one in planned), default=0.0), 2)
    return figures


def _waits(one: Outcome) -> list[object]:
    return [
        one.queue_ms,
        one.queue_p99_ms,
        one.latency_ms,
        one.ttft_p99_ms,
        one.moves,
        one.plans,
        one.plan_ms,
        one.plan_p99_ms,
    ]


def _around_capacity(bench: Bench) -> dict[str, Any]:
    """Queueing delay, mean and P99, at 0.5 to 1.5 times the capacity, and of more workers at the capacity itself.

    The figures compare Motet's dispatch with the best of the others, moves included, and with perfect balance.
    """
    small, large = ((4, 8), (6, 12)) if bench.quick else (SMALL, LARGE)
    each = capacity(bench.base)
    runs: dict[str, dict[str, Future[Outcome]]] = {}
    for (workers, adapters), seconds, loads in (
        (small, bench.base.seconds, OF_CAPACITY[1:4:2] if bench.quick else OF_CAPACITY),
        (large, min(bench.base.seconds, LARGE_S), (1.0,)),
    ):
        for load in loads:
            more = {"workers": workers, "adapters": adapters, "skew": 10, "rate": load * each * workers, "seconds": seconds}
            names = (*OTHERS, "motet's dispatch", PERFECT)
            runs[f"{workers} workers, {load:g}"] = {n: bench.pool.submit(measure, bench.case(n, **more)) for n in names}
    found: dict[str, Any] = {}
    for label, futures in runs.items():
        at = {name: future.result() for name, future in futures.items()}
        rows = [[name, one.queue_ms, one.queue_p99_ms, one.latency_ms, one.moves] for name, one in at.items()]
        title = f"{label} x capacity"
        print(report.table(title, ("", "queueing ms", "p99", "latency ms/token", "moves"), rows), flush=True)
        found[label] = {
            part: {name: round(getattr(one, part), 1) for name, one in at.items()} for part in ("queue_ms", "queue_p99_ms")
        }
    bench.watch.mark()

    def over(part: str, names: Sequence[str]) -> dict[str, float]:
        pairs = {label: (one[part]["motet's dispatch"], min(one[part][n] for n in names)) for label, one in found.items()}
        return {label: round(own / max(best, 1e-9), 3) for label, (own, best) in pairs.items()}

    figures = {
        "queueing_vs_best_rival": over("queue_ms", OTHERS),
        "queueing_p99_vs_best_rival": over("queue_p99_ms", OTHERS),
        "queueing_vs_perfect": over("queue_ms", (PERFECT,)),
    }
    title = "queueing of Motet's dispatch over that of the best of the others and of perfect balance"
    columns = ("", "mean / best", "p99 / best", "mean / perfect")
    print(report.table(title, columns, [[label, *[one[label] for one in figures.values()]] for label in found]), flush=True)
    return {"around_capacity": found, "capacity_per_worker": round(each, 3), **figures}


def _stretched(bench: Bench) -> dict[str, Any]:
    """Average latency by the length of requests, at one rate (the paper's Fig. 11b)."""
    names = ("dlora, moves", "round-robin", "proactive-only", PERFECT, FREE)
    scales = (1.0,) if bench.quick else SCALES
    return _latencies(bench, "by length", names, {str(scale): {"each": STRETCHED_LOAD, "scale": scale} for scale in scales})


def _long(bench: Bench) -> dict[str, Any]:
    """Average latency where the queue of an overloaded worker has time to grow."""
    names = ("dlora, moves", "round-robin", "proactive-only", "motet's dispatch", PERFECT, FREE)
    seconds = bench.base.seconds if bench.quick else LONG_S
    loads = LONG_LOADS[: 1 if bench.quick else None]
    return _latencies(
        bench,
        f"{seconds / 60:g} minutes, by requests/s of a worker",
        names,
        {str(each): {"each": each, "seconds": seconds} for each in loads},
    )


def _latencies(bench: Bench, title: str, names: Sequence[str], cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{case: {system: average latency in ms per token}} of the small cluster. `each`: requests/s of a worker."""
    workers, adapters = (4, 8) if bench.quick else SMALL
    found: dict[str, Any] = {}
    for label, more in cases.items():
        changed = {key: value for key, value in more.items() if key != "each"}
        usual: dict[str, Any] = {"workers": workers, "adapters": adapters, "skew": 10, "rate": more["each"] * workers}
        at = bench.run(**{name: bench.case(name, **usual, **changed) for name in names})
        found[label] = {name: round(one.latency_ms, 1) for name, one in at.items()}
    rows = [[label, *one.values()] for label, one in found.items()]
    print(report.table(f"{workers} workers: average latency, ms per token, {title}", ("", *names), rows), flush=True)
    return found


# ---- constants


def _tune(bench: Bench) -> None:
    """Average latencies by constants, on the minutes reserved for tuning."""
    tuning: dict[str, Any] = {"first_minute": TUNING, "seed": 0}
    merges = {
        f"lowest {lowest:g}, starving +{gap:g}, relief {relief:g}, drain {drain:g}": System(
            merge=replace(MERGE, lowest=lowest, alpha=lowest, starving=MERGE.credit + gap, relief=relief, drain=drain)
        )
        for lowest in (0.6, 0.8, 0.9)
        for gap in (50_000.0, 150_000.0)
        for relief in (1.0, 8.0)
        for drain in (0.5, 10.0)
    }
    merges |= {f"merged only, {turn} steps in turn": System(merge="always", turn=turn) for turn in (100, 300, 1000)}
    skews = (1, 30, 100)
    cases = {
        (name, skew): bench.pool.submit(
            measure,
            replace(bench.base, system=system, skew=skew, rate=4.0, seconds=bench.alone_s / 2, **tuning),
        )
        for name, system in merges.items()
        for skew in skews
    }
    rows = [[name, *[cases[name, skew].result().latency_ms for skew in skews]] for name in merges]
    rows.sort(key=lambda row: sum(row[1:]))  # type: ignore[arg-type]
    columns = ("", *[f"skew {skew}" for skew in skews])
    print(report.table("one worker, 4 requests/s: latency, ms per token", columns, rows), flush=True)
    plans = {
        f"wait {wait:g} ms, eta {eta:g} ms, gamma {gamma:g}, top {top}": replace(
            PLAN, wait_ms=wait, plan=replace(PLAN.plan, eta_ms=eta, gamma=gamma, top=top)
        )
        for wait in (15.0, 50.0, 200.0)
        for eta in (5.0, 50.0, 150.0)
        for gamma in (1.0, 1.1)
        for top in (2, 4)
    }
    more: dict[str, Any] = {"workers": 8, "adapters": 32, "skew": 10, "rate": 26.0, "seconds": 120.0}
    waits = {
        name: bench.pool.submit(
            measure, replace(bench.base, system=System(merge=FAIR, dispatch="turn", balance=config), **more, **tuning)
        )
        for name, config in plans.items()
    }
    lines = [[name, one.result().queue_ms, one.result().latency_ms, one.result().moves] for name, one in waits.items()]
    lines.sort(key=lambda row: float(row[1]))  # type: ignore[arg-type]
    print(
        report.table(
            "8 workers, dispatched in turn: queueing ms, latency ms per token, moves",
            ("", "queueing", "latency", "moves"),
            lines,
        )
    )
