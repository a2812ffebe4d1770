"""Durations of the steps of a simulated image engine, from measured ones (`shared.model.ImageSteps`)."""

from __future__ import annotations

from collections.abc import Sequence

from motet.policies.step.image_batch import ImageBatchLimits, ImagePlan, S
from motet.policies.times.image_times import Bucket, ImageTimes
from motet.shared.model import ImageSizeSteps, ImageSteps
from motet.twin.events import to_ps


class ImageStepModel:
    """The step times of one kind of image worker."""

    def __init__(self, facts: ImageSteps) -> None:
        self.facts = facts
        self._times = measured_times(facts)

    @property
    def limits(self) -> ImageBatchLimits:
        """The rows that the memory allows."""
        facts = self.facts
        return ImageBatchLimits(rows_most=lambda bucket: facts.rows_most(bucket.area))

    def step_ps(self, plan: ImagePlan[S], row_ranks: float) -> int:
        """The time of the planned step. `row_ranks`: of its requests, rows of 512 x 512 pixels times the ranks of adapters."""
        facts, count = self.facts, len(plan.requests)
        bucket = plan.requests[0].bucket
        if plan.stage == "encode":
            return to_ps(facts.encode_ms + count * facts.encode_request_ms)
        if plan.stage == "decode":
            size = nearest(facts.sizes, bucket)
            pixels = bucket.area / (size.height * size.width)
            return to_ps(size.decode_ms + pixels * count * size.decode_picture_ms)
        adapters = len({digest for seq in plan.requests for digest, _ in seq.adapters})
        return to_ps(self._times.step_ms(bucket, plan.rows) + facts.rank_ms * row_ranks + facts.adapter_ms * adapters)


def measured_times(facts: ImageSteps) -> ImageTimes:
    """What a worker with these step times knows of them after its warm-up."""
    times = ImageTimes()
    for size in facts.sizes:
        bucket = Bucket(size.height, size.width, text_tokens=size.text_tokens)
        for rows, took_ms in zip(size.rows, size.step_ms, strict=True):
            times.observe(bucket, rows, took_ms)
        times.observe_decode(bucket, 1, size.decode_ms + size.decode_picture_ms)
    times.observe_encode(1, facts.encode_ms + facts.encode_request_ms)
    return times


def nearest(sizes: Sequence[ImageSizeSteps], bucket: Bucket) -> ImageSizeSteps:
    """The measured size that is nearest to a bucket's by its area."""
    return min(sizes, key=lambda size: abs(size.height * size.width - bucket.area))
