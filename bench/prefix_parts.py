"""Workers, workloads and one run of `bench.prefix`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from bench.rivals.prefixes import POLICIES
from motet.policies.cluster.prefix_index import Depth
from motet.shared.model import PerfModel, Slo, WorkerLimits
from motet.shared.scheduler_options import AdmissionName
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import BusDelays, Cluster
from motet.twin.metrics import NEVER, Latencies
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import PerfSteps
from motet.twin.traces import read_trace
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Intensity, Lengths, Workload, arrivals, pick, zipf

BLOCK = 64
KV_TOKENS = 400_000
"""Of Llama-3-8B (128 KiB per token) beside its weights on a GPU of 80 GB."""
CONTEXT_TOKEN_PS = 45_000  # reading a token's K and V at 2.9 TB/s
ADAPTER_RANK, ADAPTER_BYTES = 16, 80 << 20
PERF = PerfModel(
    prefill_base_ms=8.0,
    prefill_token_ms=0.03,
    prefill_lora_ms=0.01,
    decode_base_ms=8.0,
    decode_row_ms=0.03,
    decode_lora_ms=0.001,
    load_base_ms=0.5,
    load_ms_per_mib=0.04,
)
"""An 8B model on an H100: a pass over the weights, and half of the card's bf16 arithmetic for prompts."""
SLO = Slo(ttft_slo_ms=2_000.0, tpot_slo_ms=40.0)
WARM = 0.2
"""Share of the requests that fill the caches and are not counted."""


NATS_MS_PER_MIB, RDMA_MS_PER_MIB = 6.7, 0.1
"""KV blocks over NATS, as measured (docs/decisions/0024), and over a transport of 10 GB/s that Motet does not have."""
CPU_PERF = PerfModel(
    prefill_base_ms=20.0,
    prefill_token_ms=1.0,
    prefill_lora_ms=0.1,
    decode_base_ms=25.0,
    decode_row_ms=2.0,
    decode_lora_ms=0.01,
    load_base_ms=0.5,
    load_ms_per_mib=0.04,
    kv_base_ms=3.0,
    kv_ms_per_mib=2.8,
)
"""A model of 428M parameters on a CPU: prefill and fetches as `bench.rebalance_kv` and `bench.prefix_fetch` measure them."""
CPU_KV_TOKENS, CPU_KV_TOKEN_BYTES = 64_000, 32 << 10
KV_TOKEN_BYTES = 128 << 10


def cpu_worker() -> WorkerSpec:
    """One CPU server."""
    gpu = worker()
    limits = msgspec.structs.replace(
        gpu.limits, device="cpu", max_running=32, kv_blocks_total=CPU_KV_TOKENS // BLOCK, kv_token_bytes=CPU_KV_TOKEN_BYTES
    )
    return replace(gpu, limits=limits, perf=CPU_PERF, steps=PerfSteps(CPU_PERF))


def worker(kv_ms_per_mib: float = NATS_MS_PER_MIB) -> WorkerSpec:
    """One GPU, which fetches KV blocks at this rate."""
    limits = WorkerLimits(
        base_model="llama-3-8b",
        device="cuda",
        max_model_len=131_072,
        max_running=256,
        max_waiting=4_096,
        block_size=BLOCK,
        kv_blocks_total=KV_TOKENS // BLOCK,
        adapter_bytes_total=64 * ADAPTER_BYTES,
        max_lora_rank=64,
        kv_format="bench",
        kv_token_bytes=KV_TOKEN_BYTES,
    )
    perf = msgspec.structs.replace(PERF, kv_base_ms=2.0, kv_ms_per_mib=kv_ms_per_mib)
    steps = PerfSteps(PERF, context_token_ps=CONTEXT_TOKEN_PS)
    options = WorkerOptions(prefix_cache=True, max_step_tokens=2_048, max_loras=64)
    return WorkerSpec(limits=limits, perf=perf, steps=steps, options=options)


# ---- workloads


def recorded(path: Path, rate: float, *, most: int = 0) -> Workload:
    """Recorded requests, with their times stretched to `rate` per second; all for the base model."""
    trace = read_trace(path)
    none = np.zeros(0, np.int64)
    made = (
        trace
        if isinstance(trace, Workload)
        else trace.workload(np.random.default_rng(0), ranks=none, adapter_bytes=none, slo=SLO)
    )
    fits = np.flatnonzero(made.prompt_tokens + made.output_tokens < 131_072)[: most or None]
    made = made.take(fits)
    return replace(made, arrival_s=(made.arrival_s - made.arrival_s[0]) * (len(made) / rate / made.duration_s))


