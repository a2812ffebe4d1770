"""Chameleon's scheduler (section 4.3) where memory binds: does any order of the queue lower the P99 TTFT?

The worker and its requests are those of `bench.chameleon`, with less memory. Two settings. In one, of 7 GiB at 8 requests/s,
running requests and their adapters fill the memory most of the time. The other is calibrated to the paper at its high load of 9
requests/s: with 14 GiB 75% of the requests need no copy, and the peak of memory in use is all of it (sections 5.2.1 and 5.2.5).
Beside Chameleon's queues run first come, first served, the other orders, and Chameleon with one part changed at a time.

Bounds run beside them: copies that take no time, evictions that know the future, and an order that lets the largest requests
wait until no other one does. On one machine where every order does the same work, first come, first served has the least
maximum of response times. So the least P99 is had by giving up the most costly 1% and serving the others in turn. What remains
for an order is to change the work, by fewer copies.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from bisect import bisect_left, insort
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.chameleon_parts import HIGH, TRACE, Case, Outcome, Policy, informed, mean, outcome, worker, workload
from bench.rivals.queues import FIRST, ShortestFirst, SizeQueues, residents_first, steps_left
from motet.policies.step.batch_state import AdmissionState, S
from motet.policies.step.request_queues import QUEUES, WINDOW
from motet.twin.cluster import Cluster
from motet.twin.events import HEARTBEAT, PS_PER_S

SETTINGS = {"7 GiB, 8/s": (7.0, 8.0), "14 GiB, 9/s": (14.0, HIGH)}
SIZES_GIB = (10.0, 12.0, 14.0, 16.0, 26.0)
SLO_S = 5.18  # five times a request alone (`bench.chameleon`)
NO_COPY_MS = 1e-3
GIVEN_UP = 0.007
"""Share of the requests that `LargestLast` lets wait. P99 does not see them."""
PAPER_HIT_RATE = 0.75
TICK_S = 0.25


class LargestLast(ShortestFirst[S]):
    """First come, first served, but the largest GIVEN_UP of all requests wait until no other one does. They may starve.

    `ahead_s`: the head start of requests whose adapter is on the device, as in Chameleon's queues.
    """

    def __init__(self, ahead_s: float, *, total_tokens: float, token_bytes: float) -> None:
        self._ahead_s, self._token_bytes = ahead_s, token_bytes
        self._sizes: list[float] = []  # of all requests so far, ascending
        self._late: set[int] = set()

    def arrived(self, seq: S, now_s: float) -> None:
        """Compare its prompt, output and adapter with those of all requests so far."""
        tokens = seq.length + steps_left(seq) + seq.adapter_bytes / self._token_bytes
        if len(self._sizes) >= FIRST and bisect_left(self._sizes, tokens) > (1 - GIVEN_UP) * len(self._sizes):
            self._late.add(seq.order)
        insort(self._sizes, tokens)

    def candidates(self, state: AdmissionState[S], now_s: float) -> list[S]:
        """The waiting requests in turn, the largest behind all others."""
        in_turn = residents_first(state, lambda seq: self._ahead_s)
        return sorted(in_turn, key=lambda seq: (seq.priority, seq.order in self._late))[:WINDOW]


QUEUES.add("chameleon, scaled quotas", lambda **memory: SizeQueues(**memory, scaled=True))
QUEUES.add("chameleon, nobody ahead", lambda **memory: SizeQueues(**memory, ahead=0.0))
QUEUES.add("chameleon, free bypass", lambda **memory: SizeQueues(**memory, squashes=False))
QUEUES.add("largest last", lambda **memory: LargestLast(0.0, **memory))
QUEUES.add("largest last, adapters ahead", lambda **memory: LargestLast(SLO_S, **memory))

PARTS = ("scaled quotas", "nobody ahead", "free bypass")
ORDERS = ("fcfs", "chameleon", *[f"chameleon, {part}" for part in PARTS], "static", "sjf", "motet", "auto")
LARGEST = ("largest last", "largest last, adapters ahead")
FUTURE, FREE = "evictions that know the future", "copies that take no time"


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--seed", type=int, default=10, help="the first of the seeds; below 10 are those of the tuning")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("MOTET_DATA"), help=f"directory of {TRACE}; without it lengths are drawn"
    )


class InUse:
    """The share of a worker's memory that running requests and their adapters use. Make this object before the cluster runs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.shares: list[float] = []
        self._tick()

    def _tick(self) -> None:
        events = self._cluster.events
        if events.now_s < self._cluster.workload.duration_s:
            events.at(events.now_ps + round(TICK_S * PS_PER_S), HEARTBEAT, self._tick)
        memory = self._cluster.workers[0].engine.batches.memory
        used = sum(size for (_, kind), size in memory.held().items() if kind in ("running", "used"))
        self.shares.append(used / memory.total_bytes)


