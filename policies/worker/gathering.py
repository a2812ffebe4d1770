"""Lets requests wait for several adapters at once, without a deadlock.

    outside ──in turn, if there is room for all──> inside ──every copy is held──> ready

A request that holds one copy while it waits for another one keeps memory from the rest. Two of them could wait for each other
for ever. So a request waits *outside* first, where it holds nothing, in the order of arrival. Those *inside* hold copies and
wait for the rest, and all their adapters together fit the host memory. Their loads go before all others in the host tier's
queue. Everything else in host memory is held by requests that end, so those inside get their copies.

No request is overtaken for this: one comes in only after the loads that were asked for before it have begun.

Copies may be larger than promised (`HostTier.loaded`). When those inside no longer fit for that reason, the youngest goes out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Generic

from motet.policies.memory.host_tier import HostTier
from motet.policies.worker.request_life import Entry, R
from motet.shared.model import AdapterRef


class Gathering(Generic[R]):
    """The requests of one worker that wait for several adapters."""

    def __init__(self, host: HostTier[Any]) -> None:
        self._host = host
        self._outside: OrderedDict[Entry[R], int] = OrderedDict()  # with the loads that had been asked for before it
        self._inside: OrderedDict[Entry[R], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outside) + len(self._inside)

    def inside(self, entry: Entry[R]) -> bool:
        """Whether the request holds copies and waits for the rest."""
        return entry in self._inside

    def join(self, entry: Entry[R]) -> None:
        """A request has come that lacks copies."""
        self._outside[entry] = self._host.asked

    def leave(self, entry: Entry[R]) -> None:
        """The request waits no longer: it has all copies, or was given up. Unknown ones are ignored."""
        self._outside.pop(entry, None)
        self._inside.pop(entry, None)

    def enter(self) -> Entry[R] | None:
        """The next request that may hold copies and wait for the rest; it is inside now. None: not yet."""
        entry = next(iter(self._outside), None)
        if entry is None or self._host.queued_before(self._outside[entry]) or not self._host.fits(self._bytes(entry)):
            return None
        del self._outside[entry]
        self._inside[entry] = None
        return entry

    def too_many(self) -> Entry[R] | None:
        """The youngest of those inside, if they do not fit any more; it is outside again, before all others. Else None.

        The caller releases its copies.
        """
        if self._host.fits(self._bytes()):
            return None
        entry, _ = self._inside.popitem()
        self._outside[entry] = self._host.asked
        self._outside.move_to_end(entry, last=False)
        return entry

    def too_large(self) -> tuple[Entry[R], int] | None:
        """The next one outside, and the bytes of its adapters, if these alone exceed the host memory; it waits no longer."""
        entry = next(iter(self._outside), None)
        size_bytes = sum(map(self._size, entry.adapters)) if entry is not None else 0
        if entry is None or self._host.fits(size_bytes):
            return None
        del self._outside[entry]
        return entry, size_bytes

    def _bytes(self, *more: Entry[R]) -> int:
        """Bytes of all adapters of those inside and of `more`, each counted once."""
        adapters = {one.digest: one for entry in (*self._inside, *more) for one in entry.adapters}
        return sum(map(self._size, adapters.values()))

    def _size(self, adapter: AdapterRef) -> int:
        return self._host.size(adapter.digest) or adapter.size_bytes
