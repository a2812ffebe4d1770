"""The one clock of the live services. Policies never read it: they are handed `now_s`."""

from __future__ import annotations

import time


def now_s() -> float:
    """Monotonic seconds: for durations, deadlines and policies."""
    return time.monotonic()


def unix_ms() -> int:
    """Wall-clock milliseconds since the epoch: for what crosses machines or is shown to people."""
    return time.time_ns() // 1_000_000
