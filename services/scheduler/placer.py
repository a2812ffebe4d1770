"""Tells workers which adapters are at home there, by demand: desired residency by recent rates.

The scheduler that plans (`planner`) writes one `shared.placement.Placement` per worker, as `policies.cluster.placement`
decides: every few minutes, and at once when a worker comes or leaves. It counts only the requests that it gets itself. All
schedulers follow what is written, since dispatch counts what it costs to leave a home.

A plan that was made elsewhere (`motet homes PLAN`) comes as the adapters of each of its workers. They are matched to live
workers such that the fewest bytes are loaded, and are the homes from which the next decision goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from motet.policies.cluster.homes import match
from motet.policies.cluster.placement import Placing
from motet.services.scheduler import metrics
from motet.services.scheduler.cluster import WatchedCluster
from motet.services.scheduler.events import AtHome
from motet.services.scheduler.planner import Planner
from motet.shared import subjects
from motet.shared.bus import Bus, encode
from motet.shared.clock import now_s, unix_ms
from motet.shared.errors import MotetError
from motet.shared.kv import Bucket
from motet.shared.placement import Placement, PlacementWatch
from motet.shared.telemetry import logger
from motet.shared.wire.homes import SetHomes

log = logger("motet.scheduler.placer")
LOOK_S = 0.25
FIRST_S = 30.0
"""Seconds from the start to the first decision, at most: rates are known by then."""


class Placer:
    """Follows placements for one scheduler, and writes them while it plans.

    `identity`: unique to this process; `every_s`: from one decision to the next; `on_homes` is called with each change.
    """

    def __init__(
        self,
        bus: Bus,
        cluster: WatchedCluster,
        placing: Placing,
        planner: Planner,
        *,
        identity: str,
        every_s: float,
        on_homes: Callable[[AtHome], None],
    ) -> None:
        self._bus, self._cluster, self._identity, self._placing = bus, cluster, identity, placing
        self._planner, self._every_s, self._on_homes = planner, every_s, on_homes
        self._watch = PlacementWatch(bus, ">", self._changed)
        self._told: dict[str, tuple[str, ...]] = {}
        self._bucket: Bucket | None = None
        self._next_s = 0.0
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        """Follow the placements of all schedulers, and listen for plans."""
        await self._watch.start()
        await self._bus.subscribe(subjects.HOMES, SetHomes, self.set_homes)

    def _changed(self) -> None:
        now = {worker_id: placed.digests for worker_id, placed in self._watch.all.items()}
        for worker_id in self._told.keys() | now.keys():
            digests = now.get(worker_id, ())
            if self._told.get(worker_id, ()) != digests:
                self._on_homes(AtHome(worker_id, digests))
        self._told = now

    async def run(self) -> None:
        """Place when a worker has come or left, and from time to time. Never returns."""
        self._next_s = now_s() + min(FIRST_S, self._every_s)
        workers = self._serving()
        while True:
            await asyncio.sleep(LOOK_S)
            serving = self._serving()
            if not self._planner.mine or (serving == workers and now_s() < self._next_s):
                continue
            try:
                await self.place()
            except (MotetError, TimeoutError) as error:
                log.warning("nothing was placed", extra={"error": repr(error)})
                continue  # again at the next look
            workers, self._next_s = serving, now_s() + self._every_s

    def _serving(self) -> set[str]:
        return {known.worker_id for known in self._cluster.serving(now_s())}

    async def place(self) -> None:
        """Compute each worker's placement and write those that have changed. Raises Unavailable when JetStream is away."""
        async with self._writing:
            now = now_s()
            looks = self._placing.look(self._cluster.serving(now), self._cluster.state, now, self._told)
            await self._write({one: found for look in looks for one, found in (await asyncio.to_thread(look.place)).items()})

    async def set_homes(self, said: SetHomes) -> None:
        """Give the live workers of a base model the adapters of a plan. Only the scheduler that plans does so."""
        if not self._planner.mine:
            return
        async with self._writing:
            serving = [one for one in self._cluster.serving(now_s()) if one.limits.base_model == said.base_model]
            adapters = [adapter for worker in said.workers for adapter in worker]
            try:
                homes = match(
                    [[adapter.digest for adapter in worker] for worker in said.workers],
                    {adapter.digest: adapter.size_bytes for adapter in adapters},
                    {one.worker_id: self._on_device(one.worker_id) for one in serving},
                    self._told,
                    {
                        one.worker_id: {adapter.digest for adapter in adapters if adapter.rank > one.limits.max_lora_rank}
                        for one in serving
                    },
                )
                await self._write(homes)
            except (ValueError, MotetError, TimeoutError) as error:
                log.warning("a plan's homes were not placed", extra={"base_model": said.base_model, "error": str(error)})
                return
            self._next_s = now_s() + self._every_s

    def _on_device(self, worker_id: str) -> set[str]:
        return {digest for digest, tier in self._cluster.state.adapters(worker_id).items() if tier == "device"}

    async def _write(self, placed: Mapping[str, tuple[str, ...]]) -> None:
        if self._bucket is None:
            self._bucket = await Bucket.open(self._bus, subjects.KV_PLACEMENT, wait_s=0.0)
        for worker_id, digests in placed.items():
            if digests != self._watch.digests(worker_id):
                value = Placement(owner=self._identity, digests=digests, since_unix_ms=unix_ms())
                await self._bucket.put(worker_id, encode(value))
                metrics.PLACEMENTS.inc()
                log.info("placed", extra={"worker": worker_id, "adapters": len(digests)})
        for worker_id in self._watch.all.keys() - placed.keys():
            if not self._cluster.knows(worker_id):
                await self._bucket.delete(worker_id)
