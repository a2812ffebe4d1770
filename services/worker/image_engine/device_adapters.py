"""Adapters in the pool of an image engine: copies that are spread between steps, and what is told of them.

    begin      a slot was granted: the adapter's pages are reserved, and its copy is under way
    advance    the next piece of the copies
    left       a slot was taken back; a copy into it is given up

`policies.step.image_batch` decides who gets slots. Requests that wait for a copy hold up no other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from motet.kernels import LoraPool
from motet.policies.memory.adapter_slots import AdapterSlots, Grant
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.request import CopyStats, ResidencyChange
from motet.shared.clock import now_s

PIECE_BYTES = 4 << 20
"""The most that is copied at once."""


@dataclass(slots=True)
class _Copy:
    adapter: HostAdapter
    pieces: Iterator[int]
    began_s: float


class DeviceAdapters:
    """The adapters of a pool. `changes` and `arrived` are reported with each step."""

    def __init__(self, pool: LoraPool, slots: AdapterSlots) -> None:
        self.pool, self.slots = pool, slots
        self.changes: list[ResidencyChange] = []
        self.arrived = 0  # copies that became whole
        self._slot_of: dict[str, int] = {}
        self._copies: dict[str, _Copy] = {}
        self._doomed: set[str] = set()  # to leave when their last request has ended
        self._copied_bytes, self._copied_s, self._told_bytes = 0, 0.0, 0

    @property
    def slot_of(self) -> Mapping[str, int]:
        """{digest: slot} of all adapters with a slot."""
        return self._slot_of

    @property
    def copying(self) -> bool:
        """Whether copies are under way."""
        return bool(self._copies)

    def size_bytes(self, adapter: HostAdapter) -> int:
        """Bytes that the adapter takes on the device."""
        return self.pool.bytes_needed(adapter.ranks)

    def begin(self, slot: int, adapter: HostAdapter) -> None:
        """Copy an adapter into a slot that was granted. Raises what the pool raises when it cannot take the weights."""
        self._doomed.discard(adapter.digest)
        self.pool.reserve(slot, adapter.packed)
        self._slot_of[adapter.digest] = slot
        pieces = self.pool.filling(slot, adapter.packed, piece_bytes=PIECE_BYTES)
        self._copies[adapter.digest] = _Copy(adapter, pieces, now_s())

    def advance(self, most_bytes: int) -> None:
        """Copy up to `most_bytes` and the rest of a piece, first come first served."""
        if not self._copies:
            return
        left, began_s = most_bytes, now_s()
        for digest, copy in list(self._copies.items()):
            for copied in copy.pieces:
                left -= copied
                if left <= 0:
                    break
            else:
                self._whole(digest)
            if left <= 0:
                break
        self._copied_bytes += most_bytes - left
        self._copied_s += now_s() - began_s

    def left(self, digest: str, slot: int) -> None:
        """The adapter has lost its slot, also during a copy."""
        self.pool.free(slot)
        del self._slot_of[digest]
        if self._copies.pop(digest, None) is None:
            self.changes.append(ResidencyChange(digest, None))

    def prefetch(self, adapter: HostAdapter, over: Collection[str] | None) -> bool:
        """Copy an adapter that no request has asked for, if there is room. Returns whether it is there or comes.

        A pinned one may evict idle ones. With `over` it comes only if no other copy is under way, and evicts idle ones of it.
        """
        digest, size_bytes = adapter.digest, self.size_bytes(adapter)
        self._doomed.discard(digest)
        if digest in self.slots:
            return True
        grant: Grant | None = None
        if over is None:
            grant = self.slots.prefetch(digest, size_bytes, evicting=digest in self.slots.pinned)
        elif not self._copies:
            grant = self.slots.foresee(digest, size_bytes, over)
        if grant is None:
            return False
        for evicted, slot in grant.evicted:
            self.left(evicted, slot)
        self.begin(grant.slot, adapter)
        return True

    def unload(self, digest: str) -> None:
        """Take an adapter off the device, now or when its last request has ended."""
        if digest in self.slots:
            self._doomed.add(digest)
        self.sweep()

    def sweep(self) -> None:
        """Remove adapters that are to leave and that no request holds."""
        for digest in [one for one in self._doomed if not self.slots.users(one)]:
            self._doomed.discard(digest)
            if digest in self.slots:
                self.left(digest, self.slots.drop(digest))
        for digest, slot in self.slots.unkept():
            self.left(digest, slot)

    def stats(self) -> CopyStats | None:
        """Statistics of the copies since the last call; None when there were none."""
        if self._copied_bytes == self._told_bytes and not self._copies:
            return None
        told, self._told_bytes = self._told_bytes, self._copied_bytes
        rate = self._copied_bytes / self._copied_s if self._copied_s else 0.0
        return CopyStats(link_bytes=self._copied_bytes - told, bytes_per_s=rate, under_way=len(self._copies))

    def check(self) -> None:
        """Assert that slots, copies and the pool agree."""
        assert set(self._copies) == set(self.slots.loading), "copies and slots disagree"
        assert set(self._slot_of) == set(self.slots.digests()), "adapters and slots disagree"
        assert int(self.pool.loaded.sum()) == len(self._slot_of), "the pool and the slots disagree"
        assert self._doomed <= set(self._slot_of), "an adapter is to leave that is not there"

    def _whole(self, digest: str) -> None:
        copy = self._copies.pop(digest)
        copy.adapter.rest()
        self.slots.arrived(digest)
        self.arrived += 1
        self.changes.append(ResidencyChange(digest, "device", now_s() - copy.began_s))
