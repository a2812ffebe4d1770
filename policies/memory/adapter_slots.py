"""Accounts for the adapters on the device: slots, bytes, reference counts, and an eviction policy for idle adapters.

A slot holds one adapter version. The adapter is *used* while sequences hold it and *idle* afterwards; only idle adapters are
evicted, in the order of `policies.memory.eviction`. An adapter takes its own size: no slot is padded to the largest rank. Where
copies run beside the steps (`asynchronous`), an adapter is *loading* from its grant until `arrived`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from motet.policies.memory.eviction import Eviction, NextUse
from motet.policies.memory.worth import Reuse


class Grant(msgspec.Struct):
    """A slot to run on. `load`: the adapter's weights must be copied in first, after the `evicted` ones are removed."""

    slot: int
    load: bool = False
    evicted: list[tuple[str, int]] = []  # (digest, slot)


class _Resident(msgspec.Struct):
    slot: int
    size_bytes: int
    users: int
    since: int = 0  # `clock` when it became idle


class AdapterSlots:
    """Accounting of `slots` slots and `bytes_total` bytes of adapter memory. Keys are adapter digests."""

    def __init__(self, slots: int, bytes_total: int, *, asynchronous: bool = False, eviction: Eviction | None = None) -> None:
        self.asynchronous = asynchronous
        self.slots = slots
        self.bytes_total = bytes_total
        self.bytes_free = bytes_total
        self.reuse: Reuse | None = None
        """If set, it counts whether idle adapters are used again or evicted."""
        self.clock = 0
        """The time of `reuse`: admissions so far, set by the owner."""
        self._residents: dict[str, _Resident] = {}
        self.eviction: Eviction = eviction or NextUse()
        self.waited: Callable[[], Collection[str]] = tuple
        """Returns the adapters that waiting requests need; these are evicted after the others."""
        self.pinned: Collection[str] = ()
        """Pinned adapters. They are evicted after all others, and no prefetch takes their room."""
        self._idle = 0  # adapters without users
        self.idle_bytes = 0
        """Bytes of the adapters without users."""
        self._loading: dict[str, int] = {}
        self._free_slots = list(range(slots - 1, -1, -1))

    def __contains__(self, digest: str) -> bool:
        return digest in self._residents

    @property
    def loading(self) -> Mapping[str, int]:
        """{digest: slot} of adapters that are being copied, in the order in which their copies began."""
        return self._loading

    def size_bytes(self, digest: str) -> int:
        """The size of a resident adapter."""
        return self._residents[digest].size_bytes

    def arrived(self, digest: str) -> None:
        """The copy of this adapter is complete."""
        del self._loading[digest]

    def digests(self) -> list[str]:
        """All adapters with a slot, loading or loaded."""
        return list(self._residents)

    def users(self, digest: str) -> int:
        """The number of sequences that hold the adapter; 0 if it is not on the device."""
        resident = self._residents.get(digest)
        return resident.users if resident else 0

    def fits(self, size_bytes: int, *, evicting: bool = True) -> bool:
        """Whether a new adapter of this size would fit now."""
        if evicting:
            has_slot = bool(self._free_slots or self._idle)
            return has_slot and size_bytes <= self.bytes_free + self.idle_bytes
        return bool(self._free_slots) and size_bytes <= self.bytes_free

    def acquire(self, digest: str, size_bytes: int) -> Grant | None:
        """Add a user of the adapter. None if it is not resident and would need the room of a used one."""
        resident = self._residents.get(digest)
        if resident is not None:
            if not resident.users:
                self._idle -= 1
                self.idle_bytes -= resident.size_bytes
                if self.reuse is not None:
                    self.reuse.used(self.clock - resident.since)
            self.eviction.use(digest, resident.size_bytes)
            resident.users += 1
            return Grant(resident.slot)
        if not self.fits(size_bytes):
            return None
        evicted: list[tuple[str, int]] = []
        if not self._free_slots or size_bytes > self.bytes_free:
            for idle in self.victims():
                evicted.append(self.evict(idle))
                if size_bytes <= self.bytes_free:
                    break
        slot = self._free_slots.pop()
        self._residents[digest] = _Resident(slot, size_bytes, users=1)
        self.eviction.use(digest, size_bytes)
        if self.asynchronous:
            self._loading[digest] = slot
        self.bytes_free -= size_bytes
        return Grant(slot, load=True, evicted=evicted)

    def acquire_all(self, adapters: Iterable[tuple[str, int]]) -> list[Grant] | None:
        """Add a user of each of these different adapters (digest, bytes). None, and no change, unless all have room at once."""
        adapters = list(adapters)
        missing = [size_bytes for digest, size_bytes in adapters if digest not in self._residents]
        resting = [one for digest, _ in adapters if (one := self._residents.get(digest)) is not None and not one.users]
        idle_bytes = self.idle_bytes - sum(one.size_bytes for one in resting)
        slots = len(self._free_slots) + self._idle - len(resting)
        if len(missing) > slots or sum(missing) > self.bytes_free + idle_bytes:
            return None
        grants: dict[str, Grant] = {}
        for resident in (True, False):  # those that are here first, so that none of them is evicted for another
            for digest, size_bytes in adapters:
                if digest not in grants and (digest in self._residents) == resident:
                    grant = self.acquire(digest, size_bytes)
                    assert grant is not None, "there is room for all"
                    grants[digest] = grant
        return [grants[digest] for digest, _ in adapters]

    def prefetch(self, digest: str, size_bytes: int, *, evicting: bool = True) -> Grant | None:
        """A slot for an adapter without a user. Only idle adapters that no request waits for are evicted. None without room."""
        return self._bring(digest, size_bytes, self.unwanted() if evicting else ())

    def foresee(self, digest: str, size_bytes: int, over: Collection[str]) -> Grant | None:
        """A slot for an adapter that a request may need soon; None without room.

        Only adapters in `over` are evicted, in this order, if they are idle and neither pinned nor waited for.
        """
        unwanted = set(self.unwanted())
        return self._bring(digest, size_bytes, (idle for idle in over if idle in unwanted))

    def _bring(self, digest: str, size_bytes: int, candidates: Iterable[str]) -> Grant | None:
        """A slot for an adapter without a user. The first idle `candidates` are evicted for it.

        None, and no change, when evicting all of them is not enough. The eviction policy counts a use only when a request uses
        the adapter.
        """
        leaving: list[str] = []
        slots, room, rest = len(self._free_slots), self.bytes_free, iter(candidates)
        while not slots or size_bytes > room:
            idle = next(rest, None)
            if idle is None:
                return None
            leaving.append(idle)
            slots, room = slots + 1, room + self._residents[idle].size_bytes
        evicted = [self.evict(idle) for idle in leaving]
        slot = self._free_slots.pop()
        self._residents[digest] = _Resident(slot, size_bytes, users=0, since=self.clock)
        self._idle += 1
        self.idle_bytes += size_bytes
        self.bytes_free -= size_bytes
        self.eviction.come(digest, size_bytes)
        self.eviction.release(digest)
        if self.asynchronous:
            self._loading[digest] = slot
        return Grant(slot, load=True, evicted=evicted)

    def release(self, digest: str) -> None:
        """Remove a user. An adapter without users stays until its room is needed."""
        resident = self._residents[digest]
        resident.users -= 1
        if not resident.users:
            self._idle += 1
            self.idle_bytes += resident.size_bytes
            resident.since = self.clock
            self.eviction.release(digest)

    def unkept(self) -> list[tuple[str, int]]:
        """Drop the idle adapters that the eviction policy does not keep. Returns them with their slots."""
        if self.eviction.keeps or not self._idle:
            return []
        return [self.evict(digest) for digest in list(self.unwanted())]

    def victims(self) -> Iterator[str]:
        """Idle adapters in the order of eviction: first those that no request waits for, then the others, then pinned ones.

        The caller may remove each adapter during the iteration.
        """
        waited, pinned = self.waited(), self.pinned
        later: list[str] = []
        for digest in self.eviction:
            if digest in waited or digest in pinned:
                later.append(digest)
            else:
                yield digest
        yield from sorted(later, key=pinned.__contains__)

    def unwanted(self) -> Iterator[str]:
        """Idle adapters that are neither pinned nor waited for, in the order of eviction."""
        waited, pinned = self.waited(), self.pinned
        return (digest for digest in self.eviction if digest not in waited and digest not in pinned)

    def evict(self, digest: str) -> tuple[str, int]:
        """Evict an idle adapter to make room. Returns it with the freed slot."""
        if self.reuse is not None:
            self.reuse.left(self.clock - self._residents[digest].since)
        return digest, self.drop(digest)

    def resize(self, bytes_total: int) -> None:
        """Change `bytes_total`. Raises ValueError when the resident adapters would not fit."""
        if bytes_total < self.bytes_total - self.bytes_free:
            raise ValueError(f"adapters hold {self.bytes_total - self.bytes_free} bytes, more than {bytes_total}")
        self.bytes_free += bytes_total - self.bytes_total
        self.bytes_total = bytes_total

    def drop(self, digest: str) -> int:
        """Remove an idle adapter, or cancel its copy; returns the freed slot."""
        if self._residents[digest].users:
            raise ValueError(f"adapter {digest} is in use")
        resident = self._residents.pop(digest)
        self._loading.pop(digest, None)
        self._idle -= 1
        self.idle_bytes -= resident.size_bytes
        self.eviction.forget(digest)
        self.bytes_free += resident.size_bytes
        self._free_slots.append(resident.slot)
        return resident.slot

    def check(self, users: Mapping[str, int]) -> None:
        """Assert that slots, bytes and reference counts add up; `users` maps each used digest to its sequences."""
        used = {digest: resident.users for digest, resident in self._residents.items() if resident.users}
        assert used == dict(users), f"reference counts {used} differ from the sequences' {dict(users)}"
        slots = sorted([*self._free_slots, *(resident.slot for resident in self._residents.values())])
        assert slots == list(range(self.slots)), "a slot is lost or taken twice"
        held = sum(resident.size_bytes for resident in self._residents.values())
        assert self.bytes_free == self.bytes_total - held >= 0, "bytes do not add up"
        assert all(self._residents[digest].slot == slot for digest, slot in self._loading.items()), "a copy without a slot"
        idle = set(self._residents) - set(used)
        assert set(self.eviction) == idle and self._idle == len(idle), "victims differ from adapters without users"
        assert self.idle_bytes == sum(self._residents[digest].size_bytes for digest in idle), "idle bytes"
