"""The experiment of the Chameleon bench: the worker, its requests, and one run of the twin.

The worker. Of 40.5 GiB (90% of the card) weights take 12.6 and activations some 2; 26 GiB hold KV blocks and adapters in one
budget. A step reads the weights in 20 ms; a prompt token costs 0.18 ms, and 0.002 ms more per unit of rank (at rank 128 and 512
tokens, 60% of the TTFT is the adapter, Fig. 2). The paper scales the trace's lengths by a factor that it does not name, and
measures what copies cost S-LoRA: at 8 requests/s of rank 32, 50 and 500 adapters have 1.69 and 2.60 times the P99 TTFT of one
(section 3.2). Both unknowns, SCALE and COPY_MS, are calibrated to that, to the objective of 5 s, and to the load at which
S-LoRA breaks: 8.6 requests/s. Steps stand still while an adapter is copied; copies take the same time with every policy.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bench.predictor import made_up_requests
from bench.rivals.evictions import Lru
from motet.policies.lengths.features import unpack
from motet.policies.lengths.model import Curve
from motet.policies.times.perf_model import MIB
from motet.services.predictor.examples import read_examples
from motet.services.predictor.fit import fit
from motet.shared.model import PerfModel, Slo, WorkerLimits
from motet.shared.profile import EngineSteps
from motet.shared.worker_options import Switch, WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.link import LinkModel
from motet.twin.memory import LLAMA2_7B
from motet.twin.metrics import Latencies
from motet.twin.steps import MeasuredSteps
from motet.twin.traces import read_trace
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Floats, Intensity, Lengths, Request, Workload, arrivals, pick, zipf

RANKS = (8, 16, 32, 64, 128)
RANK_BYTES = LLAMA2_7B.adapter_rank_bytes(("q_proj", "k_proj", "v_proj", "o_proj"))  # rank 32 is 64 MiB, as in section 3.2
GIB = 1 << 30
MEMORY_GIB = 26.0
TIGHT_GIB = 16.0
BLOCK_SIZE, MAX_RUNNING, STEP_TOKENS, PREFETCH = 16, 256, 512, 8
LONGEST = 4096  # prompt tokens of the trace
SCALE = 0.205
COPY_MS = 85.0  # of rank 128
STEPS = EngineSteps(
    rows=(1, 64, 128, 512, 2048),
    pass_ms=(20.0, 22.0, 28.0, 97.1, 373.6),
    sampled_ms=0.02,
    prefill_ms=0.5,
    adapter_mib_ms=0.0017,
    row_rank_ms=0.002,
    context_token_ms=0.00087,
    pair_ms=7e-6,
    r2=1.0,
)
PERF = PerfModel(
    prefill_base_ms=20.0, prefill_token_ms=0.18, prefill_lora_ms=0.0, decode_base_ms=20.0, decode_row_ms=0.1,
    decode_lora_ms=0.0, load_base_ms=0.0, load_ms_per_mib=COPY_MS / 256,
)  # fmt: skip
WARM_S = 30.0
HIGH = 9.0
TRACE, POPULARITY = "azure_llm_2023_conv.csv.gz", "genai_lora_requests.csv.gz"
INSTRUCTIONS = "alpaca_text.jsonl.gz"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a worker handles adapters and queues."""

    eviction: str
    queues: str = "fcfs"
    prefetch: int = PREFETCH
    foresight: Switch = "off"
    knows: Literal["", "future", "popularity"] = ""
    """The facts that `informed` evicts by; it replaces `eviction`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    `popularity`: of ranks and of adapters within a rank, U(niform) or P(ower law); or "trace"; or "periodic": each adapter is
    requested at its own intervals, with deviations of 10%.
    """

    policy: Policy
    rate: float = HIGH
    seed: int = 10
    adapters: int = 100
    popularity: str = "U-P"
    only_rank: int = 0
    memory_gib: float = MEMORY_GIB
    predict: str = "perfect"  # or "real", "none"
    hot: float = 0.0  # this share of all requests is for one adapter
    copy_ms: float = COPY_MS
    drag: float = 1.0  # 1: steps stand still while an adapter is copied; 0: copies cost steps nothing
    slo_s: float = 5.0
    seconds: float = 300.0
    data: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """The results of a run: times in milliseconds, and shares of 1."""

    ttft_p50: float
    ttft_p99: float
    ttft_max: float
    tpot_p99: float
    e2e: float
    hit_rate: float
    tail_p99: float  # TTFT of all but the hot adapter
    squashed: float
    foreseen: float  # copies ahead of a request, per request


