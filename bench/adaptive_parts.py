"""The cluster, the six workloads and the settings of `bench.adaptive`, and one run of the twin.

Four workers like that of `bench.chameleon`: a Llama-2-7B in a step of 20 ms and more, 0.18 ms per prompt token, LoRA by rows
and ranks; 64 seats. KV blocks and adapters share 24 GiB, or what the workload says. A copy to the device runs beside the steps
at 3.16 GB/s, as `bench.chameleon` found it; a disk of 2 GB/s and a store of 1.3 GB/s are behind it. The merged copy has the
12.1 GiB of the linear layers and takes 0.25 s to make. CPU processes can compute for adapters that are not there yet
(`bench.cpu_assist_twin`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench import rivals  # noqa: F401 - registers policies
from bench.chameleon_parts import STEPS
from bench.cpu_assist_twin import CORE_SHARE, ELEMENT_BYTES, FLOPS_PER_ELEMENT, GFLOPS, READ_GBPS, START_MS
from motet.policies.step.cold_start import AssistRates
from motet.policies.times.perf_model import MIB
from motet.shared.model import MODULES, PerfModel, Slo, WorkerLimits
from motet.shared.worker_options import Switch, WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.link import LinkModel
from motet.twin.memory import LLAMA2_7B
from motet.twin.metrics import Latencies
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import Link, MeasuredSteps
from motet.twin.storage import StorageModel
from motet.twin.worker_spec import MergedCopyModel, WorkerSpec
from motet.twin.workload import Intensity, Lengths, Workload, arrivals, pick, rank_mix, zipf

GIB = 1 << 30
WORKERS, SEATS, BLOCK_SIZE = 4, 64, 16
WARM_S = 10.0
"""Requests of this time are not counted."""
COPY_MS_PER_MIB = 85.0 / 256
PERF = PerfModel(
    prefill_base_ms=20.0, prefill_token_ms=0.18, prefill_lora_ms=0.0, decode_base_ms=20.0, decode_row_ms=0.15,
    decode_lora_ms=0.002, load_base_ms=0.0, load_ms_per_mib=COPY_MS_PER_MIB, fetch_base_ms=5.0,
    fetch_ms_per_mib=0.8,
)  # fmt: skip
RANK_BYTES = LLAMA2_7B.adapter_rank_bytes(("q_proj", "k_proj", "v_proj", "o_proj"))
LINEAR_BYTES = 2 * LLAMA2_7B.layers * sum(a * b for a, b in map(LLAMA2_7B.features, MODULES))
COPY = MergedCopyModel(size_bytes=LINEAR_BYTES, mib_ms=0.02)  # of all linear layers
SLO = Slo(ttft_slo_ms=1000.0, tpot_slo_ms=100.0)


@dataclass(frozen=True, kw_only=True)
class Load:
    """One of the six workloads. `measure`: what settings are compared by, "goodput" or "latency"."""

    shares: NDArray[np.float64]
    rate: float  # of all workers, per second
    measure: str
    ranks: dict[int, float]
    seconds: float = 120.0
    prompt: float = 200.0  # tokens, means
    output: float = 100.0
    burst: tuple[float, float, float] | None = None
    """From one share of the run to another one, one adapter gets so many more requests per second."""
    memory_gib: float = 24.0
    host_gib: float | None = None
    rounds: int = 0  # each adapter is asked for so many times in a row, then never again


LOADS: dict[str, Load] = {
    "uniform": Load(shares=np.full(64, 1 / 64), rate=24.0, measure="latency", ranks={32: 1.0}),
    "one hot adapter": Load(
        shares=np.r_[0.97, np.full(31, 0.03 / 31)],
        rate=26.0,
        measure="latency",
        ranks={64: 1.0},
        seconds=240.0,
        memory_gib=48.0,
    ),
    "burst on one adapter": Load(
        shares=np.full(64, 1 / 64), rate=18.0, measure="goodput", ranks={32: 1.0}, burst=(0.4, 0.6, 24.0)
    ),
    "cold storm": Load(
        shares=zipf(512, 0.5), rate=16.0, measure="latency", ranks={16: 1.0, 32: 1.0, 64: 1.0}, host_gib=8.0, memory_gib=12.0
    ),
    "overload 1.3 x": Load(shares=zipf(64), rate=46.0, measure="goodput", ranks={8: 1.0, 16: 1.0, 32: 1.0, 64: 1.0}),
    "memory bound": Load(
        shares=zipf(64),
        rate=8.0,
        measure="goodput",
        ranks={32: 1.0, 64: 1.0},
        prompt=500.0,
        output=250.0,
        memory_gib=10.0,
        seconds=400.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is on."""

    merge: Switch = "off"
    rebalance: Switch = "off"
    queues: str = "fcfs"
    foresight: Switch = "off"
    assist: int = 0


OFF = Setting()
ASSIST = 4
"""CPU LoRA processes: as `auto` settles on, where a GPU's worker has eight cores or more."""
FIXED = {
    "off": OFF,
    "merge": replace(OFF, merge="on"),
    "rebalance": replace(OFF, rebalance="on"),
    "queues": replace(OFF, queues="motet"),
    "foresight": replace(OFF, foresight="on"),
    "assist": replace(OFF, assist=ASSIST),
    "all on": Setting(merge="on", rebalance="on", queues="motet", foresight="on", assist=ASSIST),
}
AUTO = Setting(merge="auto", rebalance="auto", queues="auto", foresight="auto", assist=ASSIST)
ALONE = {
    "merge auto": replace(OFF, merge="auto"),
    "rebalance auto": replace(OFF, rebalance="auto"),
    "queues auto": replace(OFF, queues="auto"),
    "foresight auto": replace(OFF, foresight="auto"),
}
"""Each `auto` alone."""
SETTINGS = {**FIXED, "auto": AUTO, **ALONE}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    load: str
    setting: Setting
    seed: int
    scale: float = 1.0  # of the load's time
    rate: float = 1.0  # times the load's rate
    policy: str = "motet"


