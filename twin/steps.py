"""Durations of steps and loads: the only models in the twin. All decisions are made by the live code.

The time of an engine step is `fixed + context`: a part that depends on the batch, and a part proportional to the tokens whose
K and V attention reads, in total and for the longest sequence. Between two decode steps of an unchanged batch only the second
part changes, by `rows * context_token_ps + longest_token_ps`. So a run of such steps is summed exactly, in integers:

    step i of a run (i = 0, 1, ...) takes  first + i * growth          n steps take  n * first + growth * n(n-1)/2
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import isqrt
from typing import Protocol

from motet.policies.times.perf_model import MIB, batch_load, decode_ms, load_ms, prefill_ms
from motet.policies.times.step_fit import without_context_ms
from motet.policies.times.step_record import Step
from motet.shared.model import EngineSteps, PerfModel
from motet.twin.events import to_ps


class Batch(Step, kw_only=True):
    """The step record of a simulated engine. `context_tokens` and the time stay 0; the step model provides them."""

    waiting: int = 0  # requests that the step's admission left waiting
    loads: tuple[int, ...] = ()  # bytes of each adapter that is copied to the device first
    chance: float = 0.5  # which of all steps with such a batch it is: 0 the shortest, 1 the longest


class StepModel(Protocol):
    """The step-time model of one kind of worker."""

    @property
    def reads_adapters(self) -> bool:
        """Whether a step's time depends on `distinct_adapters` or `adapter_bytes`; if not, they stay 0."""
        ...

    @property
    def context_token_ps(self) -> int:
        """Time per token in the KV cache of the step's sequences, including the new tokens."""
        ...

    @property
    def longest_token_ps(self) -> int:
        """Time per token in the KV cache of the longest sequence of the step."""
        ...

    def fixed_ps(self, batch: Batch) -> int:
        """All other time of a step."""
        ...


@dataclass(frozen=True, slots=True)
class PerfSteps:
    """Steps by the linear models that schedulers use (CaraServe section 5). Prefill and decode parts add up.

    `schedule_ms`: time of the engine per step outside the model. `waiting_ms`: time per waiting request (the scheduler overhead
    of the adapter-caching paper, section 5).
    """

    perf: PerfModel
    schedule_ms: float = 0.0
    waiting_ms: float = 0.0
    context_token_ps: int = 0
    longest_token_ps: int = 0
    reads_adapters = False

    def fixed_ps(self, batch: Batch) -> int:
        perf = self.perf
        total_ms = self.schedule_ms + self.waiting_ms * batch.waiting
        if batch.decode_rows:
            load = batch_load(perf.kernel, batch.decode_rows, batch.decode_rank_sum, batch.decode_max_rank)
            total_ms += decode_ms(perf, float(batch.decode_rows), load)
        if batch.prefill_tokens:
            load = batch_load(perf.kernel, batch.prefill_requests, batch.prefill_rank_sum, batch.prefill_max_rank)
            total_ms += prefill_ms(perf, float(batch.prefill_tokens), load)
        for size_bytes in batch.loads:
            total_ms += load_ms(perf, float(size_bytes))
        return to_ps(total_ms)


