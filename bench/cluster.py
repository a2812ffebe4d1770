"""CaraServe's cluster experiment (section 7.5) on the twin: every scheduling policy on the same 60 workers and requests.

340 requests/s for adapters with the popularity of Azure Functions, Alpaca lengths, ranks 8 to 128, and an SLO on the time per
output token of 1.5 times that of a request alone. `--data DIR` (or MOTET_DATA) holds the recorded popularity and lengths;
without it a power law and log-normal lengths of the same shape are drawn. Then the load is raised until each policy breaks.
More runs: every adapter cached on every worker (the paper's own case) with both kernels, Motet's policy with one part off, and
`--minutes` of the recorded trace with their own popularity and arrivals per minute; nothing was tuned on these. Runs go side by
side.

The worker is the paper's, a Llama-2-7B on an A10 (24 GB). Decode: the four latencies around its Fig. 5. Prefill: an
iteration of its own, a pass over the weights and 0.2 ms per token. A copy to the device stops the engine, as loading on
demand does there. How long it takes follows from section 7.2, where it lengthens the time per token by 71, 28 and 25% at 9
requests/s of rank 64, 9 of rank 32 and 6 of rank 64: about 0.28 ms per MiB; the table "setting" compares. Of 20 GiB
(90% of the card) the weights take 12.6 and activations some 1.5; of the rest 4 GiB hold KV (8,192 tokens) and 2 GiB adapters.
Up to 32 requests run together, as in Punica.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from bench import report
from bench.rivals import POLICIES
from bench.rivals.parts import ABLATIONS
from bench.watch import Watch
from motet.policies.times.perf_model import MIB
from motet.shared.model import PerfModel, Slo, WorkerLimits
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import BusDelays, Cluster
from motet.twin.memory import LLAMA2_7B
from motet.twin.metrics import Latencies
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import A10_BGMV, A10_MBGMV, PerfSteps
from motet.twin.traces import Popularity, read_lengths, read_popularity
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Intensity, Lengths, Workload, arrivals, pick, zipf

WORKERS, RATE, SLO_FACTOR = 60, 340.0, 1.5
RANKS = (8, 16, 32, 64, 128)
ADAPTERS = 1250
LOAD_BASE_MS, LOAD_MS_PER_MIB = 1.0, 0.28
KV_BLOCKS, BLOCK_SIZE, ADAPTER_MIB, MAX_RUNNING = 512, 16, 2048, 32
WARM_S = 15.0  # until the batches have their usual size; requests of that time are not counted
BROKEN = 0.9  # attainment below which a policy has broken
MINUTES = "958-960"
PAPER = "mbgmv"  # the kernel of the paper's three comparisons, and of the figures
POPULARITY, LENGTHS = "maf2019_sample_invocations_per_minute.csv.gz", "alpaca_text.jsonl.gz"


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--seed", type=int, default=0, help="another draw of arrivals, lengths, and adapters' ranks")
    parser.add_argument("--data", type=Path, default=os.environ.get("MOTET_DATA"), help=f"directory of {POPULARITY} and so on")
    parser.add_argument("--minutes", default=MINUTES, help=f"of the recorded popularity, replayed as well (default {MINUTES})")


def _minutes(text: str) -> range:
    """Parses minutes: "958-960" includes both ends."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@dataclass(frozen=True)
