"""Small clusters for the twin's tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from motet.shared.model import Slo, WorkerLimits
from motet.shared.profile import EngineSteps
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import BusDelays, Cluster
from motet.twin.link import LinkModel
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import A10_MBGMV, MeasuredSteps, PerfSteps
from motet.twin.storage import StorageModel
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Intensity, Lengths, Workload, arrivals, pick, rank_mix, zipf

RANK_BYTES = 1 << 20
STEPS = EngineSteps(
    rows=(1, 16, 64, 512),
    pass_ms=(30.0, 30.5, 38.0, 150.0),
    sampled_ms=0.1,
    prefill_ms=0.7,
    adapter_mib_ms=0.01,
    row_rank_ms=0.0003,
    context_token_ms=0.0002,
    longest_token_ms=0.0007,
    pair_ms=0.00001,
    prefill_spread=(0.8, 1.0, 1.4),
    r2=0.99,
)


def workload(seed: int = 0, *, rate: float = 12.0, seconds: float = 20.0, prefixes: bool = False, cv: float = 2.0) -> Workload:
    """Bursty arrivals of short requests on 63 adapters and the base."""
    rng = np.random.default_rng(seed)
    times = arrivals(rng, Intensity.constant(rate, seconds), cv=cv)
    prompt, output = Lengths.lognormal(rng, prompt_mean=60, output_mean=80).draw(rng, len(times))
    ranks = rank_mix(rng, 63, {8: 1, 16: 1, 32: 1, 64: 1, 128: 1})
    return Workload(
        arrival_s=times,
        adapter=pick(rng, zipf(64), len(times)) - 1,
        prompt_tokens=prompt,
        output_tokens=output,
        ranks=ranks,
        adapter_bytes=ranks * RANK_BYTES,
        slos=(Slo(tpot_slo_ms=60.0),),
        prefix=[tuple(rng.integers(4, size=3).tolist()) for _ in times] if prefixes else None,
        prefix_tokens=32 if prefixes else 0,
    )


def spec(
    *,
    kv_blocks: int = 200,
    max_running: int = 32,
    max_waiting: int = 200,
    context_token_ps: int = 1000,
    prefix_cache: bool = False,
    host_bytes: int | None = None,
    max_loras: int = 8,
    measured: bool = False,
    adapter_bytes: int = 1 << 30,
    kv_block_bytes: int = 0,
    link: LinkModel | None = None,
) -> WorkerSpec:
    limits = WorkerLimits(
        base_model="base",
        max_model_len=1024,
        max_running=max_running,
        max_waiting=max_waiting,
        block_size=16,
        kv_blocks_total=kv_blocks,
        adapter_bytes_total=adapter_bytes,
        max_lora_rank=128,
        kv_block_bytes=kv_block_bytes,
    )
    linear = PerfSteps(A10_MBGMV, waiting_ms=0.01, context_token_ps=context_token_ps)
    return WorkerSpec(
        limits=limits,
        perf=A10_MBGMV,
        steps=MeasuredSteps(STEPS, A10_MBGMV) if measured else linear,
        storage=StorageModel(host_bytes=host_bytes),
        options=WorkerOptions(prefix_cache=prefix_cache, max_loras=max_loras),
        link=link,
    )


def run(load: Workload, worker: WorkerSpec, *, workers: int = 3, max_run: int | None = None, **options: Any) -> Cluster:
    """A finished run, after which no worker has requests left. `max_run` bounds how many steps are advanced at once."""
    options.setdefault("bus", BusDelays(submit_ms=0.5, assign_ms=1.0, stream_ms=0.2))
    options.setdefault("scheduler", SchedulerSpec())
    cluster = Cluster(load, [worker] * workers, **options)
    for one in cluster.workers:
        if max_run is not None:
            one.engine.max_run = max_run
    cluster.run()
    for one in cluster.workers:
        assert not len(one.core) and not one.engine.batches.state.running and not one.engine.batches.state.waiting
        one.engine.batches.state.kv.check([])
        one.engine.batches.state.adapters.check({})
    return cluster


def history(cluster: Cluster) -> dict[str, Any]:
    """All decisions and measurements of a run, exact to the bit."""
    metrics = cluster.metrics
    columns = ("first_ps", "end_ps", "admitted_ps", "worker", "output_tokens", "refused")
    return {**{name: getattr(metrics, name).tolist() for name in columns}, "figures": cluster.summary()}
