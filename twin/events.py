"""The virtual clock. Time is an integer number of picoseconds, so that sums do not depend on the order of additions."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

PS_PER_S = 1_000_000_000_000
PS_PER_MS = 1_000_000_000

# At one instant, what ends comes first, then what is told about it, then what is new.
STEP, MESSAGE, HEARTBEAT, ARRIVAL = range(4)


def to_ps(time_ms: float) -> int:
    """Milliseconds as a whole number of picoseconds."""
    return round(time_ms * PS_PER_MS)


class Events:
    """The event queue, ordered by (time, priority, order of calls): the same calls always produce the same history."""

    def __init__(self) -> None:
        self.now_ps = 0
        self.now_s = 0.0
        """The same time in seconds, for policies."""
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time_ps: int, priority: int, action: Callable[..., None], *args: Any) -> None:
        """Call `action(*args)` at `time_ps`, which must not be in the past."""
        self._sequence += 1
        heappush(self._heap, (time_ps, priority, self._sequence, action, args))

    def run(self, until_ps: int | None = None) -> None:
        """Run events until none is left, or up to and including the time `until_ps`."""
        heap, last_ps = self._heap, inf if until_ps is None else until_ps
        while heap and heap[0][0] <= last_ps:
            now_ps, _, _, action, args = heappop(heap)
            self.now_ps, self.now_s = now_ps, now_ps / PS_PER_S
            action(*args)
        if until_ps is not None and until_ps > self.now_ps:
            self.now_ps, self.now_s = until_ps, until_ps / PS_PER_S
