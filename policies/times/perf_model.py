"""Step times: the linear models of CaraServe section 5, for one worker or for many at once.

The paper's models are `a * load + b`, where the load of a batch S depends on the kernel:

    BGMV  (padded to the largest rank):  |S| * max rank in S
    MBGMV (no padding):                  sum of the ranks in S

Ours add a term per prefill token and per decoded row, so base-only requests (rank 0) cost something too; they count
as rows of |S|. Every function takes floats with a `PerfModel` or arrays, one element per worker, with columns of the
same names; all times are milliseconds. The constant is charged to an empty batch as well, exactly as in the paper's
formula, so it cancels in the differences that Algorithm 1 compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Kernel = Literal["bgmv", "mbgmv"]
Floats = NDArray[np.float64]
Number = TypeVar("Number", float, Floats)
Number_co = TypeVar("Number_co", float, Floats, covariant=True)
MIB = 1024 * 1024


class Coefficients(Protocol[Number_co]):
    """The coefficients of `shared.model.PerfModel`: numbers, or arrays with one element per worker."""

    @property
    def prefill_base_ms(self) -> Number_co: ...
    @property
    def prefill_token_ms(self) -> Number_co: ...
    @property
    def prefill_lora_ms(self) -> Number_co: ...
    @property
    def decode_base_ms(self) -> Number_co: ...
    @property
    def decode_row_ms(self) -> Number_co: ...
    @property
    def decode_lora_ms(self) -> Number_co: ...
    @property
    def load_base_ms(self) -> Number_co: ...
    @property
    def load_ms_per_mib(self) -> Number_co: ...
    @property
    def fetch_base_ms(self) -> Number_co: ...
    @property
    def fetch_ms_per_mib(self) -> Number_co: ...


def lora_load(kernel: Kernel, ranks: Sequence[int]) -> float:
    """The LoRA load of a batch. `ranks` has one entry per request, 0 for the base model."""
    return batch_load(kernel, len(ranks), sum(ranks), max(ranks, default=0))


def batch_load(kernel: Kernel, requests: int, rank_sum: int, max_rank: int) -> float:
    """The LoRA load of a batch with these numbers."""
    return float(requests * max_rank if kernel == "bgmv" else rank_sum)


def prefill_ms(perf: Coefficients[Number], tokens: Number, load: Number) -> Number:
    """Time to prefill `tokens` prompt tokens of a batch with this LoRA load."""
    return perf.prefill_base_ms + perf.prefill_token_ms * tokens + perf.prefill_lora_ms * load


def decode_ms(perf: Coefficients[Number], rows: Number, load: Number) -> Number:
    """Time of one decode step of `rows` requests with this LoRA load, which is the time per output token of each request."""
    return perf.decode_base_ms + perf.decode_row_ms * rows + perf.decode_lora_ms * load


def load_ms(perf: Coefficients[Number], size_bytes: float) -> Number:
    """Time to bring an adapter of `size_bytes` from host memory onto the device."""
    return perf.load_base_ms + perf.load_ms_per_mib * (size_bytes / MIB)


def fetch_ms(perf: Coefficients[Number], size_bytes: float) -> Number:
    """Time to bring an adapter of `size_bytes` into a worker's host memory."""
    return perf.fetch_base_ms + perf.fetch_ms_per_mib * (size_bytes / MIB)
