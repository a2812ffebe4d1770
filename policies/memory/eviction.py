"""Which adapter leaves first when a tier is full.

A tier tells its eviction policy when adapters are used, released or removed, and asks for an order. The tier decides when room
is needed. One instance belongs to one tier. Adapters in use are never in the order. Adapters that queued requests need come
after the others, and pinned ones last (`AdapterSlots.victims`). No adapter is exempt, so no request waits for ever.

    lru          least recently released
    score        .45 F + .10 R + .45 S, the lowest first (Chameleon section 4.2): keeps what is used often and large
    fair-share   the same with equal weights (section 5.3)
    gdsf         F * cost / bytes + age (Greedy Dual Size Frequency): the age is the value of the last victim
    next-use     P(the next request is for it) * cost / bytes: seconds of copying that keeping a byte is expected to save
    none         nothing is kept that no request runs with or waits for (S-LoRA)

Times are seconds on the clock of `now_s`, which the tier's owner sets.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from motet.policies.memory.next_request import NextRequest
from motet.shared.worker_options import EvictionName

REFRESH_S = 300.0
"""T_refresh: uses before that count no more."""
Cost = Callable[[str, int], float]
"""Seconds to bring an adapter of so many bytes back, from the tier that it would come from."""


class Eviction(Protocol):
    """The order in which idle adapters are evicted. Keys are adapter digests."""

    now_s: float
    keeps: bool
    """Whether idle adapters may stay that no request waits for."""

    def use(self, digest: str, size_bytes: int) -> None:
        """One more request uses the adapter."""

    def come(self, digest: str, size_bytes: int) -> None:
        """The adapter has come without a request, which is not a use. It may be evicted once it is released."""

    def release(self, digest: str) -> None:
        """No request uses the adapter now, so it may be evicted."""

    def forget(self, digest: str) -> None:
        """The adapter has left the tier."""

    def __iter__(self) -> Iterator[str]:
        """Idle adapters in the order of eviction. The caller may remove each during the iteration."""


class Lru:
    """The least recently released adapter is evicted first."""

    keeps = True

    def __init__(self) -> None:
        self.now_s = 0.0
        self._idle: OrderedDict[str, None] = OrderedDict()

    def use(self, digest: str, size_bytes: int) -> None:
        """An adapter in use is not evicted."""
        self._idle.pop(digest, None)

    def come(self, digest: str, size_bytes: int) -> None:
        """Once released, the adapter is evicted after all others."""

    def release(self, digest: str) -> None:
        """The adapter goes to the end of the order."""
        self._idle[digest] = None

    def forget(self, digest: str) -> None:
        """The adapter has left the tier."""
        self._idle.pop(digest, None)

    def __iter__(self) -> Iterator[str]:
        """Least recently released first."""
        return iter([*self._idle])


class KeepNothing(Lru):
    """Adapters are evicted as soon as no request runs with them or waits for them."""

    keeps = False


@dataclass(eq=False)
class _Ranked:
    """Idle adapters by a value that subclasses define.

    The lowest value is evicted first; of equal ones the least recently released.
    """

    now_s: float = 0.0
    keeps: bool = True
    _sizes: dict[str, int] = field(default_factory=dict)  # of all adapters in the tier
    _idle: dict[str, None] = field(default_factory=dict)  # the least recently released first

    def use(self, digest: str, size_bytes: int) -> None:
        """An adapter in use is not evicted."""
        self._idle.pop(digest, None)
        self._sizes[digest] = size_bytes

    def come(self, digest: str, size_bytes: int) -> None:
        """Does nothing: only requests are counted."""
        self._sizes[digest] = size_bytes

    def release(self, digest: str) -> None:
        """The adapter may be evicted."""
        self._idle[digest] = None

    def forget(self, digest: str) -> None:
        """The adapter has left the tier."""
        self._idle.pop(digest, None)
        self._sizes.pop(digest, None)

    def __iter__(self) -> Iterator[str]:
        """The least valuable first."""
        values = self.values()
        return iter(sorted(values, key=values.__getitem__))

    def values(self) -> dict[str, float]:
        """The present value of each idle adapter, the least recently released first."""
        raise NotImplementedError


@dataclass(eq=False)
class Score(_Ranked):
    """Chameleon's score (section 4.2), each term over its maximum among the residents.

    Frequency is the number of uses within `refresh_s`; recency falls from 1 for an adapter used just now to 0 for the one used
    longest ago; size is in bytes.
    """

    frequency: float = 0.45
    recency: float = 0.10
    size: float = 0.45
    refresh_s: float = REFRESH_S
    _uses: deque[tuple[float, str]] = field(default_factory=deque)
    _counts: Counter[str] = field(default_factory=Counter)
    _used_s: dict[str, float] = field(default_factory=dict)  # when each adapter in the tier was last used

    def use(self, digest: str, size_bytes: int) -> None:
        """Count the use."""
        super().use(digest, size_bytes)
        self._used_s[digest] = self.now_s
        self._uses.append((self.now_s, digest))
        self._counts[digest] += 1

    def come(self, digest: str, size_bytes: int) -> None:
        """Counts no use, but makes the adapter as recent as one that was used just now."""
        super().come(digest, size_bytes)
        self._used_s[digest] = self.now_s

    def release(self, digest: str) -> None:
        """The adapter was in use until now."""
        super().release(digest)
        self._used_s[digest] = self.now_s

    def forget(self, digest: str) -> None:
        """The adapter has left the tier. Its uses stay counted."""
        super().forget(digest)
        self._used_s.pop(digest, None)

    def __iter__(self) -> Iterator[str]:
        """The least valuable first, by terms that change when an adapter leaves."""
        passed: set[str] = set()
        while following := [digest for digest in super().__iter__() if digest not in passed]:
            passed.add(following[0])
            yield following[0]

    def values(self) -> dict[str, float]:
        counts, uses = self._counts, self._uses
        while uses and uses[0][0] < self.now_s - self.refresh_s:
            _, digest = uses.popleft()
            counts[digest] -= 1
            if not counts[digest]:
                del counts[digest]
        most = max((counts[digest] for digest in self._sizes), default=0) or 1
        largest = max(self._sizes.values(), default=0) or 1
        oldest_s = max(self.now_s - min(self._used_s.values(), default=0.0), 1e-9)

        def value(digest: str) -> float:
            recency = 1 - (self.now_s - self._used_s[digest]) / oldest_s
            return self.frequency * counts[digest] / most + self.recency * recency + self.size * self._sizes[digest] / largest

        return {digest: value(digest) for digest in self._idle}


@dataclass(eq=False)
class Gdsf(_Ranked):
    """Greedy Dual Size Frequency: uses * cost / bytes, plus the value of the last evicted adapter at the last use."""

    cost: Cost = lambda digest, size_bytes: 1.0
    _age: float = 0.0
    _counts: Counter[str] = field(default_factory=Counter)
    _worth: dict[str, float] = field(default_factory=dict)

    def use(self, digest: str, size_bytes: int) -> None:
        """Count the use, at the present age of the cache."""
        super().use(digest, size_bytes)
        self._counts[digest] += 1
        self._worth[digest] = self._age + self._counts[digest] * self.cost(digest, size_bytes) / max(1, size_bytes)

    def come(self, digest: str, size_bytes: int) -> None:
        """Give the adapter the value of one that was used once."""
        super().come(digest, size_bytes)
        self._worth[digest] = self._age + self.cost(digest, size_bytes) / max(1, size_bytes)

    def forget(self, digest: str) -> None:
        """The age of the cache becomes the value of the evicted adapter."""
        super().forget(digest)
        self._counts.pop(digest, None)
        self._age = max(self._age, self._worth.pop(digest, 0.0))

    def values(self) -> dict[str, float]:
        return {digest: self._worth[digest] for digest in self._idle}


@dataclass(eq=False)
class NextUse(_Ranked):
    """The value is the expected copying time saved by the next request, per byte: P(it is for this adapter) * cost / bytes.

    An adapter that came before its request has the value of one used once more.
    """

    cost: Cost = lambda digest, size_bytes: 1.0
    requests: NextRequest = field(default_factory=NextRequest)
    _ahead: dict[str, list[float]] = field(default_factory=dict)

    def use(self, digest: str, size_bytes: int) -> None:
        """Count the request."""
        sizes, requests = self._sizes, self.requests
        self._idle.pop(digest, None)
        self._ahead.pop(digest, None)
        sizes[digest] = size_bytes
        requests.room(len(sizes))
        requests.used(digest)

    def come(self, digest: str, size_bytes: int) -> None:
        """Counts no use. Until its request comes, the adapter has the value of one used once more."""
        super().come(digest, size_bytes)
        self._ahead[digest] = self.requests.one()

    def forget(self, digest: str) -> None:
        """The adapter has left the tier. Its requests stay counted."""
        super().forget(digest)
        self._ahead.pop(digest, None)

    def values(self) -> dict[str, float]:
        idle, sizes, cost = self._idle, self._sizes, self.cost
        values = {}
        for digest, chance in zip(idle, self.requests.chances(idle, self._ahead), strict=True):
            size_bytes = sizes[digest]
            values[digest] = chance * cost(digest, size_bytes) / (size_bytes or 1)
        return values


def make_eviction(name: EvictionName, cost: Cost = lambda digest, size_bytes: 1.0 + size_bytes) -> Eviction:
    """The policy of this name for one tier. The default `cost` of a copy is its bytes plus a constant per copy."""
    match name:
        case "lru":
            return Lru()
        case "score":
            return Score()
        case "fair-share":
            return Score(frequency=1 / 3, recency=1 / 3, size=1 / 3)
        case "gdsf":
            return Gdsf(cost=cost)
        case "next-use":
            return NextUse(cost=cost)
        case "none":
            return KeepNothing()
