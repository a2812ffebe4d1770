"""A worker's host tier and adapter store on their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import bench.rivals  # noqa: F401 (lru)
from motet.policies.memory.host_tier import DiskRoom, HostTier, Load
from motet.services.worker.adapter_files import AdapterFiles
from motet.services.worker.adapters import AdapterLoader
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.shared.bus import Bus
from motet.shared.errors import TooLarge
from motet.shared.model import AdapterRef


class AdapterTiers:
    """Host tier and store without a worker: `acquire` waits for a copy and holds it.

    `on_change(digest)` is called after a digest entered or left a tier.
    """

    def __init__(
        self,
        bus: Bus,
        files: AdapterFiles,
        *,
        host_bytes: int,
        disk_bytes: int,
        parse: Callable[[Path, str], HostAdapter],
        on_change: Callable[[str], None],
    ) -> None:
        self.tier: HostTier[asyncio.Future[HostAdapter]] = HostTier(host_bytes, disk_bytes, files=files.found, eviction="lru")
        self.store = AdapterLoader(bus, files, self, parse=parse)
        self._on_change = on_change

    async def acquire(self, ref: AdapterRef) -> HostAdapter:
        """The host copy of `ref`, held until `release(ref.digest)`.

        Raises AdapterNotFound when the object store does not have it, Unavailable when the store cannot be reached or keeps
        sending wrong bytes, InvalidAdapter when the blob does not fit the model, TooLarge when it never fits in host memory.
        """
        tier = self.tier
        if not tier.fits(ref.size_bytes):
            raise TooLarge(f"adapter of {ref.size_bytes} bytes does not fit in host_cache_mib ({tier.host_bytes} bytes)")
        arrival = asyncio.get_running_loop().create_future()
        if tier.hold(ref, arrival):
            return self.store.copy(ref.digest)
        self._perform()
        try:
            return await asyncio.shield(arrival)
        except asyncio.CancelledError:
            if not arrival.done():
                tier.give_up(ref.digest, arrival)
            elif arrival.exception() is None:
                self.release(ref.digest)  # it was already counted as a holder
            raise

    def release(self, digest: str) -> None:
        """Release one hold."""
        self.tier.release(digest)
        self._perform()

    def drop(self, digest: str) -> None:
        """Remove a version from both tiers, now or when its last hold is released."""
        self.tier.drop(digest)
        self._perform()

    def close(self) -> None:
        """Abandon running loads."""
        self.store.close()

    # ---- what the store tells

    def loaded(self, digest: str, adapter: HostAdapter) -> None:
        """The waiting holders get the copy."""
        for arrival in self.tier.loaded(digest, adapter.nbytes, adapter.blob_bytes):
            if not arrival.done():
                arrival.set_result(adapter)
        self._changed(digest)
        self._perform()

    def failed(self, digest: str, error: Exception) -> None:
        """The waiting holders get the error."""
        for arrival in self.tier.failed(digest):
            if not arrival.done():
                arrival.set_exception(error)
        self._changed(digest)
        self._perform()

    def file_lost(self, digest: str) -> None:
        """The file is fetched again."""
        self.tier.file_lost(digest)

    def make_disk_room(self, missing_bytes: int) -> DiskRoom:
        """Delete files that can be spared, if they free as much."""
        room = self.tier.make_disk_room(missing_bytes)
        self._perform()
        return room

    def _perform(self) -> None:
        for action in self.tier.take_actions():
            if isinstance(action, Load):
                self.store.load(action.adapter, action.source)
            else:
                self.store.evict(action)
                self._changed(action.digest)

    def _changed(self, digest: str) -> None:
        self._on_change(digest)
