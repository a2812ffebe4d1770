"""Makes the merged copy of the weights between the steps, as `policies.step.merged_copy` decides.

    plan.dropped      ──> drop       its memory is freed before the boundary of KV blocks and adapters moves
    plan.copy_started ──> begin      after the boundary has moved; then a slice before every step, until it is complete

A slice runs on the threads of the steps, between two steps. A separate thread would take a core from the threads of a step,
which all wait for the slowest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from motet.policies.step.batch_state import StepPlan
from motet.policies.step.merged_copy import MergedCopy
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.native.seats import LiveSequence
from motet.shared import clock
from motet.shared.telemetry import logger

SHARE = 0.2
"""Share of a step's time that a slice takes, and so of the time between two tokens while a copy is made."""
NO_ROOM = "--merge on: on a CPU the merged copy borrows memory from the KV cache, which needs --device-memory shared"
log = logger("motet.worker.merging")


class MergedWeights(Protocol):
    """A backend's copy of the weights."""

    @property
    def nbytes(self) -> int:
        """Bytes of the present copy."""

    def size(self, adapter: HostAdapter) -> int:
        """Bytes of a copy with this adapter."""

    def begin(self, adapter: HostAdapter) -> None:
        """Begin a copy with this adapter. Raises MemoryError when the system has no room."""

    def advance(self, enough: Callable[[], bool]) -> bool:
        """Compute the copy until `enough()`, called every few tenths of a millisecond, is true.

        Returns whether it is complete.
        """

    def drop(self) -> None:
        """Drop the copy."""


class CopyMaker:
    """Makes the merged copy in slices between the steps. `weights` are the backend's, `copy` is the policy's."""

    def __init__(self, weights: MergedWeights, copy: MergedCopy) -> None:
        self._weights, self._copy = weights, copy
        self._making = ""  # the adapter of the present copy
        self._refused = False  # the system had no memory for it
        self._slices = False  # the last plan goes on with it
        self._took_s = 0.0

    def size(self, adapter: HostAdapter) -> int:
        """Bytes of a copy with this adapter."""
        return self._weights.size(adapter)

    def drop(self, plan: StepPlan[LiveSequence]) -> None:
        """Drop the copy if the plan says so, before the boundary between KV blocks and adapters moves."""
        if plan.dropped:
            self._weights.drop()
            self._making = ""

    def begin(self, plan: StepPlan[LiveSequence], sequences: Iterable[LiveSequence]) -> None:
        """Begin or continue the plan's copy, after the boundary of memory has moved."""
        if plan.copy_started and plan.copy_started != self._making:
            weights = next(live.request.adapter for live in sequences if live.adapter == plan.copy_started)
            assert weights is not None, "it has an adapter"
            self._making, self._took_s, self._refused = plan.copy_started, 0.0, False
            try:
                self._weights.begin(weights)
            except MemoryError:  # steps stay unmerged, and another adapter's copy may fit
                log.exception("the merged copy has no memory", extra={"adapter": plan.copy_started})
                self._refused = True
        self._slices = bool(plan.copy_started) and not self._refused

    def advance(self, step_s: float) -> float:
        """Compute a slice of the copy, short compared with a step of `step_s`. Returns the seconds that it took."""
        if not self._slices:
            return 0.0
        began_s = clock.now_s()
        until_s = began_s + SHARE * step_s
        whole = self._weights.advance(lambda: clock.now_s() >= until_s)
        took_s = clock.now_s() - began_s
        self._took_s += took_s
        if whole:
            self._slices = False
            self._copy.made(self._took_s * 1000)
        return took_s
