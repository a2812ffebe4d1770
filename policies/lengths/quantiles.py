"""Running quantiles of output length per adapter, over exponentially decayed histograms.

    edges   1 2 3 ... 12 13 15 17 ...   exact for short answers, then about 8% wide
    a new sample weighs 1, every older one of the same histogram is multiplied by DECAY

An adapter with fewer than MIN_SAMPLES samples uses the histogram over all requests, and needs none of its own yet. The number
of adapters is bounded: the least recently used (updated or asked for) is evicted.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from math import ceil

import msgspec

MIN_SAMPLES = 8
DECAY = 0.996  # half of the weight lies on the last 173 samples
DEFAULT_TOKENS = 128  # expected length before anything was seen
MAX_TOKENS = 1 << 20
RENORMALISE_AT = 1e12
_SHARES = 0.5, 0.9


def _edges() -> list[int]:
    edges, edge = [1], 1
    while edge < MAX_TOKENS:
        edge = max(edge + 1, ceil(edge * 1.08))
        edges.append(edge)
    return edges


EDGES = _edges()  # bucket i holds the lengths edges[i] <= n < edges[i + 1]
_BUCKETS = len(EDGES) - 1


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Output length in tokens, clipped to the request's limit, estimated from `samples` samples; 0 samples: a default."""

    p50_tokens: int
    p90_tokens: int
    samples: int


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """A histogram in the stored form: the buckets with weight, and their weights relative to the next sample's."""

    adapter_digest: str
    buckets: list[int]
    weights: list[float]
    mean_tokens: float
    samples: int


class _Histogram:
    """Decayed counts. Instead of shrinking the old weights, each new weight is larger, since only ratios matter.

    A cursor per quantile points at its bucket and knows the weight below. A sample moves it by one bucket now and then.
    """

    __slots__ = ("_at", "_below", "all_weight", "samples", "token_weight", "weight", "weights")

    def __init__(self) -> None:
        self.weights = array("d", bytes(8 * _BUCKETS))
        self.weight = 1.0  # of the next sample
        self.all_weight = 0.0  # sum of `weights`
        self.token_weight = 0.0  # sum of weight * length, for the mean
        self.samples = 0
        self._at, self._below = [0] * len(_SHARES), [0.0] * len(_SHARES)

    def add(self, tokens: int) -> None:
        bucket, weight = bisect_right(EDGES, tokens) - 1, self.weight
        self.weights[bucket] += weight
        self.all_weight += weight
        self.token_weight += weight * tokens
        self.samples += 1
        for which, at in enumerate(self._at):
            if bucket < at:
                self._below[which] += weight
        self.weight = weight / DECAY
        if self.weight > RENORMALISE_AT:
            self._renormalise()

    def _renormalise(self) -> None:
        self.weights = array("d", [weight / self.weight for weight in self.weights])
        self.all_weight = sum(self.weights)
        self.token_weight /= self.weight
        self.weight = 1.0
        self._below = [sum(self.weights[:at]) for at in self._at]

    def saved(self, adapter_digest: str) -> Saved:
        buckets = [bucket for bucket, weight in enumerate(self.weights) if weight]
        weights = [self.weights[bucket] / self.weight for bucket in buckets]
        return Saved(adapter_digest, buckets, weights, self.mean(), self.samples)

    @classmethod
    def over(cls, lengths: Iterable[int]) -> _Histogram:
        histogram = cls()
        for tokens in lengths:
            histogram.add(tokens)
        return histogram

    @classmethod
    def of(cls, saved: Saved) -> _Histogram:
        histogram = cls()
        for bucket, weight in zip(saved.buckets, saved.weights, strict=True):
            histogram.weights[bucket] = weight
        histogram.all_weight = sum(histogram.weights)
        histogram.token_weight = saved.mean_tokens * histogram.all_weight
        histogram.samples = saved.samples
        return histogram

    def quantile(self, which: int) -> int:
        """The length at this share (an index into `_SHARES`) of the weight, interpolated inside its bucket."""
        if not self.samples:
            return DEFAULT_TOKENS
        weights, at, below = self.weights, self._at[which], self._below[which]
        target = _SHARES[which] * self.all_weight
        while at and below >= target:
            at -= 1
            below -= weights[at]
        while (inside := weights[at]) < target - below and at < _BUCKETS - 1:
            below += inside
            at += 1
        self._at[which], self._below[which] = at, below
        low, last = EDGES[at], EDGES[at + 1] - 1
        part = (target - below) / inside if inside > 0 else 0.0
        return round(low + (last - low) * min(1.0, max(0.0, part)))

    def mean(self) -> float:
        return self.token_weight / self.all_weight


