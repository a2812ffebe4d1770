"""Promise: under overload a cluster serves as many requests inside their objectives as it does at its best load."""

from __future__ import annotations

import numpy as np
import pytest

from motet.policies.cluster.objectives import Admission
from motet.shared.model import PerfModel, Slo, WorkerLimits
from motet.shared.worker_options import DEFAULTS, WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.metrics import Latencies
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import PerfSteps
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Intensity, Workload, arrivals

PERF = PerfModel(
    prefill_base_ms=3.0, prefill_token_ms=0.1, prefill_lora_ms=0.0, decode_base_ms=3.0, decode_row_ms=0.4, decode_lora_ms=0.0,
    load_base_ms=1.0, load_ms_per_mib=0.1,
)  # fmt: skip
SEATS, TOKENS = 16, 64
CAPACITY = SEATS * 1000.0 / (TOKENS * (3.0 + 0.4 * SEATS) + SEATS * (3.0 + 0.1 * TOKENS))  # requests/s: 21
CLASSES = (
    Slo(slo_class="interactive", ttft_slo_ms=500.0, tpot_slo_ms=50.0),
    Slo(),
    Slo(slo_class="batch", ttft_slo_ms=10_000.0),
)
SECONDS, WARM_S = 40.0, 10.0


def offered(load: float) -> Workload:
    """Poisson arrivals at `load` times the capacity: a quarter interactive, a quarter standard, half batch."""
    rng = np.random.default_rng(1)
    times = arrivals(rng, Intensity.constant(load * CAPACITY, SECONDS))
    tokens = np.full(len(times), TOKENS)
    return Workload(
        arrival_s=times,
        adapter=np.full(len(times), -1),
        prompt_tokens=tokens,
        output_tokens=tokens,
        ranks=np.array([8]),
        adapter_bytes=np.array([1 << 20]),
        slo=rng.choice(3, size=len(times), p=(0.25, 0.25, 0.5)),
        slos=CLASSES,
    )


def served(load: float, admission: Admission, queues: str = DEFAULTS.queues) -> tuple[float, float]:
    """(requests served within their objectives per second, that share of the interactive requests)."""
    workload = offered(load)
    limits = WorkerLimits(
        base_model="b", max_model_len=1024, max_running=SEATS, max_waiting=256, block_size=16, kv_blocks_total=4000,
        adapter_bytes_total=1 << 30, max_lora_rank=64,
    )  # fmt: skip
    worker = WorkerSpec(limits=limits, perf=PERF, steps=PerfSteps(PERF), options=WorkerOptions(queues=queues))
    cluster = Cluster(workload, [worker], SchedulerSpec(admission=admission))
    cluster.run()
    times = Latencies.of(workload, cluster.metrics)
    assert workload.slo is not None
    slos = workload.slo[times.rows]
    kept = times.ttft_ms <= np.array([slo.ttft_slo_ms for slo in CLASSES])[slos]
    kept &= times.tpot_ms <= np.array([slo.tpot_slo_ms for slo in CLASSES])[slos]
    end_s = workload.arrival_s[times.rows] + times.e2e_ms / 1000.0
    counted = workload.arrival_s > WARM_S
    interactive = kept[(slos == 0) & counted[times.rows]].sum() / ((workload.slo == 0) & counted).sum()
    return float((kept & (end_s > WARM_S) & (end_s <= SECONDS)).sum() / (SECONDS - WARM_S)), float(interactive)


@pytest.mark.parametrize("load", [1.5, 3.0])
def test_goodput_stays_near_its_peak_and_interactive_requests_keep_their_objectives(load: float) -> None:
    peak, _ = served(1.0, "objective")
    goodput, interactive = served(load, "objective")
    assert goodput >= 0.9 * peak and interactive >= 0.9


def test_without_admission_by_objective_first_come_first_served_keeps_few_objectives_under_overload() -> None:
    peak, _ = served(1.0, "room", queues="fcfs")
    in_order, _ = served(3.0, "room", queues="fcfs")
    late_last, _ = served(3.0, "room")
    assert in_order < 0.5 * peak
    assert late_last > 1.5 * in_order
