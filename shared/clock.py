"""The clock of the live services. Policies never read it: they get `now_s` as an argument."""

from __future__ import annotations

import time


def now_s() -> float:
    """Monotonic seconds: for durations, deadlines and policies."""
    return time.monotonic()


def unix_ms() -> int:
    """Wall-clock milliseconds since the epoch: for values that cross machines or are shown to people."""
    return time.time_ns() // 1_000_000
