"""The live engine and the twin's worker get the same requests and must run the same batches, step for step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import fields

import bench.rivals  # noqa: F401 (adds the names)
from motet.policies.step.batch_core import BatchCore
from motet.policies.step.cold_start import AssistRates
from motet.policies.times.step_record import Step
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.native.engine import Engine
from motet.shared.model import PerfModel, WorkerLimits
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.events import PS_PER_MS
from motet.twin.link import LinkModel
from motet.twin.steps import Batch
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Workload
from tests.services.worker.support_engine import BLOCK_SIZE, PacedRunner, Run, make_engine, request, run
from tests.support_models import MAX_LEN, VOCAB

REQUESTS = 40
PREFIX_TOKENS = 12  # a block and a half
# Step times that engine and twin assume. They are so short that a request which joins layer by layer never waits in the layers.
# Such a wait would take no time in this engine, and some in the twin.
QUICK = PerfModel(
    prefill_base_ms=0.05,
    prefill_token_ms=0.001,
    prefill_lora_ms=0.0,
    decode_base_ms=0.05,
    decode_row_ms=0.0,
    decode_lora_ms=0.0,
    load_base_ms=0.0,
    load_ms_per_mib=0.0,
)


@dataclass
class Recorder:
    """A step model by which every step takes a millisecond; remembers the batches."""

    context_token_ps: int = 0
    longest_token_ps: int = 0
    reads_adapters: bool = True
    batches: list[Batch] = field(default_factory=list)

    def fixed_ps(self, batch: Batch) -> int:
        self.batches.append(batch)
        return PS_PER_MS


def counted(step: Step) -> dict[str, int]:
    """The record of a step without the facts that only an engine knows: its duration and its contexts."""
    unknown = ("time_ms", "context_tokens", "longest_context", "cold_rows")
    return {field.name: getattr(step, field.name) for field in fields(Step) if field.name not in unknown}


def scripted(seed: int, engine: Engine, adapters: list[HostAdapter]) -> tuple[Workload, list[list[int]]]:
    """A workload with one arrival before every step, and its prompts. Some begin with the same tokens; all end differently."""
    rng = np.random.default_rng(seed)
    prefix = [tuple(rng.integers(3, size=rng.integers(4)).tolist()) for _ in range(REQUESTS)]
    tail = rng.integers(1, 30, size=REQUESTS)
    prompts = [
        [10 + block for block in prefix[i] for _ in range(PREFIX_TOKENS)] + rng.integers(20, VOCAB, size=tail[i]).tolist()
        for i in range(REQUESTS)
    ]
    return (
        Workload(
            # the engine sees what came before a step; the twin's steps begin at whole milliseconds
            arrival_s=np.maximum(0.0, np.arange(REQUESTS) - 0.5) / 1000.0,
            adapter=rng.integers(-1, len(adapters), size=REQUESTS),
            prompt_tokens=np.array([len(prompt) for prompt in prompts]),
            output_tokens=rng.integers(5, 40, size=REQUESTS),
            ranks=np.array([adapter.rank for adapter in adapters]),
            adapter_bytes=np.array([engine.runner.adapter_bytes(adapter) for adapter in adapters]),
            prefix=prefix,
            prefix_tokens=PREFIX_TOKENS,
        ),
        prompts,
    )


def served(engine: Engine, workload: Workload, prompts: list[list[int]], adapters: list[HostAdapter]) -> Run:
    """The workload in the live engine, with one more request before every step."""
    requests = []
    for i, prompt in enumerate(prompts):
        adapter = None if workload.adapter[i] < 0 else adapters[workload.adapter[i]]
        one = request(str(i), prompt, adapter, max_tokens=int(workload.output_tokens[i]))
        arrival_s = float(workload.arrival_s[i])
        requests.append(msgspec.structs.replace(one, predicted_tokens=int(workload.output_tokens[i]), arrival_s=arrival_s))
    return run(engine, requests, per_step=1, clock_s=1e-3)


def simulated(
    workload: Workload,
    engine: Engine,
    recorder: Recorder,
    *,
    kv_blocks: int,
    link: LinkModel | None = None,
    merged: dict[str, Any] | None = None,
    prepare: Callable[[BatchCore[Any]], None] = lambda batches: None,
    **options: Any,
) -> Cluster:
    """The workload on the twin of that engine. `recorder` sees every step; `merged`: of its WorkerSpec."""
    limits = WorkerLimits(
        base_model="m",
        max_model_len=MAX_LEN,
        max_running=12,
        max_waiting=1000,
        block_size=BLOCK_SIZE,
        kv_blocks_total=kv_blocks,
        adapter_bytes_total=engine.lora_bytes,
        max_lora_rank=64,
        kv_block_bytes=engine.runner.kv_block_bytes if engine.runner.elastic else 0,
        kv_token_bytes=engine.runner.kv_block_bytes // BLOCK_SIZE,
    )
    spec = WorkerSpec(limits=limits, perf=QUICK, steps=recorder, link=link, options=WorkerOptions(**options), **merged or {})
    cluster = Cluster(workload, [spec], None)
    cluster.workers[0].engine.max_run = 1
    prepare(cluster.workers[0].engine.batches)
    cluster.run()
    return cluster


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kv_blocks", "max_step_tokens", "max_loras", "prefix_cache"),
    [(600, 256, 16, True), (600, 24, 16, False), (40, 48, 2, True), (30, 64, 3, False)],
)
def test_the_twins_worker_runs_the_batches_of_the_live_engine(
    checkpoint, seed: int, kv_blocks: int, max_step_tokens: int, max_loras: int, prefix_cache: bool
) -> None:
    model_dir, adapters = checkpoint
    limits = {"kv_blocks": kv_blocks, "max_loras": max_loras, "prefix_cache": prefix_cache}
    engine = make_engine(model_dir, max_running=12, max_step_tokens=max_step_tokens, **limits)
    workload, prompts = scripted(seed, engine, adapters)
    live = served(engine, workload, prompts, adapters)

    recorder = Recorder()
    cluster = simulated(
        workload,
        engine,
        recorder,
        kv_blocks=kv_blocks,
        max_step_tokens=max_step_tokens,
        max_loras=max_loras,
        prefix_cache=prefix_cache,
    )

    assert [counted(batch) for batch in recorder.batches] == [counted(step) for step in live.steps]
    assert [(b.waiting, len(b.loads)) for b in recorder.batches] == [(s.waiting, s.adapters_loaded) for s in live.steps]
    metrics = cluster.metrics
    assert metrics.preemptions == live.total("preempted") and metrics.prefix_tokens == live.total("cached_tokens")
    ends = {int(request_id): item.index + len(item.tokens) for request_id, item in live.last.items()}
    assert metrics.output_tokens.tolist() == [ends[i] for i in range(REQUESTS)]


MEMORIES = [(600, 16, True, 0), (90, 3, False, 0), (50, 16, True, 1), (50, 16, False, 1)]
COLD_STARTS = ["blocking", "assist", "auto"]
POLICIES: list[dict[str, Any]] = [
    {},
    {"queues": "sjf", "eviction": "gdsf", "prefetch": 3},
    {"eviction": "none", "prefetch": 2},
]


def combined() -> list[Any]:
    """Every combination. The suite runs some in which each two values of different settings meet; the others are thorough."""
    made = []
    for (m, memory), (c, cold_start), (p, policies) in product(*map(enumerate, (MEMORIES, COLD_STARTS, POLICIES))):
        marks = () if p == (m + c) % len(POLICIES) else pytest.mark.thorough
        made.append(pytest.param(*memory, cold_start, policies, marks=marks))
    return made


@pytest.mark.parametrize(("kv_blocks", "max_loras", "prefix_cache", "shared_mib", "cold_start", "policies"), combined())
def test_the_twins_worker_runs_the_batches_of_an_engine_whose_copies_run_beside_its_steps(
    checkpoint, kv_blocks: int, max_loras: int, prefix_cache: bool, shared_mib: int, cold_start: str, policies: dict[str, Any]
) -> None:
    model_dir, adapters = checkpoint
    limits = {"kv_blocks": kv_blocks, "max_loras": max_loras, "prefix_cache": prefix_cache, "max_running": 12, **policies}
    options = {"perf": lambda: QUICK, "cold_start": cold_start, "runner": PacedRunner}
    if shared_mib:
        options |= {"lora_bytes": shared_mib << 20, "runner_options": {"elastic": True}}
    engine = make_engine(model_dir, max_step_tokens=48, **limits, **options)
    runner = engine.runner
    runner.bytes_per_s, runner.processes = 50e6, 1  # a copy takes up to 30 steps
    workload, prompts = scripted(1, engine, adapters)
    workload.adapter[0], workload.output_tokens[0] = -1, 220  # one request runs all the time, so no step is skipped
    live = served(engine, workload, prompts, adapters)

    recorder = Recorder()
    rates = AssistRates(1, mib_row_ms=1e-9)
    cluster = simulated(
        workload,
        engine,
        recorder,
        kv_blocks=kv_blocks,
        max_step_tokens=48,
        max_loras=max_loras,
        prefix_cache=prefix_cache,
        link=LinkModel(bytes_per_s=50e6, layers=3, assist=rates),
        cold_start=cold_start,
        **policies,
    )

    batches, steps = recorder.batches, live.steps
    assert [(counted(batch), batch.waiting) for batch in batches] == [(counted(step), step.waiting) for step in steps]
    modes = [mode for step in live.steps for mode, _ in step.cold_starts]
    assert {mode: modes.count(mode) for mode in set(modes)} == cluster.metrics.cold_starts and modes
    assert cluster.metrics.preemptions == live.total("preempted")
    ends = {int(request_id): item.index + len(item.tokens) for request_id, item in live.last.items()}
    assert cluster.metrics.output_tokens.tolist() == [ends[i] for i in range(REQUESTS)]


def test_the_settings_of_these_tests_preempt_share_prefixes_and_evict_adapters(checkpoint) -> None:
    model_dir, adapters = checkpoint
    engine = make_engine(model_dir, max_running=12, max_step_tokens=48, kv_blocks=40, max_loras=2)
    workload, prompts = scripted(0, engine, adapters)
    live = served(engine, workload, prompts, adapters)
    assert live.total("preempted") and live.total("cached_tokens") and live.total("adapters_loaded") > len(adapters)