def measure_order(case: Case) -> tuple[Outcome, float]:
    """Make one run. Returns its outcome and the peak of memory in use, as a share."""
    load = workload(case)
    cluster = Cluster(load, [worker(case)], None)
    if case.policy.knows:
        cluster.workers[0].engine.batches.slots.eviction = informed(case, load)
    in_use = InUse(cluster)
    cluster.run()
    return outcome(load, cluster), max(in_use.shares)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything, print the tables, return the figures."""
    seeds = range(args.seed, args.seed + (1 if args.quick else 6))
    base = Case(
        policy=Policy(eviction="next-use"),
        seconds=args.seconds or (8.0 if args.quick else 200.0),
        data=Path(args.data) if args.data is not None else None,
        slo_s=SLO_S,
    )
    cases: dict[tuple[str, str], Case] = {("size", f"{size:g} GiB"): replace(base, memory_gib=size) for size in SIZES_GIB}
    for setting, (memory_gib, rate) in SETTINGS.items():
        here = replace(base, memory_gib=memory_gib, rate=rate)
        for name in (*ORDERS, *LARGEST):
            cases[setting, name] = replace(here, policy=replace(base.policy, queues=name))
        for name in ("fcfs", *LARGEST):
            cases[setting, f"{name}; {FUTURE}"] = replace(here, policy=replace(base.policy, queues=name, knows="future"))
        cases[setting, FREE] = replace(here, copy_ms=NO_COPY_MS)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        runs = {key: [pool.submit(measure_order, replace(case, seed=seed)) for seed in seeds] for key, case in cases.items()}
        found = {key: [one.result() for one in ones] for key, ones in runs.items()}
    args.watch.mark()
    means = {key: mean(one for one, _ in ones) for key, ones in found.items()}
    peaks = {key: float(np.mean([peak for _, peak in ones])) for key, ones in found.items()}
    figures = _calibration(means, peaks)
    for setting in SETTINGS:
        figures[setting] = _setting(setting, {name: one for (where, name), one in means.items() if where == setting})
    print(f"{len(seeds)} seeds from {args.seed}, {base.seconds:g} s each", file=sys.stderr)
    return figures | {"seconds": base.seconds, "seed": args.seed, "recorded_workload": base.data is not None}


def _calibration(means: dict[tuple[str, str], Outcome], peaks: dict[tuple[str, str], float]) -> dict[str, Any]:
    """By size of memory: the share of requests that need no copy, and the peak of memory in use."""
    sizes = {name: (one.hit_rate, peaks[where, name]) for (where, name), one in means.items() if where == "size"}
    rows: list[list[object]] = [[name, 100 * hits, 100 * peak] for name, (hits, peak) in sizes.items()]
    print(report.table(f"fcfs, {HIGH:g} requests/s", ("memory", "needs no copy %", "peak of memory in use %"), rows))
    chosen = min(sizes, key=lambda name: abs(sizes[name][0] - PAPER_HIT_RATE))
    return {
        "sizes": {name: {"hit_rate": round(hits, 4), "peak": round(peak, 4)} for name, (hits, peak) in sizes.items()},
        "size_with_the_papers_hit_rate": chosen,
    }


def _setting(setting: str, found: dict[str, Outcome]) -> dict[str, Any]:
    """One setting's table and figures."""
    first = found["fcfs"]
    rows: list[list[object]] = [
        [
            name,
            one.ttft_p50 / 1e3,
            one.ttft_p99 / 1e3,
            one.ttft_max / 1e3,
            f"{100 * (one.ttft_p50 / first.ttft_p50 - 1):+.0f}",
            f"{100 * (one.ttft_p99 / first.ttft_p99 - 1):+.0f}",
            100 * one.hit_rate,
            one.tpot_p99,
        ]
        for name, one in found.items()
    ]
    columns = ("order or bound", "TTFT p50 s", "p99 s", "max s", "p50 %", "p99 %", "needs no copy %", "TPOT p99 ms")
    print(report.table(f"{setting}, beside fcfs", columns, rows), flush=True)
    ours = found["chameleon"]
    return {
        "p99_vs_fcfs": round(ours.ttft_p99 / first.ttft_p99, 4),
        "p50_vs_fcfs": round(ours.ttft_p50 / first.ttft_p50, 4),
        "orders": {name: {key: round(value, 4) for key, value in asdict(one).items()} for name, one in found.items()},
    }