@lru_cache(maxsize=2)
def _lengths(data: Path | None, part: int) -> Lengths:
    """The even (0) or odd (1) rows of the trace."""
    if data is None:
        rng = np.random.default_rng(7)
        drawn = Lengths.lognormal(rng, prompt_mean=1155, output_mean=211, prompt_cv=1.0, output_cv=0.8)
        return drawn.capped(LONGEST, 2 * LONGEST)
    trace = read_trace(data / TRACE)
    prompt, output = trace.prompt_tokens, trace.output_tokens
    assert prompt is not None and output is not None, "the trace has lengths"
    rows = slice(part, None, 2)
    return Lengths(np.minimum(prompt[rows], LONGEST), output[rows])


@lru_cache(maxsize=1)
def _order_of_adapters(data: Path) -> NDArray[np.int64]:
    """The adapters of the GenTD26 trace's requests, in order; numbered by first appearance."""
    known: dict[str, int] = {}
    with gzip.open(data / POPULARITY, "rt", encoding="utf-8") as file:
        names = [row["lora_ids"].split(";")[0] for row in csv.DictReader(file) if row["lora_ids"]]
    return np.array([known.setdefault(name, len(known)) for name in names])


def shares(popularity: str, adapters: int) -> NDArray[np.float64]:
    """Per adapter, in the order of ranks; a fifth of them has each rank."""
    each = adapters // len(RANKS)
    of_ranks = zipf(len(RANKS)) if popularity[0] == "P" else np.full(len(RANKS), 1 / len(RANKS))
    within = zipf(each) if popularity[2] == "P" else np.full(each, 1 / each)
    return (of_ranks[:, None] * within[None, :]).ravel()


