"""CaraServe's cluster experiment (section 7.5) on the twin: every scheduling policy on the same 60 workers and requests.

340 requests/s for adapters with the popularity of Azure Functions, Alpaca lengths, ranks 8 to 128, and an SLO on the time per
output token of 1.5 times that of a request alone. `--data DIR` (or MOTET_DATA) holds the recorded popularity and lengths;
without it a power law and log-normal lengths of the same shape are drawn. Then the load is raised until each policy breaks.

The worker is the paper's, a Llama-2-7B on an A10 (24 GB). Decode: the four latencies around its Fig. 5. Prefill: an
iteration of its own, a pass over the weights and 0.2 ms per token. A copy to the device stops the engine, as loading on
demand does there. How long it takes follows from section 7.2, where it lengthens the time per token by 71, 28 and 25% at 9
requests/s of rank 64, 9 of rank 32 and 6 of rank 64: about 0.28 ms per MiB; the table "setting" compares. Of 20 GiB
(90% of the card) the weights take 12.6 and activations some 1.5; of the rest 4 GiB hold KV (8,192 tokens) and 2 GiB adapters.
Up to 32 requests run together, as in Punica.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from bench import report
from motet.policies.dispatch import POLICIES
from motet.policies.perf_model import MIB
from motet.shared.model import PerfModel, Slo, WorkerLimits
from motet.twin.cluster import Bus, Cluster
from motet.twin.memory import LLAMA2_7B
from motet.twin.metrics import Latencies
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import A10_BGMV, A10_MBGMV, PerfSteps
from motet.twin.traces import read_lengths, read_popularity
from motet.twin.worker import WorkerSpec
from motet.twin.workload import Intensity, Lengths, Workload, arrivals, pick, zipf

WORKERS, RATE, SLO_FACTOR = 60, 340.0, 1.5
RANKS = (8, 16, 32, 64, 128)
ADAPTERS = 1250
LOAD_BASE_MS, LOAD_MS_PER_MIB = 1.0, 0.28
KV_BLOCKS, BLOCK_SIZE, ADAPTER_MIB, MAX_RUNNING = 512, 16, 2048, 32
WARM_S = 15.0  # until the batches have their usual size; requests of that time are not counted
BROKEN = 0.9  # attainment below which a policy has broken
PAPER = "mbgmv"  # the kernel of the paper's three comparisons, and of the figures
POPULARITY, LENGTHS = "maf2019_sample_invocations_per_minute.csv.gz", "alpaca_text.jsonl.gz"


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--seed", type=int, default=0, help="another draw of arrivals, lengths, and adapters' ranks")
    parser.add_argument("--data", type=Path, default=os.environ.get("MOTET_DATA"), help=f"directory of {POPULARITY} and so on")


@dataclass(frozen=True)
class Setting:
    """What is the same for every policy."""

    shares: NDArray[np.float64]
    lengths: Lengths
    workers: int
    seconds: float
    seed: int = 0

    @classmethod
    def of(cls, args: argparse.Namespace) -> Setting:
        workers = 6 if args.quick else WORKERS
        seconds = args.seconds or (5.0 if args.quick else 45.0)
        if args.data is not None:
            shares = read_popularity(Path(args.data) / POPULARITY).shares
            return cls(shares, read_lengths(Path(args.data) / LENGTHS), workers, seconds, args.seed)
        rng = np.random.default_rng(7)
        lengths = Lengths.lognormal(rng, prompt_mean=20.7, output_mean=65.8, prompt_cv=0.7, output_cv=0.95)
        return cls(zipf(ADAPTERS, 1.27), lengths, workers, seconds, args.seed)

    def _draws(self, *numbers: int) -> Iterator[Generator]:
        return (np.random.default_rng(1000 * self.seed + number) for number in numbers)

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """One per adapter: each rank once among every five neighbours in popularity, so that no rank is favoured."""
        (rng,) = self._draws(4)
        fives = -(-len(self.shares) // len(RANKS))
        in_order = np.concatenate([rng.permutation(RANKS) for _ in range(fives)])[: len(self.shares)]
        ranks = np.empty(len(self.shares), np.int64)
        ranks[np.argsort(-self.shares, kind="stable")] = in_order
        return ranks

    def workload(self, rate: float, tpot_slo_ms: float, *, rank: int = 0, shared: bool = True) -> Workload:
        """So many requests per second for the adapters; not `shared`: each for an adapter of its own, of this rank."""
        times, choices, pairs = self._draws(1, 2, 3)  # alike at every rate
        at = arrivals(times, Intensity.constant(rate, WARM_S + self.seconds))
        adapter = pick(choices, self.shares, len(at)) if shared else np.arange(len(at))
        ranks = self.ranks if shared else np.full(max(1, len(at)), rank)
        prompt, output = self.lengths.draw(pairs, len(at))
        slo = Slo(ttft_slo_ms=60_000.0, tpot_slo_ms=tpot_slo_ms)  # the objective is the time per token
        return Workload(
            arrival_s=at, adapter=adapter, prompt_tokens=prompt, output_tokens=output, ranks=ranks,
            adapter_bytes=ranks * LLAMA2_7B.adapter_rank_bytes(("q_proj", "k_proj", "v_proj")), slos=(slo,),
        )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One run. Times in milliseconds, means over requests unless said."""

    attainment: float
    tpot_ms: float
    tpot_p99_ms: float
    per_token_ms: float  # end to end
    ttft_ms: float
    hit_rate: float

    def row(self, name: str) -> list[object]:
        """A line of a table with `COLUMNS`."""
        shown = (100 * self.attainment, self.tpot_ms, self.tpot_p99_ms, self.per_token_ms, self.ttft_ms, 100 * self.hit_rate)
        return [name, *shown]


