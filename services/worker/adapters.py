"""Carries out the decisions of `policies.memory.host_tier`: fetches adapters from the object store to files, and maps files
into memory.

    object store  --fetch, SHA-256 checked, atomic rename-->  disk  --mapped, header checked-->  host  -->  engine

Rules:
- no blob is read here: `parse` alone, which is the engine's, knows formats (`shared.adapter_blob`).
- an adapter is its content digest; a file whose content has another digest is deleted and fetched again. `AdapterFiles` says
  when a file is hashed: once, not at every load.
- a host copy is a mapping of its file, alive also when the file is evicted; files are never written to once named.
- a download is a `.part` file, locked while it is written; unlocked ones are left from a crash and are deleted.
- a full disk evicts files that are not in use, before the fetch or in the middle of it, if they free enough for it.

All methods run on the event loop; files are read, hashed and parsed in threads.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from motet.policies.memory.host_tier import DiskRoom, Evict, Forget
from motet.services.worker import metrics
from motet.services.worker.adapter_files import AdapterFiles, hash_of
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import AdapterNotFound, MotetError, NotFound, Overloaded, Unavailable, WorkerFull
from motet.shared.model import AdapterRef
from motet.shared.objects import Objects, read_object
from motet.shared.telemetry import logger

log = logger("motet.worker.adapters")
FETCH_BASE_S = 15.0
FETCH_BYTES_PER_S = 4 * 1024 * 1024  # a link slower than this is treated as broken


Copy = TypeVar("Copy")
"""An engine's host copy of an adapter."""
Copy_contra = TypeVar("Copy_contra", contravariant=True)


class Decider(Protocol[Copy_contra]):
    """Makes the decisions for an `AdapterLoader` and gets the results."""

    def loaded(self, digest: str, adapter: Copy_contra) -> None:
        """A load has succeeded: the copy is in host memory and the file on disk."""

    def failed(self, digest: str, error: Exception) -> None:
        """A load failed."""

    def file_lost(self, digest: str) -> None:
        """A file is missing, or its content does not match its digest."""

    def make_disk_room(self, missing_bytes: int) -> DiskRoom:
        """The disk lacks room for a download: `evict` files that are not in use, if they free as much."""


class _DiskFull(Exception):
    """The disk took `written_bytes` of a download and no more."""

    def __init__(self, written_bytes: int) -> None:
        self.written_bytes = written_bytes


