"""Host memory for adapters, in front of disk and object store; the device's slots are `policies.adapter_slots`.

The rules are those of the live worker's tiers: one load per adapter however many requests wait, `LOADS_AT_ONCE` at a
time, first come first served; copies nobody holds leave, least recently used first; when holders fill the budget, loads
wait for one to let go. What was fetched once is read from disk later. Loads wait for their links' latency side by side, and
their bytes come one load after another.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from twin.events import STEP, Events
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
    """How much fits in host memory and how long loading into it takes; `host_bytes` None: everything is there already."""

    host_bytes: int | None = None
    disk: Link = DISK
    store: Link = STORE


EVERYTHING_IN_HOST = StorageModel()


class HostTier:
    """One worker's host copies. `acquire` now, or later through the callback; every holder releases once."""

    def __init__(self, model: StorageModel, events: Events) -> None:
        self._model, self._events = model, events
        self._held: dict[str, tuple[int, int]] = {}  # digest -> (bytes, holders), for those with holders
        self._idle: OrderedDict[str, int] = OrderedDict()  # digest -> bytes
        self._used = 0  # bytes of both and of loads under way
        self._on_disk: set[str] = set()
        self._loads: dict[str, _Load] = {}
        self._queue: deque[str] = deque()
        self._active = 0
        self._free_ps = {"disk": 0, "store": 0}  # when the last load on each way ends
        self.fetches = self.reads = 0  # from the store, from disk

    def __contains__(self, digest: str) -> bool:
        return digest in self._held or digest in self._idle

    def digests(self) -> list[str]:
        """Every copy here, where that is counted."""
        return [*self._held, *self._idle]

    def acquire(self, digest: str, size_bytes: int, ready: Callable[[], None]) -> bool:
        """Hold the copy. True if it is here; otherwise `ready` is called when it has come and is held."""
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
                way, link = "disk", self._model.disk
            else:
                self.fetches += 1
                way, link = "store", self._model.store
            self._free_ps[way] = link.end_ps(self._events.now_ps, self._free_ps[way], load.size_bytes)
            self._events.at(self._free_ps[way], STEP, self._loaded, digest)

    def _loaded(self, digest: str) -> None:
        load = self._loads.pop(digest)
        self._active -= 1
        self._on_disk.add(digest)
        self._held[digest] = (load.size_bytes, len(load.waiters))
        for ready in load.waiters:
            ready()
        self._start()
