"""Merging to compare with: one adapter after another is merged, always."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from motet.policies.step.merge_decision import MergeCosts, Mode

FOREVER = 1 << 30


@dataclass(eq=False)
class AlwaysMerged:
    """A baseline that is always merged, one adapter after another (the paper's merged-only, and PEFT).

    An adapter's turn ends when it has no requests left, or after `turn` steps if others wait.
    """

    turn: int = 300
    merged: str = ""
    whole: str | None = None
    _now: str = ""
    _steps: int = 0

    def choose(self, fcfs: Mapping[str, int], alone: Mapping[str, int], seats: int) -> Mode:
        """The next adapter's turn, or the rest of the present one."""
        if self._now not in alone or (self._steps >= self.turn and len(alone) > 1):
            after = sorted(one for one in alone if one > self._now)
            self._now = after[0] if after else min(alone, default="")
            self._steps = 0
        self.merged = self._now
        return Mode(self.merged, frozenset((self._now,)))

    def ran(self, steps: int) -> None:
        """Count the steps of the turn."""
        self._steps += steps

    def steady(self) -> int:
        """The steps that are left of the turn."""
        return max(1, self.turn - self._steps)

    def unmerge(self) -> None:
        """The turn ends."""
        self.merged = ""
        self._steps = FOREVER


def always_merged(costs: MergeCosts) -> AlwaysMerged:
    """The policy for `MergeInPlace`."""
    return AlwaysMerged()