COLUMNS = ("policy", "attainment %", "TPOT ms", "p99", "E2E ms/token", "TTFT ms", "adapter on device %")
PERFECT = Bus(state_ms=0.0, delta_s=0.0, heartbeat_s=0.05)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything, print the tables, return the figures."""
    setting = Setting.of(args)
    _check_setting(setting)
    kernels = {kernel: _compare(setting, kernel, quick=args.quick) for kernel in ("mbgmv", "bgmv")}
    return {
        **kernels[PAPER],
        **{f"{name}_bgmv": value for name, value in kernels["bgmv"].items()},
        "workers": setting.workers,
        "requests_per_s": RATE * setting.workers / WORKERS,
        "seconds": setting.seconds,
        "seed": setting.seed,
        "recorded_workload": args.data is not None,
    }


def _compare(setting: Setting, kernel: str, *, quick: bool) -> dict[str, float]:
    perf = _perf(kernel)
    slo_ms = SLO_FACTOR * perf.decode_base_ms
    scale = setting.workers / WORKERS

    def measure(policy: str, rate: float, **more: Any) -> Outcome:
        outcome = simulate(setting.workload(rate * scale, slo_ms), perf, policy, workers=setting.workers, **more)
        print(f"  {kernel} {policy} {rate:.0f}/s: {outcome.attainment:.2%}", file=sys.stderr, flush=True)
        return outcome

    at_rate = {policy: measure(policy, RATE) for policy in POLICIES}
    two = measure("motet", RATE, schedulers=2)
    oracle = measure("motet", RATE, oracle=True)
    rows = [outcome.row(policy) for policy, outcome in at_rate.items()]
    rows += [two.row("motet, 2 schedulers"), oracle.row("motet, perfect state and lengths")]
    title = f"{kernel.upper()}, {setting.workers} workers, {RATE * scale:.0f} requests/s; SLO {slo_ms:.1f} ms per token"
    print(report.table(title, COLUMNS, rows), flush=True)
    motet = at_rate["motet"]
    figures = {
        "attainment": round(motet.attainment, 4),
        **{f"tpot_vs_{name.replace('-', '')}": round(motet.tpot_ms / at_rate[name].tpot_ms, 4)
           for name in ("most-idle", "random", "first-fit")},
        **{f"least_tpot_vs_{name.replace('-', '')}": round(perf.decode_base_ms / at_rate[name].tpot_ms, 4)
           for name in ("most-idle", "random", "first-fit")},
        "oracle_attainment": round(oracle.attainment, 4),
        "oracle_tpot_vs_mostidle": round(oracle.tpot_ms / at_rate["most-idle"].tpot_ms, 4),
        "attainment_two_schedulers": round(two.attainment, 4),
    }  # fmt: skip
    if quick:
        return {**figures, "attainment_when_next_best_is_90": round(motet.attainment, 4)}
    breaks = {policy: _breaking_rate(policy, measure) for policy in POLICIES}
    next_best = max((policy for policy in POLICIES if policy != "motet"), key=lambda policy: breaks[policy])
    there = {policy: measure(policy, breaks[next_best]) for policy in ("motet", next_best)}
    title = f"{kernel.upper()}: requests/s at which attainment falls to {BROKEN:.0%}"
    print(report.table(title, ("policy", "requests/s"), [[policy, rate] for policy, rate in breaks.items()]))
    title = f"{kernel.upper()}: where the next best breaks, {breaks[next_best]:.0f} requests/s"
    print(report.table(title, COLUMNS, [outcome.row(policy) for policy, outcome in there.items()]), flush=True)
    return {
        **figures,
        "attainment_when_next_best_is_90": round(there["motet"].attainment, 4),
        "next_best_breaks_at": round(breaks[next_best], 1),
        "motet_breaks_at": round(breaks["motet"], 1),
    }


def _breaking_rate(policy: str, measure: Callable[[str, float], Outcome]) -> float:
    """The load at which attainment falls to BROKEN: steps up or down by a tenth, then the line between the last two."""
    rate, step, before = RATE, 0.0, (0.0, 1.0)
    while 0.05 * RATE < rate < 4 * RATE:
        attained = measure(policy, rate).attainment
        if not step:
            step = 0.1 * RATE if attained >= BROKEN else -0.1 * RATE
        elif (attained >= BROKEN) != (step > 0):
            share = (before[1] - BROKEN) / (before[1] - attained)
            return before[0] + share * (rate - before[0])
        before = (rate, attained)
        rate += step
    return rate


def _check_setting(setting: Setting) -> None:
    """What loading on demand adds to the time per token on one worker, each request with its own adapter: paper and twin."""
    rows: list[list[object]] = []
    for rate, rank, paper in ((9.0, 64, 71.0), (9.0, 32, 28.0), (6.0, 64, 25.0)):
        workload = setting.workload(rate, 1e6, rank=rank, shared=False)
        perf = _perf("bgmv")
        free = msgspec.structs.replace(perf, load_base_ms=0.0, load_ms_per_mib=0.0)
        with_loads, cached = (simulate(workload, p, "random", workers=1, roomy=True).tpot_ms for p in (perf, free))
        rows.append([f"{rate:g} requests/s, rank {rank}", paper, 100 * (with_loads / cached - 1)])
    print(report.table("setting: time per token, loading on demand over all cached", ("", "paper +%", "twin +%"), rows))


def simulate(
    workload: Workload,
    perf: PerfModel,
    policy: str,
    *,
    workers: int,
    schedulers: int = 1,
    oracle: bool = False,
    roomy: bool = False,
) -> Outcome:
    """One run. `oracle`: lengths are known and states arrive at once; `roomy`: memory and seats for every request."""
    limits = WorkerLimits(
        base_model="llama-2-7b", max_model_len=2048, max_running=256 if roomy else MAX_RUNNING, max_waiting=256,
        block_size=BLOCK_SIZE, kv_blocks_total=16 * KV_BLOCKS if roomy else KV_BLOCKS,
        adapter_bytes_total=(64 if roomy else 1) * ADAPTER_MIB * int(MIB), max_lora_rank=max(RANKS),
    )  # fmt: skip
    spec = WorkerSpec(limits=limits, perf=perf, steps=PerfSteps(perf), max_loras=256)
    cluster = Cluster(
        workload,
        [spec] * workers,
        SchedulerSpec(policy=policy, admission="room", oracle_lengths=oracle),  # policies alone are compared
        schedulers=schedulers,
        bus=PERFECT if oracle else Bus(),
    )
    cluster.run()
    times = Latencies.of(workload, cluster.metrics)
    counted = workload.arrival_s[times.rows] >= WARM_S
    tpot_ms = times.tpot_ms[counted]
    kept = ~(tpot_ms > workload.slos[0].tpot_slo_ms)  # a single token has no time per token to miss
    tpot_ms = tpot_ms[~np.isnan(tpot_ms)]
    metrics = cluster.metrics
    return Outcome(
        attainment=float(kept.sum() / (workload.arrival_s >= WARM_S).sum()),
        tpot_ms=float(tpot_ms.mean()),
        tpot_p99_ms=float(np.quantile(tpot_ms, 0.99)),
        per_token_ms=float(times.per_token_ms[counted].mean()),
        ttft_ms=float(times.ttft_ms[counted].mean()),
        hit_rate=1 - metrics.device_loads / max(1, metrics.adapter_admissions),
    )


def _perf(kernel: str) -> PerfModel:
    perf = A10_BGMV if kernel == "bgmv" else A10_MBGMV
    return msgspec.structs.replace(perf, load_base_ms=LOAD_BASE_MS, load_ms_per_mib=LOAD_MS_PER_MIB)