class AdapterLoader(Generic[Copy]):
    """Loads and deletes a worker's adapters, as its decider says.

    `parse` makes a host copy from a verified file: its path and digest.
    """

    def __init__(self, bus: Bus, files: AdapterFiles, decider: Decider[Copy], *, parse: Callable[[Path, str], Copy]) -> None:
        self._bus, self._files, self._decider, self._parse = bus, files, decider, parse
        self._objects: Objects | None = None
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._copies: dict[str, Copy] = {}

    def copy(self, digest: str) -> Copy:
        """The host copy of an adapter that was loaded and not evicted."""
        return self._copies[digest]

    def close(self) -> None:
        """Abandon running loads, and remove the directory if it is a private one."""
        for load in self._loads.values():
            load.cancel()
        self._files.close()

    # ---- actions

    def evict(self, action: Evict | Forget) -> None:
        """Release a copy, or delete a file, or both."""
        tiers = ("host", "disk") if isinstance(action, Forget) else (action.tier,)
        if "host" in tiers:
            self._copies.pop(action.digest, None)
        if "disk" in tiers:
            self._files.discard(action.digest)
        if isinstance(action, Evict):
            metrics.ADAPTER_EVICTIONS.labels(action.tier).inc()

    def load(self, ref: AdapterRef, source: Literal["disk", "store"]) -> None:
        """Load a copy into host memory; the decider gets the result."""
        self._loads[ref.digest] = asyncio.get_running_loop().create_task(self._load(ref, source))

    async def _load(self, ref: AdapterRef, source: Literal["disk", "store"]) -> None:
        digest, began = ref.digest, now_s()
        try:
            adapter = await asyncio.to_thread(self._from_disk, digest) if source == "disk" else None
            if adapter is None:
                source = "store"
                self._files.discard(digest)
                self._decider.file_lost(digest)
                adapter = await self.fetch(ref)
        except Exception as error:
            del self._loads[digest]
            metrics.ADAPTER_LOAD_FAILURES.inc()
            log.warning("adapter not loaded", extra={"digest": digest, "error": repr(error)})
            self._decider.failed(digest, error)
            return
        del self._loads[digest]
        self._copies[digest] = adapter
        metrics.ADAPTER_LOADS.labels(source).inc()
        metrics.ADAPTER_LOAD_S.labels(source).observe(took_s := now_s() - began)
        metrics.LORA_LOAD_S.labels("load").observe(took_s)
        self._decider.loaded(digest, adapter)

    # ---- files and the object store

    def _from_disk(self, digest: str) -> Copy | None:
        """The host copy, or None when the file is missing or its content does not match its digest."""
        path = self._files.path(digest)
        try:
            if not self._files.intact(digest):
                metrics.ADAPTER_CORRUPT.labels("disk").inc()
                log.warning("cached adapter corrupt, fetching it again", extra={"digest": digest})
                return None
            return self._parse(path, digest)
        except OSError as error:
            log.warning("cached adapter unreadable", extra={"digest": digest, "error": repr(error)})
            return None

    async def fetch(self, ref: AdapterRef) -> Copy:
        """Download the file, verify it and move it to its name. If the content is wrong, try once more."""
        if self._objects is None:
            self._objects = await Objects.open(self._bus, subjects.BLOBS)
        wrong = 0
        self._make_room(ref, self._files.free_bytes)
        while wrong < 2:
            try:
                adapter = await self._download(ref, self._objects)
                if adapter is not None:
                    return adapter
            except NotFound:
                raise AdapterNotFound(f"adapter {ref.name!r} ({ref.digest[:12]}) is not in the object store") from None
            except _DiskFull as full:  # another process's files, or a quota that free bytes do not show
                self._make_room(ref, min(full.written_bytes, ref.size_bytes - 1))
                continue
            except (Overloaded, Unavailable, OSError) as error:
                reason = error.message if isinstance(error, MotetError) else repr(error)
                raise Unavailable(f"adapter {ref.name!r} ({ref.digest[:12]}) cannot be fetched: {reason}") from error
            wrong += 1
            metrics.ADAPTER_CORRUPT.labels("store").inc()
        raise Unavailable(f"adapter {ref.name!r}: the object store's copy does not have digest {ref.digest[:12]}")

    def _make_room(self, ref: AdapterRef, free_bytes: int) -> None:
        """Make room on the disk, which has `free_bytes`. Raises Unavailable, or WorkerFull if waiting does not help."""
        missing_bytes = ref.size_bytes - free_bytes
        if missing_bytes <= 0 or (room := self._decider.make_disk_room(missing_bytes)) == "made":
            return
        error = WorkerFull if room == "never" else Unavailable
        why = "" if room == "never" else ", and the adapters on it are in use"
        raise error(
            f"adapter {ref.name!r} ({ref.digest[:12]}) cannot be fetched: this worker's disk is full{why}; it has"
            f" {ref.size_bytes} bytes, {free_bytes} are free"
        )

    async def _download(self, ref: AdapterRef, store: Objects) -> Copy | None:
        timeout_s = FETCH_BASE_S + ref.size_bytes / FETCH_BYTES_PER_S
        with self._files.partial(ref.digest) as (path, sink):
            try:
                await asyncio.wait_for(read_object(self._bus, store, ref.digest, sink), timeout_s)
                sink.flush()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise _DiskFull(path.stat().st_size) from error
            return await asyncio.to_thread(self._admit, path, ref.digest)

    def _admit(self, partial: Path, digest: str) -> Copy | None:
        if hash_of(partial) != digest:
            return None
        adapter = self._parse(partial, digest)  # mapped before it is named: from then on others may evict it
        self._files.admit(partial, digest)
        return adapter
