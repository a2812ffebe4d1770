"""Places adapters on workers by demand (dLoRA section 5.1): desired residency by recent rates, every few minutes.

The scheduler that plans (`rebalancer`) writes one `shared.placement.Placement` per worker, as `policies.cluster.placement`
decides. It counts only the requests that it gets itself.
"""

from __future__ import annotations

from motet.policies.cluster.scheduler_core import SchedulerCore
from motet.services.scheduler import metrics
from motet.services.scheduler.cluster import WatchedCluster
from motet.shared import subjects
from motet.shared.bus import Bus, encode
from motet.shared.clock import now_s, unix_ms
from motet.shared.kv import Bucket
from motet.shared.placement import Placement, PlacementWatch
from motet.shared.telemetry import logger

log = logger("motet.scheduler.placer")


class Placer:
    """Writes placements for one scheduler. `identity`: unique to this process."""

    def __init__(self, bus: Bus, cluster: WatchedCluster, core: SchedulerCore, *, identity: str) -> None:
        self._bus, self._cluster, self._identity, self._placing = bus, cluster, identity, core.placing
        self.every_s = core.options.place_s
        self._watch = PlacementWatch(bus, ">")
        self._bucket: Bucket | None = None

    async def start(self) -> None:
        """Follow the placements of all schedulers."""
        await self._watch.start()

    async def place(self) -> None:
        """Compute each worker's placement and write those that have changed. Raises Unavailable when JetStream is away."""
        if self._bucket is None:
            self._bucket = await Bucket.open(self._bus, subjects.KV_PLACEMENT, wait_s=0.0)
        now = now_s()
        placed = self._placing.place(self._cluster.serving(now), self._cluster.state, now)
        for worker_id, digests in placed.items():
            if digests != self._watch.digests(worker_id):
                value = Placement(owner=self._identity, digests=digests, since_unix_ms=unix_ms())
                await self._bucket.put(worker_id, encode(value))
                metrics.PLACEMENTS.inc()
                log.info("placed", extra={"worker": worker_id, "adapters": len(digests)})
        for worker_id in self._watch.all.keys() - placed.keys():
            if not self._cluster.knows(worker_id):
                await self._bucket.delete(worker_id)
