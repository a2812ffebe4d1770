"""Kinds of workers and demands for tests of packing and its bound."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from motet.policies.plan.capacity import Settings
from motet.policies.plan.demand import Demand
from motet.policies.plan.fleet import Kind, Packing
from motet.policies.plan.native_steps import LinearSteps
from motet.shared.model import PerfModel
from motet.twin.vllm.law import VllmSteps
from motet.twin.vllm.steps import TERMS, VllmStepModel

STEPS = VllmStepModel(
    ms=dict.fromkeys(TERMS, 0.0)
    | {
        "constant": 12.0,
        "tokens": 0.01,
        "rows": 0.006,
        "context_ktokens": 0.06,
        "mixed_context_ktokens": 0.04,
        "lora": 1.3,
        "lora_tokens": 0.01,
        "slot_expand": 0.008,
        "slot_shrink": 0.016,
        "adapter": 0.24,
        "adapter_expand": 0.007,
        "adapter_shrink": 0.16,
    },
    load_full_ms=9.0,
    load_padded_ms=11.0,
    scan_us=0.2,
    listed_us=0.2,
)
"""Steps of a vLLM server that resembles an H100 with an 8B model."""
MIB = 2**20


def vllm_kind(*, cost: float = 1.0, most: int | None = None, name: str = "vllm") -> Kind:
    """A server with 8 to 96 slots of rank 8 or 32; each slot takes KV."""
    found = [(float(slots), rank, 200_000.0 - 45.0 * slots * rank) for rank in (8.0, 32.0) for slots in (8, 16, 32, 64, 96)]
    slots, rank, kv_tokens = np.array(found).T
    settings = Settings(
        steps=VllmSteps(STEPS, slots, rank),
        slots=slots,
        adapter_bytes=np.full(len(slots), np.inf),
        max_rank=rank,
        kv_tokens=kv_tokens,
        seats=256,
        step_tokens=2048,
    )
    return Kind(name=name, settings=settings, cost=cost, most=most)


def native_kind(
    *, cost: float = 1.0, most: int | None = None, adapter_mib: float = 2048.0, kv_tokens: float = 40_000.0
) -> Kind:
    """A native worker whose adapters are limited by bytes, with two divisions of its memory."""
    perf = PerfModel(
        prefill_base_ms=10.0,
        prefill_token_ms=0.1,
        prefill_lora_ms=0.01,
        decode_base_ms=15.0,
        decode_row_ms=0.3,
        decode_lora_ms=0.002,
        load_base_ms=2.0,
        load_ms_per_mib=0.1,
    )
    settings = Settings(
        steps=LinearSteps(perf=perf),
        slots=np.full(2, np.inf),
        adapter_bytes=np.array([1.0, 0.25]) * adapter_mib * MIB,
        max_rank=np.full(2, 64.0),
        kv_tokens=np.array([1.0, 1.5]) * kv_tokens,
        seats=64,
    )
    return Kind(name="native", settings=settings, cost=cost, most=most)


def demand_of(
    rate: object, *, rank: object = 8, size_mib: object = 16, prompt: float = 200.0, output: float = 150.0, slo: bool = True
) -> Demand:
    """Adapters of these rates, within objectives of 1 s and 150 ms unless `slo` is False."""
    return Demand.of(
        rate,  # type: ignore[arg-type]
        rank=rank,  # type: ignore[arg-type]
        size_bytes=np.asarray(size_mib, dtype=np.float64) * MIB,
        prompt_tokens=prompt,
        output_tokens=output,
        ttft_slo_ms=1000.0 if slo else np.inf,
        tpot_slo_ms=150.0 if slo else np.inf,
    )


@st.composite
def demands(draw: st.DrawFn, *, adapters: int = 60) -> Demand:
    """Up to so many adapters with rates from 0.005 to 3 requests/s and ranks 8 to 32."""
    count = draw(st.integers(1, adapters))
    chance = np.random.default_rng(draw(st.integers(0, 2**16)))
    most = draw(st.sampled_from((0.05, 0.5, 3.0)))
    rate = np.exp(chance.uniform(np.log(0.005), np.log(most), count))
    if draw(st.booleans()):
        rate = chance.choice(most / 2.0 ** np.arange(4), count)
    return demand_of(rate, rank=chance.choice(draw(st.sampled_from(((8,), (8, 32), (8, 16, 32)))), count))


def served(packing: Packing, adapters: int) -> np.ndarray:
    """The share of each adapter's requests that a packing serves."""
    shares = np.zeros(adapters)
    for worker in packing.workers:
        np.add.at(shares, list(worker.rows), worker.shares)
    return shares
