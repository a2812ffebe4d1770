"""dLoRA's experiments (OSDI 2024, sections 7.3 to 7.5) on the twin: merging, moves between workers, and what they cost.

One worker with 8 adapters: never, always, or as `policies.merge_decision` says merged; with the paper's LoRA (einsum) and
with kernels like this project's. Then 8 and 32 workers: round-robin over preloaded adapters, dispatch by pending time, and
moves of requests on top. Constants were chosen with `--tune` on minutes 301 to 305 of the recorded day; results are from
minutes 901 to 905, and the load before those alone says which adapters are preloaded. `--data DIR` (or MOTET_DATA) holds the
traces; without it a power law with bursts and log-normal lengths are drawn.

The worker and the workloads: `bench.dlora_parts`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import report
from bench.dlora_parts import INVOCATIONS, LENGTHS, MERGE, PLAN, SLO_MS, SYSTEMS, Case, Outcome, System, capacity, measure

TUNING, HELD_BACK = 301, 901  # first minutes
SKEWS = (1, 10, 30, 100)
ALONE = ("dlora", "merged-only", "unmerged-only, einsum", "ours, unmerged", "ours, merging")
MERGING = ("dlora", "ours, merging")
TOGETHER = (
    "dlora",
    "round-robin",
    "round-robin, moves",
    "proactive-only",
    "motet's dispatch",
    "motet's dispatch, moves",
)
LOADS = (2.5, 3.0, 3.5, 4.0)  # requests per second of a worker
SCALES = (0.5, 1.0, 2.0)
LOAD = 0.95  # of the highest rate that keeps the objective
LARGE = (32, 128)  # workers, adapters
SMALL = (8, 32)
spawn = multiprocessing.get_context("spawn")


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("MOTET_DATA"), help=f"directory of {INVOCATIONS} and {LENGTHS}"
    )
    parser.add_argument("--tune", action="store_true", help="compare constants on the tuning minutes instead; not recorded")
    parser.add_argument("--seed", type=int, default=1, help="of the draws; 0 is that of the tuning")


class Bench:
    """Runs cases side by side."""

    def __init__(self, args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
        self.pool, self.quick, self.watch = pool, bool(args.quick), args.watch
        self.base = Case(
            system=SYSTEMS["dlora"],
            rate=1.0,
            seconds=args.seconds or (20.0 if args.quick else 300.0),
            first_minute=HELD_BACK,
            seed=args.seed,
            data=Path(args.data) if args.data is not None else None,
        )

    def case(self, name: str, **more: Any) -> Case:
        """The usual case of a system."""
        return replace(self.base, system=SYSTEMS[name], **more)

    def run(self, **cases: Case) -> dict[str, Outcome]:
        """The outcomes of some cases."""
        runs = {name: self.pool.submit(measure, case) for name, case in cases.items()}
        return {name: run.result() for name, run in runs.items()}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything, print the tables, return the figures."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        bench = Bench(args, pool)
        if args.tune:
            _tune(bench)
            return {}
        figures = _alone(bench)
        figures |= _together(bench, *SMALL, "small")
        figures |= _together(bench, *((4, 8) if args.quick else LARGE), "large")
        figures["stretched"] = _stretched(bench)
    return {
        **figures,
        "recorded_workload": args.data is not None,
        "seed": args.seed,
        "seconds": bench.base.seconds,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- one worker


def _alone(bench: Bench) -> dict[str, Any]:
    skews = (30,) if bench.quick else SKEWS
    within = 0.5 if bench.quick else 0.04
    searches: dict[tuple[int, str], Future[float]] = {
        (skew, name): bench.pool.submit(capacity, bench.case(name, skew=skew), 1.0, 10.0, within)
        for skew in skews
        for name in ALONE
    }
    found: dict[str, Any] = {}
    rates, latencies, shares = [], [], []
    for skew in skews:
        rate = {name: searches[skew, name].result() for name in ALONE}
        at = bench.run(**{name: bench.case(name, skew=skew, rate=rate["dlora"]) for name in ALONE})
        own = bench.run(**{name: bench.case(name, skew=skew, rate=rate[name]) for name in MERGING})
        at_load = LOAD * rate["ours, unmerged"]
        ours = bench.run(**{name: bench.case(name, skew=skew, rate=at_load) for name in ("ours, unmerged", "ours, merging")})
        rates.append([f"skew {skew}", *[rate[name] for name in ALONE]])
        latencies.append([f"skew {skew}", *[at[name].latency_ms for name in ALONE]])
        shares.append([f"skew {skew}", *[v for one in own.values() for v in (one.merged, one.switches, one.overhead)]])
        found[str(skew)] = {
            "rates": {name: round(value, 3) for name, value in rate.items()},
            "latency_ms": {name: round(one.latency_ms, 1) for name, one in at.items()},
            "p90_ms": {name: round(one.p90_ms, 1) for name, one in at.items()},
            "merged_share": round(own["dlora"].merged, 3),
            "switch_overhead": round(own["dlora"].overhead, 4),
            "ours_merging_latency_vs_unmerged": round(ours["ours, merging"].latency_ms / ours["ours, unmerged"].latency_ms, 3),
        }
        _say(f"  skew {skew}: {found[str(skew)]}")
    bench.watch.mark()
    print(report.table(f"one worker: requests/s with an average latency of {SLO_MS:.0f} ms per token", ("", *ALONE), rates))
    print(report.table("one worker: average latency at dLoRA's rate, ms per token", ("", *ALONE), latencies))
    columns = ("", "merged share", "switches", "overhead", "ours: merged share", "switches", "overhead")
    print(report.table("one worker: steps that are merged", columns, shares), flush=True)

    def best(measure: str, name: str, *, more: bool) -> float:
        """dLoRA over a rival at the skew that is best for dLoRA, as the paper's "up to"."""
        pairs = [(one[measure][name], one[measure]["dlora"]) for one in found.values()]
        return round(max(own / other if more else other / own for other, own in pairs), 3)

    gains = [one["rates"]["ours, merging"] / one["rates"]["ours, unmerged"] for one in found.values()]
    return {
        "vs_merged_only": best("rates", "merged-only", more=True),
        "vs_unmerged_only": best("rates", "unmerged-only, einsum", more=True),
        "vs_our_unmerged": round(max(gains), 3),
        "latency_vs_merged_only": best("latency_ms", "merged-only", more=False),
        "latency_vs_unmerged_only": best("latency_ms", "unmerged-only, einsum", more=False),
        "p90_vs_merged_only": best("p90_ms", "merged-only", more=False),
        "p90_vs_unmerged_only": best("p90_ms", "unmerged-only, einsum", more=False),
        "by_skew": found,
    }


