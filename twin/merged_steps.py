"""Steps of a simulated engine that can merge an adapter: resting requests, and the time that changes of the weights take."""

from __future__ import annotations

from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import StepPlan
from motet.policies.step.merge_decision import Modes
from motet.policies.step.merged_copy import CopySlices
from motet.policies.step.paying_merge import LONG
from motet.twin.events import PS_PER_MS, to_ps
from motet.twin.metrics import Metrics
from motet.twin.run import Live, Run
from motet.twin.worker_spec import WorkerSpec


class MergedSteps:
    """One engine's merged adapter: in a copy of the weights that is made a slice at a time, or in place."""

    def __init__(self, spec: WorkerSpec, batches: BatchCore[Live], modes: Modes, metrics: Metrics) -> None:
        if batches.copy is not None and spec.merged_copy is None:
            raise ValueError("merge: the worker's profile does not say how large a merged copy is; measure it with --merge on")
        self._modes, self._metrics, self._state, self._copy = modes, metrics, batches.state, batches.copy
        self._batches = batches
        self._slices = CopySlices(batches.copy, ms=1 / PS_PER_MS) if batches.copy is not None else None
        self._make_ps = spec.merged_copy.make_ps if spec.merged_copy is not None else 0
        self._change_ps = to_ps(spec.in_place.costs.switch_ms) if spec.in_place is not None else 0
        self._copied_ps, self._last_ps = 0, 0  # of the copy that is made; how long the last step took

    def slice_ps(self) -> int:
        """The time of a slice of the copy, which is made now."""
        most_ps = round(self._slices.slice(self._last_ps)) if self._slices is not None else 0
        if self._slices is None or not most_ps:
            return 0
        left_ps = self._make_ps - self._copied_ps
        slice_ps = min(left_ps, most_ps)
        self._copied_ps += slice_ps
        self._slices.worked(slice_ps, whole=slice_ps == left_ps)
        return slice_ps

    def decided(self, plan: StepPlan[Live]) -> None:
        """The plan drops the copy, or begins one."""
        if self._slices is not None:
            self._slices.dropped(plan)
            if self._slices.begun(plan):
                self._copied_ps = 0

    def rest(self, plan: StepPlan[Live], now_ps: int) -> None:
        """Record the time that a request rested as a gap between two of its tokens."""
        for live in plan.decodes:
            if live.rested_ps >= 0:
                self._metrics.gaps(now_ps - live.rested_ps, 0, 1, 1)
                live.rested_ps = -1
        if plan.resting:
            for live in self._state.running:
                if live.decoding and not live.scheduled and live.rested_ps < 0:
                    live.rested_ps = now_ps

    def switch_ps(self, plan: StepPlan[Live]) -> int:
        """The time to change the weights before the step; none where there is a merged copy."""
        if not plan.switched:
            return 0
        self._metrics.switches += 1
        self._metrics.switch_ps += self._change_ps
        return self._change_ps

    def steady(self, plan: StepPlan[Live]) -> int:
        """How many steps run until modes or copy may change."""
        if plan.switched or plan.copy_started:
            return 1
        if not self._batches.weighs:
            return LONG
        return self._modes.steady() if self._copy is None else min(self._modes.steady(), self._copy.steady)

    def ran(self, run: Run, steps: int) -> None:
        """The first `steps` steps of the run have ended."""
        if not self._batches.weighs:
            self._metrics.unmerged_steps += steps
            return
        if self._copy is not None:
            for step in range(steps):
                self._last_ps = run.first_ps + step * run.growth_ps - run.slice_ps
                run.batch.time_ms = self._last_ps / PS_PER_MS
                self._copy.observe(run.batch)
        self._modes.ran(steps)
        if run.plan.merged:
            self._metrics.merged_steps += steps
        else:
            self._metrics.unmerged_steps += steps
