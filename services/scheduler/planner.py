"""Which scheduler plans: moves of requests, placements of adapters, numbers of workers.

Every scheduler has a `Planner`, and one of them has the role: the holder of the key `planner.scheduler` in the bucket of
leases. It renews the key, and another one takes over when the key has not changed for `EXPIRY_S`. A holder that cannot renew it
stops earlier, so there are never two.
"""

from __future__ import annotations

import asyncio

import msgspec

from motet.services.scheduler import metrics
from motet.shared import subjects
from motet.shared.bus import Bus, decode, encode
from motet.shared.clock import now_s, unix_ms
from motet.shared.errors import MotetError
from motet.shared.kv import Bucket, KvEntry
from motet.shared.leases import EXPIRY_S, RENEW_S
from motet.shared.telemetry import logger
from motet.shared.wire.worker_state import Lease

log = logger("motet.scheduler.planner")
KEY = "planner.scheduler"  # as earlier versions and permissions name it
STOP_S = 1.5  # a holder that has not renewed for this long plans no more; shorter than EXPIRY_S


class Turn:
    """A role that one of several processes has at a time: the process that holds `key`."""

    def __init__(self, bucket: Bucket, key: str, holder: str) -> None:
        self._bucket, self._key, self._holder = bucket, key, holder
        self._renewed_s = float("-inf")
        self._seen: tuple[int, float] = 0, 0.0  # the key's last revision, and since when by our clock

    @property
    def mine(self) -> bool:
        """Whether this process has the role now."""
        return now_s() - self._renewed_s < STOP_S

    async def renew(self) -> None:
        """Renew the key, or take it if it has no holder or its holder is gone. Raises Unavailable when JetStream is away."""
        began_s = now_s()
        entry = await self._bucket.get(self._key)
        if entry is not None and not self._ours(entry):
            revision, since_s = self._seen
            if entry.revision != revision:
                self._seen = entry.revision, began_s
                return
            if began_s - since_s < EXPIRY_S:
                return
        lease = Lease(incarnation=self._holder, renewed_unix_ms=unix_ms())
        if await self._bucket.replace(self._key, encode(lease), entry.revision if entry is not None else 0) is not None:
            self._renewed_s = began_s

    def _ours(self, entry: KvEntry) -> bool:
        try:
            return bool(decode(entry.value, Lease).incarnation == self._holder)
        except msgspec.MsgspecError:
            return False

    async def release(self) -> None:
        """Give up the role, so that another process can take it at once."""
        if self.mine:
            self._renewed_s = float("-inf")
            await self._bucket.delete(self._key)


class Planner:
    """Whether this scheduler is the one that plans. `identity`: unique to this process."""

    def __init__(self, bus: Bus, identity: str) -> None:
        self._bus, self._identity = bus, identity
        self._turn: Turn | None = None

    @property
    def mine(self) -> bool:
        """Whether this scheduler has the role now."""
        return self._turn is not None and self._turn.mine

    async def run(self) -> None:
        """Keep the role, or take it when it is free. Never returns."""
        while True:
            try:
                await asyncio.wait_for(self._renew(), timeout=STOP_S)
            except (MotetError, TimeoutError) as error:
                log.warning("the role of the planner was not renewed", extra={"error": repr(error)})
            metrics.PLANNING.set(self.mine)
            await asyncio.sleep(RENEW_S)

    async def _renew(self) -> None:
        if self._turn is None:
            self._turn = Turn(await Bucket.open(self._bus, subjects.KV_LEASES, wait_s=0.0), KEY, self._identity)
        await self._turn.renew()

    async def stop(self) -> None:
        """Give up the role, so that another scheduler can plan at once."""
        if self._turn is not None:
            await self._turn.release()
