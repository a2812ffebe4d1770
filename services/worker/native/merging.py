"""Makes the merged copy of the weights between the steps, as `policies.step.merged_copy` decides.

plan.dropped      ──> drop       its memory is freed before the boundary of KV blocks and adapters moves
plan.copy_started ──> begin      after the boundary has moved; then a slice before every step, until it is complete
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from motet.policies.step.batch_state import StepPlan
from motet.policies.step.merged_copy import CopySlices, MergedCopy
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.native.seats import LiveSequence
from motet.shared import clock
from motet.shared.telemetry import logger

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
        """Begin a copy with this adapter, which replaces the present one. Raises MemoryError when there is no room."""

    def advance(self, enough: Callable[[], bool]) -> bool:
        """Compute the copy until `enough()`, called every few tenths of a millisecond, is true.

        Returns whether it is complete.
        """

    def drop(self) -> None:
        """Drop the copy."""


class CopyMaker:
    """Makes the merged copy in slices between the steps. `weights` are the backend's, `copy` is the policy's."""

    def __init__(self, weights: MergedWeights, copy: MergedCopy) -> None:
        self._weights, self._slices = weights, CopySlices(copy, ms=1000.0)

    def size(self, adapter: HostAdapter) -> int:
        """Bytes of a copy with this adapter."""
        return self._weights.size(adapter)

    def drop(self, plan: StepPlan[LiveSequence]) -> None:
        """Drop the copy if the plan says so, before the boundary between KV blocks and adapters moves."""
        if self._slices.dropped(plan):
            self._weights.drop()

    def begin(self, plan: StepPlan[LiveSequence], sequences: Iterable[LiveSequence]) -> None:
        """Begin or continue the plan's copy, after the boundary of memory has moved."""
        if not self._slices.begun(plan):
            return
        weights = next(live.request.weights for live in sequences if live.adapter == plan.copy_started)
        assert weights is not None, "it has an adapter"
        try:
            self._weights.begin(weights)
        except MemoryError:
            log.exception("the merged copy has no memory", extra={"adapter": plan.copy_started})
            self._slices.refuse()

    def advance(self, step_s: float) -> float:
        """Compute a slice of the copy, short compared with a step of `step_s`. Returns the seconds that it took."""
        slice_s = self._slices.slice(step_s)
        if not slice_s:
            return 0.0
        began_s = clock.now_s()
        whole = self._weights.advance(lambda: clock.now_s() - began_s >= slice_s)
        took_s = clock.now_s() - began_s
        self._slices.worked(took_s, whole=whole)
        return took_s
