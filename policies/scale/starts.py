"""How long workers of a base model take to start: the lead of a decision to have one more.

Measured from the notice that a worker loads its model to the first look at which it serves, so up to one period too long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

KEPT = 64
USUAL_S = 60.0
"""Until a start was seen."""
SHARE = 0.9


class Starts:
    """The starts of the workers of one base model."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=KEPT)
        self._starting: dict[str, float] = {}

    def look(self, now_s: float, starting: Mapping[str, float], ready: Collection[str]) -> None:
        """Take in who starts, since when, and who serves."""
        self._took_s += [now_s - since_s for name, since_s in self._starting.items() if name in ready and name not in starting]
        self._starting = dict(starting)

    @property
    def lead_s(self) -> float:
        """What nine of ten of the last starts did not exceed."""
        took_s = sorted(self._took_s)
        return took_s[min(int(SHARE * len(took_s)), len(took_s) - 1)] if took_s else USUAL_S
