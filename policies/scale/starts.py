"""How long workers of a base model take to start: the lead of a decision to have one more.

Measured from the notice that a worker loads its model to the first look at which it serves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

KEPT = 64
USUAL_S = 60.0
"""Until a start was seen."""
SHARE = 0.9


class Starts:
    """The starts of the workers of one base model."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=KEPT)
        self._begun: dict[str, float] = {}

    def begun(self, name: str, now_s: float) -> None:
        """A worker loads its model."""
        self._begun.pop(name, None)
        self._begun[name] = now_s
        if len(self._begun) > KEPT:
            del self._begun[next(iter(self._begun))]

    def ended(self, name: str) -> None:
        """It has failed or stopped."""
        self._begun.pop(name, None)

    def look(self, now_s: float, serving: Collection[str]) -> None:
        """Take in who serves."""
        for name in self._begun.keys() & set(serving):
            self._took_s.append(now_s - self._begun.pop(name))

    @property
    def lead_s(self) -> float:
        """What nine of ten of the last starts did not exceed."""
        took_s = sorted(self._took_s)
        return took_s[min(int(SHARE * len(took_s)), len(took_s) - 1)] if took_s else USUAL_S
