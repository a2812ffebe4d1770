"""What is asked of a set of adapters: rates, ranks, sizes, lengths and objectives, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
NO_OBJECTIVE = np.inf


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Adapters and the load on each. Every column is [n]; `count` says for how many equal adapters a row stands."""

    rate: Floats  # requests/s of one adapter
    rank: Floats  # 0 for the base model
    size_bytes: Floats  # of one adapter on a device
    prompt_tokens: Floats  # mean
    prompt_square: Floats  # mean of the squares
    prompt_p99: Floats  # 99th percentile
    output_tokens: Floats  # mean
    output_square: Floats  # mean of the squares
    output_inverse: Floats  # mean of 1 / (output tokens - 1), over requests with two and more
    ttft_slo_ms: Floats
    tpot_slo_ms: Floats
    share: Floats  # of requests that must meet both objectives
    count: Floats
    peakedness: float = 1.0
    """Variance of the number of arrivals over its mean, at the time scale of a request; 1 for Poisson arrivals."""

    @classmethod
    def of(
        cls,
        rate: ArrayLike,
        *,
        rank: ArrayLike = 8,
        size_bytes: ArrayLike = 0,
        prompt_tokens: ArrayLike,
        prompt_square: ArrayLike | None = None,
        prompt_p99: ArrayLike | None = None,
        output_tokens: ArrayLike,
        output_square: ArrayLike | None = None,
        output_inverse: ArrayLike | None = None,
        ttft_slo_ms: ArrayLike = NO_OBJECTIVE,
        tpot_slo_ms: ArrayLike = NO_OBJECTIVE,
        share: ArrayLike = 0.99,
        count: ArrayLike = 1,
        peakedness: float = 1.0,
    ) -> Demand:
        """A demand whose columns may be single numbers. What is not given of the lengths is that of exponential ones."""
        prompt, output = np.asarray(prompt_tokens, dtype=np.float64), np.asarray(output_tokens, dtype=np.float64)
        lengths = (
            prompt,
            2.0 * np.square(prompt) if prompt_square is None else prompt_square,
            np.log(100.0) * prompt if prompt_p99 is None else prompt_p99,
            output,
            2.0 * np.square(output) if output_square is None else output_square,
            np.log1p(output) / np.maximum(output - 1.0, 1.0) if output_inverse is None else output_inverse,
        )
        rates = np.atleast_1d(np.asarray(rate, dtype=np.float64))
        others = (rank, size_bytes, *lengths, ttft_slo_ms, tpot_slo_ms, share, count)
        columns = [np.broadcast_to(np.asarray(column, dtype=np.float64), rates.shape) for column in others]
        return cls(**dict(zip(COLUMNS, (rates, *columns), strict=True)), peakedness=peakedness)

    def __len__(self) -> int:
        return len(self.rate)

    def take(self, rows: Sequence[int] | NDArray[np.intp], count: Floats | None = None) -> Demand:
        """Some of the rows, with other counts if given."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        return replace(self, **columns if count is None else columns | {"count": count})

    def shared(self, rows: Sequence[int] | NDArray[np.intp], shares: Sequence[float] | Floats) -> Demand:
        """Some of the rows, each with a share of its rate."""
        taken = self.take(np.asarray(rows, dtype=np.intp))
        return replace(taken, rate=taken.rate * np.asarray(shares))

    def faster(self, factor: float) -> Demand:
        """The same adapters at `factor` times their rates."""
        return replace(self, rate=self.rate * factor)

    @cached_property
    def adapters(self) -> float:
        """Number of adapters."""
        return float(self.count.sum())

    @cached_property
    def total_rate(self) -> float:
        """Requests/s of all adapters."""
        return float((self.rate * self.count).sum())

    def mean(self, column: Floats) -> float:
        """The mean of a column over requests."""
        return float((column * self.rate * self.count).sum()) / self.total_rate

    @property
    def tokens_s(self) -> float:
        """Prompt and output tokens per second that come in."""
        return self.total_rate * (self.mean(self.prompt_tokens) + self.mean(self.output_tokens))


COLUMNS = tuple(field.name for field in fields(Demand) if field.name != "peakedness")
