"""Places adapters on workers by demand (dLoRA section 5.1): desired residency by recent rates, every few minutes.

The scheduler that plans (`rebalancer`) writes one `shared.placement.Placement` per worker. It counts only the requests that it
gets itself. With several schedulers each gets the same share of every adapter's requests, and only ratios matter.
"""

from __future__ import annotations

from motet.policies.cluster.placement import Room, preload
from motet.policies.cluster.worker_book import Known
from motet.policies.worker.load_forecast import Forecast
from motet.services.scheduler import metrics
from motet.services.scheduler.cluster import WatchedCluster
from motet.shared import subjects
from motet.shared.bus import Bus, encode
from motet.shared.clock import now_s, unix_ms
from motet.shared.kv import Bucket
from motet.shared.model import AdapterRef
from motet.shared.placement import Placement, PlacementWatch
from motet.shared.telemetry import logger

log = logger("motet.scheduler.placer")
LEAST = 2.0 / 900.0
"""Requests per second below which an adapter is not worth a place."""


class Placer:
    """Writes placements for one scheduler. `identity`: unique to this process.

    `every_s`: the interval between two calls of `place`.
    """

    def __init__(self, bus: Bus, cluster: WatchedCluster, *, identity: str, every_s: float) -> None:
        self._bus, self._cluster, self._identity, self.every_s = bus, cluster, identity, every_s
        self._rates = Forecast()
        self._sizes: dict[str, int] = {}
        self._watch = PlacementWatch(bus, ">")
        self._bucket: Bucket | None = None

    async def start(self) -> None:
        """Follow the placements of all schedulers."""
        await self._watch.start()

    def asked(self, adapter: AdapterRef) -> None:
        """A new request for the adapter came."""
        self._rates.used(adapter.digest, now_s())
        self._sizes[adapter.digest] = adapter.size_bytes
        if len(self._sizes) > 2 * len(self._rates):
            self._sizes = {digest: self._sizes[digest] for digest in self._rates if digest in self._sizes}

    async def place(self) -> None:
        """Compute each worker's placement and write those that have changed. Raises Unavailable when JetStream is away."""
        if self._bucket is None:
            self._bucket = await Bucket.open(self._bus, subjects.KV_PLACEMENT, wait_s=0.0)
        now = now_s()
        loads = {digest: rate for digest in self._rates if (rate := self._rates.rate(digest, now)) >= LEAST}
        by_model: dict[str, list[Known]] = {}
        for known in self._cluster.serving(now):
            by_model.setdefault(known.limits.base_model, []).append(known)
        placed: dict[str, tuple[str, ...]] = {}
        for workers in by_model.values():
            rooms = {
                one.worker_id: Room(free_bytes=one.limits.adapter_bytes_most, slots=one.limits.pin_slots) for one in workers
            }
            present = {one.worker_id: self._cluster.state.adapters(one.worker_id) for one in workers}
            placed |= preload(loads, self._sizes, rooms, present)
        for worker_id, digests in placed.items():
            if digests != self._watch.digests(worker_id):
                value = Placement(owner=self._identity, digests=digests, since_unix_ms=unix_ms())
                await self._bucket.put(worker_id, encode(value))
                metrics.PLACEMENTS.inc()
                log.info("placed", extra={"worker": worker_id, "adapters": len(digests)})
        for worker_id in self._watch.all.keys() - placed.keys():
            if not self._cluster.knows(worker_id):
                await self._bucket.delete(worker_id)
