"""Chameleon's experiment (sections 5.1 to 5.4) on the twin: adapter memory and queues of one worker.

One Llama-7B on an A40; 100 adapters of ranks 8 to 128 in equal shares, within a rank by a power law; lengths of the Azure
conversation trace; Poisson arrivals. The objective is a TTFT of five times the mean time of a request alone. The rivals are
S-LoRA (first come, first served; adapters copied ahead for queued requests; none kept), SJF, Chameleon without scheduler or
cache, LRU, FairShare, GDSF, static queues, and Chameleon; all of them are policies of the same worker core. `--data DIR` (or
MOTET_DATA) holds the traces; without it log-normal lengths are drawn. Constants were chosen with seeds below 10 and the even
rows of the trace; what is reported comes from other seeds and the odd rows.

Upper bounds run beside the policies: copies that take no time, and evictions that know the adapters' true popularity or the
time of each next request. The foresight of a scheduler over several workers: `bench.chameleon_fleet`.

The worker and how it is calibrated: `bench.chameleon_parts`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.chameleon_fleet import WORKERS, measure_fleet, measure_foreseeing_fleet
from bench.chameleon_parts import (
    HIGH,
    INSTRUCTIONS,
    MEMORY_GIB,
    POPULARITY,
    TIGHT_GIB,
    TRACE,
    Case,
    Outcome,
    Policy,
    mean,
    measure,
    waiting,
)
from bench.watch import Watch

SLO_FACTOR = 5.0
LOADS = (6.0, 8.0, 9.0)
PREDICTIONS = ("perfect", "real", "none")
PAPER = {"load": 8.6, "lora_50": 1.69, "lora_500": 2.60, "slo_s": 5.0}
POLICIES = {
    "s-lora": Policy(eviction="none"),
    "sjf": Policy(eviction="none", queues="sjf"),
    "chameleon, no cache": Policy(eviction="none", queues="chameleon"),
    "chameleon, no scheduler": Policy(eviction="score"),
    "static queues": Policy(eviction="score", queues="static"),
    "chameleon": Policy(eviction="score", queues="chameleon"),
    "lru": Policy(eviction="lru"),
    "fair-share": Policy(eviction="fair-share"),
    "gdsf": Policy(eviction="gdsf"),
    "motet": Policy(eviction="next-use"),
    "motet, put off": Policy(eviction="next-use", queues="motet"),
}
OURS = ("motet", "motet, put off")
SAME_MEMORY = ("lru", "fair-share", "gdsf")
"""Systems that behave like "chameleon, no scheduler" where all adapters fit, so their breaking loads are not searched."""
SEARCH_S = 200.0
"""The breaking loads are left out when less time than this is left."""
FREE = "copies that take no time"
"""The variant without the time of copies. No cache and no prefetch can do better with the same queue."""
FUTURE, POPULARITY_KNOWN = "future known", "popularity known"
NO_COPY_MS = 1e-3
EVICTIONS = ("none", "lru", "fair-share", "score", "gdsf", "next-use")
EVICTIONS_S = 600.0
"""Counted time of the runs that compare evictions: a cache has to fill before it can lose anything."""
spawn = multiprocessing.get_context("spawn")


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--seed", type=int, default=10, help="the first of the seeds; below 10 are those of the tuning")
    parser.add_argument("--plots", type=Path, help="with --quick: only draw the plot of docs/adapter-memory.md into this file")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("MOTET_DATA"), help=f"directory of {TRACE}, {POPULARITY} and {INSTRUCTIONS}"
    )


def breaking_load(case: Case, seeds: tuple[int, ...], low: float = 7.0, high: float = 12.0, within: float = 0.1) -> float:
    """Requests/s at which the mean P99 TTFT over seeds reaches the objective."""
    while high - low > within:
        rate = (low + high) / 2
        p99 = np.mean([measure(replace(case, rate=rate, seed=seed)).ttft_p99 for seed in seeds])
        if p99 <= case.slo_s * 1e3:
            low = rate
        else:
            high = rate
    print(f"  {case.policy.eviction}, {case.policy.queues}: {low:.2f} requests/s", file=sys.stderr, flush=True)
    return (low + high) / 2


class Bench:
    """Runs cases side by side and keeps their outcomes."""

    def __init__(self, args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
        self.pool, self.watch, self.quick = pool, args.watch, bool(args.quick)
        self.seeds = tuple(range(args.seed, args.seed + (1 if args.quick else 6)))
        data = Path(args.data) if args.data is not None else None
        seconds = args.seconds or (8.0 if args.quick else 300.0)
        self.base = Case(policy=POLICIES["s-lora"], seconds=seconds, data=data, seed=args.seed)
        alone = replace(self.base, rate=0.05, seconds=200.0 if args.quick and args.plots is None else 10_000.0)
        self.slo_s = SLO_FACTOR * measure(alone).e2e / 1e3
        self.base = replace(self.base, slo_s=self.slo_s)

    def all(
        self, cases: dict[Any, Case], name: str, seeds: int, run: Callable[[Case], Outcome] = measure
    ) -> dict[Any, Outcome]:
        """Run every case for some of the seeds. Cases are left out when time is short."""
        if self.watch.left_s < 40.0 and not self.quick:
            self.watch.skip(name)
            return {}
        runs = {
            key: [self.pool.submit(run, replace(case, seed=seed)) for seed in self.seeds[:seeds]] for key, case in cases.items()
        }
        found = {key: mean(one.result() for one in ones) for key, ones in runs.items()}
        self.watch.mark()
        return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything, print the tables, return the figures."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        bench = Bench(args, pool)
        if args.plots is not None:
            _plot(bench, args.plots)
            return {"plots": str(args.plots)}
        figures = _run(bench, args.watch)
    return figures | {"seconds": bench.base.seconds, "seed": args.seed, "recorded_workload": bench.base.data is not None}


# in one piece: a measurement is read from top to bottom, from its cases to its figures
def _run(bench: Bench, watch: Watch) -> dict[str, Any]:
    base = bench.base
    names = ("s-lora", "chameleon", "motet") if bench.quick else tuple(POLICIES)
    loads = (HIGH,) if bench.quick else LOADS
    cases = {(name, load): replace(base, policy=POLICIES[name], rate=load) for name in names for load in loads}
    free = replace(base, policy=POLICIES["motet"], copy_ms=NO_COPY_MS)
    cases |= {(FREE, load): replace(free, rate=load) for load in loads}
    ones = {n: replace(base, adapters=n, only_rank=32, rate=8.0) for n in (1, 50, 500)}
    found = bench.all(cases, "loads", 6)
    lora = bench.all(ones, "S-LoRA's own figures", 6)
    searched = {name: replace(base, policy=POLICIES[name]) for name in names if name not in SAME_MEMORY}
    searched[FREE] = free
    lost: dict[str, float] = {}
    if watch.left_s > SEARCH_S and not bench.quick:
        breaks = {name: bench.pool.submit(breaking_load, case, bench.seeds[:3]) for name, case in searched.items()}
        lost = {name: future.result() for name, future in breaks.items()}
    elif not bench.quick:
        watch.skip("the loads at which policies break")
    s_lora = {load: found["s-lora", load] for load in loads}
    for load in loads:
        rows: list[list[object]] = [
            [
                name,
                (one := found[name, load]).ttft_p50 / 1e3,
                one.ttft_p99 / 1e3,
                f"{_less(one.ttft_p50, s_lora[load].ttft_p50):+.1f}",
                f"{_less(one.ttft_p99, s_lora[load].ttft_p99):+.1f}",
                100 * one.hit_rate,
                one.tpot_p99,
            ]
            for name in (*names, FREE)
        ]
        columns = ("policy", "TTFT p50 s", "p99 s", "p50 %", "p99 %", "needs no copy %", "TPOT p99 ms")
        print(report.table(f"{load:g} requests/s, beside S-LoRA", columns, rows), flush=True)
    figures: dict[str, Any] = {
        "slo_s": round(bench.slo_s, 3),
        "policies": {f"{name}@{load:g}": _rounded(one) for (name, load), one in found.items()},
    }
    figures |= {f"lora_{n}": round(lora[n].ttft_p99 / lora[1].ttft_p99, 3) for n in (50, 500) if lora}
    if lost:
        rows = [[name, load, load / lost["s-lora"]] for name, load in lost.items()]
        print(report.table(f"requests/s at which P99 TTFT is {bench.slo_s:.2f} s", ("policy", "requests/s", "x S-LoRA"), rows))
        figures |= {"breaks_at": {name: round(load, 2) for name, load in lost.items()}}
        figures["load_vs_free_copies"] = round(lost["motet"] / lost[FREE], 3)
        figures["load_vs_slora"] = round(lost["motet"] / lost["s-lora"], 3)
        figures["s_lora_load_error"] = round(lost["s-lora"] / PAPER["load"] - 1, 3)
    ours, others = found["motet", HIGH], [found[name, HIGH] for name in names if name not in OURS]
    figures |= {
        "ttft_p99_vs_slora": round(ours.ttft_p99 / s_lora[HIGH].ttft_p99, 4),
        "ttft_p50_vs_slora": round(ours.ttft_p50 / s_lora[HIGH].ttft_p50, 4),
        "hit_rate": round(ours.hit_rate, 4),
        "best_other_policy_p99_vs_ours": round(min(one.ttft_p99 for one in others) / ours.ttft_p99, 4),
    }
    for load in loads:
        rival, one, bound = s_lora[load], found["motet", load], found[FREE, load]
        figures |= {
            f"ttft_p99_vs_slora@{load:g}": round(one.ttft_p99 / rival.ttft_p99, 4),
            f"ttft_p50_vs_slora@{load:g}": round(one.ttft_p50 / rival.ttft_p50, 4),
            f"p99_gain_of_free_copies@{load:g}": _share(rival, one, bound),
        }
    figures.setdefault("load_vs_slora", None)
    figures |= _prediction(bench) | _fleet(bench)
    if not bench.quick:
        figures |= _more(bench) | _evictions(bench)
    return figures


def _share(worst: Outcome, ours: Outcome, best: Outcome) -> float:
    """The saved P99 TTFT, `worst - ours`, as a share of `worst - best`."""
    return round((worst.ttft_p99 - ours.ttft_p99) / (worst.ttft_p99 - best.ttft_p99), 4)


def _evictions(bench: Bench) -> dict[str, Any]:
    """Compares all eviction policies with the same queue, where not all adapters fit."""
    settings = [("U-P", 100, TIGHT_GIB)]
    settings += [(popularity, n, MEMORY_GIB) for n in (500, 1000, 200) for popularity in ("U-U", "U-P", "P-P")]
    settings.append(("U-P", 10, MEMORY_GIB))
    if bench.base.data is not None:
        settings.insert(1, ("trace", 0, TIGHT_GIB))
    figures: dict[str, Any] = {}
    rows: list[list[object]] = []
    for popularity, n, memory in settings:  # the most telling ones first
        rate = 6.0 if popularity == "U-U" and n >= 500 else 7.5  # more than that overloads every policy
        setting = replace(
            bench.base, popularity=popularity, adapters=n or 100, memory_gib=memory, rate=rate, seconds=EVICTIONS_S
        )
        cases: dict[str, Case] = {name: replace(setting, policy=Policy(eviction=name)) for name in EVICTIONS}
        cases[FUTURE] = replace(setting, policy=Policy(eviction="lru", knows="future"))
        if n:
            cases[POPULARITY_KNOWN] = replace(setting, policy=Policy(eviction="lru", knows="popularity"))
        cases[FREE] = replace(setting, policy=Policy(eviction="next-use"), copy_ms=NO_COPY_MS)
        title = f"{popularity} {n or 'GenTD26'} adapters, {memory:g} GiB, {rate:g}/s"
        found = bench.all(cases, title, 4)
        for name, one in found.items():
            rows.append([title, name, one.ttft_p50 / 1e3, one.ttft_p99 / 1e3, 100 * one.hit_rate])
        if found:
            others = min(found[name].ttft_p99 for name in EVICTIONS if name != "next-use")
            figures[title] = {name: _rounded(one) for name, one in found.items()} | {
                "best_other_vs_ours": round(others / found["next-use"].ttft_p99, 4),
                "gain_of_future": _share(found["none"], found["next-use"], found[FUTURE]),
                "gain_of_popularity": _share(found["none"], found["next-use"], found[POPULARITY_KNOWN]) if n else None,
            }
    print(report.table("evictions", ("setting", "eviction", "TTFT p50 s", "p99 s", "needs no copy %"), rows))
    return {"evictions": figures}


def _fleet(bench: Bench) -> dict[str, Any]:
    """Compares foresight on several workers: none, each worker's own, and a scheduler's."""
    base = replace(bench.base, policy=Policy(eviction="gdsf", prefetch=0), rate=3.0 * WORKERS, memory_gib=10.0)
    loads = {"at intervals": replace(base, popularity="periodic", adapters=800), "U-P": replace(base, adapters=1000)}
    if bench.base.data is not None:
        loads["GenTD26"] = replace(base, popularity="trace")
    if bench.quick:
        loads = {"at intervals": replace(loads["at intervals"], adapters=100)}
    foreseeing = replace(base.policy, foresight="on")
    own = {(name, "none"): case for name, case in loads.items()}
    own |= {(name, "each worker's"): replace(case, policy=foreseeing) for name, case in loads.items()}
    found = bench.all(own, "foresight of workers", 2, measure_fleet)
    foreseen = {(name, "the scheduler's"): case for name, case in loads.items()}
    found |= bench.all(foreseen, "foresight of a scheduler", 2, measure_foreseeing_fleet)
    rows: list[list[object]] = [
        [name, who, one.ttft_p50, one.ttft_p99, one.e2e / 1e3, 100 * one.hit_rate, one.foreseen]
        for (name, who), one in sorted(found.items())
    ]
    columns = ("requests", "foresight", "TTFT p50 ms", "p99 ms", "request s", "needs no copy %", "foreseen copies each")
    print(report.table(f"foresight, {WORKERS} workers, {base.rate:g} requests/s", columns, rows))
    return {"fleet": {f"{name}, {who}": _rounded(one) for (name, who), one in found.items()}}


def _prediction(bench: Bench) -> dict[str, Any]:
    """The queues that use predictions: with true lengths, with the length predictor's, and with none."""
    queues = {"sjf": "sjf", "chameleon": "chameleon", "motet": "motet"}
    if bench.quick:
        queues = {"chameleon": "chameleon"}
    cases = {
        (name, kind): replace(bench.base, rate=HIGH, policy=Policy(eviction="next-use", queues=which), predict=kind)
        for name, which in queues.items()
        for kind in PREDICTIONS
    }
    if not bench.quick:
        cases["fcfs", "none"] = replace(bench.base, rate=HIGH, policy=POLICIES["motet"], predict="none")
    found = bench.all(cases, "prediction", 6)
    rows: list[list[object]] = [
        [f"{name}, {kind}", one.ttft_p50 / 1e3, one.ttft_p99 / 1e3, one.tpot_p99, one.e2e / 1e3]
        for (name, kind), one in found.items()
    ]
    title = f"queues by what they are told of output lengths, {HIGH:g} requests/s"
    print(report.table(title, ("queue, prediction", "TTFT p50 s", "p99 s", "TPOT p99 ms", "request s"), rows))
    return {"prediction": {f"{name}, {kind}": _rounded(one) for (name, kind), one in found.items()}}


