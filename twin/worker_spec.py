"""What a simulated worker is made of: limits, options, and models of the times that everything takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from motet.policies.step.image_batch import ImageBatch
from motet.policies.step.merge_decision import MergeConfig, MergeCosts, Merging, Modes
from motet.policies.step.merged_copy import MERGE
from motet.policies.times.perf_model import MIB
from motet.shared.model import ImageSteps, PerfModel, WorkerLimits
from motet.shared.worker_options import DEFAULTS, WorkerOptions
from motet.twin.events import to_ps
from motet.twin.link import LinkModel
from motet.twin.steps import StepModel
from motet.twin.storage import EVERYTHING_IN_HOST, StorageModel


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedCopyModel:
    """The merged copy of an engine's weights: its size, and the time in which an engine makes a MiB of it."""

    size_bytes: int
    mib_ms: float

    @property
    def make_ps(self) -> int:
        """The time to make the copy."""
        return to_ps(self.mib_ms * self.size_bytes / MIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeInPlace:
    """An engine that stops to merge an adapter into its only weights, as in the paper: for comparisons."""

    costs: MergeCosts
    policy: Callable[[MergeCosts], Modes] = Merging
    """Makes the policy of one worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpec:
    """What makes a worker draw pictures: its step times, and what plans its steps (comparisons have others)."""

    steps: ImageSteps
    batch: Callable[..., ImageBatch[Any]] = ImageBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """The limits and durations of a worker, and the step-time model that it reports to schedulers."""

    limits: WorkerLimits
    perf: PerfModel  # as reported; schedulers decide with it
    steps: StepModel  # as it is
    storage: StorageModel = EVERYTHING_IN_HOST
    link: LinkModel | None = None  # None: an adapter is copied to the device before a step, and the step takes longer
    options: WorkerOptions = DEFAULTS
    merged_copy: MergedCopyModel | None = None  # for `options.merge`
    merging: MergeConfig = MERGE  # its constants
    in_place: MergeInPlace | None = None
    images: ImageSpec | None = None  # of a worker that draws pictures, instead of `steps`

    @property
    def engine_options(self) -> WorkerOptions:
        """The options of its engine, in which `auto` does not merge where the size of a merged copy is not known."""
        options = self.options
        return replace(options, merge="off") if options.merge == "auto" and self.merged_copy is None else options
