"""Homes of adapters on the twin: workers with few slots, many adapters, and the adapters that are seldom asked for.

8 and 32 workers as vLLM's on an H100 with an 8B model: 16 slots of one size, steps that grow with the adapters in the batch,
and 10 ms for a copy, for which steps wait. A request whose adapter has no slot waits until another adapter has no request left.
500 adapters get Poisson arrivals, by a power law or in the order of a recorded trace (`--order FILE`). Every policy has the
same workers, requests and memory. `lora-affinity` is the Kubernetes gateway's scorer with room for an adapter where a seat is
free; tuned, there is room where a slot is free, and its other two scorers have the weights that were best on other seeds
(`TUNED`). Loads are all copies to the device, those of homes that no request had asked for too.

`bytes_per_replan`: homes are planned again every 180 s, from rates as a scheduler sees them, while a worker comes, another one
leaves and the popularity drifts; beside rendezvous hashing and minimum-cost flow (`bench.rivals.homes`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import homes_live, report
from bench.rivals import POLICIES
from bench.rivals.homes import min_cost_flow, rendezvous
from bench.rivals.policies import WeightedAffinity
from motet.policies.cluster.choice import Choose
from motet.policies.cluster.homes import NO_HOMES, Homes, bytes_to_load, plan
from motet.policies.times.load_forecast import Forecast
from motet.shared.model import EngineSteps, PerfModel, Slo, WorkerLimits
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.metrics import Latencies
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import MeasuredSteps
from motet.twin.traces import read_trace
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Intensity, Lengths, Workload, arrivals, pick, zipf

WORKERS, SLOTS, ADAPTERS = (8, 32), 16, 500
RATE, RATES = 6.0, (4.0, 6.0, 7.0)  # requests/s for each worker
HEADLINE_SEED = 71  # no constant was chosen on it
WARM_S, SECONDS = 60.0, 150.0
TAIL = 0.1  # the most popular share of the adapters, which is not in the tail
SLOT_BYTES, RANK = 40 << 20, 16
STEPS = EngineSteps(  # of a published calibration of vLLM 0.8.5: a pass, .4 ms for each adapter in it, attention
    rows=(1, 128, 512, 2048), pass_ms=(14.2, 15.6, 24.0, 80.0), sampled_ms=0.006, prefill_ms=0.0, adapter_mib_ms=0.01,
    row_rank_ms=0.0, context_token_ms=6.4e-5, pair_ms=0.0, r2=1.0,
)  # fmt: skip
PERF = PerfModel(
    kernel="mbgmv", prefill_base_ms=1.0, prefill_token_ms=0.021, prefill_lora_ms=0.0, decode_base_ms=14.5, decode_row_ms=0.12,
    decode_lora_ms=0.0, load_base_ms=10.0, load_ms_per_mib=0.0,
)  # fmt: skip
LIMITS = WorkerLimits(
    base_model="m", engine="vllm", max_model_len=8192, max_running=256, max_waiting=1024, block_size=16, kv_blocks_total=24_000,
    adapter_bytes_total=SLOTS * SLOT_BYTES, max_lora_rank=RANK, copies="stall", pin_slots=SLOTS // 2,
    pin_bytes=SLOTS // 2 * SLOT_BYTES, adapter_slots=SLOTS,
)  # fmt: skip
OPTIONS = WorkerOptions(
    max_loras=SLOTS, queues="fcfs", eviction="lru", foresight="off", max_step_tokens=2048, cold_start="blocking"
)
TUNED = (0.0, 0.0)
"""Weights of queue and KV memory beside affinity: the best of WEIGHTS by the tail's P99 on the seeds 1 and 2 at RATE."""
WEIGHTS = ((0.0, 0.0), (0.25, 0.0), (0.5, 0.0), (1.0, 0.0), (2.0, 0.0), (0.25, 0.25), (0.5, 0.5), (1.0, 1.0), (2.0, 2.0))
REPLANS, REPLAN_S = 10, 180.0
COMES, LEAVES, DRIFT = 3, 6, 0.02  # at which plans; the share of adapters that change places between two plans


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--seed", type=int, default=HEADLINE_SEED, help="of arrivals, adapters and lengths")
    parser.add_argument("--order", type=Path, help="a recorded trace: the adapters of its requests, in their order")
    parser.add_argument("--live", action="store_true", help="a worker that comes to live ones (bench.homes_live); nothing else")
    parser.add_argument("--tune", action="store_true", help="lora-affinity with all weights, on other seeds; nothing else")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `order`: a trace that says which adapter comes when; None for a power law."""

    policy: str
    workers: int
    rate: float
    seconds: float
    seed: int
    order: Path | None = None
    weights: tuple[float, float] | None = None
    placement: bool = False


@dataclass(frozen=True)
class Outcome:
    """The results after `WARM_S`: times in milliseconds, adapter copies to the device per request."""

    tail_p99: float
    ttft_p50: float
    ttft_p99: float
    tpot: float
    loads: float

    def row(self, *names: object) -> list[object]:
        """A line of a table with `COLUMNS`."""
        return [*names, self.tail_p99, self.ttft_p50, self.ttft_p99, self.tpot, self.loads]


COLUMNS = ("workers", "requests/s each", "policy", "tail TTFT p99 ms", "TTFT p50", "p99", "TPOT ms", "loads/request")


def workload(case: Case) -> Workload:
    """The requests of a case."""
    rng = np.random.default_rng(case.seed)
    at = arrivals(rng, Intensity.constant(case.rate * case.workers, case.seconds))
    adapter = _ordered(case.order, len(at), rng.random()) if case.order else pick(rng, zipf(ADAPTERS), len(at))
    lengths = Lengths.lognormal(rng, prompt_mean=500, output_mean=200, prompt_cv=1.0, output_cv=0.8).capped(4096, 8192)
    prompt, output = lengths.draw(rng, len(at))
    return Workload(
        arrival_s=at, adapter=adapter, prompt_tokens=prompt, output_tokens=output, ranks=np.full(ADAPTERS, RANK),
        adapter_bytes=np.full(ADAPTERS, SLOT_BYTES), slos=(Slo(ttft_slo_ms=2000.0, tpot_slo_ms=50.0),),
    )  # fmt: skip


def _ordered(path: Path, count: int, start: float) -> NDArray[np.int64]:
    """`count` adapters in the order of a trace from this share of it on, and again from its beginning; 0 is the most popular.

    Raises SystemExit for a trace without adapters.
    """
    trace = read_trace(path)
    if trace.adapter is None:
        raise SystemExit(f"homes: {path} does not say which adapters its requests are for")
    names, counts = np.unique(trace.adapter[trace.adapter >= 0], return_counts=True)
    place = np.full(int(names.max()) + 1, ADAPTERS)
    place[names[np.argsort(-counts, kind="stable")]] = np.arange(len(names))
    order = place[trace.adapter[trace.adapter >= 0]]
    order = order[order < ADAPTERS]
    return order[(np.arange(count) + int(start * len(order))) % len(order)].astype(np.int64)


def measure(case: Case) -> Outcome:
    """Make one run."""
    load = workload(case)
    choose: Choose | None = WeightedAffinity(*case.weights) if case.weights is not None else None
    spec = WorkerSpec(limits=LIMITS, perf=PERF, steps=MeasuredSteps(times=STEPS, perf=PERF), options=OPTIONS)
    scheduler = SchedulerSpec(policy=case.policy, choose=choose, admission="room", rebalance="off", placement=case.placement)
    cluster = Cluster(load, [spec] * case.workers, scheduler)
    warm_s = min(WARM_S, 0.5 * case.seconds)
    cluster.run(until_s=warm_s)
    metrics = cluster.metrics
    cold = metrics.device_loads + metrics.brought
    cluster.run()
    times = Latencies.of(load, metrics)
    counted = load.arrival_s[times.rows] >= warm_s
    tail = counted & (load.adapter[times.rows] >= _head(load))
    ttft_ms = times.ttft_ms
    outcome = Outcome(
        tail_p99=float(np.quantile(ttft_ms[tail], 0.99)),
        ttft_p50=float(np.quantile(ttft_ms[counted], 0.5)),
        ttft_p99=float(np.quantile(ttft_ms[counted], 0.99)),
        tpot=float(np.nanmean(times.tpot_ms[counted])),
        loads=(metrics.device_loads + metrics.brought - cold) / int((load.arrival_s >= warm_s).sum()),
    )
    print(f"  {case}: tail p99 {outcome.tail_p99:.0f} ms, {outcome.loads:.3f} loads", file=sys.stderr, flush=True)
    return outcome


def _head(load: Workload) -> int:
    return round(TAIL * len(load.ranks))


# ---- bytes that move


def moves(workers: int, seed: int) -> dict[str, tuple[float, float]]:
    """(bytes of homes that move per plan after the first, the most loaded worker over the mean) of each placement."""
    plans: dict[str, Callable[[dict[str, float], list[str], Homes], Homes]] = {
        "homes": lambda load, names, before: plan(load, sizes, {name: before.get(name, ()) for name in names}, before),
        "rendezvous": lambda load, names, before: rendezvous(load, names),
        "min_cost_flow": lambda load, names, before: min_cost_flow(load, sizes, names, before),
    }
    sizes = {f"a{number}": SLOT_BYTES for number in range(ADAPTERS)}
    rng, forecast = np.random.default_rng(seed), Forecast()
    names, shares = [f"w{number:02}" for number in range(workers)], zipf(ADAPTERS)
    before: dict[str, Homes] = dict.fromkeys(plans, NO_HOMES)
    moved, uneven = dict.fromkeys(plans, 0.0), dict.fromkeys(plans, 0.0)
    for number in range(REPLANS + 1):
        at = arrivals(rng, Intensity.constant(RATE * workers, REPLAN_S)) + number * REPLAN_S
        for at_s, adapter in zip(at.tolist(), pick(rng, shares, len(at)).tolist(), strict=True):
            forecast.used(f"a{adapter}", at_s)
        names = [*names, "w-new"] if number == COMES else names[1:] if number == LEAVES else names
        load = {name: rate for name in forecast if (rate := forecast.rate(name, (number + 1) * REPLAN_S)) > 2.0 / 900.0}
        for which, make in plans.items():
            now = make(load, names, before[which])
            moved[which] += bytes_to_load(now, sizes, before[which]) if number else 0
            uneven[which] += _uneven(now, load) / (REPLANS + 1)
            before[which] = now
        swapped = rng.choice(ADAPTERS, 2 * round(DRIFT * ADAPTERS / 2), replace=False)
        shares[swapped] = shares[swapped[::-1]]
    return {which: (moved[which] / REPLANS, uneven[which]) for which in plans}


def _uneven(homes: Homes, load: dict[str, float]) -> float:
    copies: dict[str, int] = {}
    for adapters in homes.values():
        for one in adapters:
            copies[one] = copies.get(one, 0) + 1
    loads = [sum(load[one] / copies[one] for one in adapters) for adapters in homes.values()]
    return max(loads) / (sum(loads) / len(loads))


# ---- the bench


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything, print the tables, return the figures."""
    if args.tune:
        return _tune(args)
    if args.live:
        return homes_live.measure(args)
    sizes = (4,) if args.quick else WORKERS
    seconds = args.seconds or (30.0 if args.quick else SECONDS)
    orders = [None, *([args.order] if args.order is not None else [])]
    cases = _cases(args, orders, sizes, seconds)
    found = _measured(cases, args)
    figures: dict[str, Any] = {}
    for order in orders:
        _print(order, cases, found)
        for workers in sizes:
            suffix = ("" if order is None else "_trace") + ("" if workers == sizes[0] else f"_{workers}")
            mine = [one for one in cases if (one.order, one.workers, one.rate) == (order, workers, RATE) and one in found]
            figures |= _figures({label: found[one] for label, one in zip(_policies(), mine, strict=False)}, suffix)
    return figures | _moved(sizes, args.seed) | {"seed": args.seed, "seconds": seconds, "requests_per_s_each": RATE}


