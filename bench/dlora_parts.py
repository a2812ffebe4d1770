"""The clusters, workloads and systems of `bench.dlora`: dLoRA's experiments (sections 7.1, 7.3, 7.4) on the twin.

A worker is a Llama-2-7B on an A800 80 GB: 54 GiB of KV (110,592 tokens), 2 GiB of adapters. A step takes 20 ms for the engine
and 9 ms for the weights, 0.1 ms per row, 0.33 us per token of context (0.5 MB of KV at 1.6 TB/s) and 0.075 ms per prompt token
(half of 312 TFLOP/s), so that a step of the usual batch takes about the 50 ms that the paper's objective is ten times of. LoRA
adds 38.9% to all of it but attention (the paper's Fig. 5, einsum), or 10% (this project's kernels: 0.91 of the speed without
LoRA). An adapter of rank 8 has 20 MB and is copied beside the steps at 20 GB/s. Merging or unmerging takes 20 ms: two passes
over the weights. No request is refused.

Lengths: ShareGPT, as vLLM's benchmark filters it (prompt up to 1,024 tokens, 2,048 in all). Arrivals: Azure Functions 2019,
counts per function and minute, scaled to a rate. Functions by falling frequency go to adapters in turn, `skew` at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.adaptive_parts import COPY
from bench.dlora_limit import Grouping
from bench.rivals.merging import always_merged
from bench.rivals.policies import least_pending, pending_ms
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choice, Choose, lightest, spread
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.holders import ON_DEVICE
from motet.policies.cluster.migration_plan import Held, PlanConfig, Replica, plan
from motet.policies.cluster.placement import Room, preload
from motet.policies.cluster.rebalance import RebalanceConfig
from motet.policies.step.merge_decision import MergeConfig, MergeCosts, Merging
from motet.policies.times.perf_model import Floats
from motet.shared.model import PerfModel, Slo, WorkerLimits
from motet.shared.worker_options import Switch, WorkerOptions
from motet.twin.cluster import BalanceSpec, Cluster
from motet.twin.link import LinkModel
from motet.twin.memory import LLAMA2_7B
from motet.twin.metrics import Latencies
from motet.twin.scheduler import SchedulerSpec
from motet.twin.steps import LoraShare, PerfSteps
from motet.twin.traces import read_invocations, read_lengths
from motet.twin.worker import Worker
from motet.twin.worker_spec import MergeInPlace, WorkerSpec
from motet.twin.workload import Intensity, Lengths, Workload, arrivals, zipf

INVOCATIONS, LENGTHS = "maf2019_sample_invocations_per_minute.csv.gz", "sharegpt_lengths.csv.gz"
EINSUM, OURS = 0.389, 0.1
REST_MS = 20.0  # that a request is assumed to rest where another adapter is merged
SWITCH_MS = 20.0
RANK, ADAPTER_BYTES = 8, 20 << 20
KV_TOKENS, SEATS = 110_592, 256
SLO_MS = 500.0  # of the average latency: time from arrival to end per output token
IDLE_MS = 100.0  # that latency without a queue, about
PERF = PerfModel(
    prefill_base_ms=0.0, prefill_token_ms=0.075, prefill_lora_ms=0.0, decode_base_ms=29.0, decode_row_ms=0.1,
    decode_lora_ms=0.0, load_base_ms=1.0, load_ms_per_mib=0.05,
)  # fmt: skip
CONTEXT_TOKEN_PS = 330_000
LINK = LinkModel(bytes_per_s=20e9, layers=32)
LIMITS = WorkerLimits(
    base_model="llama-2-7b",
    max_model_len=4096,
    max_running=SEATS,
    max_waiting=1 << 20,
    block_size=16,
    kv_blocks_total=KV_TOKENS // 16,
    adapter_bytes_total=2 << 30,
    max_lora_rank=8,
    copies="wait",
)
MERGE = MergeConfig(
    alpha=0.9,
    beta=0.6,
    lowest=0.9,
    lowest_beta=0.5,
    credit=500_000.0,
    starving=650_000.0,
    normal=500_000.0,
    relief=8.0,
    drain=0.5,
)
"""Constants for a worker alone, where the average latency counts and requests may wait for minutes."""
FAIR = MergeConfig()
"""Constants for clusters, where the wait before the first token counts."""
PLAN = RebalanceConfig(wait_ms=50.0)


@dataclass(frozen=True, kw_only=True)
class System:
    """What a cluster does.

    `lora`: what LoRA adds to a step; `merge`: None never, "always", or thresholds, for merging in place as in the paper, which
    no worker of Motet does; `shared`: adapters and KV blocks share the memory; `copy`: a worker's --merge, whose copy takes
    memory of both; `dispatch`: a policy of the scheduler, "turn" (round-robin over the workers with the adapter) or "mode"
    (pending time, plus `REST_MS` where another adapter is merged); `balance`: requests move between workers; `pooled`: one
    worker with the memory and speed of all (`_pool`).
    """

    lora: float = EINSUM
    merge: MergeConfig | str | None = None
    shared: bool = False
    copy: Switch = "off"
    turn: int = 300
    dispatch: str = "least-pending"
    balance: RebalanceConfig | None = None
    pooled: bool = False


SYSTEMS = {
    "dlora": System(merge=MERGE),
    "merged-only": System(merge="always"),
    "unmerged-only, einsum": System(),
    "ours, unmerged": System(lora=OURS),
    "ours, in place": System(lora=OURS, merge=MERGE),
    "ours, shared memory": System(lora=OURS, shared=True),
    "ours, a copy": System(lora=OURS, shared=True, copy="on"),
    "ours, a copy where it pays": System(lora=OURS, shared=True, copy="auto"),
    "no LoRA": System(lora=0.0),
    "dlora, moves": System(merge=FAIR, balance=PLAN),
    "round-robin": System(merge=FAIR, dispatch="turn"),
    "round-robin, moves": System(merge=FAIR, dispatch="turn", balance=PLAN),
    "proactive-only": System(merge=FAIR),
    "by mode": System(merge=FAIR, dispatch="mode", balance=PLAN),
    "motet's dispatch": System(merge=FAIR, dispatch="motet"),
    "motet's dispatch, moves": System(merge=FAIR, dispatch="motet", balance=RebalanceConfig()),
    "perfect balance": System(pooled=True),
    "perfect balance, no LoRA": System(lora=0.0, pooled=True),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    system: System
    rate: float  # requests per second of all workers
    workers: int = 1
    adapters: int = 8
    skew: int = 1
    seconds: float = 300.0
    first_minute: int = 901
    scale: float = 1.0  # of all lengths
    seed: int = 0
    data: Path | None = None

    @property
    def simulated(self) -> int:
        """The number of workers that the twin simulates."""
        return 1 if self.system.pooled else self.workers


@dataclass(frozen=True)
class Outcome:
    """The results of a run: milliseconds, and counts."""

    latency_ms: float  # sum of end-to-end times over sum of output tokens, as in the paper
    p90_ms: float  # of the requests' own times per token
    queue_ms: float
    queue_p99_ms: float
    ttft_p99_ms: float
    served_per_s: float
    merged: float  # share of steps
    switches: int
    overhead: float  # share of the time that switches and plans take
    moves: int
    plans: int
    plan_ms: float  # mean
    plan_p99_ms: float


def workload(case: Case) -> Workload:
    """The requests of a case. At every rate arrivals, adapters and lengths are the same; only the times are scaled."""
    minutes = max(1, -(-int(case.seconds) // 60))
    table = _by_adapter(case.data, case.adapters, case.skew, case.first_minute, minutes)
    times, choices, pairs = (np.random.default_rng((case.seed, number)) for number in range(3))
    per_minute: NDArray[np.float64] = table.sum(axis=0)
    rates = np.asarray(per_minute * (case.rate / per_minute.mean()), np.float64)
    intensity = Intensity(np.arange(minutes + 1, dtype=np.float64) * 60.0, rates).until(case.seconds)
    at = arrivals(times, intensity)
    upto = np.cumsum(table / per_minute, axis=0)[:, np.minimum((at // 60.0).astype(int), minutes - 1)]
    adapter = np.minimum((upto < choices.random(len(at))).sum(axis=0), case.adapters - 1)
    prompt, output = _lengths(case.data).draw(pairs, len(at))
    return Workload(
        arrival_s=at,
        adapter=adapter.astype(np.int64),
        prompt_tokens=np.clip(np.rint(prompt * case.scale).astype(np.int64), 1, 2047),
        output_tokens=np.clip(np.rint(output * case.scale).astype(np.int64), 1, 2047),
        ranks=np.full(case.adapters, RANK),
        adapter_bytes=np.full(case.adapters, ADAPTER_BYTES),
        slos=(Slo(ttft_slo_ms=5000.0, tpot_slo_ms=SLO_MS),),
    )


@lru_cache(maxsize=1)
def _lengths(data: Path | None) -> Lengths:
    if data is not None:
        return read_lengths(data / LENGTHS).capped(1024, 2048)
    drawn = Lengths.lognormal(np.random.default_rng(7), prompt_mean=300, output_mean=300, prompt_cv=1.0, output_cv=0.8)
    return drawn.capped(1024, 2048)


@lru_cache(maxsize=8)
def _table(data: Path | None) -> NDArray[np.float64]:
    """Invocations [functions, minutes] of the whole day. Functions are ordered by falling frequency."""
    if data is None:  # a power law whose functions burst in minutes of their own
        rng = np.random.default_rng(7)
        table = zipf(400, 1.27)[:, None] * rng.lognormal(0.0, 1.0, (400, 960))
    else:
        table = read_invocations(data / INVOCATIONS)
    return table[np.argsort(-table.sum(axis=1), kind="stable")]


def _by_adapter(data: Path | None, adapters: int, skew: int, first_minute: int, minutes: int) -> NDArray[np.float64]:
    """Invocations [adapters, minutes] of a window that begins with the first minute (from 1)."""
    table = _table(data)[:, first_minute - 1 : first_minute - 1 + minutes]
    owner = (np.arange(len(table)) // skew) % adapters
    found = np.zeros((adapters, minutes))
    np.add.at(found, owner, table)
    return found


class InTurn:
    """The paper's round-robin: in turn over the workers that have the adapter on the device, or over all if none has it."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def __call__(self, state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
        held = state.holders(ask.adapter)
        rows: Iterable[int] = np.flatnonzero(fit).tolist()
        if held is not None:
            rows = [row for row in held.rows[(held.bits & ON_DEVICE) > 0].tolist() if fit[row]] or rows
        ordered = sorted(rows, key=state.ids.__getitem__)
        turn = self._counts[ask.adapter] = self._counts.get(ask.adapter, -1) + 1
        return Choice(ordered[turn % len(ordered)])


