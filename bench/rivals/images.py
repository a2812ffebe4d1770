"""Orders of image steps to compare with. All run in the same worker on the same step times as Motet's own, and their adapters
are fetched beside the steps too, which the systems that inspired them do not do.

    OneAtATime        one request until its picture is there, first come first served: ROCK's workers, and on-demand loading
    FirstCome         mixed batches as Motet's, without its order
    EqualOldest       a step has requests with equal adapters, those of the oldest request (vLLM-Omni with steps as units)
    EqualStay         the same, but a batch that has begun runs to its end; nobody joins it
    EqualLargest      the adapters of most requests first, unless the oldest has waited for `PATIENCE` times its own time
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from motet.policies.step.image_batch import PATIENCE, ImageBatch, ImageSequence
from motet.policies.times.image_times import Bucket


def by_arrival(seq: ImageSequence) -> Any:
    """First come, first served."""
    return seq.order


class FirstCome(ImageBatch[ImageSequence]):
    """Mixed batches as Motet's, but first come, first served."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, urgency=by_arrival)


class OneAtATime(FirstCome):
    """A step has one request, the oldest whose adapters are there."""

    def rows_limit(self, bucket: Bucket) -> int:
        """None but the first fits."""
        return 1

    rows_now = rows_limit


def _kind(seq: ImageSequence) -> tuple[Bucket, frozenset[str]]:
    """What the requests of a step have in common."""
    return seq.bucket, frozenset(digest for digest, _ in seq.adapters)


class EqualOldest(FirstCome):
    """The requests with the size and the adapters of the oldest one, as many as fit, oldest first."""

    def _denoises(self, ready: list[ImageSequence]) -> list[ImageSequence]:
        kind = _kind(self._head(ready))
        chosen: list[ImageSequence] = []
        left = self.rows_now(kind[0])
        for seq in ready:
            if _kind(seq) == kind and (seq.rows <= left or not chosen):
                chosen.append(seq)
                left -= seq.rows
        return chosen

    def _head(self, ready: list[ImageSequence]) -> ImageSequence:
        return ready[0]


class EqualStay(EqualOldest):
    """A batch runs to its end before the next one is formed."""

    _batch: tuple[ImageSequence, ...] = ()

    def _denoises(self, ready: list[ImageSequence]) -> list[ImageSequence]:
        here = set(ready)
        left = [seq for seq in self._batch if seq in here and seq.stage == "denoise"]
        if not left:
            left = super()._denoises(ready)
            self._batch = tuple(left)
        return left


class EqualLargest(EqualOldest):
    """The adapters of the largest group first. What has begun goes on before what has not."""

    now_s = 0.0

    def plan(self, now_s: float) -> Any:
        """Remembers the time."""
        self.now_s = now_s
        return super().plan(now_s)

    def _head(self, ready: list[ImageSequence]) -> ImageSequence:
        oldest = ready[0]
        own_s = self.times.own_ms(oldest.bucket, oldest.rows, oldest.steps) / 1000.0
        if self.now_s - oldest.arrival_s > PATIENCE * own_s:
            return oldest
        sizes = Counter(map(_kind, ready))
        return max(ready, key=lambda seq: (min(sizes[_kind(seq)], self.rows_limit(seq.bucket)), seq.step > 0))
