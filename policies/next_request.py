"""Predicts which adapter the next request is for, from counts of requests that fade at three speeds.

    memory       one set of counts; they halve within 1, 4 or 16 requests for every adapter that there is room for
    share        an adapter's count over the sum of all counts: this memory's probability that the next request is for it
    trust        how well a memory predicted the last requests: the product of the shares that it gave them; old ones fade
    prediction   the shares of the three memories, weighted by their trust

The memory that fades slowly represents steady popularity, the one that fades quickly represents bursts. Which one predicts best
depends on the traffic, so the weights are learned. Adapters that are not in the worker's memory are counted, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from math import exp, log
from operator import add

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
NOTHING: Sequence[float] = (0.0,) * len(MEMORIES)
NO_CREDIT: Mapping[str, list[float]] = {}


class _Memory:
    """The counts of one memory."""

    __slots__ = ("growth", "surprise", "total", "unit")

    def __init__(self) -> None:
        self.growth = 1.0  # of `unit`, from one request to the next
        self.unit = 1.0  # what a request counts now
        self.total = 1.0  # of all counts
        self.surprise = 0.0  # at the last requests: minus the logarithm of the trust


class NextRequest:
    """Learns from requests, answers for any adapter. Keeps at most MAX_ADAPTERS, the most recently asked for."""

    def __init__(self) -> None:
        self._room = 0
        self._memories = [_Memory() for _ in MEMORIES]
        self._counts: dict[str, list[float]] = {}  # in each memory; the least recently asked for first
        self.room(LEAST_ROOM)

    def __len__(self) -> int:
        return len(self._counts)

    def room(self, adapters: int) -> None:
        """So many adapters fit in memory, as far as it has been seen."""
        if adapters > self._room:
            self._room = 1 << (adapters - 1).bit_length()
            for memory, length in zip(self._memories, MEMORIES, strict=True):
                memory.growth = 2 ** (1 / (length * self._room))

    def used(self, digest: str) -> None:
        """A request for the adapter has begun."""
        counts = self._counts.pop(digest, None) or [0.0] * len(MEMORIES)
        for i, memory in enumerate(self._memories):
            share = counts[i] / memory.total
            memory.surprise = FADE * memory.surprise - log(share if share > UNKNOWN else UNKNOWN)
            unit = memory.unit = memory.unit * memory.growth
            memory.total += unit
            counts[i] += unit
        self._counts[digest] = counts
        if len(self._counts) > MAX_ADAPTERS:
            del self._counts[next(iter(self._counts))]
        if self._memories[0].unit > LARGEST:
            self._scale_down()

    def one(self) -> list[float]:
        """What a request counts now, in each memory."""
        return [memory.unit for memory in self._memories]

    def chances(self, digests: Collection[str], ahead: Mapping[str, list[float]] = NO_CREDIT) -> list[float]:
        """How likely the next request is for each of these adapters. `ahead`: adapters that are credited with more counts."""
        a, b, c = self._worth_of_counts()
        counts = list(map(self._counts.get, digests, repeat(NOTHING)))
        if ahead:
            for i, digest in enumerate(digests):
                counts[i] = list(map(add, counts[i], ahead.get(digest, NOTHING)))
        return [a * x + b * y + c * z for x, y, z in counts]

    def _worth_of_counts(self) -> list[float]:
        """What a count in each memory adds to the prediction."""
        least = min([memory.surprise for memory in self._memories])
        trust = [exp(least - memory.surprise) for memory in self._memories]
        whole = sum(trust)
        return [one / whole / memory.total for one, memory in zip(trust, self._memories, strict=True)]

    def _scale_down(self) -> None:
        """Counts stay as they are to each other."""
        for i, memory in enumerate(self._memories):
            for counts in self._counts.values():
                counts[i] /= memory.unit
            memory.total /= memory.unit
            memory.unit = 1.0