# ---- several workers


def _together(bench: Bench, workers: int, adapters: int, size: str) -> dict[str, Any]:
    """Waits by system and load. The figures are of the load at which dLoRA gains most, as the paper's "up to"."""
    more: dict[str, Any] = {"workers": workers, "adapters": adapters, "skew": 10}
    if size == "large":
        more["seconds"] = min(bench.base.seconds, 120.0)
    found: dict[float, dict[str, Outcome]] = {}
    runs = {
        (each, name): bench.pool.submit(measure, bench.case(name, rate=each * workers, **more))
        for each in (LOADS[:1] if bench.quick else LOADS)
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
    kept = [at for at in found.values() if at["dlora"].latency_ms <= SLO_MS] or list(found.values())

    def most(name: str, part: str, over: str = "dlora") -> float:
        return round(max(getattr(at[name], part) / max(getattr(at[over], part), 1e-9) for at in kept), 3)

    figures: dict[str, Any] = {
        f"queueing_vs_rr{suffix}": most("round-robin", "queue_ms"),
        f"queueing_vs_proactive{suffix}": most("proactive-only", "queue_ms"),
        f"latency_vs_rr{suffix}": most("round-robin", "latency_ms"),
        f"latency_vs_proactive{suffix}": most("proactive-only", "latency_ms"),
        f"rr_vs_rr_with_moves{suffix}": most("round-robin", "queue_ms", over="round-robin, moves"),
        f"overhead{suffix}": round(max(at["dlora"].overhead for at in kept), 5),
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


def _stretched(bench: Bench) -> dict[str, Any]:
    """Average latency by the length of requests, at a rate of equally many tokens (the paper's Fig. 11b)."""
    workers, adapters = (4, 8) if bench.quick else SMALL
    names = ("dlora", "round-robin", "proactive-only")
    rows: list[list[object]] = []
    found: dict[str, Any] = {}
    for scale in (1.0,) if bench.quick else SCALES:
        more: dict[str, Any] = {"workers": workers, "adapters": adapters, "skew": 10, "scale": scale}
        at = bench.run(**{name: bench.case(name, rate=LOADS[1] * workers / scale, **more) for name in names})
        found[str(scale)] = {name: round(one.latency_ms, 1) for name, one in at.items()}
        rows.append([f"{scale:g} x", *[one.latency_ms for one in at.values()]])
    print(report.table(f"{workers} workers: average latency by length, ms per token", ("lengths", *names), rows), flush=True)
    return found


# ---- constants


def _tune(bench: Bench) -> None:
    """Average latencies on the tuning minutes, by constants."""
    tuning: dict[str, Any] = {"first_minute": TUNING, "seed": 0}
    merges = {
        f"alpha {alpha:g}, beta {alpha - gap:g}, period {period}, credit {credit:g}, starving {starving:g} x": replace(
            MERGE, alpha=alpha, beta=alpha - gap, period=period, credit=credit, starving=starving * credit, normal=credit
        )
        for alpha in (0.6, 0.75)
        for gap in (0.1, 0.3)
        for period in (20, 100)
        for credit in (2000.0, 20_000.0)
        for starving in (1.05, 1.2)
    }
    cases = {
        (name, skew): bench.pool.submit(
            measure,
            replace(bench.base, system=System(merge=config), skew=skew, rate=4.0, **tuning),
        )
        for name, config in merges.items()
        for skew in (10, 30, 100)
    }
    rows = [[name, *[cases[name, skew].result().latency_ms for skew in (10, 30, 100)]] for name in merges]
    rows.sort(key=lambda row: sum(row[1:]))  # type: ignore[arg-type]
    print(report.table("one worker, 4 requests/s: latency, ms per token", ("", "skew 10", "30", "100"), rows), flush=True)
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
            measure, replace(bench.base, system=System(merge=MERGE, dispatch="turn", balance=config), **more, **tuning)
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
