"""Decides which adapters are in a worker's host memory and on its disk: which are held, loaded next, and evicted.

    object store ──Load("store")──> file on disk ──Load("disk")──> copy in host memory ──held by requests──> device
                                    least recently loaded out      eviction policy among copies without holders

The caller carries out the actions that `take_actions` returns, in order, and reports the results: the live worker with files
and an object store, the twin with a model of their links.

Rules:
- One load per adapter serves all requests that wait for it, and fails for all of them. The next request tries again.
- At most LOADS_AT_ONCE loads run, first come, first served. A load reserves its bytes in host memory before it begins. When
  held copies fill the budget, loads wait until one is released: requests wait, memory does not grow. A request that waits
  for a copy holds none, or all such requests fit together (`policies.worker.gathering`), so some request always finishes.
- A copy with holders stays. It remains valid when its file leaves the disk, so files may leave while their copies are held.
- A full disk costs no file unless enough of them can go: an adapter that cannot fit costs no other its place.
- `drop` removes a version from both tiers as soon as it is neither held nor being loaded; a new holder cancels the removal.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from motet.policies.memory.eviction import Eviction, make_eviction
from motet.shared.model import AdapterRef, Tier

LOADS_AT_ONCE = 4
DISK_S, DISK_BYTES_PER_S = 0.001, 2e9
STORE_S, STORE_BYTES_PER_S = 0.005, 125e6
"""Assumed latency and bandwidth of the disk and of the object store, from which the worth of a copy is computed."""
H = TypeVar("H", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Load:
    """Bring a copy into host memory. The caller reports the result by `loaded` or `failed`."""

    adapter: AdapterRef
    source: Literal["disk", "store"]


@dataclass(frozen=True, slots=True)
class Evict:
    """Make room: free the copy in host memory (`tier` "host"), or delete the file ("disk")."""

    digest: str
    tier: Literal["host", "disk"]


@dataclass(frozen=True, slots=True)
class Forget:
    """Free the copy and delete the file, if they exist."""

    digest: str


TierAction = Load | Evict | Forget
DiskRoom = Literal["made", "later", "never"]
"""Whether a file has room now, could have it once copies in use are released, or cannot have it on this disk."""


@dataclass(slots=True)
class _Copy:
    size_bytes: int
    holders: int


@dataclass(slots=True)
class _Loading(Generic[H]):
    adapter: AdapterRef  # its bytes are reserved once the load has begun
    waiters: list[H] = field(default_factory=list)
    asked: int = 0  # requests that came for it meanwhile
    begun: bool = False
    serial: int = 0  # counts the loads; those of requests that hold copies already have 0


class HostTier(Generic[H]):
    """Host memory of `host_bytes` in front of a disk of `disk_bytes`. `files` are on the disk already, oldest first.

    `host_bytes` None: every adapter is in host memory, and nothing is counted. `disk_bytes` None: the disk is never full. `H`
    identifies the requests that wait for a copy.
    """

    def __init__(
        self,
        host_bytes: int | None,
        disk_bytes: int | None,
        *,
        files: Iterable[tuple[str, int]] = (),
        eviction: str = "next-use",
    ) -> None:
        self.host_bytes, self.disk_bytes = host_bytes, disk_bytes
        self.eviction: Eviction = make_eviction(eviction, self.reload_s)
        self.pinned: set[str] = set()
        """Pinned adapters. Both tiers evict them after all others."""
        self._copies: dict[str, _Copy] = {}
        self._files: OrderedDict[str, int] = OrderedDict(files)  # digest -> bytes, least recently loaded first
        self._loads: dict[str, _Loading[H]] = {}
        self._queue: deque[str] = deque()  # loads that have not begun
        self._doomed: set[str] = set()
        self.actions: list[TierAction] = []
        """Actions since the last `take_actions`, in order."""
        self.host_used_bytes = 0
        """Bytes of all copies."""
        self.reserved_bytes = 0
        """Bytes promised to unfinished loads."""
        self.asked = 0
        """Loads asked for so far."""
        self.idle_bytes = 0
        """Bytes of the copies without a holder."""
        self.disk_used_bytes = sum(self._files.values())

    # ---- what is here

    def __contains__(self, digest: str) -> bool:
        """Whether a copy is in host memory."""
        return digest in self._copies

    def tier(self, digest: str) -> Tier | None:
        """The faster of the two tiers that have the adapter; None if neither has it."""
        return "host" if digest in self._copies else "disk" if digest in self._files else None

    @property
    def copies(self) -> list[str]:
        """The adapters in host memory."""
        return list(self._copies)

    @property
    def files(self) -> list[str]:
        """The adapters on disk, least recently loaded first."""
        return list(self._files)

    @property
    def loading(self) -> bool:
        """Whether a load is under way or waits."""
        return bool(self._loads)

    def has(self, digest: str) -> bool:
        """Whether an adapter can be copied to the device at once."""
        return self.host_bytes is None or digest in self._copies

    def holders(self, digest: str) -> int:
        """The number of requests that hold the copy; 0 without a copy."""
        copy = self._copies.get(digest)
        return copy.holders if copy is not None else 0

    def size(self, digest: str) -> int:
        """The bytes of the copy; 0 without a copy."""
        copy = self._copies.get(digest)
        return copy.size_bytes if copy is not None else 0

    def queued_before(self, asked: int) -> bool:
        """Whether one of the first `asked` loads has not begun."""
        return any(0 < self._loads[digest].serial <= asked for digest in self._queue)

    def reload_s(self, digest: str, size_bytes: int) -> float:
        """Estimated time to load an evicted copy again: from disk if its file is there, else from the store."""
        if digest in self._files:
            return DISK_S + size_bytes / DISK_BYTES_PER_S
        return STORE_S + size_bytes / STORE_BYTES_PER_S

    def fits(self, size_bytes: int) -> bool:
        """Whether a copy of this size fits in an empty host memory."""
        return self.host_bytes is None or size_bytes <= self.host_bytes

    def take_actions(self) -> list[TierAction]:
        """The actions since the last call, in order."""
        actions, self.actions = self.actions, []
        return actions

    # ---- holding

    def hold(self, adapter: AdapterRef, holder: H, *, first: bool = False) -> bool:
        """Hold the copy for a request; the copy must fit. True: it is in host memory.

        False: it is being loaded, and `loaded` will return `holder`. `first`: the load goes before all that are queued.
        """
        if self.host_bytes is None:
            return True
        digest = adapter.digest
        self._doomed.discard(digest)
        copy = self._copies.get(digest)
        if copy is not None:
            if not copy.holders:
                self.idle_bytes -= copy.size_bytes
            self.eviction.use(digest, copy.size_bytes)
            copy.holders += 1
            return True
        load = self._wait(adapter, holder)
        load.asked += 1
        if first and not load.begun:
            load.serial = 0
            self._queue.remove(digest)
            self._queue.appendleft(digest)
        self._begin()
        return False

    def fetch(self, adapter: AdapterRef, holder: H) -> None:
        """Load a copy that no request asks for. It must be missing and fit; `loaded` will return `holder`."""
        self._doomed.discard(adapter.digest)
        self._wait(adapter, holder)
        self._begin()

    def _wait(self, adapter: AdapterRef, holder: H) -> _Loading[H]:
        load = self._loads.get(adapter.digest)
        if load is None:
            self.asked += 1
            load = self._loads[adapter.digest] = _Loading(adapter, serial=self.asked)
            self._queue.append(adapter.digest)
        load.waiters.append(holder)
        return load

    def release(self, digest: str) -> None:
        """Release one hold."""
        if self.host_bytes is None:
            return
        copy = self._copies[digest]
        copy.holders -= 1
        if not copy.holders:
            self._rest(digest, copy.size_bytes)
            self._begin()

    def give_up(self, digest: str, holder: H) -> None:
        """A request no longer waits for the copy. A load that has begun continues."""
        load = self._loads[digest]
        load.waiters.remove(holder)
        if not load.waiters and not load.begun:
            del self._loads[digest]
            self._queue.remove(digest)
            if digest in self._doomed:
                self._forget(digest)
            self._begin()

    def drop(self, digest: str) -> None:
        """Remove a version from both tiers: now, or as soon as it is neither held nor being loaded."""
        if digest in self._loads or self.holders(digest):
            self._doomed.add(digest)
        else:
            self._forget(digest)

    # ---- what came of the actions

    def loaded(self, digest: str, size_bytes: int, file_bytes: int) -> list[H]:
        """A load has succeeded: the copy takes `size_bytes`, its file `file_bytes`. Returns the requests that waited for it."""
        load = self._loads.pop(digest)
        self.reserved_bytes -= load.adapter.size_bytes
        self._copies[digest] = _Copy(size_bytes, len(load.waiters))
        self.host_used_bytes += size_bytes
        self.eviction.come(digest, size_bytes)
        for _ in range(load.asked):
            self.eviction.use(digest, size_bytes)
        self._keep_file(digest, file_bytes)
        if not load.waiters:
            self._rest(digest, size_bytes)
        while self._over(0) and self._evict_copy():  # a copy cast to a wider type is larger than promised
            pass
        self._begin()
        return load.waiters

    def failed(self, digest: str) -> list[H]:
        """A load has failed. Returns the requests that waited for it."""
        load = self._loads.pop(digest)
        self.reserved_bytes -= load.adapter.size_bytes
        self._doomed.discard(digest)
        self._begin()
        return load.waiters

    def file_lost(self, digest: str) -> None:
        """The file is missing, or its content does not match its digest."""
        self.disk_used_bytes -= self._files.pop(digest, 0)

    def make_disk_room(self, missing_bytes: int) -> DiskRoom:
        """The file system lacks `missing_bytes` for a download: evict files, least recently loaded first, until they suffice.

        Evicts nothing if they do not. Files in use stay. Files without a host copy go first, and pinned ones last. A host copy
        maps its file, and a mapped file frees no space, so the copy is evicted with it.
        """
        spare = [digest for digest in self._files if not self.holders(digest) and digest not in self._loads]
        spare.sort(key=lambda digest: (digest in self.pinned, digest in self._copies))
        going: list[str] = []
        for digest in spare:
            if missing_bytes <= 0:
                break
            going.append(digest)
            missing_bytes -= self._files[digest]
        if missing_bytes > 0:
            return "never" if missing_bytes > self.disk_used_bytes - sum(self._files[digest] for digest in spare) else "later"
        for digest in going:
            if digest in self._copies:
                self._remove_copy(digest)
                self.actions.append(Evict(digest, "host"))
            self.file_lost(digest)
            self.actions.append(Evict(digest, "disk"))
        return "made"

    # ---- room

    def _begin(self) -> None:
        """Begin queued loads in their order while there is room."""
        while self._queue and len(self._loads) - len(self._queue) < LOADS_AT_ONCE:
            digest = self._queue[0]
            load = self._loads[digest]
            while self._over(load.adapter.size_bytes):
                if not self._evict_copy():
                    return
            self._queue.popleft()
            load.begun = True
            self.reserved_bytes += load.adapter.size_bytes
            self.actions.append(Load(load.adapter, "disk" if digest in self._files else "store"))

    def _over(self, more_bytes: int) -> bool:
        assert self.host_bytes is not None
        return self.host_used_bytes + self.reserved_bytes + more_bytes > self.host_bytes

    def _evict_copy(self) -> bool:
        leaving = next((digest for digest in self.eviction if digest not in self.pinned), None) or next(
            iter(self.eviction), None
        )
        if leaving is None:
            return False
        self._remove_copy(leaving)
        self.actions.append(Evict(leaving, "host"))
        return True

    def _remove_copy(self, digest: str) -> None:
        """Remove a copy without holders."""
        size_bytes = self._copies.pop(digest).size_bytes
        self.host_used_bytes -= size_bytes
        self.idle_bytes -= size_bytes
        self.eviction.forget(digest)

    def _keep_file(self, digest: str, file_bytes: int) -> None:
        self.file_lost(digest)
        if self.disk_bytes is not None and file_bytes > self.disk_bytes:
            self.actions.append(Evict(digest, "disk"))
            return
        self._files[digest] = file_bytes
        self.disk_used_bytes += file_bytes
        while self.disk_bytes is not None and self.disk_used_bytes > self.disk_bytes:
            oldest = min(self._files, key=lambda one: (one == digest, one in self.pinned))  # of equals the first
            self.file_lost(oldest)
            self.actions.append(Evict(oldest, "disk"))

    def spare(self, size_bytes: int, leaving: Iterable[str]) -> bool:
        """Make room by evicting those copies of `leaving` that no request holds, in this order.

        False, and no change, if that is not enough.
        """
        going: list[str] = []
        room = 0
        for digest in leaving:
            if not self._over(size_bytes - room):
                break
            if not self.holders(digest) and digest not in self.pinned:
                going.append(digest)
                room += self._copies[digest].size_bytes
        if self._over(size_bytes - room):
            return False
        for digest in going:
            self._remove_copy(digest)
            self.actions.append(Evict(digest, "host"))
        return True

    def _rest(self, digest: str, size_bytes: int) -> None:
        """The last request has released the copy."""
        self.idle_bytes += size_bytes
        self.eviction.release(digest)
        if digest in self._doomed:
            self._forget(digest)

    def _forget(self, digest: str) -> None:
        self._doomed.discard(digest)
        if digest in self._copies:
            self._remove_copy(digest)
        self.file_lost(digest)
        self.actions.append(Forget(digest))

    def check(self) -> None:
        """Assert that bytes and holders add up (tests)."""
        assert self.host_used_bytes == sum(copy.size_bytes for copy in self._copies.values()), "host bytes"
        idle = {digest: copy.size_bytes for digest, copy in self._copies.items() if not copy.holders}
        assert self.idle_bytes == sum(idle.values()), "idle bytes"
        assert self.reserved_bytes == sum(load.adapter.size_bytes for load in self._loads.values() if load.begun), (
            "reserved bytes"
        )
        assert self.disk_used_bytes == sum(self._files.values()), "disk bytes"
        assert set(self.eviction) == set(idle), "idle copies"
        assert not self._copies.keys() & self._loads.keys(), "a copy that is here is loaded"
        queued = {digest: load.serial for digest, load in self._loads.items() if not load.begun}
        assert [one for one in self._queue if not queued[one]] + [one for one, serial in queued.items() if serial] == list(
            self._queue
        ), "queue"
        assert len(self._loads) - len(self._queue) <= LOADS_AT_ONCE, "too many loads"
