"""Which adapter leaves first when a tier is full.

A tier tells its eviction policy when adapters are used, released or removed, and asks for an order. The tier decides when room
is needed. One instance belongs to one tier. Adapters in use are never in the order. Adapters that queued requests need come
after the others, and pinned ones last (`AdapterSlots.victims`). No adapter is exempt, so no request waits for ever.

    next-use     P(the next request is for it) * cost / bytes: seconds of copying that keeping a byte is expected to save
    gdsf         F * cost / bytes + age (Greedy Dual Size Frequency): the age is the value of the last victim

Others to compare with are in bench/rivals. Plug-ins add their own to `EVICTIONS` (docs/extending.md).

Times are seconds on the clock of `now_s`, which the tier's owner sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from motet.policies.memory.next_request import NextRequest
from motet.shared.tables import Table

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


@dataclass(eq=False)
class Ranked:
    """Idle adapters by a value that subclasses define.

    The lowest value is evicted first; of equal ones the least recently released.
    """

    now_s: float = 0.0
    keeps: bool = True
    sizes: dict[str, int] = field(default_factory=dict)  # of all adapters in the tier
    idle: dict[str, None] = field(default_factory=dict)  # the least recently released first

    def use(self, digest: str, size_bytes: int) -> None:
        """An adapter in use is not evicted."""
        self.idle.pop(digest, None)
        self.sizes[digest] = size_bytes

    def come(self, digest: str, size_bytes: int) -> None:
        """Does nothing: only requests are counted."""
        self.sizes[digest] = size_bytes

    def release(self, digest: str) -> None:
        """The adapter may be evicted."""
        self.idle[digest] = None

    def forget(self, digest: str) -> None:
        """The adapter has left the tier."""
        self.idle.pop(digest, None)
        self.sizes.pop(digest, None)

    def __iter__(self) -> Iterator[str]:
        """The least valuable first."""
        values = self.values()
        return iter(sorted(values, key=values.__getitem__))

    def values(self) -> dict[str, float]:
        """The present value of each idle adapter, the least recently released first."""
        raise NotImplementedError


@dataclass(eq=False)
class Gdsf(Ranked):
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
        return {digest: self._worth[digest] for digest in self.idle}


@dataclass(eq=False)
class NextUse(Ranked):
    """The value is the expected copying time saved by the next request, per byte: P(it is for this adapter) * cost / bytes.

    An adapter that came before its request has the value of one used once more.
    """

    cost: Cost = lambda digest, size_bytes: 1.0
    requests: NextRequest = field(default_factory=NextRequest)
    _ahead: dict[str, list[float]] = field(default_factory=dict)

    def use(self, digest: str, size_bytes: int) -> None:
        """Count the request."""
        sizes, requests = self.sizes, self.requests
        self.idle.pop(digest, None)
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
        idle, sizes, cost = self.idle, self.sizes, self.cost
        values = {}
        for digest, chance in zip(idle, self.requests.chances(idle, self._ahead), strict=True):
            size_bytes = sizes[digest]
            values[digest] = chance * cost(digest, size_bytes) / (size_bytes or 1)
        return values


EVICTIONS: Table[Callable[[Cost], Eviction]] = Table(
    {"next-use": lambda cost: NextUse(cost=cost), "gdsf": lambda cost: Gdsf(cost=cost)}
)
"""Makes the eviction of one tier, given what it costs to bring an adapter back."""


def make_eviction(name: str, cost: Cost = lambda digest, size_bytes: 1.0 + size_bytes) -> Eviction:
    """The eviction with this name for one tier. The default cost is an adapter's bytes plus a constant. Raises UnknownName."""
    return EVICTIONS.named(name)(cost)