class ByMode:
    """Pending time, with exact knowledge of each worker's merged adapter, which a snapshot could not give."""

    def __init__(self) -> None:
        self.workers: Mapping[str, Worker] = {}

    def __call__(self, state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
        merged = [self.workers[name].engine.batches.state.merged if name in self.workers else "" for name in state.ids]
        cost = pending_ms(state, ask, avg_resp_len) + mode_ms(merged, ask.adapter)
        best = lightest(cost, fit)
        return Choice(spread(state, best, ask.key), float(cost[best[0]]))


def mode_ms(merged: Sequence[str], adapter: str) -> Floats:
    """The wait that each worker's mode adds for a request: it rests where another adapter than its own is merged."""
    return np.array([REST_MS if one and one != adapter else 0.0 for one in merged])


def reachable(case: Case) -> float:
    """A bound of what merging can reach if changes between adapters cost what they do (`bench.dlora_limit`).

    It is a place between the rates without merging (0) and without LoRA (1).
    """
    minutes = max(1, -(-int(case.seconds) // 60))
    shares = _by_adapter(case.data, case.adapters, case.skew, case.first_minute, minutes).sum(axis=1)
    return _grouping(case).part(shares.tolist(), case.seconds, SLO_MS)


def capacity(case: Case) -> float:
    """The requests per second that a worker serves with a full batch and without merging."""
    return 1000.0 / _grouping(case).unmerged_ms


def _grouping(case: Case) -> Grouping:
    lengths = _lengths(case.data)
    return Grouping(
        np.asarray(lengths.prompt_tokens, np.float64), np.asarray(lengths.output_tokens, np.float64), PERF,
        kv_tokens=KV_TOKENS, context_token_ms=CONTEXT_TOKEN_PS / 1e9, lora=case.system.lora,
    )  # fmt: skip


def preloaded(case: Case) -> dict[str, tuple[str, ...]]:
    """The adapters on the device at the start, chosen by the hour before the window."""
    before = _by_adapter(case.data, case.adapters, case.skew, max(1, case.first_minute - 60), 60).sum(axis=1)
    names = [f"adapter-{index:05d}" for index in range(case.adapters)]
    count, pooled = case.simulated, case.workers // case.simulated
    room = Room(free_bytes=pooled * (KV_TOKENS << 19), slots=pooled * 48)
    rooms = {f"worker-{index:04d}": room for index in range(count)}
    return preload(dict(zip(names, before.tolist(), strict=True)), dict.fromkeys(names, ADAPTER_BYTES), rooms)


def build(case: Case) -> Cluster:
    """The simulated cluster of a case."""
    system = case.system
    merging = None
    if system.merge is not None:
        costs = MergeCosts(switch_ms=SWITCH_MS, step_ms=29.0, row_ms=0.1 + 1e-9 * CONTEXT_TOKEN_PS * 500, lora=system.lora)
        policy = partial(Merging, config=system.merge) if isinstance(system.merge, MergeConfig) else always_merged
        merging = MergeInPlace(costs=costs, policy=policy)
    block_bytes = LIMITS.block_size * LLAMA2_7B.kv_token_bytes
    spec = WorkerSpec(
        limits=msgspec.structs.replace(LIMITS, kv_block_bytes=block_bytes) if system.shared else LIMITS,
        perf=PERF,
        steps=LoraShare(PerfSteps(PERF, context_token_ps=CONTEXT_TOKEN_PS), system.lora),
        link=LINK,
        options=WorkerOptions(
            max_step_tokens=2048, max_loras=64, queues="fcfs", foresight="off", cold_start="blocking", merge=system.copy
        ),
        in_place=merging,
        merged_copy=COPY,
    )
    if system.pooled:
        spec = _pool(spec, case)
    by_mode = ByMode()
    own: dict[str, Choose] = {"turn": InTurn(), "mode": by_mode, "least-pending": least_pending}
    choose = own.get(system.dispatch)
    cluster = Cluster(
        workload(case),
        [spec] * case.simulated,
        SchedulerSpec(policy=system.dispatch, choose=choose, admission="room", rebalance="off"),
        balance=BalanceSpec(config=system.balance, clock_s=time.perf_counter)
        if system.balance is not None and case.workers > 1
        else None,
        preload=preloaded(case),
    )
    by_mode.workers = {worker.worker_id: worker for worker in cluster.workers}
    return cluster


def _pool(spec: WorkerSpec, case: Case) -> WorkerSpec:
    """One worker with the memory of all workers. Its step computes the requests of all in the time that each needs for an equal
    share.

    It bounds what dispatch and moves could reach: every worker always has the same work, and nothing else takes time.
    """
    count, perf = case.workers, spec.perf
    each = msgspec.structs.replace(
        perf, prefill_token_ms=perf.prefill_token_ms / count, decode_row_ms=perf.decode_row_ms / count
    )
    limits = msgspec.structs.replace(
        spec.limits,
        max_running=SEATS * count,
        kv_blocks_total=spec.limits.kv_blocks_total * count,
        adapter_bytes_total=spec.limits.adapter_bytes_total * count,
    )
    steps = LoraShare(PerfSteps(each, context_token_ps=CONTEXT_TOKEN_PS // count), case.system.lora)
    return replace(
        spec,
        limits=limits,
        perf=each,
        steps=steps,
        options=msgspec.structs.replace(
            spec.options, max_step_tokens=spec.options.max_step_tokens * count, max_loras=case.adapters
        ),
    )


def measure(case: Case) -> Outcome:
    """Make one run, to the end of its last request."""
    cluster = build(case)
    two = [Replica(worker_id=name, requests=[Held(f"{name}{i}", "", 1.0, 1.0) for i in range(3)]) for name in ("a", "b")]
    plan(two, {}, PlanConfig())  # loads the solver, so that no plan is measured with it
    cluster.run()
    load, metrics = cluster.workload, cluster.metrics
    times = Latencies.of(load, metrics)
    plans_ms = np.array([1000.0 * took_s for took_s, _ in cluster.plans] or [0.0])
    steps_s = sum(worker.engine.busy_ps for worker in cluster.workers) / 1e12
    overhead_s = metrics.switch_ps / 1e12 + plans_ms.sum() / 1000.0
    return Outcome(
        latency_ms=float(times.e2e_ms.sum() / metrics.output_tokens[times.rows].sum()),
        p90_ms=float(np.quantile(times.per_token_ms, 0.9)),
        queue_ms=float(times.queue_ms.mean()),
        queue_p99_ms=float(np.quantile(times.queue_ms, 0.99)),
        ttft_p99_ms=float(np.quantile(times.ttft_ms, 0.99)),
        served_per_s=len(times.rows) / (float(metrics.end_ps.max()) / 1e12),
        merged=metrics.merged_steps / max(1, metrics.merged_steps + metrics.unmerged_steps),
        switches=metrics.switches,
        overhead=float(overhead_s / steps_s),
        moves=metrics.moves,
        plans=len(cluster.plans),
        plan_ms=float(plans_ms.mean()),
        plan_p99_ms=float(np.quantile(plans_ms, 0.99)),
    )


def sustained(case: Case, *, tries: int = 6, within: float = 0.03) -> tuple[Case, Outcome]:
    """The case at the rate at which the average latency equals the objective. `case` has a first guess.

    At that rate the queue grows during the whole run. So the next guess is that of a fluid queue: requests wait for half of the
    time by which the arriving work exceeds the run.
    """
    tokens = float(_lengths(case.data).output_tokens.mean())
    window_ms = 500.0 * case.seconds / tokens  # half of the run, per output token
    best: tuple[Case, Outcome] | None = None
    for _ in range(tries):
        found = measure(case)
        if best is None or abs(found.latency_ms - SLO_MS) < abs(best[1].latency_ms - SLO_MS):
            best = case, found
        if abs(found.latency_ms / SLO_MS - 1.0) < within:
            break
        change = (window_ms + SLO_MS - IDLE_MS) / (window_ms + max(0.0, found.latency_ms - IDLE_MS))
        case = replace(case, rate=case.rate * min(max(change, 0.5), 1.5))
    assert best is not None
    return best
