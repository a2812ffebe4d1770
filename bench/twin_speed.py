"""How fast the digital twin is: one engine for an hour, and a cluster for ten minutes, on one core.

    gpu_hour_s      64 adapters of ranks 8, 16, 32 with 0.1, 0.05 or 0.025 requests/s each (3.7 requests/s in all) and
                    250 prompt and 231 output tokens on average: the low rates of the adapter-caching paper's validation
                    (section 8.1), whose own twin takes 39 s for an hour on average. The engine's times are about those
                    of an H100 with Llama-3.1-8B.
    cluster_10min_s 60 A10 workers, 40,000 adapters by Zipf's law, 340 requests/s, Alpaca-like lengths (CaraServe
                    section 7.5), Motet's scheduling with its states 1 ms old, heartbeats and all
    rss_mib         the most memory the whole bench used

Each in a process of its own; the time is that of the run with its summary, without imports.
"""

from __future__ import annotations

import argparse
import resource
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench import report
from bench.rig.processes import spawned
from motet.shared.model import PerfModel, Slo, WorkerLimits
from motet.twin.cluster import Cluster
from motet.twin.memory import ATTENTION_QKV, LLAMA2_7B
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import A10_MBGMV, PerfSteps
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Intensity, Ints, Lengths, Workload, arrivals, per_adapter, pick, rank_mix, zipf

GIB = 1 << 30
WITHIN_S = 600.0
H100 = PerfModel(
    kernel="mbgmv",
    prefill_base_ms=0.5,
    prefill_token_ms=0.027,
    prefill_lora_ms=0.0,
    decode_base_ms=14.0,
    decode_row_ms=0.05,
    decode_lora_ms=0.01,
    load_base_ms=3.0,
    load_ms_per_mib=0.05,
)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both, print the table, return the figures."""
    scale = 0.01 if args.quick else 1.0
    hour = _measured(gpu_hour, 3600 * scale)
    args.watch.mark()
    cluster = _measured(cluster_10min, 600 * scale)
    args.watch.mark()
    rows = [
        (name, f["requests"], f["simulated_s"], f["wall_s"], f["us_per_request"], f["rss_mib"])
        for name, f in (("one engine", hour), ("60 workers", cluster))
    ]
    print(report.table("The twin's speed", ("", "requests", "simulated s", "s", "us per request", "MiB"), rows))
    return {
        "gpu_hour_s": hour["wall_s"],
        "cluster_10min_s": cluster["wall_s"],
        "rss_mib": max(hour["rss_mib"], cluster["rss_mib"]),
        "gpu_hour": hour,
        "cluster": cluster,
    }


def gpu_hour(seconds: float) -> Cluster:
    """One engine without a scheduler."""
    rng = np.random.default_rng(0)
    times, adapter = per_adapter(rng, np.resize([0.1, 0.05, 0.025], 64), seconds)
    prompt, output = Lengths.lognormal(rng, prompt_mean=250, output_mean=231).capped(1024, 2048).draw(rng, len(times))
    ranks = rank_mix(rng, 64, {8: 1, 16: 1, 32: 1})
    workload = Workload(
        arrival_s=times,
        adapter=adapter,
        prompt_tokens=prompt,
        output_tokens=output,
        ranks=ranks,
        adapter_bytes=ranks * LLAMA2_7B.adapter_rank_bytes(ATTENTION_QKV),
    )
    limits = limits_of(max_running=256, kv_blocks=16_000, adapter_bytes=GIB)
    return Cluster(workload, [WorkerSpec(limits=limits, perf=H100, steps=PerfSteps(H100, context_token_ps=80_000))], None)


def cluster_10min(seconds: float) -> Cluster:
    """The paper's large simulation, with the policies of the live scheduler and worker."""
    rng = np.random.default_rng(0)
    times = arrivals(rng, Intensity.constant(340.0, seconds))
    adapters = 40_000
    prompt, output = alpaca_like(rng, len(times))
    ranks = rank_mix(rng, adapters, {8: 1, 16: 1, 32: 1, 64: 1, 128: 1})
    workload = Workload(
        arrival_s=times,
        adapter=pick(rng, zipf(adapters), len(times)),
        prompt_tokens=prompt,
        output_tokens=output,
        ranks=ranks,
        adapter_bytes=ranks * LLAMA2_7B.adapter_rank_bytes(ATTENTION_QKV),
        slos=(Slo(tpot_slo_ms=60.0),),
    )
    limits = limits_of(max_running=64, kv_blocks=900, adapter_bytes=2 * GIB)
    worker = WorkerSpec(limits=limits, perf=A10_MBGMV, steps=PerfSteps(A10_MBGMV))
    return Cluster(workload, [worker] * 60, SchedulerSpec(admission="room"))


def alpaca_like(rng: np.random.Generator, requests: int) -> tuple[Ints, Ints]:
    """Prompt and output tokens [requests], with the means and spreads of the Alpaca set."""
    return Lengths.lognormal(rng, prompt_mean=21, output_mean=126, prompt_cv=0.7, output_cv=0.8).draw(rng, requests)


def limits_of(*, max_running: int, kv_blocks: int, adapter_bytes: int) -> WorkerLimits:
    """The limits of a simulated GPU."""
    return WorkerLimits(
        base_model="base",
        max_model_len=4096,
        max_running=max_running,
        max_waiting=4096,
        block_size=16,
        kv_blocks_total=kv_blocks,
        adapter_bytes_total=adapter_bytes,
        max_lora_rank=128,
    )


def _measured(build: Any, seconds: float) -> dict[str, Any]:
    with spawned(_child, build, seconds, within_s=WITHIN_S) as child:
        return dict(child.first)


def _child(pipe: Connection, build: Any, seconds: float) -> None:
    cluster = build(seconds)
    began, began_cpu = time.perf_counter(), time.process_time()
    cluster.run()
    figures = cluster.summary()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    requests = figures["requests"]
    pipe.send(
        {
            "requests": requests,
            "simulated_s": seconds,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "us_per_request": 1e6 * wall_s / requests,
            "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "tpot_p50_ms": figures["tpot_ms"]["p50"],
            "busy_share": figures["throughput"]["busy_share"],
            "refused": figures["refused"],
        }
    )