def _cases(args: argparse.Namespace, orders: Sequence[Path | None], sizes: Sequence[int], seconds: float) -> list[Case]:
    """All loads on the smaller fleet by the power law, else RATE."""
    return [
        Case(policy=policy, workers=workers, rate=rate, seconds=seconds, seed=args.seed, order=order, **extra)
        for order in orders
        for workers in sizes
        for rate in (RATES if workers == sizes[0] and order is None and not args.quick else (RATE,))
        for policy, extra in _policies().values()
    ]


def _print(order: Path | None, cases: list[Case], found: dict[Case, Outcome]) -> None:
    labels = list(_policies())
    rows = [
        found[case].row(case.workers, case.rate, labels[number % len(labels)])
        for number, case in enumerate(cases)
        if case.order == order and case in found
    ]
    title = "by a power law" if order is None else "in the order of the trace"
    print(report.table(f"{ADAPTERS} adapters {title}, {SLOTS} slots a worker", COLUMNS, rows))


def _policies() -> dict[str, tuple[str, dict[str, Any]]]:
    assert "lora-affinity" in POLICIES
    return {
        "motet": ("motet", {"placement": True}),
        "lora-affinity, tuned": ("lora-affinity", {"weights": TUNED}),
        "lora-affinity": ("lora-affinity", {}),
        "motet without homes": ("motet", {}),
    }


