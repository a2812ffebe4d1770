"""Sequences that overtake one without adapter memory because they are predicted to end in time (Chameleon section 4.3.3).

This is the end of rule 4 of `policies.step.batch_admission`, for queues that want it (`request_queues.Queues.squashes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from motet.policies.step.batch_state import AdmissionState, S, Sequence


class Overtaking(Generic[S]):
    """The sequences that wait without adapter memory, and those that overtook them by prediction."""

    def __init__(self) -> None:
        self.squashed = 0
        """Sequences that overtook another one and were preempted for it, so far."""
        self._passed: list[tuple[S, list[S]]] = []

    def may(self, state: AdmissionState[S], seq: S, blocked: list[S]) -> bool:
        """Whether the sequence may overtake those of `blocked`.

        It may if its adapter is in use, because then it takes no adapter memory, or if it is predicted to end before the first
        of them has room.
        """
        if state.adapters.users(seq.adapter):
            return True
        if steps_left(seq) + 1 >= steps_until_room(state, blocked[0].adapter_bytes):
            return False
        self._passed += [(one, [seq]) for one in blocked]
        return True

    def squash(self, state: AdmissionState[S], preempt: Callable[[S], None]) -> None:
        """Preempt sequences that overtook an earlier one, if it lacks nothing but their adapters' memory."""
        if not self._passed:
            return
        slots = state.adapters
        self._passed = self._still_passed(state)
        for seq in dict.fromkeys(seq for seq, _ in self._passed):
            passing = [one for waits, others in self._passed if waits is seq for one in others]
            mine = {one.adapter for one in passing if slots.users(one.adapter) == 1}
            if slots.fits(seq.adapter_bytes) or not slots.fits(seq.adapter_bytes - sum(map(slots.size_bytes, mine))):
                continue
            for one in passing:
                if one.adapter in mine and one.blocks and not slots.fits(seq.adapter_bytes):
                    preempt(one)
                    self.squashed += 1

    def _still_passed(self, state: AdmissionState[S]) -> list[tuple[S, list[S]]]:
        """The pairs of `_passed` that still hold: one sequence waits without a slot, others overtook it and still run."""
        waiting = {id(seq) for seq in state.waiting}
        return [
            (seq, passing)
            for seq, others in self._passed
            if id(seq) in waiting and seq.slot < 0 and (passing := [one for one in others if one.slot >= 0 and one.blocks])
        ]


def steps_left(seq: Sequence) -> int:
    """Predicted number of steps until the sequence ends, with one token each. At least 1."""
    return max(1, seq.expected_length - seq.length)


def steps_until_room(state: AdmissionState[S], size_bytes: int) -> float:
    """Predicted steps until ending sequences have freed enough adapter memory; infinite when they never free enough."""
    slots = state.adapters
    ends: dict[str, int] = {}
    for seq in state.running:
        if seq.slot >= 0:
            ends[seq.adapter] = max(ends.get(seq.adapter, 0), steps_left(seq))
    short = size_bytes
    for digest, steps in sorted(ends.items(), key=lambda end: end[1]):
        short -= slots.size_bytes(digest)
        if slots.fits(max(0, short)):
            return steps
    return float("inf")