def _more(bench: Bench) -> dict[str, Any]:
    """Measures prefetch, and a load in which one adapter has most of the requests."""
    base = replace(bench.base, rate=HIGH)
    periodic = replace(base, popularity="periodic", rate=3.0, adapters=200, memory_gib=10.0)
    put_off, ours = POLICIES["motet, put off"], POLICIES["motet"]
    tight = replace(base, rate=8.0, memory_gib=TIGHT_GIB)
    ways = {
        "no prefetch": replace(ours, prefetch=0),
        "prefetch": ours,
        "prefetch, foresight": replace(ours, foresight="on"),
        "prefetch, foresight auto": replace(ours, foresight="auto"),
    }
    cases: dict[str, Case] = {
        "no prefetch": replace(base, policy=ways["no prefetch"]),
        "prefetch": replace(base, policy=ours),
        **{f"{name}, tight": replace(tight, policy=policy) for name, policy in ways.items()},
        **{f"{name}, tight, copies beside steps": replace(tight, policy=policy, drag=0.0) for name, policy in ways.items()},
        f"{FREE}, tight": replace(tight, policy=ours, copy_ms=NO_COPY_MS),
        "periodic": replace(periodic, policy=ours),
        "periodic, foresight auto": replace(periodic, policy=replace(ours, foresight="auto")),
        "periodic, foresight": replace(periodic, policy=replace(ours, foresight="on")),
        "hot adapter, first come": replace(base, policy=ours, rate=10.5, hot=0.5),
        "hot adapter, put off": replace(base, policy=put_off, rate=10.5, hot=0.5),
    }
    found = bench.all(cases, "more", 6)
    rows: list[list[object]] = [
        [name, one.ttft_p50 / 1e3, one.ttft_p99 / 1e3, one.tail_p99 / 1e3, 100 * one.hit_rate, 100 * one.squashed]
        for name, one in found.items()
    ]
    columns = ("run", "TTFT p50 s", "p99 s", "p99 s of other adapters", "needs no copy %", "squashed %")
    print(report.table("parts", columns, rows))
    return {"parts": {name: _rounded(one) for name, one in found.items()}}


