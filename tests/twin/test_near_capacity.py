"""Promise: where memory is full, requests wait no longer with Motet's policy than with dispatch by pending time alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.rivals.policies import least_pending
from motet.policies.cluster.choice import Choose
from motet.shared.model import PerfModel, Slo, WorkerLimits
from motet.twin.cluster import Cluster
from motet.twin.metrics import Latencies
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import PerfSteps
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Lengths, Workload

PERF = PerfModel(
    prefill_base_ms=0.0, prefill_token_ms=0.075, prefill_lora_ms=0.0, decode_base_ms=29.0, decode_row_ms=0.1,
    decode_lora_ms=0.0, load_base_ms=0.0, load_ms_per_mib=0.0,
)  # fmt: skip
LIMITS = WorkerLimits(
    base_model="b", max_model_len=2048, max_running=256, max_waiting=4096, block_size=16, kv_blocks_total=512,
    adapter_bytes_total=0, max_lora_rank=8,
)  # fmt: skip
RATE, SECONDS, WORKERS = 32.0, 90.0, 4  # about what the memory of four workers can serve


def waits_ms(choose: Choose | None, seed: int) -> NDArray[np.float64]:
    """Queueing delays of requests of very different lengths under a policy, None for Motet's."""
    rng = np.random.default_rng(seed)
    count = int(RATE * SECONDS)
    lengths = Lengths.lognormal(rng, prompt_mean=120, output_mean=120, prompt_cv=1.0, output_cv=1.0)
    prompt, output = lengths.capped(512, 1024).draw(rng, count)
    workload = Workload(
        arrival_s=np.sort(rng.uniform(0.0, SECONDS, count)),
        adapter=np.full(count, -1),
        prompt_tokens=prompt,
        output_tokens=output,
        ranks=np.array([8]),
        adapter_bytes=np.array([0]),
        slos=(Slo(ttft_slo_ms=5000.0, tpot_slo_ms=500.0),),
    )
    spec = WorkerSpec(limits=LIMITS, perf=PERF, steps=PerfSteps(PERF))
    cluster = Cluster(workload, [spec] * WORKERS, SchedulerSpec(admission="room", choose=choose, rebalance="off"))
    cluster.run()
    return Latencies.of(workload, cluster.metrics).queue_ms


def test_at_capacity_requests_wait_no_longer_than_by_pending_time() -> None:
    motet, pending = (np.concatenate([waits_ms(choose, seed) for seed in (1, 2)]) for choose in (None, least_pending))
    assert motet.mean() <= 1.1 * pending.mean()
    assert np.quantile(motet, 0.99) <= 1.1 * np.quantile(pending, 0.99)
    assert pending.mean() > 50.0, "there is a queue"
