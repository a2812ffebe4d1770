"""CPU-assisted prefill at the scale of CaraServe's section 7.2, on the digital twin: one GPU, 512 adapters, 3 to 9 requests/s.

    A10     Llama-2-7B, rank 64 on q, k, v (96 MiB), step times of twin/steps.py, 10 GB/s for adapters
    H200    Llama-3.1-8B, rank 64 on all projections (320 MiB), steps at 60% of the card's bandwidth and arithmetic, 50 GB/s

Popularity follows Zipf's law, lengths are Alpaca-like; the device has room for a sixteenth of the adapters. Eight CPU processes
at 170 GFLOP/s each, as a current server core computes bfloat16 LoRA; each reads the adapter from memory at 10 GB/s, needs 1 ms
to start, and a core carries out the copies. "stop and copy" is the usual way of serving systems: a step waits for the copies
that it needs, and so do all requests in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from bench import report
from bench.twin_speed import alpaca_like, limits_of
from motet.policies.step.cold_start import AssistRates, ColdStartName
from motet.policies.times.perf_model import MIB
from motet.shared.model import MODULES, PerfModel
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.link import LinkModel
from motet.twin.memory import ATTENTION_QKV, LLAMA2_7B, LLAMA31_8B, ModelShapes
from motet.twin.steps import A10_MBGMV, PerfSteps
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Intensity, Workload, arrivals, pick, zipf

ADAPTERS, RESIDENT, RANK = 512, 32, 64
RATES = (3.0, 6.0, 9.0)
SECONDS = 300.0  # as the paper's runs
GFLOPS, PROCESSES = 170.0, 8
READ_GBPS, START_MS, CORE_SHARE = 10.0, 1.0, 1.0
ELEMENT_BYTES, FLOPS_PER_ELEMENT = 2, 2
H200 = PerfModel(
    prefill_base_ms=6.2,  # 16 GB of weights at 0.6 of 4.3 TB/s
    prefill_token_ms=0.034,  # 16 GFLOP at 0.6 of 790 TFLOP/s
    prefill_lora_ms=0.0,
    decode_base_ms=6.2,
    decode_row_ms=0.02,
    decode_lora_ms=0.002,
    load_base_ms=0.1,
    load_ms_per_mib=MIB / 50e6,
)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU with a model."""

    name: str
    perf: PerfModel
    shapes: ModelShapes
    modules: tuple[str, ...]
    link_bytes_per_s: float
    memory_gib: int

    @property
    def adapter_bytes(self) -> int:
        return RANK * self.shapes.adapter_rank_bytes(self.modules)


DEVICES = (
    Device("A10", A10_MBGMV, LLAMA2_7B, ATTENTION_QKV, 10e9, 24),
    Device("H200", H200, LLAMA31_8B, MODULES, 50e9, 141),
)


def paper_scale(*, quick: bool) -> dict[str, Any]:
    """Print the table; returns {device: {way: mean TTFT relative to cached, mean over the rates}}."""
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for device in DEVICES:
        ratios: dict[str, list[float]] = {}
        for rate in RATES:
            found = {way: _summary(device, spec, rate, 30.0 if quick else SECONDS) for way, spec in _ways(device).items()}
            cached = found["cached"]
            for way, summary in found.items():
                times = [summary[figure]["mean"] for figure in ("ttft_ms", "tpot_ms", "e2e_ms")]
                ratios.setdefault(way, []).append(times[0] / cached["ttft_ms"]["mean"])
                beside = [summary[figure]["mean"] / cached[figure]["mean"] for figure in ("ttft_ms", "tpot_ms", "e2e_ms")]
                rows.append([f"{device.name}, {rate:g}/s, {way}", *times, *beside])
        figures[device.name] = {way: round(sum(values) / len(values), 3) for way, values in ratios.items()}
    columns = ["", "TTFT ms", "TPOT ms", "latency ms", "TTFT / cached", "TPOT", "latency"]
    print(report.table(f"Twin: {ADAPTERS} adapters, {RESIDENT} on the device (means)", columns, rows))
    return figures


def _ways(device: Device) -> dict[str, WorkerSpec]:
    slots = RESIDENT * device.adapter_bytes
    kv_blocks = device.shapes.kv_blocks(device.memory_gib << 30, adapter_bytes=slots, block_size=16)
    limits = limits_of(max_running=64, kv_blocks=kv_blocks, adapter_bytes=slots)
    plain = WorkerSpec(limits=limits, perf=device.perf, steps=PerfSteps(device.perf))
    at_once = msgspec.structs.replace(device.perf, load_base_ms=0.0, load_ms_per_mib=0.0)
    mib_row_ms = MIB / ELEMENT_BYTES * FLOPS_PER_ELEMENT / (GFLOPS * 1e6)

    def beside(way: ColdStartName) -> WorkerSpec:
        rates = AssistRates(
            PROCESSES, mib_row_ms=mib_row_ms, mib_ms=MIB / (READ_GBPS * 1e6), start_ms=START_MS, core_share=CORE_SHARE
        )
        link = LinkModel(bytes_per_s=device.link_bytes_per_s, layers=device.shapes.layers, assist=rates)
        return replace(plain, link=link, options=WorkerOptions(cold_start=way))

    return {
        "cached": replace(plain, perf=at_once, steps=PerfSteps(at_once)),
        "stop and copy": plain,
        "on demand": beside("blocking"),
        "layer-wise": beside("layerwise"),
        "assist": beside("assist"),
        "auto": beside("auto"),
    }


def _summary(device: Device, spec: WorkerSpec, rate: float, seconds: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    times = arrivals(rng, Intensity.constant(rate, seconds))
    prompt, output = alpaca_like(rng, len(times))
    ranks = np.full(ADAPTERS, RANK)
    workload = Workload(
        arrival_s=times,
        adapter=pick(rng, zipf(ADAPTERS), len(times)),
        prompt_tokens=prompt,
        output_tokens=output,
        ranks=ranks,
        adapter_bytes=ranks * device.shapes.adapter_rank_bytes(device.modules),
    )
    cluster = Cluster(workload, [spec], None)
    cluster.run()
    return cluster.summary()