class LengthQuantiles:
    """Learns lengths from finished requests and estimates those of new ones.

    At most `max_adapters` histograms of about 1.5 KiB; an adapter with few samples takes less.
    """

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._all = _Histogram()
        self._adapters: OrderedDict[str, _Histogram | list[int]] = OrderedDict()  # a list: the few samples that there are

    @property
    def adapters(self) -> int:
        """The number of known adapters, including the base model (digest "")."""
        return len(self._adapters)

    def observe(self, adapter_digest: str, output_tokens: int) -> None:
        """A request of this adapter ("" for the base model) ended after `output_tokens` tokens; zero counts as one."""
        tokens = min(max(1, output_tokens), MAX_TOKENS - 1)
        self._all.add(tokens)
        known = self._adapters.get(adapter_digest)
        if known is None:
            while len(self._adapters) >= self._max_adapters:
                self._adapters.popitem(last=False)
            self._adapters[adapter_digest] = [tokens]
            return
        if isinstance(known, _Histogram):
            known.add(tokens)
        else:
            known.append(tokens)
            if len(known) == MIN_SAMPLES:
                self._adapters[adapter_digest] = _Histogram.over(known)
        self._adapters.move_to_end(adapter_digest)

    def estimate(self, adapter_digest: str, max_tokens: int) -> Estimate:
        """The expected length of a request of this adapter that may produce `max_tokens` tokens (at least 1)."""
        histogram = self._best(adapter_digest)
        p50, p90 = (min(max(1, max_tokens), histogram.quantile(which)) for which in range(len(_SHARES)))
        return Estimate(p50_tokens=p50, p90_tokens=p90, samples=histogram.samples)

    def expected_tokens(self, adapter_digest: str, max_tokens: int) -> int:
        """The median of the `estimate`."""
        return min(max(1, max_tokens), self._best(adapter_digest).quantile(0))

    def samples(self, adapter_digest: str) -> int:
        """The number of observed requests of this adapter."""
        known = self._adapters.get(adapter_digest, ())
        return known.samples if isinstance(known, _Histogram) else len(known)

    def saved(self, most: int) -> list[Saved]:
        """The histogram over all requests, then those of the `most` most recently used adapters, least recent first."""
        if not self._all.samples:
            return []
        kept = list(self._adapters.items())[-most:]
        histograms = [(digest, one if isinstance(one, _Histogram) else _Histogram.over(one)) for digest, one in kept]
        return [self._all.saved(""), *(histogram.saved(digest) for digest, histogram in histograms)]

    def restore(self, saved: list[Saved]) -> None:
        """Replace all histograms by those that `saved` returned."""
        if not saved:
            return
        self._all = _Histogram.of(saved[0])
        self._adapters = OrderedDict((one.adapter_digest, _Histogram.of(one)) for one in saved[1:][-self._max_adapters :])

    def _best(self, adapter_digest: str) -> _Histogram:
        known = self._adapters.get(adapter_digest)
        if not isinstance(known, _Histogram) or known.samples < MIN_SAMPLES:
            return self._all
        self._adapters.move_to_end(adapter_digest)
        return known

    def mean_tokens(self) -> float:
        """The average length over all requests: `avg_resp_len` of CaraServe's Algorithm 1. Never below 1."""
        return self._all.mean() if self._all.samples else float(DEFAULT_TOKENS)
