"""Times of an image engine's steps: of denoising by picture size and rows, of encoding, of decoding; and the *knee*: how many
rows of one size a denoising step should have.

    rows              1     2     4     8    16
    ms               10    12    16    24    40       a larger batch than the knee makes all its pictures
    ms per row       10     6     4     3   2.5       wait, and draws hardly more pictures per second

The knee is the smallest number of rows at which the time per row is within NEAR of its least. Steps with more rows than it are
not made, so a knee that was measured while the machine was busy would stay too low. Therefore one step in REFRESH may have
twice as many (`rows`), and the first new time of a number of rows counts half. Times between measured numbers
of rows are interpolated, and extrapolated beyond the last one. They come from a warm-up and are refreshed by every step. A size
that was never measured has the times of the nearest one, of which the part that grows with the rows grows with the pixels too.
`own_ms` is what a request takes that has the engine for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

NEAR = 0.05
WEIGHT = 0.1
"""Of the latest step in a mean time."""
AGAIN = 0.5
"""Of a step in the mean time of a number of rows that did not run for REFRESH steps."""
REFRESH = 32
"""Steps of a size until its knee is computed again."""
SIZES_MAX = 256
START_MS = 1.0
"""Assumed time of a step while no size was measured."""


class Bucket(NamedTuple):
    """What the requests of one step have in common: the shape of their latents, and the tokens of their encodings."""

    height: int  # of the latents, as `width`
    width: int
    channels: int = 4
    text_tokens: int = 77

    @property
    def area(self) -> int:
        """The number of positions of the latents."""
        return self.height * self.width


class _Times:
    """Mean times of one bucket, by rows."""

    __slots__ = ("at", "knees", "ms", "seen")

    def __init__(self, ms: Iterable[tuple[int, float]] = ()) -> None:
        self.ms: dict[int, float] = dict(ms)
        self.at: dict[int, int] = {}  # number of the latest step with so many rows
        self.seen = 0
        self.knees: dict[int, int] = {}  # by the most rows

    def observe(self, rows: int, took_ms: float) -> None:
        known = self.ms.get(rows)
        weight = WEIGHT if self.seen - self.at.get(rows, 0) < REFRESH else AGAIN
        self.ms[rows] = took_ms if known is None else known + weight * (took_ms - known)
        self.at[rows] = self.seen
        self.seen += 1
        if known is None or self.seen % REFRESH == 0:
            self.knees.clear()

    def step_ms(self, rows: int) -> float:
        """The time of a step of so many rows. It never falls with the rows, so a measured dip counts as flat."""
        points = sorted(self.ms)
        times = list(accumulate((self.ms[point] for point in points), max))
        after = next((at for at, point in enumerate(points) if point >= rows), len(points))
        if after == 0 or len(points) == 1:
            return times[0]
        after = min(after, len(points) - 1)  # beyond the end as in the last part
        low, high = points[after - 1], points[after]
        return times[after - 1] + (times[after] - times[after - 1]) * (rows - low) / (high - low)

    def knee(self, most: int) -> int:
        """The knee among 1 to `most` rows."""
        if most not in self.knees:
            each = [self.step_ms(rows) / rows for rows in range(1, most + 1)]
            least = min(each)
            self.knees[most] = next(rows for rows, ms in enumerate(each, 1) if ms <= (1.0 + NEAR) * least)
        return self.knees[most]


class ImageTimes:
    """The step times of one worker, of at most `SIZES_MAX` buckets."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[Bucket, _Times] = OrderedDict()
        self._encode_ms = 0.0  # of one request
        self._decode_ms = 0.0  # of one position of the latents

    @property
    def sizes(self) -> list[Bucket]:
        """The buckets that were measured."""
        return list(self._sizes)

    def observe(self, bucket: Bucket, rows: int, took_ms: float) -> None:
        """A step of so many rows took so long. Times that are not positive are ignored."""
        if not took_ms > 0.0:
            return
        times = self._sizes.get(bucket)
        if times is None:
            if len(self._sizes) >= SIZES_MAX:
                self._sizes.popitem(last=False)
            times = self._sizes[bucket] = _Times()
        times.observe(rows, took_ms)

    def observe_encode(self, requests: int, took_ms: float) -> None:
        """A step encoded so many requests. Times that are not positive are ignored."""
        self._encode_ms = _mean(self._encode_ms, took_ms / requests)

    def observe_decode(self, bucket: Bucket, pictures: int, took_ms: float) -> None:
        """A step decoded so many pictures of a size. Times that are not positive are ignored."""
        self._decode_ms = _mean(self._decode_ms, took_ms / (pictures * bucket.area))

    def decode_ms(self, bucket: Bucket) -> float:
        """The expected time to decode one picture; it grows with the pixels. 0 while none was decoded."""
        return self._decode_ms * bucket.area

    def own_ms(self, bucket: Bucket, rows: int, steps: int, *, pictures: int = 1, together: int = 1) -> float:
        """The expected time of a request that is alone: its encoding, so many steps of its pictures, their decoding.

        Each picture has `rows`, and up to `together` of them share a step.
        """
        full, rest = divmod(pictures, together)
        each_ms = full * self.step_ms(bucket, together * rows) + (self.step_ms(bucket, rest * rows) if rest else 0.0)
        return self._encode_ms + steps * each_ms + pictures * self.decode_ms(bucket)

    def step_ms(self, bucket: Bucket, rows: int) -> float:
        """The expected time of a denoising step of so many rows."""
        times = self._of(bucket)
        return times.step_ms(rows) if times is not None else START_MS

    def knee(self, bucket: Bucket, most: int) -> int:
        """The rows that a step of this bucket should have, 1 to `most`; `most` where no size was measured."""
        times = self._of(bucket)
        return times.knee(most) if times is not None else most

    def rows(self, bucket: Bucket, most: int) -> int:
        """The rows that the next step of this bucket may have, 1 to `most`: the knee, and from time to time twice as many."""
        knee, own = self.knee(bucket, most), self._sizes.get(bucket)
        return min(most, 2 * knee) if own is not None and own.seen % REFRESH == REFRESH - 1 else knee

    def _of(self, bucket: Bucket) -> _Times | None:
        """The bucket's own times, or while they are one those of the nearest bucket with more; None without any."""
        own = self._sizes.get(bucket)
        if own is not None and len(own.ms) > 1:
            return own
        known = [one for one, times in self._sizes.items() if len(times.ms) > 1]
        if not known:
            return own or next(iter(self._sizes.values()), None)
        near = min(known, key=lambda one: abs(one.area - bucket.area))
        times, share = self._sizes[near], bucket.area / near.area
        first = times.step_ms(1)
        fixed = max(0.0, min(first, 2 * first - times.step_ms(2)))  # of a step: what does not grow with its rows
        return _Times((rows, fixed + share * (times.step_ms(rows) - fixed)) for rows in times.ms)


def _mean(known_ms: float, took_ms: float) -> float:
    """A mean time with the latest one."""
    if not took_ms > 0.0:
        return known_ms
    return known_ms + WEIGHT * (took_ms - known_ms) if known_ms else took_ms
