"""Limits the time of a bench, and checks whether the machine's speed was stable meanwhile.

A bench ends within ten minutes. Its repetitions go through `Watch.rounds`, which stops early when another round would not end
in time. Meanwhile a short fixed piece of work is timed repeatedly, on all cores at once. If its time changes, or if other
processes use the machine, the bench's figures are less reliable. The bench then prints that the machine did not hold still, and
records it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.report import Elsewhere

LIMIT_S = 540.0  # ten minutes, less what a bench does after its last round
STILL, MEMORY_STILL, QUIET_CORES = 0.1, 0.3, 0.1  # above them the machine did not hold still
MARK_EVERY_S = 5.0
HASHED, COPIED, REPEATS = 1 << 20, 8 << 20, 7  # bytes and times of the calibration: some 0.1 s


class Watch:
    """Watches the time and the machine's speed during a bench, from its creation on."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.began_s, self.limit_s = time.monotonic(), limit_s
        self._others = Elsewhere()
        self._marked_s = 0.0
        self._marks_ms: list[tuple[float, float]] = []  # (arithmetic, memory)
        self._skipped: list[str] = []
        self.mark()

    @property
    def left_s(self) -> float:
        """Seconds until the limit; negative after it."""
        return self.began_s + self.limit_s - time.monotonic()

    def rounds(self, wanted: int, name: str = "rounds", *, at_least: int = 1, within: float = 1.0) -> Iterator[int]:
        """Yields 0 up to `wanted` - 1. Ends when one more round like the longest would not end within this share of the limit.

        The first `at_least` rounds always run. Calibrates between rounds.
        """
        longest_s = 0.0
        for number in range(wanted):
            if number >= at_least and self.left_s - longest_s < (1.0 - within) * self.limit_s:
                self.skip(f"{number} of {wanted} {name}")
                return
            began_s = time.monotonic()
            yield number
            longest_s = max(longest_s, time.monotonic() - began_s)
            if time.monotonic() - self._marked_s >= MARK_EVERY_S:
                self.mark()

    def skip(self, what: str) -> None:
        """Record what was left out to end in time."""
        self._skipped.append(what)

    def mark(self) -> None:
        """Time the calibration's work on every core at once. The best of some repetitions counts."""
        cores = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(cores) as pool:
            found = list(pool.map(lambda _: work_ms(), range(cores)))
        self._marks_ms.append((max(one[0] for one in found), max(one[1] for one in found)))
        self._marked_s = time.monotonic()

    def figures(self) -> dict[str, Any]:
        """The figures for the record. A spread is the slowest mark over the fastest, minus one."""
        marks = np.array(self._marks_ms)
        arithmetic, memory = (marks.max(axis=0) / marks.min(axis=0) - 1.0).tolist()
        cores = self._others.cores()
        return {
            "held_still": arithmetic <= STILL and memory <= MEMORY_STILL and cores <= QUIET_CORES,
            "calibration_spread": round(arithmetic, 3),
            "memory_spread": round(memory, 3),
            "elsewhere_cores": round(cores, 3),
            "seconds": round(time.monotonic() - self.began_s, 1),
            "cut_short": self._skipped,
        }

    def says(self) -> str:
        """The same figures as a sentence."""
        found = self.figures()
        facts = (
            f"a fixed piece of arithmetic varied by {found['calibration_spread']:.0%}, of copying by"
            f" {found['memory_spread']:.0%}, other processes took {found['elsewhere_cores']:.2f} cores"
        )
        lines = [f"The machine {'held still' if found['held_still'] else 'did NOT hold still'}: {facts}."]
        if self._skipped:
            lines.append(f"Cut short to end within ten minutes: {', '.join(self._skipped)}.")
        return "\n".join(lines)


def work_ms() -> tuple[float, float]:
    """Milliseconds of hashing and of copying, both without the interpreter's lock. The best of `REPEATS`."""
    data, source, target = bytes(HASHED), np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8)
    hashing, copying = [], []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        hashlib.sha256(data).digest()
        hashed_s = time.perf_counter()
        np.copyto(target, source)
        hashing.append(hashed_s - began_s)
        copying.append(time.perf_counter() - hashed_s)
    return 1000 * min(hashing), 1000 * min(copying)