class Setting:
    """The conditions that all policies share."""

    shares: NDArray[np.float64]
    lengths: Lengths
    workers: int
    seconds: float
    seed: int = 0
    minutes: str = ""
    window: Popularity | None = None  # of these minutes alone

    @classmethod
    def of(cls, args: argparse.Namespace) -> Setting:
        workers = 6 if args.quick else WORKERS
        seconds = args.seconds or (5.0 if args.quick else 45.0)
        if args.data is not None:
            shares = read_popularity(Path(args.data) / POPULARITY).shares
            lengths = read_lengths(Path(args.data) / LENGTHS)
            window = read_popularity(Path(args.data) / POPULARITY, minutes=_minutes(args.minutes)) if args.minutes else None
            return cls(shares, lengths, workers, seconds, args.seed, args.minutes, window)
        rng = np.random.default_rng(7)
        lengths = Lengths.lognormal(rng, prompt_mean=20.7, output_mean=65.8, prompt_cv=0.7, output_cv=0.95)
        return cls(zipf(ADAPTERS, 1.27), lengths, workers, seconds, args.seed)

    def _draws(self, *numbers: int) -> Iterator[Generator]:
        return (np.random.default_rng(1000 * self.seed + number) for number in numbers)

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """One rank per adapter. Among five neighbours in popularity each rank occurs once, so that no rank is favoured."""
        (rng,) = self._draws(4)
        fives = -(-len(self.shares) // len(RANKS))
        in_order = np.concatenate([rng.permutation(RANKS) for _ in range(fives)])[: len(self.shares)]
        ranks = np.empty(len(self.shares), np.int64)
        ranks[np.argsort(-self.shares, kind="stable")] = in_order
        return ranks

    def workload(
        self, rate: float, tpot_slo_ms: float, *, rank: int = 0, shared: bool = True, recorded: bool = False
    ) -> Workload:
        """Requests for the adapters, `rate` per second.

        Not `shared`: each request has an adapter of its own, of this rank. `recorded`: popularity and arrival pattern are those
        of `window`, with this mean rate.
        """
        times, choices, pairs = self._draws(1, 2, 3)  # alike at every rate
        shares, intensity = self.shares, Intensity.constant(rate, WARM_S + self.seconds)
        if recorded and self.window is not None:
            shares, intensity = self.window.shares, self.window.scaled(rate)
        at = arrivals(times, intensity)
        adapter = pick(choices, shares, len(at)) if shared else np.arange(len(at))
        ranks = self.ranks if shared else np.full(max(1, len(at)), rank)
        prompt, output = self.lengths.draw(pairs, len(at))
        slo = Slo(ttft_slo_ms=60_000.0, tpot_slo_ms=tpot_slo_ms)  # the objective is the time per token
        return Workload(
            arrival_s=at, adapter=adapter, prompt_tokens=prompt, output_tokens=output, ranks=ranks,
            adapter_bytes=ranks * LLAMA2_7B.adapter_rank_bytes(("q_proj", "k_proj", "v_proj")), slos=(slo,),
        )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The results of one run. Times in milliseconds, means over requests unless stated otherwise."""

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

    def rounded(self) -> dict[str, float]:
        """The values rounded for the record."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


COLUMNS = ("policy", "attainment %", "TPOT ms", "p99", "E2E ms/token", "TTFT ms", "adapter on device %")
PERFECT = BusDelays(state_ms=0.0, delta_s=0.0, heartbeat_s=0.05)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run to make: the name of a policy or ablation, and what differs from the usual setting."""

    policy: str
    kernel: str = PAPER
    rate: float = RATE  # of 60 workers
    schedulers: int = 1
    oracle: bool = False
    cached: bool = False
    recorded: bool = False  # arrivals and popularity of `Setting.window`


def measure(setting: Setting, case: Case) -> Outcome:
    """Make one run."""
    perf = _perf(case.kernel)
    slo_ms = SLO_FACTOR * perf.decode_base_ms
    if case.cached:
        perf = _free(perf)
    workload = setting.workload(case.rate * setting.workers / WORKERS, slo_ms, recorded=case.recorded)
    scheduler = SchedulerSpec(
        policy=case.policy,
        choose=ABLATIONS.get(case.policy),
        admission="room",
        oracle_lengths=case.oracle,
        copies=case.schedulers,
        rebalance="off",
    )
    outcome = simulate(workload, perf, scheduler, workers=setting.workers, cached=case.cached)
    facts = [f"{case.rate:.0f}/s"]
    facts += [name for name, there in (("cached", case.cached), ("oracle", case.oracle), ("recorded", case.recorded)) if there]
    print(f"  {case.kernel} {case.policy} {', '.join(facts)}: {outcome.attainment:.2%}", file=sys.stderr, flush=True)
    return outcome


RIVALS = ("most-idle", "random", "first-fit")  # of the paper's comparisons
BOUND = "motet, perfect state and lengths"
"""What Motet's policy would reach with true lengths and states without delay."""
spawn = multiprocessing.get_context("spawn")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything, print the tables, return the figures."""
    setting = Setting.of(args)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        figures = _measure_all(setting, pool, args.watch, quick=args.quick)
    return {
        **figures,
        "workers": setting.workers,
        "requests_per_s": RATE * setting.workers / WORKERS,
        "seconds": setting.seconds,
        "seed": setting.seed,
        "recorded_workload": args.data is not None,
    }


# in one piece: a measurement is read from top to bottom, from its cases to its figures
def _measure_all(setting: Setting, pool: Executor, watch: Watch, *, quick: bool) -> dict[str, Any]:
    """Run the cases side by side, the most important first. The last ones are left out when time is over."""
    kernels = ("mbgmv", "bgmv")
    at_rate = {kernel: [Case(policy=policy, kernel=kernel) for policy in POLICIES] for kernel in kernels}
    more = {
        kernel: {
            "motet, 2 schedulers": Case(policy="motet", kernel=kernel, schedulers=2),
            BOUND: Case(policy="motet", kernel=kernel, oracle=True),
        }
        for kernel in kernels
    }
    cached = {
        kernel: {policy: Case(policy=policy, kernel=kernel, cached=True) for policy in POLICIES}
        | {BOUND: Case(policy="motet", kernel=kernel, cached=True, oracle=True)}
        for kernel in kernels
    }
    ablation = [Case(policy=policy) for policy in ABLATIONS]
    recorded = [Case(policy=policy, recorded=True) for policy in POLICIES] if setting.window is not None else []
    cases = [*ablation, *recorded]
    for kernel in kernels:
        cases += [*cached[kernel].values(), *at_rate[kernel], *more[kernel].values()]
    checks = [pool.submit(_added_by_loads, setting, rate, rank) for rate, rank, _ in PAPER_LOADS]
    runs = {case: pool.submit(measure, setting, case) for case in cases}
    until_s = time.time() + watch.left_s
    searches = [] if quick else [(kernel, policy) for kernel in kernels for policy in POLICIES]
    breaks = {one: pool.submit(breaking_rate, _Search(setting, one[0], until_s), one[1]) for one in searches}

    paper = [[f"{rate:g} requests/s, rank {rank}", said] for rate, rank, said in PAPER_LOADS]
    rows: list[list[object]] = [[*row, check.result()] for row, check in zip(paper, checks, strict=True)]
    print(report.table("setting: time per token, loading on demand over all cached", ("", "paper +%", "twin +%"), rows))
    found = {case: future.result() for case, future in runs.items()}
    figures: dict[str, Any] = {}
    for kernel in kernels:
        of_kernel = {case.policy: found[case] for case in at_rate[kernel]}
        of_kernel |= {name: found[case] for name, case in more[kernel].items()}
        suffix = _suffix(kernel)
        figures |= {f"{name}{suffix}": value for name, value in _figures(setting, kernel, of_kernel).items()}
        rates = {policy: breaks[kernel, policy].result() for policy in POLICIES if (kernel, policy) in breaks}
        unknown = [policy for policy, rate in rates.items() if rate is None]
        for policy in unknown:
            watch.skip(f"the breaking load of {policy}, {kernel}")
        known = {policy: rate for policy, rate in rates.items() if rate is not None}
        if "motet" in known and not unknown:
            next_best = max((policy for policy in POLICIES if policy != "motet"), key=lambda policy: known[policy])
            there = {
                p: pool.submit(measure, setting, Case(policy=p, kernel=kernel, rate=known[next_best]))
                for p in ("motet", next_best)
            }
            at_break = {policy: future.result() for policy, future in there.items()}
            title = f"{kernel.upper()}: where the next best breaks, {known[next_best]:.0f} requests/s"
            print(report.table(title, COLUMNS, [outcome.row(policy) for policy, outcome in at_break.items()]), flush=True)
            figures |= {
                f"attainment_when_next_best_is_90{suffix}": round(at_break["motet"].attainment, 4),
                f"next_best_breaks_at{suffix}": round(known[next_best], 1),
                f"motet_breaks_at{suffix}": round(known["motet"], 1),
            }
        if known:
            title = f"{kernel.upper()}: requests/s at which attainment falls to {BROKEN:.0%}"
            print(report.table(title, ("policy", "requests/s"), [[policy, rate] for policy, rate in known.items()]))
            figures[f"breaks_at{suffix}"] = {policy: round(rate, 1) for policy, rate in known.items()}
    watch.mark()
    for kernel in kernels:
        of_cached = {name: found[case] for name, case in cached[kernel].items()}
        figures |= _more_figures("cached" + _suffix(kernel), f"{kernel.upper()}, adapters cached", of_cached)
    if recorded:
        title = f"{PAPER.upper()}, minutes {setting.minutes} of the trace alone"
        figures |= _more_figures("recorded", title, {case.policy: found[case] for case in recorded})
    parts = {"motet": found[at_rate[PAPER][0]]} | {case.policy: found[case] for case in ablation}
    print(report.table("Motet's policy with one part off", COLUMNS, [outcome.row(name) for name, outcome in parts.items()]))
    return figures | {"ablation": {name: outcome.rounded() for name, outcome in parts.items()}}


def _suffix(kernel: str) -> str:
    return "" if kernel == PAPER else f"_{kernel}"


def _figures(setting: Setting, kernel: str, found: dict[str, Outcome]) -> dict[str, Any]:
    """The figures of one kernel at `RATE`: {policy or variant: outcome}."""
    perf, scale = _perf(kernel), setting.workers / WORKERS
    title = f"{kernel.upper()}, {setting.workers} workers, {RATE * scale:.0f} requests/s"
    title += f"; SLO {SLO_FACTOR * perf.decode_base_ms:.1f} ms per token"
    print(report.table(title, COLUMNS, [outcome.row(name) for name, outcome in found.items()]), flush=True)
    motet, ranked, idle = found["motet"], found["rank-aware"], found["most-idle"]
    two, oracle = found["motet, 2 schedulers"], found[BOUND]
    return {
        "attainment": round(motet.attainment, 4),
        "rank_aware_attainment": round(ranked.attainment, 4),
        "rank_aware_tpot_vs_mostidle": round(ranked.tpot_ms / idle.tpot_ms, 4),
        **{f"tpot_vs_{name.replace('-', '')}": round(motet.tpot_ms / found[name].tpot_ms, 4) for name in RIVALS},
        **{f"least_tpot_vs_{name.replace('-', '')}": round(perf.decode_base_ms / found[name].tpot_ms, 4) for name in RIVALS},
        "oracle_attainment": round(oracle.attainment, 4),
        "oracle_tpot_vs_mostidle": round(oracle.tpot_ms / idle.tpot_ms, 4),
        "attainment_two_schedulers": round(two.attainment, 4),
        "policies": {name: outcome.rounded() for name, outcome in found.items()},
    }


def _more_figures(name: str, title: str, found: dict[str, Outcome]) -> dict[str, Any]:
    print(report.table(title, COLUMNS, [outcome.row(policy) for policy, outcome in found.items()]))
    motet, idle = found["motet"], found["most-idle"]
    bound = {}
    if BOUND in found:
        least_ms = found[BOUND].tpot_ms
        gains = {rival: (found[rival].tpot_ms - motet.tpot_ms) / (found[rival].tpot_ms - least_ms) for rival in RIVALS}
        bound = {f"gain_of_bound_vs_{rival.replace('-', '')}_{name}": round(gain, 4) for rival, gain in gains.items()}
        bound |= {f"bound_attainment_{name}": round(found[BOUND].attainment, 4)}
    return bound | {
        f"attainment_{name}": round(motet.attainment, 4),
        **{f"tpot_vs_{rival.replace('-', '')}_{name}": round(motet.tpot_ms / found[rival].tpot_ms, 4) for rival in RIVALS},
        f"rank_aware_attainment_{name}": round(found["rank-aware"].attainment, 4),
        f"rank_aware_tpot_vs_mostidle_{name}": round(found["rank-aware"].tpot_ms / idle.tpot_ms, 4),
        f"policies_{name}": {policy: outcome.rounded() for policy, outcome in found.items()},
    }


@dataclass(frozen=True)
class _Search:
    """Runs of one kernel at any rate until a wall-clock time. It can be pickled for another process."""

    setting: Setting
    kernel: str
    until_s: float

    def __call__(self, policy: str, rate: float) -> Outcome | None:
        """The outcome at this rate; None when time is over."""
        if time.time() > self.until_s:
            return None
        return measure(self.setting, Case(policy=policy, kernel=self.kernel, rate=rate))


def breaking_rate(search: Callable[[str, float], Outcome | None], policy: str) -> float | None:
    """The load at which attainment falls to BROKEN; None when time was over first.

    The rate is changed by a tenth per run, and the result interpolated linearly between the last two runs.
    """
    rate, step, before = RATE, 0.0, (0.0, 1.0)
    while 0.05 * RATE < rate < 4 * RATE:
        outcome = search(policy, rate)
        if outcome is None:
            return None
        attained = outcome.attainment
        if not step:
            step = 0.1 * RATE if attained >= BROKEN else -0.1 * RATE
        elif (attained >= BROKEN) != (step > 0):
            share = (before[1] - BROKEN) / (before[1] - attained)
            return before[0] + share * (rate - before[0])
        before = (rate, attained)
        rate += step
    return rate


PAPER_LOADS = ((9.0, 64, 71.0), (9.0, 32, 28.0), (6.0, 64, 25.0))
"""Requests per second, rank, and what loading on demand adds to the time per token in the paper's section 7.2, percent."""


def _added_by_loads(setting: Setting, rate: float, rank: int) -> float:
    """How much adapter loads add to the time per output token, in percent.

    One simulated worker; each request has its own adapter.
    """
    workload, perf = setting.workload(rate, 1e6, rank=rank, shared=False), _perf("bgmv")
    policy = SchedulerSpec(policy="random", admission="room", rebalance="off")
    with_loads, cached = (simulate(workload, p, policy, workers=1, roomy=True).tpot_ms for p in (perf, _free(perf)))
    return 100 * (with_loads / cached - 1)


def simulate(
    workload: Workload,
    perf: PerfModel,
    scheduler: SchedulerSpec,
    *,
    workers: int,
    roomy: bool = False,
    cached: bool = False,
) -> Outcome:
    """Make one run. A scheduler that knows lengths also gets states at once. It admits by room, as policies alone are compared.

    `roomy`: memory and seats for every request; `cached`: device memory for every adapter.
    """
    limits = WorkerLimits(
        base_model="llama-2-7b", max_model_len=2048, max_running=256 if roomy else MAX_RUNNING, max_waiting=256,
        block_size=BLOCK_SIZE, kv_blocks_total=16 * KV_BLOCKS if roomy else KV_BLOCKS,
        adapter_bytes_total=(64 if roomy or cached else 1) * ADAPTER_MIB * int(MIB), max_lora_rank=max(RANKS),
    )  # fmt: skip
    spec = WorkerSpec(limits=limits, perf=perf, steps=PerfSteps(perf), options=WorkerOptions(max_loras=4096 if cached else 256))
    cluster = Cluster(
        workload,
        [spec] * workers,
        scheduler,
        bus=PERFECT if scheduler.oracle_lengths else BusDelays(),
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


def _free(perf: PerfModel) -> PerfModel:
    """The same coefficients with copies that take no time."""
    return msgspec.structs.replace(perf, load_base_ms=0.0, load_ms_per_mib=0.0)
