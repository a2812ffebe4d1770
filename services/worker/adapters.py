"""Where a worker keeps adapter weights outside the device: two tiers in front of the object store.

    object store  --fetch, SHA-256 checked, atomic rename-->  disk  --SHA-256 checked, mapped, parsed-->  host  -->  engine
    (registry's)                                              LRU by bytes                               LRU by bytes, counted

Rules:
- an adapter is its content digest; a file whose content has another digest is deleted and fetched again.
- one load per digest, however many requests wait for it. It fails for those that wait now and is tried again later.
- a host copy is a mapping of its file, alive also when the file is evicted; files are never written to once named.
- a download lies in a `.part` file that is locked as long as somebody writes it; unlocked ones are from a crash, and go.
- a full disk costs the least recently used files that are not mapped, before the fetch or in the middle of it.
- a host copy with holders stays. When holders fill the budget, loads wait for one to let go: requests wait, memory
  does not grow. Each request holds at most one adapter, so somebody always finishes.
- `drop` takes a version out of both tiers as soon as nobody holds it.

All methods run on the event loop; files are read, hashed and parsed in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nats import errors as nats_errors
from nats.js import errors as js_errors
from nats.js.object_store import ObjectStore

from services.worker import metrics
from shared import subjects
from shared.bus import Bus
from shared.clock import now_s
from shared.errors import AdapterNotFound, BadRequest, TooLarge, Unavailable
from shared.model import AdapterRef, Tier
from shared.objects import read_object
from shared.telemetry import logger

if TYPE_CHECKING:
    from services.worker.engine.adapter_weights import HostAdapter

log = logger("motet.worker.adapters")
DIGEST = re.compile(r"[A-Za-z0-9_-]{1,128}")
SUFFIX, PARTIAL = ".safetensors", ".part"
LOADS_AT_ONCE = 4
FETCH_BASE_S = 15.0
FETCH_BYTES_PER_S = 4 * 1024 * 1024  # a link slower than this is treated as broken


class DiskTier:
    """Content-addressed files `<digest>.safetensors` in one directory, least recently used out first.

    Several workers may share the directory: files appear by atomic rename, and one that another worker evicted is
    simply missing here.
    """

    def __init__(self, directory: str, size_bytes: int) -> None:
        self._private = not directory
        self._dir = Path(directory or tempfile.mkdtemp(prefix="motet-adapters-"))
        self._dir.mkdir(parents=True, exist_ok=True)
        self._budget = size_bytes
        self._files: OrderedDict[str, int] = OrderedDict()  # digest -> bytes, least recently used first
        self._remove_cut_off()
        found = [(path, path.stat()) for path in self._dir.glob("*" + SUFFIX)]
        for path, stat in sorted(found, key=lambda item: item[1].st_mtime):
            self._files[path.name.removesuffix(SUFFIX)] = stat.st_size

    def __contains__(self, digest: str) -> bool:
        return digest in self._files

    @property
    def digests(self) -> list[str]:
        return list(self._files)

    @property
    def used_bytes(self) -> int:
        return sum(self._files.values())

    def path(self, digest: str) -> Path:
        """Where its file is. Raises BadRequest for what cannot be a digest: it comes from the bus and could name any file."""
        if not DIGEST.fullmatch(digest):
            raise BadRequest("not a digest", param="digest")
        return self._dir / (digest + SUFFIX)

    @contextlib.contextmanager
    def partial(self, digest: str) -> Iterator[tuple[Path, BinaryIO]]:
        """Where a download of `digest` is written before it is known to be right; gone afterwards unless it was renamed."""
        path = self._dir / f".{self.path(digest).stem}.{secrets.token_hex(4)}{PARTIAL}"
        try:
            with path.open("wb") as sink:
                fcntl.flock(sink, fcntl.LOCK_EX)
                yield path, sink
        finally:
            path.unlink(missing_ok=True)

    def _remove_cut_off(self) -> None:
        """Downloads that a crash cut short: nobody holds their lock."""
        for path in self._dir.glob("*" + PARTIAL):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                log.info("cut-off download removed", extra={"file": path.name})

    @property
    def free_bytes(self) -> int:
        """What the file system can still take."""
        return shutil.disk_usage(self._dir).free

    def added(self, digest: str, size_bytes: int) -> list[str]:
        """Note a file that is complete now, or was just used; returns the digests that were evicted for it."""
        self._files[digest] = size_bytes
        self._files.move_to_end(digest)
        evicted = []
        while self.used_bytes > self._budget and len(self._files) > 1:
            oldest = next(iter(self._files))
            self.discard(oldest)
            evicted.append(oldest)
        return evicted

    def discard(self, digest: str) -> None:
        self._files.pop(digest, None)
        if DIGEST.fullmatch(digest):
            self.path(digest).unlink(missing_ok=True)

    def close(self) -> None:
        if self._private:
            shutil.rmtree(self._dir, ignore_errors=True)


class _Held:
    """A host copy and how many requests hold it."""

    __slots__ = ("adapter", "holders", "size_bytes")

    def __init__(self, adapter: HostAdapter, size_bytes: int, holders: int) -> None:
        self.adapter, self.size_bytes, self.holders = adapter, size_bytes, holders


class _Load:
    """A load under way and how many requests wait for it."""

    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task, self.waiters = task, 0


class AdapterTiers:
    """Disk and host tier. `acquire` and `release` count holders; `parse` makes the host copy
    of a verified file from its path and digest.

    `on_change(digest)` is called after a digest entered or left a tier.
    """

    def __init__(
        self,
        bus: Bus,
        disk: DiskTier,
        *,
        host_bytes: int,
        parse: Callable[[Path, str], HostAdapter],
        on_change: Callable[[str], None],
    ) -> None:
        self._bus, self._disk, self._budget, self._parse, self._on_change = bus, disk, host_bytes, parse, on_change
        self._store: ObjectStore | None = None
        self._host: OrderedDict[str, _Held] = OrderedDict()
        self._loads: dict[str, _Load] = {}
        self._reserved = 0  # host bytes promised to loads under way
        self._doomed: set[str] = set()
        self._slots = asyncio.Semaphore(LOADS_AT_ONCE)
        self._turn = asyncio.Lock()  # who reserves host memory next: first come, first served
        self._room = asyncio.Event()

    # ---- what is here

    def tier(self, digest: str) -> Tier | None:
        """The faster tier that has it: host, else disk, else None."""
        return "host" if digest in self._host else "disk" if digest in self._disk else None

    @property
    def digests(self) -> set[str]:
        """Everything in either tier."""
        return {*self._host, *self._disk.digests}

    @property
    def host_used_bytes(self) -> int:
        return sum(held.size_bytes for held in self._host.values())

    def holders(self, digest: str) -> int:
        held = self._host.get(digest)
        return held.holders if held is not None else 0

    # ---- holding

    async def acquire(self, ref: AdapterRef) -> HostAdapter:
        """The host copy of `ref`, held until `release(ref.digest)`.

        Raises AdapterNotFound when the object store does not have it, Unavailable when it cannot be reached or keeps
        sending something else, InvalidAdapter when the blob does not fit the model, TooLarge when it never fits here.
        """
        digest = ref.digest
        self._doomed.discard(digest)
        held = self._host.get(digest)
        if held is not None:
            held.holders += 1
            self._host.move_to_end(digest)
            return held.adapter
        load = self._loads.get(digest)
        if load is None:
            load = self._loads[digest] = _Load(asyncio.get_running_loop().create_task(self._load(ref)))
            load.task.add_done_callback(lambda task: self._loaded(digest, task))
        load.waiters += 1
        try:
            await asyncio.shield(load.task)
        except asyncio.CancelledError:
            if load.task.done() and not load.task.cancelled() and load.task.exception() is None:
                self.release(digest)  # it was already counted as a holder
            else:
                load.waiters -= 1
            raise
        return self._host[digest].adapter

    def release(self, digest: str) -> None:
        """Give back one hold."""
        held = self._host[digest]
        held.holders -= 1
        if not held.holders:
            self._host.move_to_end(digest)
            if digest in self._doomed:
                self._forget(digest)
            self._room.set()

    def drop(self, digest: str) -> None:
        """Take a version out of both tiers, now or when its last holder lets go."""
        if digest in self._loads or self.holders(digest):
            self._doomed.add(digest)
        else:
            self._forget(digest)

    def _loaded(self, digest: str, task: asyncio.Task[None]) -> None:
        del self._loads[digest]
        if not task.cancelled() and (error := task.exception()) is not None:
            metrics.ADAPTER_LOAD_FAILURES.inc()
            log.warning("adapter not loaded", extra={"digest": digest, "error": repr(error)})
            self._doomed.discard(digest)

    def _forget(self, digest: str) -> None:
        self._doomed.discard(digest)
        self._host.pop(digest, None)
        self._disk.discard(digest)
        self._changed(digest)

    def close(self) -> None:
        """Give up loads under way and remove the directory when it is a private one."""
        for load in self._loads.values():
            load.task.cancel()
        self._disk.close()

    # ---- loading

    async def _load(self, ref: AdapterRef) -> None:
        digest = ref.digest
        async with self._slots:
            began = now_s()
            await self._reserve(ref.size_bytes)
            try:
                adapter = await asyncio.to_thread(self._from_disk, digest) if digest in self._disk else None
                source = "disk"
                if adapter is None:
                    source = "store"
                    self._disk.discard(digest)
                    adapter = await self._fetch(ref)
            finally:
                self._reserved -= ref.size_bytes
                self._room.set()
            waiters = self._loads[digest].waiters
            self._host[digest] = _Held(adapter, adapter.nbytes, waiters)
            while self._over_budget(0) and self._evict_idle():  # cast to a wider type it takes more than was promised
                pass
            for gone in self._disk.added(digest, adapter.blob_bytes):
                metrics.ADAPTER_EVICTIONS.labels("disk").inc()
                self._changed(gone)
            if not waiters and digest in self._doomed:
                self._forget(digest)
            metrics.ADAPTER_LOADS.labels(source).inc()
            metrics.ADAPTER_LOAD_S.labels(source).observe(now_s() - began)
            self._changed(digest)

    async def _reserve(self, size_bytes: int) -> None:
        """Promise host memory to a load, evicting copies nobody holds; waits while holders fill the budget."""
        if size_bytes > self._budget:
            raise TooLarge(f"adapter of {size_bytes} bytes does not fit in host_cache_mib ({self._budget} bytes)")
        async with self._turn:
            while self._over_budget(size_bytes):
                if not self._evict_idle():
                    self._room.clear()
                    await self._room.wait()
            self._reserved += size_bytes

    def _over_budget(self, more_bytes: int) -> bool:
        return self.host_used_bytes + self._reserved + more_bytes > self._budget

    def _evict_idle(self) -> bool:
        """Let go of the least recently used host copy that nobody holds; whether there was one."""
        idle = next((d for d, held in self._host.items() if not held.holders), None)
        if idle is None:
            return False
        del self._host[idle]
        metrics.ADAPTER_EVICTIONS.labels("host").inc()
        self._changed(idle)
        return True

    def _from_disk(self, digest: str) -> HostAdapter | None:
        """The host copy, or None when the file is missing or its content is not what its name says."""
        path = self._disk.path(digest)
        try:
            adapter = self._verified(path, digest)
            if adapter is None:
                metrics.ADAPTER_CORRUPT.labels("disk").inc()
                log.warning("cached adapter corrupt, fetching it again", extra={"digest": digest})
                return None
            os.utime(path)  # the order of use survives a restart
        except OSError as error:
            log.warning("cached adapter unreadable", extra={"digest": digest, "error": repr(error)})
            return None
        return adapter

    def _verified(self, path: Path, digest: str) -> HostAdapter | None:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return None
        return self._parse(path, digest)

    async def _fetch(self, ref: AdapterRef) -> HostAdapter:
        """Download, verify, move into the disk tier; one more try when the content is wrong."""
        if self._store is None:
            self._store = await self._bus.object_store(subjects.BLOBS)
        wrong = 0
        self._make_room(ref.size_bytes)
        while wrong < 2:
            try:
                adapter = await self._download(ref, self._store)
                if adapter is not None:
                    return adapter
            except js_errors.ObjectNotFoundError:
                raise AdapterNotFound(f"adapter {ref.name!r} ({ref.digest[:12]}) is not in the object store") from None
            except (nats_errors.Error, js_errors.Error, TimeoutError, OSError) as error:
                full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
                if full and self._evict_file():
                    continue
                reason = "this worker's disk is full" if full else repr(error)
                raise Unavailable(f"adapter {ref.name!r} ({ref.digest[:12]}) cannot be fetched: {reason}") from error
            wrong += 1
            metrics.ADAPTER_CORRUPT.labels("store").inc()
        raise Unavailable(f"adapter {ref.name!r}: the object store's copy does not have digest {ref.digest[:12]}")

    async def _download(self, ref: AdapterRef, store: ObjectStore) -> HostAdapter | None:
        timeout_s = FETCH_BASE_S + ref.size_bytes / FETCH_BYTES_PER_S
        with self._disk.partial(ref.digest) as (path, sink):
            await asyncio.wait_for(read_object(self._bus, store, ref.digest, sink), timeout_s)
            sink.flush()
            return await asyncio.to_thread(self._admit, path, ref.digest)

    def _make_room(self, size_bytes: int) -> None:
        while self._disk.free_bytes < size_bytes and self._evict_file():
            pass

    def _evict_file(self) -> bool:
        """Delete the least recently used file whose space that frees, since it is not mapped; whether there was one.

        A copy in host memory that nobody holds gives its mapping up for it.
        """
        unmapped = [digest for digest in self._disk.digests if not self.holders(digest) and digest not in self._loads]
        oldest = min(unmapped, key=lambda digest: digest in self._host, default=None)
        if oldest is None:
            return False
        self._host.pop(oldest, None)
        self._disk.discard(oldest)
        metrics.ADAPTER_EVICTIONS.labels("disk").inc()
        self._changed(oldest)
        return True

    def _admit(self, partial: Path, digest: str) -> HostAdapter | None:
        adapter = self._verified(partial, digest)  # mapped before it is named: from then on others may evict it
        if adapter is not None:
            partial.replace(self._disk.path(digest))
        return adapter

    def _changed(self, digest: str) -> None:
        metrics.ADAPTERS_RESIDENT.labels("host").set(len(self._host))
        metrics.ADAPTERS_RESIDENT.labels("disk").set(len(self._disk.digests))
        self._on_change(digest)
