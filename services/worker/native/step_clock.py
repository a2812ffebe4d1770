"""Measures the parts of a step."""

from __future__ import annotations

from motet.shared.clock import now_s


class StepClock:
    """The seconds of each part of the last step, in `laps`. A part that runs twice counts together."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._began_s = self._since_s = 0.0

    def begin(self) -> None:
        """A step begins now."""
        self.laps.clear()
        self._began_s = self._since_s = now_s()

    def lap(self, part: str) -> float:
        """`part` of the step ends now, and the next one begins. Returns its seconds."""
        now = now_s()
        took_s, self._since_s = now - self._since_s, now
        self.laps[part] = self.laps.get(part, 0.0) + took_s
        return took_s

    @property
    def step_s(self) -> float:
        """From the step's begin to its last lap."""
        return self._since_s - self._began_s