@dataclass(frozen=True, slots=True)
class LoraShare:
    """Steps of which LoRA takes the same share, whatever the adapters: dense products of all rows with all adapters, as with
    einsum (dLoRA section 4.1).

    `base`: the steps without LoRA. `share`: what LoRA adds to their time without attention, as a share.
    """

    base: PerfSteps
    share: float
    reads_adapters = False

    @property
    def context_token_ps(self) -> int:
        return self.base.context_token_ps

    @property
    def longest_token_ps(self) -> int:
        return self.base.longest_token_ps

    def fixed_ps(self, batch: Batch) -> int:
        fixed_ps = self.base.fixed_ps(batch)
        return round(fixed_ps * (1.0 + self.share)) if batch.row_rank_sum else fixed_ps


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Step times from what the steps read and compute: the model of `policies.times.step_fit`, which explains the terms."""

    times: EngineSteps
    perf: PerfModel  # of adapter loads

    @property
    def reads_adapters(self) -> bool:
        return self.times.adapter_mib_ms > 0

    @property
    def context_token_ps(self) -> int:
        return to_ps(self.times.context_token_ms)

    @property
    def longest_token_ps(self) -> int:
        return to_ps(self.times.longest_token_ms)

    def fixed_ps(self, batch: Batch) -> int:
        times = self.times
        total_ms = without_context_ms(
            times,
            _between(times.rows, times.pass_ms, batch.decode_rows + batch.prefill_tokens),
            sampled=batch.sampled,
            prefills=batch.prefill_requests,
            adapter_mib=batch.adapter_bytes / MIB,
            row_ranks=batch.row_rank_sum,
            pairs=batch.prefill_pairs,
        )
        if batch.prefill_tokens and times.prefill_spread:
            total_ms *= _quantile(times.prefill_spread, batch.chance)
        for size_bytes in batch.loads:
            total_ms += load_ms(self.perf, float(size_bytes))
        return to_ps(total_ms)


def _between(xs: tuple[int, ...], ys: tuple[float, ...], x: int) -> float:
    """y at x on the line through the points, which continues beyond the last one."""
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + slope * (x - xs[i - 1]) if x > xs[0] else ys[0]


def _quantile(values: tuple[float, ...], share: float) -> float:
    """The quantile at this share (0..1). `values` are quantiles in even steps."""
    at = share * (len(values) - 1)
    i = min(int(at), len(values) - 2)
    return values[i] + (values[i + 1] - values[i]) * (at - i)


@dataclass(frozen=True, slots=True)
class Link:
    """A link for adapter weights, with a latency and a bandwidth that concurrent loads share."""

    base_ms: float
    ms_per_mib: float


def elapsed_ps(first: int, growth: int, steps: int) -> int:
    """Duration of the first `steps` steps of a run."""
    return steps * first + growth * (steps * (steps - 1) // 2)


def steps_within(first: int, growth: int, time_ps: int) -> int:
    """How many steps of a run have ended `time_ps` after its start."""
    if not growth:
        return time_ps // first
    # the largest n with growth/2 n^2 + (first - growth/2) n <= time
    b = 2 * first - growth
    n = (isqrt(b * b + 8 * growth * time_ps) - b) // (2 * growth)
    while elapsed_ps(first, growth, n + 1) <= time_ps:
        n += 1
    while elapsed_ps(first, growth, n) > time_ps:
        n -= 1
    return n


# A10 with Llama-2-7B. Decode: CaraServe section 2.3, the four latencies around its Fig. 5 (24 requests of rank 32 and 16
# of rank 64: 34.8 and 35.8 ms with BGMV, 35.3 and 35.9 ms with MBGMV). Prefill is an iteration of its own there (section
# 2.2), so it costs a pass over the weights and, at half of the card's 125 TFLOP/s, 0.2 ms per token; the LoRA part of both
# phases is taken as equal. A rank-64 adapter loads in about 10 ms ("a few to tens of milliseconds", section 2.3).
A10_BGMV = PerfModel(
    kernel="bgmv",
    prefill_base_ms=31.8,
    prefill_token_ms=0.2,
    prefill_lora_ms=1 / 256,
    decode_base_ms=31.8,
    decode_row_ms=0.0,
    decode_lora_ms=1 / 256,
    load_base_ms=1.0,
    load_ms_per_mib=0.1,
)
A10_MBGMV = PerfModel(
    kernel="mbgmv",
    prefill_base_ms=33.5,
    prefill_token_ms=0.2,
    prefill_lora_ms=0.6 / 256,
    decode_base_ms=33.5,
    decode_row_ms=0.0,
    decode_lora_ms=0.6 / 256,
    load_base_ms=1.0,
    load_ms_per_mib=0.1,
)
