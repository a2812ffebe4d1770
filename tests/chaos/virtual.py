"""Chaos in virtual time: random faults over a simulated mesh that decides with the live code, thousands of seeds in a minute.

    python -m tests.chaos --virtual [--seeds 2000] [--seed 1]

A seed draws a workload and its faults: workers, schedulers and gateways that die, leave, freeze or are cut off, frames that are
lost, repeated or late, answers of schedulers that are lost, requests that move, and moments at which no worker is there. Every
accepted request must end with its own tokens, each once. A seed that fails can be run again, to the bit.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from random import Random

import numpy as np

from motet.policies.owner.owner_core import LOSSES_MAX
from motet.shared.clock import now_s
from motet.shared.model import PerfModel, WorkerLimits
from motet.shared.worker_options import WorkerOptions
from motet.twin.mesh import Fault, Mesh, What
from motet.twin.processes import Stream, token_of
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import PerfSteps
from motet.twin.storage import StorageModel
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Workload

WORKERS, SCHEDULERS, GATEWAYS, ADAPTERS = 3, 2, 2, 5
REQUESTS, SECONDS, CALM_S = 14, 4.0, 120.0
PERF = PerfModel(
    prefill_base_ms=10.0, prefill_token_ms=0.2, prefill_lora_ms=0.0, decode_base_ms=40.0, decode_row_ms=1.0, decode_lora_ms=0.0,
    load_base_ms=1.0, load_ms_per_mib=0.5,
)  # fmt: skip
LIMITS = WorkerLimits(
    base_model="m", max_model_len=256, max_running=6, max_waiting=12, block_size=16, kv_blocks_total=40,
    adapter_bytes_total=3 << 20, max_lora_rank=64,
)  # fmt: skip
SPEC = WorkerSpec(
    limits=LIMITS,
    perf=PERF,
    steps=PerfSteps(PERF),
    storage=StorageModel(host_bytes=4 << 20, disk_bytes=64 << 20),
    options=WorkerOptions(max_step_tokens=64, max_loras=3, prefix_cache=True),
)
SCHEDULER = SchedulerSpec(copies=SCHEDULERS, admission="room", max_tokens=64)
FAULTS: dict[What, tuple[str, tuple[float, float]]] = {
    "kill": ("worker scheduler", (0.5, 3.0)),
    "leave": ("worker", (0.5, 3.0)),
    "sleep": ("worker", (0.5, 8.0)),
    "freeze": ("worker scheduler gateway", (0.2, 3.5)),
    "cut": ("worker scheduler gateway", (0.2, 3.5)),
    "lossy": ("worker", (0.5, 3.0)),
    "deaf": ("scheduler", (0.2, 2.0)),
    "move": ("worker", (0.0, 0.0)),
}


@dataclass
class Result:
    """What became of the requests of some seeds."""

    seeds: int = 0
    requests: int = 0
    lost: int = 0
    duplicated: int = 0
    changed: int = 0
    refused: int = 0
    resumed: int = 0
    moved: int = 0
    parked: int = 0
    troubles: list[str] = field(default_factory=list)


def scenario(seed: int) -> tuple[Workload, list[Fault]]:
    """The requests and the faults of a seed."""
    draw, chance = np.random.default_rng(seed), Random(seed)
    workload = Workload(
        arrival_s=np.sort(draw.uniform(0.6, SECONDS, REQUESTS)),
        adapter=draw.integers(-1, ADAPTERS, REQUESTS),
        prompt_tokens=draw.integers(2, 60, REQUESTS),
        output_tokens=draw.integers(1, 40, REQUESTS),
        ranks=np.full(ADAPTERS, 8),
        adapter_bytes=np.full(ADAPTERS, 1 << 20),
    )
    faults = []
    for _ in range(chance.randint(1, 6)):
        what = chance.choice(list(FAULTS))
        kinds, (least_s, most_s) = FAULTS[what]
        kind = chance.choice(kinds.split())
        count = {"worker": WORKERS, "scheduler": SCHEDULERS, "gateway": GATEWAYS}[kind]
        at_s, lasts_s = chance.uniform(0.5, SECONDS + 1.0), chance.uniform(least_s, most_s)
        faults.append(Fault(what, kind, chance.randrange(count), at_s, lasts_s))  # type: ignore[arg-type]
    return workload, faults


def judge(stream: Stream) -> str:
    """ "" for a right answer, else what is wrong."""
    right = [token_of(stream.request.index, i) for i in range(stream.request.output_tokens)]
    if len(stream.tokens) > len(right):
        return "duplicated"
    if stream.tokens != right[: len(stream.tokens)]:
        return "changed"
    if stream.finish == "length":
        return "" if stream.tokens == right else "changed"
    if stream.error is not None and not stream.opened:
        return "refused"
    return "lost"


def run_seed(seed: int, result: Result) -> None:
    """Run one seed, and add what became of its requests."""
    workload, faults = scenario(seed)
    mesh = Mesh(workload, [SPEC] * WORKERS, SCHEDULER, gateways=GATEWAYS, faults=faults, seed=seed)
    mesh.run(SECONDS + CALM_S)
    mesh.check()
    result.seeds += 1
    result.requests += len(mesh.streams)
    result.resumed += mesh.counts.resumed
    result.moved += mesh.counts.moved
    result.parked += mesh.counts.parked
    for stream in mesh.streams:
        wrong = judge(stream)
        if wrong == "lost" and stream.losses >= LOSSES_MAX:
            wrong = "refused"  # rule 6: it may be what kills workers
        if wrong:
            setattr(result, wrong, getattr(result, wrong) + 1)
        if wrong and wrong != "refused":
            told = f"{len(stream.tokens)} of {stream.request.output_tokens} tokens, epoch {stream.epoch}, {stream.phase}"
            result.troubles.append(f"seed {seed}, request {stream.request_id}: {wrong} ({told}, {stream.error}); {faults}")


def main(seeds: int, first: int) -> int:
    """Run seeds and print the figures."""
    began_s, result = now_s(), Result()
    for seed in range(first, first + seeds):
        run_seed(seed, result)
    seconds = now_s() - began_s
    for trouble in result.troubles[:10]:
        print(trouble, file=sys.stderr)
    figures = {name: value for name, value in vars(result).items() if name != "troubles"}
    print(json.dumps(figures | {"seconds": round(seconds, 1)}))
    return 1 if result.lost or result.duplicated or result.changed else 0