class Outcome(msgspec.Struct, frozen=True):
    """The results of a run, of requests that came after WARM_S."""

    goodput: float  # requests per second within both objectives
    latency_ms: float  # mean of all that ended
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    served: float  # share of the requests
    moves: int
    merged: float  # share of the steps
    foreseen: int
    preemptions: int


def workload(case: Case) -> Workload:
    """The requests of a case: the same with every setting."""
    load = LOADS[case.load]
    times, choices, pairs, sizes = (np.random.default_rng([case.seed, number]) for number in range(4))
    seconds = WARM_S + load.seconds * case.scale
    at = arrivals(times, Intensity.constant(load.rate * case.rate, seconds))
    adapter = pick(choices, load.shares, len(at))
    if load.burst is not None:
        begin, end, rate = load.burst
        begin_s, end_s = (WARM_S + share * load.seconds * case.scale for share in (begin, end))
        more = begin_s + arrivals(times, Intensity.constant(rate * case.rate, end_s - begin_s))
        order = np.argsort(np.concatenate([at, more]), kind="stable")
        at, adapter = np.concatenate([at, more])[order], np.concatenate([adapter, np.zeros(len(more), np.int64)])[order]
    lengths = Lengths.lognormal(pairs, prompt_mean=load.prompt, output_mean=load.output, prompt_cv=0.8, output_cv=0.8)
    prompt, output = lengths.capped(2000, 4000).draw(pairs, len(at))
    ranks = rank_mix(sizes, len(load.shares), load.ranks)
    return Workload(
        arrival_s=at, adapter=adapter, prompt_tokens=prompt, output_tokens=output, ranks=ranks,
        adapter_bytes=ranks * RANK_BYTES, slos=(SLO,),
    )  # fmt: skip


def worker(load: Load, setting: Setting) -> WorkerSpec:
    """One of the workers."""
    block_bytes = BLOCK_SIZE * LLAMA2_7B.kv_token_bytes
    memory = int(load.memory_gib * GIB)
    limits = WorkerLimits(
        base_model="llama-2-7b", max_model_len=4096, max_running=SEATS, max_waiting=4096, block_size=BLOCK_SIZE,
        kv_blocks_total=memory * 3 // 4 // block_bytes, adapter_bytes_total=memory // 4, max_lora_rank=128,
        kv_block_bytes=block_bytes, pin_slots=16, pin_bytes=memory // 8, copies="bridged" if setting.assist else "wait",
    )  # fmt: skip
    mib_row_ms = MIB / ELEMENT_BYTES * FLOPS_PER_ELEMENT / (GFLOPS * 1e6)
    assist = AssistRates(
        ASSIST, mib_row_ms=mib_row_ms, mib_ms=MIB / (READ_GBPS * 1e6), start_ms=START_MS, core_share=CORE_SHARE
    )
    return WorkerSpec(
        limits=limits,
        perf=PERF,
        steps=MeasuredSteps(STEPS, PERF),
        link=LinkModel(
            bytes_per_s=MIB / COPY_MS_PER_MIB * 1e3, layers=LLAMA2_7B.layers, assist=assist if setting.assist else None
        ),
        storage=StorageModel(
            host_bytes=None if load.host_gib is None else int(load.host_gib * GIB), disk=Link(1.0, 0.5), store=Link(5.0, 0.8)
        ),
        options=WorkerOptions(
            max_step_tokens=512,
            max_loras=512,
            queues=setting.queues,
            foresight=setting.foresight,
            merge=setting.merge,
            prefetch=4,
        ),
        merged_copy=COPY,
    )


def build(case: Case) -> Cluster:
    """The simulated cluster of a case."""
    return Cluster(
        workload(case),
        [worker(LOADS[case.load], case.setting)] * WORKERS,
        SchedulerSpec(policy=case.policy, rebalance=case.setting.rebalance, place_s=15.0),
    )


def measure(case: Case) -> Outcome:
    """Make one run, to the end of its last request."""
    cluster = build(case)
    cluster.run()
    load, metrics = cluster.workload, cluster.metrics
    times = Latencies.of(load, metrics)
    counted = load.arrival_s[times.rows] >= WARM_S
    seconds = LOADS[case.load].seconds * case.scale
    kept = (times.ttft_ms <= SLO.ttft_slo_ms) & ~(times.tpot_ms > SLO.tpot_slo_ms) & counted
    return Outcome(
        goodput=float(kept.sum()) / seconds,
        latency_ms=float(times.e2e_ms[counted].mean()),
        ttft_ms=float(times.ttft_ms[counted].mean()),
        ttft_p99_ms=float(np.quantile(times.ttft_ms[counted], 0.99)),
        tpot_ms=float(np.nanmean(times.tpot_ms[counted])),
        served=float(counted.sum() / (load.arrival_s >= WARM_S).sum()),
        moves=metrics.moves,
        merged=metrics.merged_steps / max(1, metrics.merged_steps + metrics.unmerged_steps),
        foreseen=metrics.foreseen,
        preemptions=metrics.preemptions,
    )


VALUE: dict[str, Callable[[Outcome], float]] = {
    "goodput": lambda one: one.goodput,
    "latency": lambda one: 1000.0 / one.latency_ms,
}
