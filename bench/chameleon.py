"""Chameleon's experiment (sections 5.1 to 5.4) on the twin: adapter memory and queues of one worker.

One Llama-7B on an A40; 100 adapters of ranks 8 to 128 in equal shares, within a rank by a power law; lengths of the Azure
conversation trace; Poisson arrivals. The objective is a TTFT of five times the mean time of a request alone. The rivals are
S-LoRA (first come, first served; adapters copied ahead for queued requests; none kept), SJF, Chameleon without scheduler or
cache, LRU, FairShare, GDSF, static queues, and Chameleon; all of them are policies of the same worker core. `--data DIR` (or
MOTET_DATA) holds the traces; without it log-normal lengths are drawn. Constants were chosen with seeds below 10 and the even
rows of the trace; what is reported comes from other seeds and the odd rows.

The worker. Of 40.5 GiB (90% of the card) weights take 12.6 and activations some 2; 26 GiB hold KV blocks and adapters in one
budget. A step reads the weights in 20 ms; a prompt token costs 0.18 ms, and 0.002 ms more per unit of rank (at rank 128 and 512
tokens, 60% of the TTFT is the adapter, Fig. 2). The paper scales the trace's lengths by a factor that it does not name, and
measures what copies cost S-LoRA: at 8 requests/s of rank 32, 50 and 500 adapters have 1.69 and 2.60 times the P99 TTFT of one
(section 3.2). Both unknowns, SCALE and COPY_MS, are calibrated to that, to the objective of 5 s, and to the load at which
S-LoRA breaks: 8.6 requests/s. Steps stand still while an adapter is copied; how long copies take is the same for everybody.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import report
from bench.predictor import made_up_requests
from bench.watch import Watch
from motet.policies.eviction import EvictionName
from motet.policies.length_features import unpack
from motet.policies.length_model import Curve
from motet.policies.perf_model import MIB
from motet.policies.request_queues import QueuesName
from motet.services.predictor.examples import read_examples
from motet.services.predictor.fit import fit
from motet.shared.model import PerfModel, Slo, WorkerLimits
from motet.shared.profile import EngineSteps
from motet.twin.cluster import Cluster
from motet.twin.link import LinkModel
from motet.twin.memory import LLAMA2_7B
from motet.twin.metrics import Latencies
from motet.twin.steps import MeasuredSteps
from motet.twin.traces import read_trace
from motet.twin.worker import WorkerSpec
from motet.twin.workload import Floats, Intensity, Lengths, Request, Workload, arrivals, pick, zipf

RANKS = (8, 16, 32, 64, 128)
RANK_BYTES = LLAMA2_7B.adapter_rank_bytes(("q_proj", "k_proj", "v_proj", "o_proj"))  # rank 32 is 64 MiB, as in section 3.2
GIB = 1 << 30
MEMORY_GIB = 26.0
TIGHT_GIB = 16.0
BLOCK_SIZE, MAX_RUNNING, STEP_TOKENS, PREFETCH = 16, 256, 512, 8
LONGEST = 4096  # prompt tokens of the trace
SCALE = 0.205
COPY_MS = 85.0  # of rank 128
STEPS = EngineSteps(
    rows=(1, 64, 128, 512, 2048),
    pass_ms=(20.0, 22.0, 28.0, 97.1, 373.6),
    sampled_ms=0.02,
    prefill_ms=0.5,
    adapter_mib_ms=0.0017,
    row_rank_ms=0.002,
    context_token_ms=0.00087,
    pair_ms=7e-6,
    r2=1.0,
)
PERF = PerfModel(
    prefill_base_ms=20.0, prefill_token_ms=0.18, prefill_lora_ms=0.0, decode_base_ms=20.0, decode_row_ms=0.1,
    decode_lora_ms=0.0, load_base_ms=0.0, load_ms_per_mib=COPY_MS / 256,
)  # fmt: skip
WARM_S = 30.0
SLO_FACTOR = 5.0
LOADS = (6.0, 8.0, 9.0)
HIGH = 9.0
TRACE, POPULARITY = "azure_llm_2023_conv.csv.gz", "genai_lora_requests.csv.gz"
INSTRUCTIONS = "alpaca_text.jsonl.gz"
PREDICTIONS = ("perfect", "real", "none")
PAPER = {"load": 8.6, "lora_50": 1.69, "lora_500": 2.60, "slo_s": 5.0}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a worker treats adapters and queues."""

    eviction: EvictionName
    queues: QueuesName = "fcfs"
    prefetch: int = PREFETCH
    foresight: bool = False


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
    "motet": Policy(eviction="forecast"),
    "motet, put off": Policy(eviction="forecast", queues="motet"),
}
OURS = ("motet", "motet, put off")
SAME_MEMORY = ("lru", "fair-share", "gdsf")
"""They do what "chameleon, no scheduler" does where all adapters fit, so their breaking loads are not searched."""
SEARCH_S = 200.0
"""Time left below which the breaking loads are left out."""
FREE = "copies that take no time"
EVICTIONS: tuple[EvictionName, ...] = ("lru", "fair-share", "score", "gdsf", "forecast")
spawn = multiprocessing.get_context("spawn")


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--seed", type=int, default=10, help="the first of the seeds; below 10 are those of the tuning")
    parser.add_argument("--plots", type=Path, help="with --quick: only draw the plot of docs/adapter-memory.md into this file")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("MOTET_DATA"), help=f"directory of {TRACE}, {POPULARITY} and {INSTRUCTIONS}"
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `popularity`: of ranks and of adapters within a rank, U(niform) or P(ower law); or "trace"; or "periodic": each
    adapter is asked for at intervals of its own, give or take 10%."""

    policy: Policy
    rate: float = HIGH
    seed: int = 10
    adapters: int = 100
    popularity: str = "U-P"
    only_rank: int = 0
    memory_gib: float = MEMORY_GIB
    predict: str = "perfect"  # or "real", "none"
    hot: float = 0.0  # this share of all requests is for one adapter
    copy_ms: float = COPY_MS
    slo_s: float = 5.0
    seconds: float = 300.0
    data: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """Milliseconds, and shares of 1."""

    ttft_p50: float
    ttft_p99: float
    tpot_p99: float
    e2e: float
    hit_rate: float
    tail_p99: float  # TTFT of all but the hot adapter
    squashed: float


@lru_cache(maxsize=2)
def _lengths(data: Path | None, part: int) -> Lengths:
    """The even (0) or odd (1) rows of the trace."""
    if data is None:
        rng = np.random.default_rng(7)
        drawn = Lengths.lognormal(rng, prompt_mean=1155, output_mean=211, prompt_cv=1.0, output_cv=0.8)
        return drawn.capped(LONGEST, 2 * LONGEST)
    trace = read_trace(data / TRACE)
    prompt, output = trace.prompt_tokens, trace.output_tokens
    assert prompt is not None and output is not None, "the trace has lengths"
    rows = slice(part, None, 2)
    return Lengths(np.minimum(prompt[rows], LONGEST), output[rows])


@lru_cache(maxsize=1)
def _order_of_adapters(data: Path) -> NDArray[np.int64]:
    """The adapters of the GenTD26 trace's requests, in their order; numbers by first appearance."""
    known: dict[str, int] = {}
    with gzip.open(data / POPULARITY, "rt", encoding="utf-8") as file:
        names = [row["lora_ids"].split(";")[0] for row in csv.DictReader(file) if row["lora_ids"]]
    return np.array([known.setdefault(name, len(known)) for name in names])


