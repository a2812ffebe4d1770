"""Which streams take this process's messages: NATS can be connected, and answer, and yet store nothing.

A nats-server whose disk was full keeps a stream's first write error until it is restarted, also after the disk has room
again, and answers no message for that stream. A service sees it by writes that fail again and again, for `UNSTORED_S`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from motet.shared.clock import now_s
from motet.shared.errors import Overloaded, TooLarge
from motet.shared.telemetry import BUS_STORE_FAILURES, BUS_UNWRITABLE

UNSTORED_S = 5.0
FORGOTTEN_S = 60.0  # a writer that waits tries again sooner; a failure that nobody repeats says nothing about the present
FEW = 2  # failures; a single one may be anything


@dataclass(slots=True)
class _Failing:
    count: int
    first_s: float
    last_s: float


class Stores:
    """The streams whose latest write failed. Names are those of subjects or buckets, for people."""

    def __init__(self) -> None:
        self._failing: dict[str, _Failing] = {}

    @contextlib.contextmanager
    def writing(self, stream: str) -> Iterator[None]:
        """A context for one write. Its errors tell whether the stream takes messages; a refusal is an answer."""
        try:
            yield
        except (Overloaded, TooLarge):
            self._answered(stream)
            raise
        except BaseException:  # also a writer that does not wait any longer
            self._failed(stream)
            raise
        self._answered(stream)

    def unwritable(self) -> dict[str, float]:
        """The streams that have stored nothing for `UNSTORED_S` or longer -> since when, in seconds."""
        now = now_s()
        return {
            stream: now - failing.first_s
            for stream, failing in self._failing.items()
            if failing.count >= FEW and now - failing.first_s >= UNSTORED_S and now - failing.last_s < FORGOTTEN_S
        }

    def forget(self) -> None:
        """Another server, or the same one restarted: what failed before says nothing."""
        for stream in list(self._failing):
            self._answered(stream)

    def _answered(self, stream: str) -> None:
        if self._failing.pop(stream, None) is not None:
            BUS_UNWRITABLE.labels(stream).set(0)

    def _failed(self, stream: str) -> None:
        BUS_STORE_FAILURES.labels(stream).inc()
        failing = self._failing.get(stream)
        if failing is None or now_s() - failing.last_s >= FORGOTTEN_S:
            failing = self._failing[stream] = _Failing(0, now_s(), 0.0)
        failing.count, failing.last_s = failing.count + 1, now_s()
        if stream in self.unwritable():
            BUS_UNWRITABLE.labels(stream).set(1)