def chats(
    rate: float,
    *,
    seconds: float,
    seed: int,
    adapters: int = 64,
    system_tokens: int = 1_000,
    turns: int = 8,
    think_s: float = 20.0,
    shared: bool = True,
) -> Workload:
    """Chats on adapters, each with a system prompt of its own, as open arrivals of `rate` turns per second.

    A turn's prompt is everything so far and a new message. Turns follow each other after a pause of `think_s` on average,
    whatever the answers take. Not `shared`: the same lengths and times, and nothing in common.
    """
    rng = np.random.default_rng(seed)
    starts = arrivals(rng, Intensity.constant(rate / turns, seconds + turns * think_s))
    whose = pick(rng, zipf(adapters), len(starts))
    message, answer = Lengths.lognormal(rng, prompt_mean=120, output_mean=220).draw(rng, len(starts) * turns)
    pause = rng.exponential(think_s, (len(starts), turns))
    rows: list[tuple[float, int, int, int, tuple[int, ...]]] = []
    system_blocks = -(-system_tokens // BLOCK)
    for chat, (start_s, adapter) in enumerate(zip(starts.tolist(), whose.tolist(), strict=True)):
        at_s, length = start_s, system_blocks * BLOCK
        for turn in range(turns):
            prompt, output = length + int(message[chat * turns + turn]), int(answer[chat * turns + turn])
            length = prompt + output
            own = range(1 << 20, (1 << 20) + -(-length // BLOCK) - system_blocks)
            ids = *range(adapter * 256, adapter * 256 + system_blocks), *(chat * 1_024 + block for block in own)
            rows.append((at_s, adapter, prompt, output, ids if shared else ()))
            at_s += float(pause[chat, turn])
    rows = sorted(row for row in rows if turns * think_s <= row[0] < seconds + turns * think_s)
    times, adapter_of, prompts, outputs, prefix = zip(*rows, strict=True)
    return Workload(
        arrival_s=np.array(times) - turns * think_s,
        adapter=np.array(adapter_of),
        prompt_tokens=np.array(prompts),
        output_tokens=np.array(outputs),
        ranks=np.full(adapters, ADAPTER_RANK),
        adapter_bytes=np.full(adapters, ADAPTER_BYTES),
        slos=(SLO,),
        prefix=prefix,
        prefix_tokens=BLOCK,
    )


# ---- a run


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What clients saw of the requests after the warm-up."""

    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    attainment: float
    goodput: float  # requests per second within their objectives
    reused: int  # tokens of prompts
    reused_share: float  # of all
    fetched: int  # requests with blocks from another worker
    refused: int


def play(
    workload: Workload,
    workers: int,
    policy: str,
    *,
    spec: WorkerSpec,
    aware: bool = True,
    fetch: bool = True,
    admission: AdmissionName = "room",
) -> Outcome:
    """One run. `policy` "oracle": Motet's, with every cache known at every moment. `fetch`: blocks may travel."""
    oracle = policy == "oracle"
    scheduler = SchedulerSpec(
        choose=POLICIES.named("motet" if oracle else policy)(),
        prefix_aware=aware,
        kv_travel=fetch,
        admission=admission,
        max_tokens=1_024,
        rebalance="off",
    )
    bus = BusDelays(submit_ms=0.5, assign_ms=0.5, stream_ms=0.3)
    cluster = Cluster(workload, [spec] * workers, scheduler, bus=bus)
    if oracle:
        know_all(cluster)
    cluster.run()
    return outcome(workload, cluster)


def know_all(cluster: Cluster) -> None:
    """The scheduler looks into the workers' caches themselves."""
    state = cluster.schedulers[0].state
    index = state.prefixes
    plain = index.depths

    def depths(keys: Sequence[int]) -> list[Depth]:
        for one in cluster.workers:
            row = state.row(one.worker_id)
            told = one.engine.batches.state.kv.take_news() or {}
            index.add(row, [key for key, there in told.items() if there])
            index.remove(row, [key for key, there in told.items() if not there])
        return plain(keys)

    setattr(index, "depths", depths)  # noqa: B010 - mypy knows no assignment to a method


def outcome(workload: Workload, cluster: Cluster) -> Outcome:
    """The figures of a finished run."""
    times = Latencies.of(workload, cluster.metrics)
    counted = np.flatnonzero(times.rows >= WARM * len(workload))
    ttft, tpot = times.ttft_ms[counted], times.tpot_ms[counted]
    kept = (ttft <= SLO.ttft_slo_ms) & ~(tpot > SLO.tpot_slo_ms)
    began_s = float(workload.arrival_s[int(WARM * len(workload))])
    refused = int((cluster.metrics.end_ps == NEVER).sum())
    everybody = len(workload) - int(WARM * len(workload))
    return Outcome(
        ttft_mean_ms=float(ttft.mean()),
        ttft_p50_ms=float(np.median(ttft)),
        ttft_p99_ms=float(np.quantile(ttft, 0.99)),
        tpot_mean_ms=float(np.nanmean(tpot)),
        attainment=float(kept.sum()) / everybody,
        goodput=float(kept.sum()) / (workload.duration_s - began_s),
        reused=cluster.metrics.prefix_tokens,
        reused_share=cluster.metrics.prefix_tokens / float(workload.prompt_tokens.sum()),
        fetched=cluster.metrics.kv_travels,
        refused=refused,
    )
