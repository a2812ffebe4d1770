"""Which of the entries that nobody uses leaves first when a tier is full.

A tier tells its eviction what becomes of its entries and asks for a victim; whether room is needed is the tier's business.
One instance belongs to one tier. Entries in use are never victims.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class Eviction(Protocol):
    """The order in which idle entries leave. Keys are adapter digests."""

    def use(self, digest: str) -> None:
        """Somebody uses the entry from now on, new or idle before."""

    def release(self, digest: str, size_bytes: int) -> None:
        """Nobody uses the entry any more: it may be a victim."""

    def forget(self, digest: str) -> None:
        """The entry has left the tier."""

    def __iter__(self) -> Iterator[str]:
        """Idle entries, the first victim first. The caller stops iterating when it takes one out."""


class Lru:
    """The least recently released entry leaves first."""

    def __init__(self) -> None:
        self._idle: OrderedDict[str, None] = OrderedDict()

    def use(self, digest: str) -> None:
        """No victim any more."""
        self._idle.pop(digest, None)

    def release(self, digest: str, size_bytes: int) -> None:
        """The last victim of all."""
        self._idle[digest] = None
        self._idle.move_to_end(digest)

    def forget(self, digest: str) -> None:
        """It has left."""
        self._idle.pop(digest, None)

    def __iter__(self) -> Iterator[str]:
        """Least recently released first."""
        return iter(self._idle)