def workload(case: Case) -> Workload:
    """The requests of a case.

    Arrivals, adapters and lengths are drawn from separate generators, so every policy gets the same ones.
    """
    times, choices, pairs, sizes = (np.random.default_rng([case.seed, number]) for number in range(4))
    at = arrivals(times, Intensity.constant(case.rate, WARM_S + case.seconds))
    if case.popularity == "trace" and case.data is not None:
        order = _order_of_adapters(case.data)
        begin = int(choices.integers(max(1, len(order) - len(at))))
        adapter = order[begin : begin + len(at)]
        at = at[: len(adapter)]
        ranks = sizes.choice(np.array(RANKS), size=int(order.max()) + 1)
    else:
        ranks = np.repeat(np.array(RANKS), case.adapters // len(RANKS))
        of_adapters = shares(case.popularity if len(case.popularity) == 3 else "U-P", case.adapters)
        if case.only_rank:
            ranks, of_adapters = np.full(case.adapters, case.only_rank), np.full(case.adapters, 1 / case.adapters)
        if case.hot:
            of_adapters = of_adapters * (1 - case.hot)
            of_adapters[2 * len(ranks) // 5] += case.hot
        adapter = pick(choices, of_adapters, len(at))
    if case.popularity == "periodic":
        at, adapter = _periodic(choices, case)
    prompt, output = _lengths(case.data, int(case.seed >= 10)).draw(pairs, len(at))
    prompt, output = (np.maximum(1, np.rint(tokens * SCALE)).astype(np.int64) for tokens in (prompt, output))
    return Workload(
        arrival_s=at, adapter=adapter, prompt_tokens=prompt, output_tokens=output, ranks=ranks,
        adapter_bytes=ranks * RANK_BYTES, slos=(Slo(ttft_slo_ms=case.slo_s * 1e3, tpot_slo_ms=150.0),),
    )  # fmt: skip


def _periodic(rng: np.random.Generator, case: Case) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Arrivals and their adapters. Mean intervals differ by up to a factor of three."""
    end_s, mean_s = WARM_S + case.seconds, case.adapters / case.rate
    means = rng.uniform(0.5, 1.5, case.adapters) * mean_s
    many = int(3 * end_s / mean_s) + 2
    gaps = means[:, None] * np.maximum(0.1, 1 + 0.1 * rng.standard_normal((case.adapters, many)))
    times = rng.uniform(0, means)[:, None] + np.cumsum(gaps, axis=1) - gaps
    adapter = np.broadcast_to(np.arange(case.adapters)[:, None], times.shape)
    order = np.argsort(times, axis=None)
    at = times.ravel()[order]
    within = at < end_s
    return at[within], adapter.ravel()[order][within]


def worker(case: Case) -> WorkerSpec:
    """A worker with one budget for KV blocks and adapters. At first a third of it belongs to the adapters."""
    policy, memory_gib = case.policy, case.memory_gib
    block_bytes = BLOCK_SIZE * LLAMA2_7B.kv_token_bytes
    limits = WorkerLimits(
        base_model="llama-2-7b", max_model_len=4096, max_running=MAX_RUNNING, max_waiting=100_000, block_size=BLOCK_SIZE,
        kv_blocks_total=int(memory_gib * GIB * 2 / 3) // block_bytes, adapter_bytes_total=int(memory_gib * GIB / 3),
        max_lora_rank=max(RANKS), kv_block_bytes=block_bytes,
    )  # fmt: skip
    return WorkerSpec(
        limits=limits, perf=PERF, steps=MeasuredSteps(STEPS, PERF),
        link=LinkModel(
            bytes_per_s=256 * MIB / (case.copy_ms / 1e3), layers=LLAMA2_7B.layers, drag=case.drag
        ),
        options=WorkerOptions(
            max_step_tokens=STEP_TOKENS, max_loras=4096, eviction=policy.eviction, queues=policy.queues,
            prefetch=policy.prefetch, foresight=policy.foresight, cold_start="blocking",
        ),
    )  # fmt: skip


def _predictor(kind: str, load: Workload, case: Case) -> Callable[[Request], int] | None:
    """The output length that the policies get: the true one, the length predictor's median, or the mean for all requests.

    The trace has no prompts. So each request is matched with an instruction whose true length has about the same place among
    the lengths of the instructions. The model's median for that instruction has a place among these lengths too, and the
    policies get the length at the same place among the lengths of the trace.
    """
    if kind == "perfect":
        return None
    mean = max(1, round(float(load.output_tokens.mean())))
    if kind == "none":
        return lambda request: mean
    true, predicted = _predicted_places(case.data)
    lengths = np.sort(load.output_tokens)
    places = (np.argsort(np.argsort(load.output_tokens, kind="stable")) + 0.5) / len(lengths)
    jitter = np.random.default_rng([case.seed, 9]).normal(0.0, 0.01, len(lengths))  # not always the same neighbour
    chosen = np.clip(np.searchsorted(true, places + jitter), 0, len(true) - 1)
    told = np.maximum(1, np.quantile(lengths, predicted[chosen]).round().astype(np.int64))
    return lambda request: int(told[request.index])


@lru_cache(maxsize=2)
def _predicted_places(data: Path | None) -> tuple[Floats, Floats]:
    """For instructions that the model was not fitted on: places (0..1) of their true lengths, ascending, and of its medians."""
    if data is not None and (data / INSTRUCTIONS).exists():
        known = read_examples(data / INSTRUCTIONS)
        train, test = [one for number, one in enumerate(known) if number % 5], known[::5]
    else:
        train, test = made_up_requests(400, 1), made_up_requests(200, 2)
    model = fit([unpack(one.features) for one in train], [one.tokens for one in train]).model
    curve = Curve(model.edges, model.longest)
    medians = [curve.tokens(row, (0.5,))[0] for row in model.above([unpack(one.features) for one in test])]
    tokens = np.array([one.tokens for one in test], np.float64)
    order = np.argsort(tokens, kind="stable")
    lengths = tokens[order]
    return (np.arange(len(lengths)) + 0.5) / len(lengths), np.searchsorted(lengths, np.array(medians)[order]) / len(lengths)


class Informed(Lru):
    """Evicts the idle adapter with the least worth, by facts that a live worker cannot know.

    It bounds what policies can reach.
    """

    def __init__(self, worth: Callable[[str, float], float]) -> None:
        super().__init__()
        self._worth = worth

    def __iter__(self) -> Iterator[str]:
        """Idle adapters by their present worth, the least first; of equal ones the least recently released first."""
        return iter(sorted(self._idle, key=lambda digest: self._worth(digest, self.now_s)))


def informed(case: Case, load: Workload) -> Informed:
    """The eviction order for a case. "future": the adapter whose next request comes last leaves first (Belady). "popularity":
    the one that is requested least often, by the shares that adapters are drawn with.

    A copy takes as long as its bytes, so both orders are those of seconds saved per byte.
    """
    if case.policy.knows == "popularity":
        of = dict(zip([ref.digest for ref in load.adapters], shares(case.popularity, case.adapters).tolist(), strict=True))
        return Informed(lambda digest, now_s: of[digest])
    order = np.argsort(load.adapter, kind="stable")
    times = np.split(load.arrival_s[order], np.searchsorted(load.adapter[order], np.arange(1, len(load.ranks))))
    times_s = {ref.digest: own for ref, own in zip(load.adapters, times, strict=True)}

    def soon(digest: str, now_s: float) -> float:
        own = times_s[digest]
        at = int(np.searchsorted(own, now_s, side="right"))
        return -float(own[at]) if at < len(own) else -inf

    return Informed(soon)


def measure(case: Case) -> Outcome:
    """Make one run."""
    load = workload(case)
    predict = _predictor(case.predict, load, case)
    cluster = Cluster(load, [worker(case)], None, predict=predict)
    if case.policy.knows:
        cluster.workers[0].engine.batches.slots.eviction = informed(case, load)
    cluster.run()
    return outcome(load, cluster)


def outcome(load: Workload, cluster: Cluster) -> Outcome:
    """The outcome of a run that has ended."""
    times, metrics = Latencies.of(load, cluster.metrics), cluster.metrics
    counted = load.arrival_s[times.rows] >= WARM_S
    ttft, adapters = times.ttft_ms[counted], load.adapter[times.rows][counted]
    hottest = int(np.bincount(adapters).argmax())
    return Outcome(
        ttft_p50=float(np.quantile(ttft, 0.5)),
        ttft_p99=float(np.quantile(ttft, 0.99)),
        ttft_max=float(ttft.max()),
        tpot_p99=float(np.nanquantile(times.tpot_ms[counted], 0.99)),
        e2e=float(times.e2e_ms[counted].mean()),
        hit_rate=1 - (metrics.device_loads + metrics.prefetches) / max(1, metrics.adapter_admissions),
        tail_p99=float(np.quantile(ttft[adapters != hottest], 0.99)) if (adapters != hottest).any() else 0.0,
        squashed=sum(worker.engine.batches.squashed for worker in cluster.workers) / len(load),
        foreseen=metrics.foreseen / len(load),
    )


def mean(outcomes: Iterable[Outcome]) -> Outcome:
    """The mean over seeds."""
    rows = [asdict(one) for one in outcomes]
    return Outcome(**{name: float(np.mean([row[name] for row in rows])) for name in rows[0]})


def waiting(case: Case) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times in s, and how many requests had arrived by then and were not yet admitted."""
    load = workload(case)
    cluster = Cluster(load, [worker(case)], None)
    cluster.run()
    at = np.arange(0.0, load.duration_s, 2.0)
    admitted = np.sort(cluster.metrics.admitted_ps / 1e12)
    return at, np.searchsorted(load.arrival_s, at).astype(np.float64) - np.searchsorted(admitted, at)
