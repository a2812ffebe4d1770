"""Evictions to compare with: `lru`, Chameleon's `score` and `fair-share`, and `none`."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from motet.policies.memory.eviction import Ranked

REFRESH_S = 300.0
"""T_refresh: uses before that count no more."""


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
class Score(Ranked):
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
        most = max((counts[digest] for digest in self.sizes), default=0) or 1
        largest = max(self.sizes.values(), default=0) or 1
        oldest_s = max(self.now_s - min(self._used_s.values(), default=0.0), 1e-9)

        def value(digest: str) -> float:
            recency = 1 - (self.now_s - self._used_s[digest]) / oldest_s
            return self.frequency * counts[digest] / most + self.recency * recency + self.size * self.sizes[digest] / largest

        return {digest: value(digest) for digest in self.idle}
