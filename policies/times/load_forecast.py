"""Predicts the chance that an adapter is asked for again soon, from its rate and a histogram of the gaps between requests.

    rate      requests per second, where old requests fade within RATE_S: this shows steady popularity
    gaps      times between requests, in bins that double from 1/4 s on, where old gaps fade: this shows bursts
    pooled    the gaps of all adapters together, used for an adapter with few gaps of its own
    age       time since the adapter's last request; gaps shorter than this are ruled out

    by rate (t) = 1 - exp(-rate * t)
    by gaps (t) = (own gaps in (age, age + t] + PRIOR * pooled chance) / (own gaps above age + PRIOR)
    chance (t)  = geometric mean of both

Histograms per function are the technique of "Serverless in the Wild", which Chameleon sections 4.2 and 5.3 use. A histogram
alone needs many requests of an adapter; a rate alone does not represent bursts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, expm1, sqrt

SHORTEST_S = 0.25
BINS = 20  # up to 36 hours
EDGES = [0.0, *(SHORTEST_S * 2**i for i in range(BINS))]
"""Bin i holds gaps of EDGES[i] <= gap < EDGES[i + 1]; the last one is open."""
RATE_S = 900.0
PRIOR = 2.0
"""Weight of the pooled histogram, in gaps of the adapter."""
FADE_AT = 64.0
"""A histogram with this many gaps is halved."""
MAX_ADAPTERS = 16_384


@dataclass(slots=True)
class _Gaps:
    last_s: float
    weight: float = 1.0  # requests until `last_s`, each faded by its age
    from_bin: list[float] = field(default_factory=lambda: [0.0] * (len(EDGES) + 1))  # gaps in bin i or a later one

    def add(self, gap_s: float, fade_at: float) -> None:
        for i in range(bisect_right(EDGES, gap_s)):
            self.from_bin[i] += 1.0
        if self.from_bin[0] >= fade_at:
            self.from_bin = [count / 2 for count in self.from_bin]

    def above(self, age_s: float) -> float:
        """The number of gaps longer than `age_s`. Gaps count as evenly spread within their bin."""
        at = bisect_right(EDGES, age_s) - 1
        later = self.from_bin[at + 1]
        if at == len(EDGES) - 1:
            return self.from_bin[at]
        return later + (EDGES[at + 1] - age_s) / (EDGES[at + 1] - EDGES[at]) * (self.from_bin[at] - later)


@dataclass
class Forecast:
    """Forecasts requests for each adapter. Keeps at most MAX_ADAPTERS, the most recently requested."""

    _adapters: OrderedDict[str, _Gaps] = field(default_factory=OrderedDict)
    _pooled: _Gaps = field(default_factory=lambda: _Gaps(0.0))
    _since_s: float | None = None

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[str]:
        """The adapters, the least recently requested first."""
        return iter(self._adapters)

    def used(self, digest: str, now_s: float) -> None:
        """A request for the adapter began."""
        gaps = self._adapters.get(digest)
        if self._since_s is None:
            self._since_s = now_s
        if gaps is None:
            self._adapters[digest] = _Gaps(now_s)
            if len(self._adapters) > MAX_ADAPTERS:
                self._adapters.popitem(last=False)
            return
        self._adapters.move_to_end(digest)
        gaps.weight = 1.0 + gaps.weight * exp((gaps.last_s - now_s) / RATE_S)
        gap_s = max(0.0, now_s - gaps.last_s)
        gaps.add(gap_s, FADE_AT)
        self._pooled.add(gap_s, FADE_AT * 64)
        gaps.last_s = now_s

    def chance(self, digest: str, now_s: float, within_s: float) -> float:
        """The probability of a request for the adapter within that time, from 0 to 1."""
        gaps = self._adapters.get(digest)
        age_s = max(0.0, now_s - gaps.last_s) if gaps is not None else 0.0
        left = self._pooled.above(age_s)
        pooled = 1 - self._pooled.above(age_s + within_s) / left if left else 0.5
        if gaps is None:
            return pooled
        own = gaps.above(age_s)
        by_gaps = (own - gaps.above(age_s + within_s) + PRIOR * pooled) / (own + PRIOR)
        return sqrt(by_gaps * -expm1(-self.rate(digest, now_s) * within_s))

    def rate(self, digest: str, now_s: float) -> float:
        """Recent requests per second for the adapter."""
        gaps = self._adapters.get(digest)
        if gaps is None or self._since_s is None:
            return 0.0
        span_s = max(-expm1((self._since_s - now_s) / RATE_S) * RATE_S, SHORTEST_S)
        return gaps.weight * exp((gaps.last_s - now_s) / RATE_S) / span_s
