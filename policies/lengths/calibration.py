"""Conformal calibration: how often lengths really end up below the levels that a model gives them.

Every finished request has a *level*: the probability that the model, before it knew the length, gave to shorter ones. If the
model is calibrated, levels are uniform over 0..1. If 90% of them lie below 0.8, the model's 0.8 is the real 0.9. Levels are
counted per adapter and over all requests; older ones weigh less. The counts also compare the model with the histogram of the
adapter's lengths (`quantiles`) by the loss of their quantiles, so the better of the two answers.

The number of adapters is bounded: the least recently counted is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

BINS = 25
DECAY = 0.996
MIN_SAMPLES = 30
PRIOR = 20.0  # requests' worth of what all adapters show, in the count of one


class Record(msgspec.Struct, kw_only=True):
    """Decayed counts of one adapter, or of all adapters together."""

    counts: list[float]
    samples: int = 0
    model_loss: float = 0.0
    adapter_loss: float = 0.0


class Calibration:
    """Levels of finished requests by adapter digest, "" for the base model."""

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self.all = Record(counts=[0.0] * BINS)
        self.adapters: OrderedDict[str, Record] = OrderedDict()

    def seed(self, levels: Iterable[float]) -> None:
        """Start over with levels that a new model gave to lengths that it was not fitted on.

        The observed levels of single adapters belong to the old model, so they count for half.
        """
        counts = np.bincount([_bin(level) for level in levels], minlength=BINS)
        if counts.sum():
            self.all.counts = counts.astype(float).tolist()
            for record in self.adapters.values():
                record.counts = [count / 2 for count in record.counts]

    def observe(self, adapter: str, level: float, *, model_loss: float, adapter_loss: float) -> None:
        """A request of this adapter ended at this level of the model's distribution.

        The losses (`pinball`) are those of the model's quantiles and of the quantiles of the adapter's histogram.
        """
        record = self.adapters.get(adapter)
        if record is None:
            while len(self.adapters) >= self._max_adapters:
                self.adapters.popitem(last=False)
            record = self.adapters[adapter] = Record(counts=[0.0] * BINS)
        self.adapters.move_to_end(adapter)
        for one in (self.all, record):
            counts = [count * DECAY for count in one.counts]
            counts[_bin(level)] += 1.0
            one.counts = counts
            one.samples += 1
            one.model_loss = one.model_loss * DECAY + model_loss
            one.adapter_loss = one.adapter_loss * DECAY + adapter_loss

    def levels(self, adapter: str, shares: Sequence[float]) -> list[float]:
        """The levels of the model below which these shares of the adapter's requests end."""
        everybody = np.asarray(self.all.counts)
        total = everybody.sum()
        counts = everybody / total if total else np.full(BINS, 1.0 / BINS)
        record = self.adapters.get(adapter)
        if record is not None:
            counts = np.asarray(record.counts) + PRIOR * counts
        cumulative = np.concatenate(([0.0], np.cumsum(counts + 1e-9)))
        ends = np.linspace(0.0, 1.0, BINS + 1)
        found: list[float] = np.interp(np.asarray(shares) * cumulative[-1], cumulative, ends).tolist()
        return found

    def model_is_better(self, adapter: str) -> bool:
        """Whether the model's quantiles have been closer than those of the adapter's histogram so far."""
        record = self.adapters.get(adapter)
        if record is None or record.samples < MIN_SAMPLES:
            record = self.all
        return record.model_loss <= record.adapter_loss


def pinball(tokens: int, quantiles: Sequence[float], shares: Sequence[float]) -> float:
    """The pinball loss of quantiles of a length, in nats. On average it is smallest for the true quantiles."""
    error = np.log1p(tokens) - np.log1p(np.asarray(quantiles, np.float64))
    share = np.asarray(shares)
    return float(np.maximum(share * error, (share - 1.0) * error).sum())


def _bin(level: float) -> int:
    return min(BINS - 1, max(0, int(level * BINS)))
