"""The order of image steps in the twin (`python -m bench images --arrivals`): one worker, arrivals at several loads, rivals.

64 adapters, room for 12 of them on the worker; another one comes after a second, beside the steps, for every policy. Two kinds
of machine: where *launches* bind, a step takes 30 ms and 8 for each request in it; where *products* bind, 5 ms and 45. At most
8 requests share a step. Arrivals are Poisson. The adapters come

    independent   by their shares of the trace, one picture for each request
    order         in the trace's own order, one picture for each request
    pictures      in the trace's own order, with its numbers of pictures for each prompt; without one at a time, whose queues
                  only grow

A load of 1 is what Motet serves while requests wait without end and every adapter is there. The latency of a request is that of
its last picture; in time is within four times what it takes alone. Rivals (`bench.rivals.images`) have the same worker, loads
beside the steps, knee and step times; of equal-adapter batches the best of three orders counts in every figure.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

import bench.rivals  # noqa: F401 (adds the names of evictions)
from bench import report
from bench.rivals.images import EqualLargest, EqualOldest, EqualStay, FirstCome, OneAtATime
from motet.policies.step.image_batch import PATIENCE, ImageBatch
from motet.policies.times.perf_model import Floats
from motet.shared.model import ImageSizeSteps, ImageSteps, PerfModel, WorkerLimits
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.events import PS_PER_S
from motet.twin.image_steps import measured_times
from motet.twin.image_traces import Prompt, draw_prompts, most_used, read_prompts, workload_of
from motet.twin.link import LinkModel
from motet.twin.steps import Link, PerfSteps
from motet.twin.storage import StorageModel
from motet.twin.worker_spec import ImageSpec, WorkerSpec
from motet.twin.workload import Ints, Workload, zipf

KINDS: Mapping[str, tuple[float, float]] = {"launches": (30.0, 8.0), "products": (5.0, 45.0)}
LOADS = (0.5, 0.7, 0.9, 1.1, 1.3, 1.5)
ADAPTERS, ROOM, LOAD_MS = 64, 12, 1000.0
MIB, RANK, ADAPTER_MIB = 1 << 20, 32, 32
ROWS_MAX = 16
REQUESTS, START = 500, 5000  # of the trace's requests with these adapters; the order was chosen on earlier ones
PICTURES = (1, 1, 1, 2, 4, 4, 4, 4, 8, 8)  # about the trace's, for requests that are drawn
PERF = PerfModel(
    prefill_base_ms=5.0,
    prefill_token_ms=0.01,
    prefill_lora_ms=0.0,
    decode_base_ms=30.0,
    decode_row_ms=4.0,
    decode_lora_ms=0.0,
    load_base_ms=1.0,
    load_ms_per_mib=0.04,
)


@dataclass(frozen=True, slots=True)
class Rival:
    """A policy: what plans the steps, and the eviction of adapters. `room`: adapters for which the worker has room."""

    batch: Callable[..., ImageBatch[Any]]
    eviction: str = "lru"
    room: int = ROOM


RIVALS = {
    "RROD": Rival(OneAtATime, "none"),
    "ROCK's worker": Rival(OneAtATime, "lru", int(0.85 * ROOM)),
    "equal, oldest": Rival(EqualOldest),
    "equal, stay": Rival(EqualStay),
    "equal, largest": Rival(EqualLargest),
    "mixed, first come": Rival(FirstCome),
    "motet": Rival(ImageBatch, "next-use"),
}
EQUAL = [name for name in RIVALS if name.startswith("equal")]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: mean and 99th percentile of a request's seconds, the share in time, and the adapters that were fetched."""

    mean_s: float
    p99_s: float
    in_time: float
    fetches: int


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables, return the figures."""
    count = 60 if args.quick else REQUESTS
    loads = (0.9, 1.3) if args.quick else LOADS
    rng = np.random.default_rng(7)
    sources = requests(rng, args.trace, count)
    found: dict[tuple[str, str, float], dict[str, Outcome]] = {}
    for kind, source in product(KINDS, sources):
        capacity = capacity_of(kind, sources[source])
        arrivals = np.cumsum(np.random.default_rng(11).exponential(1.0, size=count))  # the same for all loads
        for load in loads:
            found[kind, source, load] = {
                name: outcome(kind, sources[source], arrivals / (load * capacity), rival)
                for name, rival in RIVALS.items()
                if source != "pictures" or rival.batch is not OneAtATime
            }
        _table(kind, source, capacity, {load: found[kind, source, load] for load in loads})
    return figures(found)


def requests(rng: Generator, trace: Path | None, count: int) -> dict[str, list[Prompt]]:
    """The requests of each source: of the trace, or without one drawn with its shares and its locality."""
    if trace is not None:
        kept = most_used(read_prompts(trace), ADAPTERS)
        window = kept[START : START + count]
        uses = Counter(one for prompt in kept for one in prompt.adapters)
        shares = np.array([uses[at] for at in range(ADAPTERS)], dtype=np.float64)
    else:
        shares = zipf(ADAPTERS, 0.82)
        window = draw_prompts(rng, count, shares, pictures=PICTURES)
    single = [Prompt(one.adapters, one.steps, 1) for one in window]
    return {
        "independent": draw_prompts(rng, count, shares / shares.sum(), repeats=0.0),
        "order": single,
        "pictures": window,
    }


def worker(kind: str, rival: Rival) -> WorkerSpec:
    """A worker of one kind of machine that runs a policy."""
    limits = WorkerLimits(
        base_model="simulated",
        engine="images",
        device="cuda",
        max_model_len=1000,
        max_running=64,
        max_waiting=1_000_000,
        block_size=1,
        kv_blocks_total=1_000_000_000,
        adapter_bytes_total=rival.room * ADAPTER_MIB * MIB,
        max_lora_rank=RANK,
        capabilities=("draws",),
        copies="wait",
    )
    load = Link(LOAD_MS, 0.0)
    return WorkerSpec(
        limits=limits,
        perf=PERF,
        steps=PerfSteps(PERF),
        storage=StorageModel(host_bytes=rival.room * ADAPTER_MIB * MIB, disk=load, store=load),
        link=LinkModel(bytes_per_s=25e9, layers=1),
        options=WorkerOptions(max_loras=rival.room, eviction=rival.eviction, foresight="off"),
        images=ImageSpec(steps=step_times(kind), batch=rival.batch),
    )


def step_times(kind: str) -> ImageSteps:
    """The step times of a kind of machine, for pictures of 512 x 512."""
    base_ms, each_ms = KINDS[kind]
    rows = (2, 4, 8, ROWS_MAX)
    size = ImageSizeSteps(
        height=64,
        width=64,
        text_tokens=77,
        rows=rows,
        step_ms=tuple(base_ms + each_ms * row / 2 for row in rows),
        decode_ms=5.0,
        decode_picture_ms=each_ms,
    )
    return ImageSteps(sizes=(size,), encode_ms=5.0, encode_request_ms=1.0, rows_max=ROWS_MAX, area_max=ROWS_MAX * 64 * 64)


def simulated(kind: str, prompts: Sequence[Prompt], arrival_s: Floats, rival: Rival) -> tuple[Cluster, Workload, Ints]:
    """A run; and the request of each picture."""
    ranks, sizes = np.full(ADAPTERS, RANK), np.full(ADAPTERS, ADAPTER_MIB * MIB)
    workload, of = workload_of(prompts, arrival_s, ranks=ranks, adapter_bytes=sizes)
    cluster = Cluster(workload, [worker(kind, rival)], None)
    cluster.run()
    return cluster, workload, of


def capacity_of(kind: str, prompts: Sequence[Prompt]) -> float:
    """Requests per second while all wait and every adapter is there."""
    everything = Rival(FirstCome, room=ADAPTERS)
    cluster, _, _ = simulated(kind, prompts, np.zeros(len(prompts)), everything)
    ends_s = np.sort(cluster.metrics.end_ps) / PS_PER_S
    edge = len(ends_s) // 10  # neither those that began together, nor the last ones
    pictures = (len(ends_s) - 2 * edge - 1) / (ends_s[-edge - 1] - ends_s[edge])
    return float(pictures * len(prompts) / len(ends_s))


def outcome(kind: str, prompts: Sequence[Prompt], arrival_s: Floats, rival: Rival) -> Outcome:
    """A run in numbers."""
    cluster, _, of = simulated(kind, prompts, arrival_s, rival)
    ends_s = np.zeros(len(prompts))
    np.maximum.at(ends_s, of, cluster.metrics.end_ps / PS_PER_S)
    took_s = ends_s - arrival_s
    batch = cluster.workers[0].engine.batch
    times, together = measured_times(step_times(kind)), ROWS_MAX // 2
    assert not len(batch), "every request has its pictures"
    bucket = next(iter(times.sizes))
    own_s = [times.own_ms(bucket, 2, one.steps, pictures=one.pictures, together=together) / 1000.0 for one in prompts]
    storage = cluster.workers[0].storage
    return Outcome(
        mean_s=float(took_s.mean()),
        p99_s=float(np.quantile(took_s, 0.99)),
        in_time=float((took_s <= PATIENCE * np.array(own_s)).mean()),
        fetches=storage.fetches + storage.reads,
    )


def _table(kind: str, source: str, capacity: float, loads: Mapping[float, Mapping[str, Outcome]]) -> None:
    rows = [
        [f"{load:g}", name, one.mean_s, one.p99_s, f"{one.in_time:.3f}", one.fetches]
        for load, outcomes in loads.items()
        for name, one in outcomes.items()
    ]
    columns = ["load", "policy", "mean s", "p99 s", "in time", "fetches"]
    print(report.table(f"{kind} bind, {source}: a load of 1 is {capacity:.2f} requests/s", columns, rows), flush=True)


def figures(found: Mapping[tuple[str, str, float], Mapping[str, Outcome]]) -> dict[str, Any]:
    """Motet over the best of the equal-adapter batches: at .9 load where launches bind, and the worst of all."""
    ratios = {case: ratio(outcomes) for case, outcomes in found.items()}
    told: dict[str, Any] = {}
    for source in {source: None for _, source, _ in ratios}:
        mean, p99 = ratios["launches", source, 0.9]
        name = "" if source == "order" else f"_{source}"
        told |= {f"mean_vs_equal{name}": round(mean, 3), f"p99_vs_equal{name}": round(p99, 3)}
    for place, what in enumerate(("mean", "p99")):
        worst = max(ratios, key=lambda case: ratios[case][place])
        told |= {f"worst_{what}_vs_equal": round(ratios[worst][place], 3), f"worst_{what}_at": list(worst)}
    runs = {
        f"{kind}, {source}, {load:g}": {name: _rounded(one) for name, one in outcomes.items()}
        for (kind, source, load), outcomes in found.items()
    }
    return told | {"patience": PATIENCE, "runs": runs}


def ratio(outcomes: Mapping[str, Outcome]) -> tuple[float, float]:
    """Mean and 99th percentile of Motet over the smallest of the equal-adapter batches."""
    ours, equal = outcomes["motet"], [outcomes[name] for name in EQUAL]
    return ours.mean_s / min(one.mean_s for one in equal), ours.p99_s / min(one.p99_s for one in equal)


def _rounded(one: Outcome) -> list[float]:
    return [round(one.mean_s, 3), round(one.p99_s, 3), round(one.in_time, 4), one.fetches]