def shares(popularity: str, adapters: int) -> NDArray[np.float64]:
    """Per adapter, in the order of ranks; a fifth of them has each rank."""
    each = adapters // len(RANKS)
    of_ranks = zipf(len(RANKS)) if popularity[0] == "P" else np.full(len(RANKS), 1 / len(RANKS))
    within = zipf(each) if popularity[2] == "P" else np.full(each, 1 / each)
    return (of_ranks[:, None] * within[None, :]).ravel()


def workload(case: Case) -> Workload:
    """Arrivals, adapters and lengths draw from generators of their own, so they are alike for every policy."""
    times, choices, pairs, sizes = (np.random.default_rng([case.seed, number]) for number in range(4))
    at = arrivals(times, Intensity.constant(case.rate, WARM_S + case.seconds))
    if case.popularity == "trace" and case.data is not None:
        order = _order_of_adapters(case.data)
        begin = int(choices.integers(max(1, len(order) - len(at))))
        adapter = order[begin : begin + len(at)]
        at = at[: len(adapter)]
        ranks = sizes.choice(np.array(RANKS), size=int(order.max()) + 1)
    else:
        ranks = np.repeat(np.array(RANKS), case.adapters // len(RANKS))
        of_adapters = shares(case.popularity if len(case.popularity) == 3 else "U-P", case.adapters)
        if case.only_rank:
            ranks, of_adapters = np.full(case.adapters, case.only_rank), np.full(case.adapters, 1 / case.adapters)
        if case.hot:
            of_adapters = of_adapters * (1 - case.hot)
            of_adapters[2 * len(ranks) // 5] += case.hot
        adapter = pick(choices, of_adapters, len(at))
    if case.popularity == "periodic":
        at, adapter = _periodic(choices, case)
    prompt, output = _lengths(case.data, int(case.seed >= 10)).draw(pairs, len(at))
    prompt, output = (np.maximum(1, np.rint(tokens * SCALE)).astype(np.int64) for tokens in (prompt, output))
    return Workload(
        arrival_s=at, adapter=adapter, prompt_tokens=prompt, output_tokens=output, ranks=ranks,
        adapter_bytes=ranks * RANK_BYTES, slos=(Slo(ttft_slo_ms=case.slo_s * 1e3, tpot_slo_ms=150.0),),
    )  # fmt: skip


def _periodic(rng: np.random.Generator, case: Case) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Arrivals and their adapters. Mean intervals differ by up to a factor of three."""
    end_s, mean_s = WARM_S + case.seconds, case.adapters / case.rate
    means = rng.uniform(0.5, 1.5, case.adapters) * mean_s
    many = int(3 * end_s / mean_s) + 2
    gaps = means[:, None] * np.maximum(0.1, 1 + 0.1 * rng.standard_normal((case.adapters, many)))
    times = rng.uniform(0, means)[:, None] + np.cumsum(gaps, axis=1) - gaps
    adapter = np.broadcast_to(np.arange(case.adapters)[:, None], times.shape)
    order = np.argsort(times, axis=None)
    at = times.ravel()[order]
    within = at < end_s
    return at[within], adapter.ravel()[order][within]


def worker(policy: Policy, memory_gib: float, copy_ms: float = COPY_MS) -> WorkerSpec:
    """The worker with one budget for KV blocks and adapters; a third of it is the adapters' at first."""
    block_bytes = BLOCK_SIZE * LLAMA2_7B.kv_token_bytes
    limits = WorkerLimits(
        base_model="llama-2-7b", max_model_len=4096, max_running=MAX_RUNNING, max_waiting=100_000, block_size=BLOCK_SIZE,
        kv_blocks_total=int(memory_gib * GIB * 2 / 3) // block_bytes, adapter_bytes_total=int(memory_gib * GIB / 3),
        max_lora_rank=max(RANKS), kv_block_bytes=block_bytes,
    )  # fmt: skip
    return WorkerSpec(
        limits=limits, perf=PERF, steps=MeasuredSteps(STEPS, PERF),
        link=LinkModel(bytes_per_s=256 * MIB / (copy_ms / 1e3), layers=LLAMA2_7B.layers, cold_start="blocking", drag=1.0),
        max_step_tokens=STEP_TOKENS, max_loras=4096, eviction=policy.eviction, queues=policy.queues,
        prefetch=policy.prefetch, foresight=policy.foresight,
    )  # fmt: skip


def _predictor(kind: str, load: Workload, case: Case) -> Callable[[Request], int] | None:
    """The output length that the policies are told: the true one, the length predictor's median, or the mean for all.

    The trace has no prompts. A request of it is told what the shipped model says of an instruction whose true length has the
    same place among the lengths of its set: the median's place among them, as a length of the trace.
    """
    if kind == "perfect":
        return None
    mean = max(1, round(float(load.output_tokens.mean())))
    if kind == "none":
        return lambda request: mean
    true, predicted = _predicted_places(case.data)
    lengths = np.sort(load.output_tokens)
    places = (np.argsort(np.argsort(load.output_tokens, kind="stable")) + 0.5) / len(lengths)
    jitter = np.random.default_rng([case.seed, 9]).normal(0.0, 0.01, len(lengths))  # not always the same neighbour
    chosen = np.clip(np.searchsorted(true, places + jitter), 0, len(true) - 1)
    told = np.maximum(1, np.quantile(lengths, predicted[chosen]).round().astype(np.int64))
    return lambda request: int(told[request.index])


@lru_cache(maxsize=2)
def _predicted_places(data: Path | None) -> tuple[Floats, Floats]:
    """Of instructions that the model was not fitted on: the places (0..1) of their true lengths, rising, and of its medians."""
    if data is not None and (data / INSTRUCTIONS).exists():
        known = read_examples(data / INSTRUCTIONS)
        train, test = [one for number, one in enumerate(known) if number % 5], known[::5]
    else:
        train, test = made_up_requests(400, 1), made_up_requests(200, 2)
    model = fit([unpack(one.features) for one in train], [one.tokens for one in train]).model
    curve = Curve(model.edges, model.longest)
    medians = [curve.tokens(row, (0.5,))[0] for row in model.above([unpack(one.features) for one in test])]
    tokens = np.array([one.tokens for one in test], np.float64)
    order = np.argsort(tokens, kind="stable")
    lengths = tokens[order]
    return (np.arange(len(lengths)) + 0.5) / len(lengths), np.searchsorted(lengths, np.array(medians)[order]) / len(lengths)


def measure(case: Case) -> Outcome:
    """Make one run."""
    load = workload(case)
    predict = _predictor(case.predict, load, case)
    cluster = Cluster(load, [worker(case.policy, case.memory_gib, case.copy_ms)], None, predict=predict)
    cluster.run()
    times, metrics = Latencies.of(load, cluster.metrics), cluster.metrics
    counted = load.arrival_s[times.rows] >= WARM_S
    ttft, adapters = times.ttft_ms[counted], load.adapter[times.rows][counted]
    hottest = int(np.bincount(adapters).argmax())
    return Outcome(
        ttft_p50=float(np.quantile(ttft, 0.5)),
        ttft_p99=float(np.quantile(ttft, 0.99)),
        tpot_p99=float(np.nanquantile(times.tpot_ms[counted], 0.99)),
        e2e=float(times.e2e_ms[counted].mean()),
        hit_rate=1 - (metrics.device_loads + metrics.prefetches) / max(1, metrics.adapter_admissions),
        tail_p99=float(np.quantile(ttft[adapters != hottest], 0.99)) if (adapters != hottest).any() else 0.0,
        squashed=cluster.workers[0].batches.squashed / len(load),
    )


def mean(outcomes: Iterable[Outcome]) -> Outcome:
    """Over seeds."""
    rows = [asdict(one) for one in outcomes]
    return Outcome(**{name: float(np.mean([row[name] for row in rows])) for name in rows[0]})


# ---- the bench


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
        self.seeds = tuple(range(args.seed, args.seed + (1 if args.quick else 3)))
        data = Path(args.data) if args.data is not None else None
        seconds = args.seconds or (8.0 if args.quick else 300.0)
        self.base = Case(policy=POLICIES["s-lora"], seconds=seconds, data=data, seed=args.seed)
        alone = replace(self.base, rate=0.05, seconds=200.0 if args.quick and args.plots is None else 10_000.0)
        self.slo_s = SLO_FACTOR * measure(alone).e2e / 1e3
        self.base = replace(self.base, slo_s=self.slo_s)

    def all(self, cases: dict[Any, Case], name: str, seeds: int = 3) -> dict[Any, Outcome]:
        """Every case for some of the seeds; cases are left out when time is short."""
        if self.watch.left_s < 40.0 and not self.quick:
            self.watch.skip(name)
            return {}
        runs = {
            key: [self.pool.submit(measure, replace(case, seed=seed)) for seed in self.seeds[:seeds]]
            for key, case in cases.items()
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


def _run(bench: Bench, watch: Watch) -> dict[str, Any]:
    base = bench.base
    names = ("s-lora", "chameleon", "motet") if bench.quick else tuple(POLICIES)
    loads = (HIGH,) if bench.quick else LOADS
    cases = {(name, load): replace(base, policy=POLICIES[name], rate=load) for name in names for load in loads}
    ones = {n: replace(base, adapters=n, only_rank=32, rate=8.0) for n in (1, 50, 500)}
    found = bench.all(cases, "loads")
    lora = bench.all(ones, "S-LoRA's own figures", 2)
    searched = {name: replace(base, policy=POLICIES[name]) for name in names if name not in SAME_MEMORY}
    searched[FREE] = replace(base, policy=POLICIES["motet"], copy_ms=1e-3)
    lost: dict[str, float] = {}
    if watch.left_s > SEARCH_S and not bench.quick:
        breaks = {name: bench.pool.submit(breaking_load, case, bench.seeds[:2]) for name, case in searched.items()}
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
            for name in names
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
    figures.setdefault("load_vs_slora", None)
    figures |= _prediction(bench)
    if not bench.quick:
        figures |= _evictions(bench) | _more(bench)
    return figures


def _evictions(bench: Bench) -> dict[str, Any]:
    """Every eviction with the same queue, where not all adapters fit."""
    settings = [("U-P", 100, TIGHT_GIB)]
    settings += [(popularity, n, MEMORY_GIB) for n in (500, 1000, 200) for popularity in ("U-U", "U-P", "P-P")]
    settings.append(("U-P", 10, MEMORY_GIB))
    if bench.base.data is not None:
        settings.insert(1, ("trace", 0, TIGHT_GIB))
    figures: dict[str, Any] = {}
    rows: list[list[object]] = []
    for popularity, n, memory in settings:  # the most telling ones first
        setting = replace(bench.base, popularity=popularity, adapters=n or 100, memory_gib=memory, rate=8.0)
        cases = {name: replace(setting, policy=Policy(eviction=name)) for name in EVICTIONS}
        title = f"{popularity} {n or 'GenTD26'} adapters, {memory:g} GiB"
        found = bench.all(cases, title, 2)
        for name, one in found.items():
            rows.append([title, name, one.ttft_p50 / 1e3, one.ttft_p99 / 1e3, 100 * one.hit_rate])
        if found:
            figures[title] = {name: _rounded(one) for name, one in found.items()}
    print(report.table("evictions, 8 requests/s", ("setting", "eviction", "TTFT p50 s", "p99 s", "needs no copy %"), rows))
    return {"evictions": figures}


def _prediction(bench: Bench) -> dict[str, Any]:
    """The queues that read predictions, with the true lengths, with the length predictor's and with none."""
    queues: dict[str, QueuesName] = {"sjf": "sjf", "chameleon": "chameleon", "motet": "motet"}
    if bench.quick:
        queues = {"chameleon": "chameleon"}
    cases = {
        (name, kind): replace(bench.base, rate=HIGH, policy=Policy(eviction="forecast", queues=which), predict=kind)
        for name, which in queues.items()
        for kind in PREDICTIONS
    }
    if not bench.quick:
        cases["fcfs", "none"] = replace(bench.base, rate=HIGH, policy=POLICIES["motet"], predict="none")
    found = bench.all(cases, "prediction", 2)
    rows: list[list[object]] = [
        [f"{name}, {kind}", one.ttft_p50 / 1e3, one.ttft_p99 / 1e3, one.tpot_p99, one.e2e / 1e3]
        for (name, kind), one in found.items()
    ]
    title = f"queues by what they are told of output lengths, {HIGH:g} requests/s"
    print(report.table(title, ("queue, prediction", "TTFT p50 s", "p99 s", "TPOT p99 ms", "request s"), rows))
    return {"prediction": {f"{name}, {kind}": _rounded(one) for (name, kind), one in found.items()}}


def _more(bench: Bench) -> dict[str, Any]:
    """Prefetch, and one adapter that asks for most."""
    base = replace(bench.base, rate=HIGH)
    periodic = replace(base, popularity="periodic", rate=3.0, adapters=200, memory_gib=10.0)
    put_off, ours = POLICIES["motet, put off"], POLICIES["motet"]
    cases: dict[str, Case] = {
        "motet, no prefetch": replace(base, policy=replace(ours, prefetch=0)),
        "motet, prefetch, tight": replace(base, policy=ours, rate=8.0, memory_gib=TIGHT_GIB),
        "motet, no prefetch, tight": replace(base, policy=replace(ours, prefetch=0), rate=8.0, memory_gib=TIGHT_GIB),
        "motet, foresight, tight": replace(base, policy=replace(ours, foresight=True), rate=8.0, memory_gib=TIGHT_GIB),
        "periodic": replace(periodic, policy=ours),
        "periodic, foresight": replace(periodic, policy=replace(ours, foresight=True)),
        "hot adapter, first come": replace(base, policy=ours, rate=10.5, hot=0.5),
        "hot adapter, put off": replace(base, policy=put_off, rate=10.5, hot=0.5),
    }
    found = bench.all(cases, "more", 2)
    rows: list[list[object]] = [
        [name, one.ttft_p50 / 1e3, one.ttft_p99 / 1e3, one.tail_p99 / 1e3, 100 * one.hit_rate, 100 * one.squashed]
        for name, one in found.items()
    ]
    columns = ("run", "TTFT p50 s", "p99 s", "p99 s of other adapters", "needs no copy %", "squashed %")
    print(report.table("parts", columns, rows))
    return {"parts": {name: _rounded(one) for name, one in found.items()}}


def _plot(bench: Bench, path: Path) -> None:
    """P99 TTFT and copies by load, and the requests that wait over time; an SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from motet.twin.plots import COLORS, STYLE

    loads = [5.0, 6.0, 7.0, 8.0, 8.5, 9.0, 9.5, 10.0]
    names = ("s-lora", "sjf", "chameleon", "motet")
    cases = {(name, load): replace(bench.base, policy=POLICIES[name], rate=load) for name in names for load in loads}
    waits = {name: bench.pool.submit(waiting, replace(bench.base, policy=POLICIES[name])) for name in names}
    found = bench.all(cases, "plots", 2)
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 2.7), layout="constrained")
        late, copied, queued = figure.subplots(1, 3)
        for name, color in zip(names, COLORS, strict=False):
            ones = [found[name, load] for load in loads]
            late.plot(loads, [one.ttft_p99 / 1e3 for one in ones], color=color, label=name)
            copied.plot(loads, [100 * (1 - one.hit_rate) for one in ones], color=color)
            queued.plot(*waits[name].result(), color=color, linewidth=0.8)
        late.axhline(bench.slo_s, color="#6b7280", linewidth=0.8, linestyle="--")
        late.set(title="P99 TTFT, s", xlabel="requests/s", ylim=(0.0, 20.0))
        copied.set(title="requests that need a copy, %", xlabel="requests/s", ylim=(0.0, 100.0))
        queued.set(title=f"requests waiting, {HIGH:g} requests/s", xlabel="s")
        late.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def waiting(case: Case) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times in s, and the requests that had come by then and not been admitted."""
    load = workload(case)
    cluster = Cluster(load, [worker(case.policy, case.memory_gib)], None)
    cluster.run()
    at = np.arange(0.0, load.duration_s, 2.0)
    admitted = np.sort(cluster.metrics.admitted_ps / 1e12)
    return at, np.searchsorted(load.arrival_s, at).astype(np.float64) - np.searchsorted(admitted, at)


def _less(value: float, than: float) -> float:
    return 100 * (value / than - 1)


def _rounded(one: Outcome) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(one).items()}
