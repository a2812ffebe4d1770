"""Predicts which adapter the next request is for, from counts of requests that fade at three speeds.

    memory       counts that halve within 1, 4 or 16 requests for every adapter that there is room for
    share        an adapter's count over the sum of all counts: how likely this memory says the next request is for it
    trust        how well a memory predicted the last requests: the product of the shares that it gave them; old ones fade
    prediction   the shares of the three memories, weighted by their trust

Steady popularity is seen best by the long memory, bursts by the short one. What is best changes with the traffic, so it is
learnt. Adapters that are not in memory are counted, too.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

MEMORIES = (1, 4, 16)
LEAST_ROOM = 16
"""A smaller room counts as this one, else the shortest memory would be of a few requests."""
FADE = 0.98
"""What a request's share counts for the trust, with every later request."""
UNKNOWN = 1e-4
"""The share that an adapter without a count is taken to have when trust is computed."""
LARGEST = 1e200
"""Counts grow instead of fading, and are scaled down when a request counts this much."""
MAX_ADAPTERS = 16_384


class NextRequest:
    """Learns from requests, answers for any adapter. Keeps at most MAX_ADAPTERS, the most recently asked for."""

    def __init__(self) -> None:
        self._room = 0
        self._growth = [1.0] * len(MEMORIES)
        self._unit = [1.0] * len(MEMORIES)  # what a request counts now
        self._total = [1.0] * len(MEMORIES)
        self._surprise = [0.0] * len(MEMORIES)
        self._counts: dict[str, list[float]] = {}  # the least recently asked for first
        self.room(LEAST_ROOM)

    def __len__(self) -> int:
        return len(self._counts)

    def room(self, adapters: int) -> None:
        """So many adapters fit in memory, as far as it has been seen."""
        if adapters > self._room:
            self._room = 1 << (adapters - 1).bit_length()
            self._growth = [2 ** (1 / (memory * self._room)) for memory in MEMORIES]

    def used(self, digest: str) -> None:
        """A request for the adapter has begun."""
        counts = self._counts.pop(digest, None) or [0.0] * len(MEMORIES)
        for i, growth in enumerate(self._growth):
            share = max(counts[i] / self._total[i], UNKNOWN)
            self._surprise[i] = FADE * self._surprise[i] - log(share)
            self._unit[i] *= growth
            self._total[i] += self._unit[i]
            counts[i] += self._unit[i]
        self._counts[digest] = counts
        if len(self._counts) > MAX_ADAPTERS:
            del self._counts[next(iter(self._counts))]
        if self._unit[0] > LARGEST:
            self._scale_down()

    def one(self) -> list[float]:
        """What a request counts now, in each memory."""
        return self._unit.copy()

    def chance(self) -> Callable[[str, list[float] | None], float]:
        """A function that says how likely the next request is for an adapter, which may be credited with more counts."""
        least = min(self._surprise)
        trust = [exp(least - surprise) for surprise in self._surprise]
        a, b, c = (one / sum(trust) / total for one, total in zip(trust, self._total, strict=True))
        nothing, counted = [0.0] * len(MEMORIES), self._counts.get

        def of(digest: str, credit: list[float] | None = None) -> float:
            x, y, z = counted(digest, nothing)
            if credit is not None:
                x, y, z = x + credit[0], y + credit[1], z + credit[2]
            return a * x + b * y + c * z

        return of

    def _scale_down(self) -> None:
        """Counts stay as they are to each other."""
        for counts in (*self._counts.values(), self._total):
            for i, unit in enumerate(self._unit):
                counts[i] /= unit
        self._unit = [1.0] * len(MEMORIES)
