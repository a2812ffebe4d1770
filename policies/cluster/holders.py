"""Which workers hold which adapter, indexed by adapter, since a decision asks for one adapter on all workers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from motet.shared.model import Tier

ON_DEVICE, IN_USE, ON_HOST = 1, 2, 4  # where an adapter is: one bit each
_TIER_BITS: dict[Tier, int] = {"device": ON_DEVICE | ON_HOST, "host": ON_HOST, "disk": 0}


def place_bits(tier: Tier | None, *, in_use: bool) -> int:
    """The bits of an adapter on one worker: of its fastest tier there, and whether a request there uses it."""
    return (_TIER_BITS[tier] if tier is not None else 0) | (IN_USE if in_use else 0)


class Holders:
    """The workers that hold one adapter, in unordered columns: `rows` of the table, and the adapter's state on each."""

    __slots__ = ("_at", "_bits", "_loaded", "_rows")

    def __init__(self) -> None:
        self._at: dict[int, int] = {}  # row -> its place in the columns, which have spare room at the end
        self._rows, self._bits, self._loaded = np.empty(4, np.intp), np.empty(4, np.uint8), np.empty(4, bool)

    def __len__(self) -> int:
        return len(self._at)

    @property
    def rows(self) -> NDArray[np.intp]:
        """The table rows of the workers that hold the adapter."""
        return self._rows[: len(self._at)]

    @property
    def bits(self) -> NDArray[np.uint8]:
        """For each of `rows` the sum of ON_DEVICE, IN_USE (by a request there) and ON_HOST."""
        return self._bits[: len(self._at)]

    @property
    def loaded(self) -> NDArray[np.bool_]:
        """For each of `rows`, whether the adapter is on the device, or about to be for a request."""
        return self._loaded[: len(self._at)]

    def mark(self, row: int, bits: int) -> int:
        """Set the adapter's bits on this row; 0 when it is not there. Returns how many more are loaded there: 1, 0 or -1."""
        place = self._at.get(row)
        before = place is not None and bool(self._loaded[place])
        if not bits:
            if place is not None:
                self._drop(row, place)
            return -before
        if place is None:
            place = self._at[row] = len(self._at)
            if place == len(self._rows):
                self._rows, self._bits, self._loaded = (np.resize(c, 2 * place) for c in (self._rows, self._bits, self._loaded))
            self._rows[place] = row
        loaded = bool(bits & (ON_DEVICE | IN_USE))
        self._bits[place], self._loaded[place] = bits, loaded
        return loaded - before

    def _drop(self, row: int, place: int) -> None:
        del self._at[row]
        last = len(self._at)
        if place != last:  # the last one takes its place
            self._at[int(self._rows[last])] = place
            for column in (self._rows, self._bits, self._loaded):
                column[place] = column[last]


class AdapterIndex:
    """The holders of every adapter that some worker holds."""

    def __init__(self) -> None:
        self._holders: dict[str, Holders] = {}

    def of(self, digest: str) -> Holders | None:
        """The workers that hold the adapter; None when no worker does."""
        return self._holders.get(digest)

    def mark(self, digest: str, row: int, bits: int) -> int:
        """Set the adapter's bits on this row; 0 when it is not there. The base model ("") is on every worker, and not here.

        Returns how many more adapters are loaded there: 1, 0 or -1.
        """
        if not digest:
            return 0
        held = self._holders.get(digest)
        if held is None:
            if not bits:
                return 0
            held = self._holders[digest] = Holders()
        more = held.mark(row, bits)
        if not bits and not held:
            del self._holders[digest]
        return more


class HomeIndex:
    """The table rows of the workers where each adapter is at home (`homes`)."""

    def __init__(self) -> None:
        self._rows: dict[str, NDArray[np.intp]] = {}
        self._adapters: dict[int, frozenset[str]] = {}

    def of(self, digest: str) -> NDArray[np.intp] | None:
        """The rows where the adapter is at home; None when it has no home."""
        return self._rows.get(digest)

    def put(self, row: int, digests: Iterable[str]) -> None:
        """Exactly these adapters are at home on this row."""
        before, now = self._adapters.get(row, frozenset()), frozenset(digests)
        for digest in before - now:
            left = self._rows[digest][self._rows[digest] != row]
            if len(left):
                self._rows[digest] = left
            else:
                del self._rows[digest]
        for digest in now - before:
            self._rows[digest] = np.append(self._rows.get(digest, np.empty(0, np.intp)), row)
        if now:
            self._adapters[row] = now
        else:
            self._adapters.pop(row, None)

    def forget(self, row: int) -> None:
        """No adapter is at home on this row."""
        self.put(row, ())
