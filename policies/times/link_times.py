"""The online estimator of a link: how long KV blocks take from another worker (`policies.memory.kv_travel`)."""

from __future__ import annotations

from motet.policies.times.perf_model import MIB

SMALL_BYTES = 64 << 10
"""A transfer up to this size measures the latency, a larger one the rate."""
RECENT = 0.3
"""Weight of the latest transfer in the estimate of the link."""


class LinkTimes:
    """Measures how long KV blocks take from another worker, in milliseconds."""

    def __init__(self) -> None:
        self.base_ms = 0.0
        self.ms_per_mib = 0.0
        """0 before the first measurement."""

    def observe(self, size_bytes: int, took_ms: float) -> None:
        """Take in a transfer.

        An abandoned one counts with the size that was asked for, although it would have taken longer still.
        """
        if size_bytes <= SMALL_BYTES:
            self.base_ms = _blend(self.base_ms, took_ms)
        else:
            self.ms_per_mib = _blend(self.ms_per_mib, max(1e-3, took_ms - self.base_ms) * MIB / size_bytes)

    @property
    def bytes_per_s(self) -> float:
        """The measured rate, 0 before the first measurement."""
        return 1000.0 * MIB / self.ms_per_mib if self.ms_per_mib else 0.0


def _blend(known: float, new: float) -> float:
    return known + RECENT * (new - known) if known else new
