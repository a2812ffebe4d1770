"""The patterns of the requests so far, as ROCK's dispatch and its placement see them: made once, made again when they shift."""

from __future__ import annotations

from collections import deque

import numpy as np

from bench.rivals.rock.matching import EVERY_S
from bench.rivals.rock.patterns import Patterns, features
from bench.rock_fleet.fleet import Fleet, Follower
from bench.rock_fleet.jobs import TOLERATES, Job

LAST = 512
"""Requests that patterns are made of."""
LEAST = 64
"""Without so many requests there is one pattern."""


class Watched(Follower):
    """Every 90 s it looks whether the last requests' patterns have shifted. `clusters`: else there is one pattern."""

    def __init__(self, *, clusters: bool = True) -> None:
        self.clusters = clusters

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self.made = 0
        self._last: deque[Job] = deque(maxlen=LAST)
        self._patterns: Patterns | None = None
        self._mean_s = 1.0  # the mean time alone when the patterns were made
        self._labels: dict[tuple[int, float, int, float], int] = {}
        self._rng = np.random.default_rng(3)
        if self.clusters:
            fleet.every(EVERY_S, self._look)

    def arrived(self, job: Job) -> None:
        self._last.append(job)

    def label(self, job: Job) -> int:
        """The pattern of a request."""
        if self._patterns is None:
            return 0
        key = (job.steps, job.mb, job.kind, job.alone_s)
        if key not in self._labels:
            self._labels[key] = int(self._patterns.labels(_vectors([job], self._mean_s))[0])
        return self._labels[key]

    def _look(self) -> None:
        if len(self._last) < LEAST:
            return
        if self._patterns is not None and not self._patterns.shifted(_vectors(self._last, self._mean_s), self._rng):
            return
        self._mean_s = float(np.mean([job.alone_s for job in self._last]))
        self._patterns = Patterns.of(_vectors(self._last, self._mean_s), self._rng)
        self._labels.clear()
        self.made += 1


def _vectors(jobs: deque[Job] | list[Job], mean_s: float) -> np.ndarray:
    columns = np.array([(job.steps, job.mb, job.kind + 1, TOLERATES * job.alone_s) for job in jobs], float)
    return features(*columns.T, mean_s=TOLERATES * mean_s)
