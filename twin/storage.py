"""The simulated host and disk tiers of adapters; the device's slots are `policies.adapter_slots`.

The rules are those of the live worker's tiers. All requests for an adapter share one load; `LOADS_AT_ONCE` loads run at a
time, first come, first served. The host tier evicts the least recently used copy that nobody holds; when held copies fill the
budget, loads wait for a release. Fetched adapters are on disk afterwards; the disk tier evicts the least recently loaded.
Latencies of loads overlap, and the loads on a link share its bandwidth equally.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from policies.perf_model import MIB
from twin.events import STEP, Events, to_ps
from twin.steps import Link

LOADS_AT_ONCE = 4
DISK = Link(1.0, 0.5)  # 2 GB/s
STORE = Link(5.0, 8.0)  # 1 Gbit/s


@dataclass(slots=True)
class _Load:
    size_bytes: int
    waiters: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageModel:
    """Sizes of host memory and disk, and loading times.

    `host_bytes` None: everything is in host memory already. `disk_bytes` None: a disk that is never full.
    """

    host_bytes: int | None = None
    disk_bytes: int | None = None
    disk: Link = DISK
    store: Link = STORE


EVERYTHING_IN_HOST = StorageModel()


class _Way:
    """The loads on one link. Calls `whole` with each completed load."""

    def __init__(self, link: Link, events: Events, whole: Callable[[str], None]) -> None:
        self._link, self._events, self._whole = link, events, whole
        self._left: dict[str, int] = {}  # digest -> how long the link alone takes for what is still to come
        self._at_ps = 0  # of which this is known
        self._serial = 0

    def begin(self, digest: str, size_bytes: int) -> None:
        link, events = self._link, self._events
        own_ps = to_ps(link.ms_per_mib * size_bytes / MIB)
        events.at(events.now_ps + to_ps(link.base_ms), STEP, self._join, digest, own_ps)

    def _join(self, digest: str, own_ps: int) -> None:
        self._pass()
        self._left[digest] = own_ps
        self._await_next()

    def _pass(self) -> None:
        now_ps, left = self._events.now_ps, self._left
        if left:
            each_ps = (now_ps - self._at_ps) // len(left)
            for digest in left:
                left[digest] -= each_ps
        self._at_ps = now_ps

    def _await_next(self) -> None:
        self._serial += 1
        if self._left:
            in_ps = len(self._left) * min(self._left.values())
            self._events.at(self._events.now_ps + in_ps, STEP, self._ended, self._serial)

    def _ended(self, serial: int) -> None:
        if serial != self._serial:
            return  # others came
        self._pass()
        digest = min(self._left, key=self._left.__getitem__)
        del self._left[digest]
        self._await_next()
        self._whole(digest)


class HostTier:
    """One worker's host copies. `acquire` now, or later through the callback; every holder releases once."""

    def __init__(self, model: StorageModel, events: Events) -> None:
        self._model, self._events = model, events
        self._held: dict[str, tuple[int, int]] = {}  # digest -> (bytes, holders), for those with holders
        self._idle: OrderedDict[str, int] = OrderedDict()  # digest -> bytes
        self._used = 0  # bytes of both and of loads under way
        self._on_disk: OrderedDict[str, int] = OrderedDict()  # digest -> bytes, least recently loaded first
        self._disk_used = 0
        self._loads: dict[str, _Load] = {}
        self._queue: deque[str] = deque()
        self._active = 0
        self._from_disk = _Way(model.disk, events, self._loaded)
        self._from_store = _Way(model.store, events, self._loaded)
        self.fetches = self.reads = 0  # from the store, from disk

    def __contains__(self, digest: str) -> bool:
        return digest in self._held or digest in self._idle

    def digests(self) -> list[str]:
        """All copies in host memory, if its size is limited."""
        return [*self._held, *self._idle]

    def acquire(self, digest: str, size_bytes: int, ready: Callable[[], None]) -> bool:
        """Hold a copy. True if it is in host memory; otherwise `ready` is called once it is loaded and held."""
        if self._model.host_bytes is None:
            return True
        if digest in self._held:
            held_bytes, holders = self._held[digest]
            self._held[digest] = (held_bytes, holders + 1)
            return True
        if digest in self._idle:
            self._held[digest] = (self._idle.pop(digest), 1)
            return True
        load = self._loads.get(digest)
        if load is None:
            load = self._loads[digest] = _Load(size_bytes)
            self._queue.append(digest)
        load.waiters.append(ready)
        self._start()
        return False

    def release(self, digest: str) -> None:
        """Give back one hold."""
        if self._model.host_bytes is None:
            return
        size_bytes, holders = self._held[digest]
        if holders > 1:
            self._held[digest] = (size_bytes, holders - 1)
            return
        del self._held[digest]
        self._idle[digest] = size_bytes
        self._start()

    def _start(self) -> None:
        assert self._model.host_bytes is not None
        while self._queue and self._active < LOADS_AT_ONCE:
            digest = self._queue[0]
            load = self._loads[digest]
            while self._used + load.size_bytes > self._model.host_bytes:
                if not self._idle:
                    return
                self._used -= self._idle.popitem(last=False)[1]
            self._queue.popleft()
            self._active += 1
            self._used += load.size_bytes
            if digest in self._on_disk:
                self.reads += 1
                self._from_disk.begin(digest, load.size_bytes)
            else:
                self.fetches += 1
                self._from_store.begin(digest, load.size_bytes)

    def _loaded(self, digest: str) -> None:
        load = self._loads.pop(digest)
        self._active -= 1
        self._keep_on_disk(digest, load.size_bytes)
        self._held[digest] = (load.size_bytes, len(load.waiters))
        for ready in load.waiters:
            ready()
        self._start()

    def _keep_on_disk(self, digest: str, size_bytes: int) -> None:
        if digest not in self._on_disk:
            self._disk_used += size_bytes
        self._on_disk[digest] = size_bytes
        self._on_disk.move_to_end(digest)
        room = self._model.disk_bytes
        while room is not None and self._disk_used > room and len(self._on_disk) > 1:
            self._disk_used -= self._on_disk.popitem(last=False)[1]
