"""Predicts which adapter the next request is for, from counts of requests that fade at three speeds.

    memory       one set of counts; they halve within 1, 4 or 16 requests for every adapter that there is room for
    share        an adapter's count over the sum of all counts: this memory's probability that the next request is for it
    trust        how well a memory predicted the last requests: the product of the shares that it gave them; old ones fade
    prediction   the shares of the three memories, weighted by their trust

The memory that fades slowly represents steady popularity, the one that fades quickly represents bursts. Which one predicts best
depends on the traffic, so the weights are learned. Adapters that are not in the worker's memory are counted, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from math import exp, log
from operator import add

MEMORIES = (1, 4, 16)
LEAST_ROOM = 16
"""A smaller room counts as this one, because the shortest memory would otherwise cover only a few requests."""
FADE = 0.98
"""Factor on the weight of a request's share in the trust, per later request."""
UNKNOWN = 1e-4
"""The assumed share of an adapter without a count, for the trust."""
LOG_UNKNOWN = log(UNKNOWN)
LARGEST = 1e200
"""Counts grow instead of fading, and are scaled down when a request counts this much."""
MAX_ADAPTERS = 16_384
NOTHING: Sequence[float] = (0.0,) * len(MEMORIES)
NO_CREDIT: Mapping[str, list[float]] = {}


class _Memory:
    """The totals of one memory."""

    __slots__ = ("growth", "surprise", "total", "unit")

    def __init__(self) -> None:
        self.growth = 1.0  # of `unit`, from one request to the next
        self.unit = 1.0  # what a request counts now
        self.total = 1.0  # of all counts
        self.surprise = 0.0  # at the last requests: minus the logarithm of the trust


class NextRequest:
    """Predicts the adapter of the next request. Keeps at most MAX_ADAPTERS, the most recently requested."""

    def __init__(self) -> None:
        self._room = 0
        self._memories = [_Memory() for _ in MEMORIES]
        self._at: dict[str, int] = {}  # where an adapter's counts begin; the least recently asked for first
        self._counts = array("d")  # one for each memory, adapter by adapter
        self.room(LEAST_ROOM)

    def __len__(self) -> int:
        return len(self._at)

    def room(self, adapters: int) -> None:
        """Memory has been seen to hold this many adapters. The largest number counts."""
        if adapters > self._room:
            self._room = 1 << (adapters - 1).bit_length()
            for memory, length in zip(self._memories, MEMORIES, strict=True):
                memory.growth = 2 ** (1 / (length * self._room))

    def used(self, digest: str) -> None:
        """A request for the adapter has begun."""
        counts, known = self._counts, self._at
        at = known.pop(digest, None)
        if at is None:
            at = self._place()
        known[digest] = at
        for memory in self._memories:
            share = counts[at] / memory.total
            memory.surprise = FADE * memory.surprise - (log(share) if share > UNKNOWN else LOG_UNKNOWN)
            memory.unit = unit = memory.unit * memory.growth
            memory.total += unit
            counts[at] += unit
            at += 1
        if self._memories[0].unit > LARGEST:
            self._scale_down()

    def _place(self) -> int:
        """A place for the counts of a new adapter: at the end, or the place of the adapter that is forgotten for it."""
        counts = self._counts
        if len(self._at) < MAX_ADAPTERS:
            counts.extend(NOTHING)
            return len(counts) - len(MEMORIES)
        at = self._at.pop(next(iter(self._at)))
        counts[at : at + len(MEMORIES)] = array("d", NOTHING)
        return at

    def one(self) -> list[float]:
        """The weight of a request at present, in each memory."""
        return [memory.unit for memory in self._memories]

    def chances(self, digests: Collection[str], ahead: Mapping[str, list[float]] = NO_CREDIT) -> list[float]:
        """The probability that the next request is for each of these adapters.

        `ahead`: further counts to credit to adapters.
        """
        a, b, c = self._worth_of_counts()
        known, counts = self._at, self._counts
        chances = []
        for digest in digests:
            at = known.get(digest)
            x, y, z = (counts[at], counts[at + 1], counts[at + 2]) if at is not None else NOTHING
            if digest in ahead:
                x, y, z = map(add, (x, y, z), ahead[digest])
            chances.append(a * x + b * y + c * z)
        return chances

    def _worth_of_counts(self) -> list[float]:
        """How much a count in each memory adds to the prediction."""
        least = min([memory.surprise for memory in self._memories])
        trust = [exp(least - memory.surprise) for memory in self._memories]
        whole = sum(trust)
        return [one / whole / memory.total for one, memory in zip(trust, self._memories, strict=True)]

    def _scale_down(self) -> None:
        """Divide all counts by the present weight, which keeps their ratios."""
        for i, memory in enumerate(self._memories):
            for at in range(i, len(self._counts), len(MEMORIES)):
                self._counts[at] /= memory.unit
            memory.total /= memory.unit
            memory.unit = 1.0