def _plot(bench: Bench, path: Path) -> None:
    """P99 TTFT and hit rate by load, and the number of waiting requests over time, as an SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from motet.twin.plots import COLORS, STYLE

    loads = [5.0, 6.0, 7.0, 8.0, 8.5, 9.0, 9.5, 10.0]
    names = ("s-lora", "sjf", "chameleon", "motet")
    cases = {(name, load): replace(bench.base, policy=POLICIES[name], rate=load) for name in names for load in loads}
    waits = {name: bench.pool.submit(waiting, replace(bench.base, policy=POLICIES[name])) for name in names}
    found = bench.all(cases, "plots", 3)
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 2.7), layout="constrained")
        late, hits, queued = figure.subplots(1, 3)
        for name, color in zip(names, COLORS, strict=False):
            ones = [found[name, load] for load in loads]
            late.plot(loads, [one.ttft_p99 / 1e3 for one in ones], color=color, label=name)
            hits.plot(loads, [100 * one.hit_rate for one in ones], color=color)
            queued.plot(*waits[name].result(), color=color, linewidth=0.8)
        late.axhline(bench.slo_s, color="#6b7280", linewidth=0.8, linestyle="--")
        late.set(title="P99 TTFT, s", xlabel="requests/s", ylim=(0.0, 20.0))
        hits.set(title="requests that need no copy, %", xlabel="requests/s", ylim=(0.0, 100.0))
        queued.set(title=f"requests waiting, {HIGH:g} requests/s", xlabel="s")
        late.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _less(value: float, than: float) -> float:
    return 100 * (value / than - 1)


def _rounded(one: Outcome) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(one).items()}