def _measured(cases: list[Case], args: argparse.Namespace) -> dict[Case, Outcome]:
    """The outcomes, side by side; the last cases are left out when time is over."""
    found: dict[Case, Outcome] = {}
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        for number in args.watch.rounds(-(-len(cases) // cores), "pairs of runs"):
            part = cases[number * cores : (number + 1) * cores]
            found |= dict(zip(part, pool.map(measure, part), strict=True))
    return found


def _figures(found: dict[str, Outcome], suffix: str) -> dict[str, Any]:
    if len(found) < len(_policies()):
        return {}
    motet = found["motet"]
    rivals = [found[name] for name in ("lora-affinity", "lora-affinity, tuned")]
    best = min(rivals, key=lambda one: one.tail_p99)
    return {
        f"tail_ttft_p99_gain{suffix}": round(best.tail_p99 / motet.tail_p99, 3),
        f"loads_per_request{suffix}": round(motet.loads, 4),
        f"loads_vs_affinity{suffix}": round(motet.loads / max(min(one.loads for one in rivals), 1e-4), 3),
        f"gain_without_homes{suffix}": round(best.tail_p99 / found["motet without homes"].tail_p99, 3),
        f"runs{suffix}": {name: {key: round(value, 4) for key, value in asdict(one).items()} for name, one in found.items()},
    }


def _moved(sizes: tuple[int, ...], seed: int) -> dict[str, Any]:
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for workers in sizes:
        found = moves(workers, seed)
        rows += [[workers, name, moved / 2**20, uneven] for name, (moved, uneven) in found.items()]
        suffix = "" if workers == sizes[0] else f"_{workers}"
        for rival in ("rendezvous", "min_cost_flow"):
            figures[f"bytes_per_replan_vs_{rival}{suffix}"] = round(found["homes"][0] / max(found[rival][0], 1.0), 3)
    title = f"{REPLANS} plans, {REPLAN_S:.0f} s apart; a worker comes, one leaves, {DRIFT:.0%} of the adapters change each time"
    print(report.table(title, ("workers", "placement", "MiB moved per plan", "most load over mean"), rows))
    return figures


def _tune(args: argparse.Namespace) -> dict[str, Any]:
    cases = [
        Case(policy="lora-affinity", workers=WORKERS[0], rate=RATE, seconds=SECONDS, seed=seed, weights=weights)
        for weights in WEIGHTS
        for seed in (1, 2)
    ]
    found = _measured(cases, args)
    rows = [found[case].row(case.workers, case.rate, f"{case.weights}, seed {case.seed}") for case in cases if case in found]
    print(report.table("lora-affinity by the weights of queue and KV memory", COLUMNS, rows))
    return {"tails": {f"{case.weights} {case.seed}": round(one.tail_p99, 1) for case, one in found.items()}}
