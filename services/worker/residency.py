"""All adapters of a worker in one place: what the registry knows, the tiers on disk and host, and the device.

Every change ends in the worker's view, so that schedulers know the fastest tier of each version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from services.worker import metrics
from services.worker.adapter_files import AdapterFiles
from services.worker.adapters import AdapterTiers
from services.worker.config import MIB, WorkerConfig
from services.worker.engine_thread import EngineThread
from services.worker.reports import StateReporter
from shared.adapter_watch import AdapterWatch
from shared.bus import Bus
from shared.clock import now_s
from shared.errors import AdapterNotFound, MotetError
from shared.model import AdapterRef, Residency
from shared.telemetry import logger

if TYPE_CHECKING:
    from services.worker.engine.adapter_weights import HostAdapter

log = logger("motet.worker.adapters")
GRACE_S = 0.25  # a gateway may know a new adapter a moment before this worker does
MAX_PREFETCHES = 64


class Adapters:
    """`tiers` count holders and load; this class decides what is wanted and tells who has to know."""

    def __init__(
        self,
        bus: Bus,
        config: WorkerConfig,
        engine: EngineThread,
        reporter: StateReporter,
        parse: Callable[[Path, str], HostAdapter],
    ) -> None:
        self._bus, self._engine, self._reporter = bus, engine, reporter
        self._device: set[str] = set()
        self._prefetches: dict[str, asyncio.Task[None]] = {}
        self.watch = AdapterWatch(bus, self._reconcile)
        self.tiers = AdapterTiers(
            bus,
            AdapterFiles(config.adapter_cache_dir),
            host_bytes=config.host_cache_mib * MIB,
            disk_bytes=config.disk_cache_mib * MIB,
            parse=parse,
            on_change=self._place,
        )

    async def start(self) -> None:
        """Follow the registry; what the disk still holds from before and the registry has deleted goes at once."""
        await self.watch.start()
        self._reconcile()

    def close(self) -> None:
        self.tiers.close()

    async def check(self, ref: AdapterRef) -> None:
        """Raises AdapterNotFound when the registry does not have this version."""
        deadline = now_s() + GRACE_S
        while self.watch.by_digest(ref.digest) is None:
            if now_s() > deadline:
                raise AdapterNotFound(f"adapter {ref.name!r} ({ref.digest[:12]}) is not registered", param="model")
            await asyncio.sleep(0.01)

    def on_device(self, digest: str, there: bool) -> None:
        """The engine loaded or left an adapter."""
        if there:
            self._device.add(digest)
        else:
            self._device.discard(digest)
            metrics.ADAPTER_EVICTIONS.labels("device").inc()
        metrics.ADAPTERS_RESIDENT.labels("device").set(len(self._device))
        self._place(digest)

    def drop(self, digest: str) -> None:
        """Out of every tier, each as soon as nothing uses it there."""
        self._engine.unload_adapter(digest)
        self.tiers.drop(digest)

    def prefetch(self, ref: AdapterRef) -> None:
        """Bring an adapter to the host, and to the device when there is room."""
        if ref.digest not in self._prefetches and len(self._prefetches) < MAX_PREFETCHES:
            task = self._prefetches[ref.digest] = self._bus.spawn(self._prefetch(ref))
            task.add_done_callback(lambda _: self._prefetches.pop(ref.digest, None))

    async def _prefetch(self, ref: AdapterRef) -> None:
        try:
            host = await self.tiers.acquire(ref)
        except MotetError as error:
            log.warning("adapter not prefetched", extra={"digest": ref.digest, "error": error.message})
            return
        self._engine.load_adapter(host)
        self.tiers.release(ref.digest)

    def _reconcile(self) -> None:
        """Let go of versions that the registry no longer has; running requests keep theirs to the end."""
        for digest in {*self.tiers.tier.copies, *self.tiers.tier.files, *self._device}:
            if self.watch.by_digest(digest) is None:
                self.drop(digest)
            else:
                self._place(digest)

    def _place(self, digest: str) -> None:
        view = self._reporter.view
        tier = "device" if digest in self._device else self.tiers.tier.tier(digest)
        facts = self.watch.by_digest(digest) or view.adapters.get(digest)  # the latter: deleted, still in use
        if tier is None or facts is None:
            view.place(digest, None)
        else:
            view.place(digest, Residency(digest, facts.rank, facts.size_bytes, tier))
        self._reporter.touch()
