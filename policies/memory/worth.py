"""Estimates the worth of a byte of cached memory: the seconds that keeping it is expected to save.

    idle adapter     chance that it is used again * seconds to copy it to the device again / its bytes
    prefix block     chance that a prompt begins with it again * seconds to prefill its tokens / its bytes

Both chances are those of an entry that is about to be evicted. An entry counts as *old* once it has been idle for half as long
as the entries that were evicted lately; the chance is the share of old entries that were used again instead of being evicted.
Time is counted in admissions, since only an admission uses a block or an adapter.
"""

from __future__ import annotations

from typing import Protocol

from motet.policies.times.perf_model import Coefficients, load_ms

LIFE_SHARE = 0.05
"""Weight of the entry that left last, in the mean time that idle entries survive."""
REMEMBERED = 256.0
"""Old entries that are counted; with more of them the counts are halved."""


class Reuse:
    """Measures how often idle entries of one cache are used again before they are evicted.

    Ages are admissions since an entry became idle.
    """

    __slots__ = ("_left", "_life", "_used")

    def __init__(self) -> None:
        self._used = self._left = 1.0  # of the old ones; nothing is known: one half
        self._life = 0.0

    @property
    def chance(self) -> float:
        """The estimated chance that the next entry to be evicted would be used again, between 0 and 1."""
        return self._used / (self._used + self._left)

    def used(self, age: int) -> None:
        """An idle entry is used again."""
        if age + age >= self._life:
            self._used += 1.0
            self._fade()

    def left(self, age: int) -> None:
        """An idle entry was evicted."""
        self._life += LIFE_SHARE * (age - self._life)
        self._left += 1.0
        self._fade()

    def _fade(self) -> None:
        if self._used + self._left > REMEMBERED:
            self._used, self._left = self._used / 2, self._left / 2


class Worth(Protocol):
    """The seconds per byte that keeping a cache's next victim is expected to save."""

    def of_adapter(self, digest: str, size_bytes: int) -> float:
        """The worth of a byte of an idle adapter."""

    def of_prefix(self) -> float:
        """The worth of a byte of the least recently used prefix block."""


class ExpectedSavings:
    """The formulas above. `perf` is the present model of step times.

    Copies pass a link of `bytes_per_s`. Without a link (0) steps wait for copies, for the time that `perf` states.
    """

    def __init__(self, adapters: Reuse, prefixes: Reuse, *, block_size: int, block_bytes: int) -> None:
        self._adapters, self._prefixes = adapters, prefixes
        self._tokens_per_byte = block_size / block_bytes
        self.perf: Coefficients[float] | None = None
        self.bytes_per_s = 0.0

    def of_adapter(self, digest: str, size_bytes: int) -> float:
        """All idle adapters have the same chance of another use."""
        if self.bytes_per_s:
            return self._adapters.chance / self.bytes_per_s
        if self.perf is None:
            return 0.0
        return self._adapters.chance * load_ms(self.perf, size_bytes) / 1e3 / size_bytes

    def of_prefix(self) -> float:
        """All idle blocks have the same chance of another use."""
        if self.perf is None:
            return 0.0
        return self._prefixes.chance * self.perf.prefill_token_ms / 1e3 * self._tokens_per_byte
