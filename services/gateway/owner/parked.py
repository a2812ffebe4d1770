"""New requests that wait for a worker to start, and the word to the schedulers that they do.

Parked ──> room for it? ── no ──> 503, with the time that a start takes
              │ yes
              └──> `Wake` at once and every WAKE_S, until a worker serves
"""

from __future__ import annotations

import contextlib

from motet.policies.tenant_shares import TenantShares
from motet.services.gateway import metrics
from motet.services.gateway.owner.fleet import Fleet
from motet.services.gateway.owner.stream import Stream
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import Unavailable
from motet.shared.wire.scale import Wake

WAKE_S = 2.0


class ParkedRequests:
    """Those of one gateway: at most `most`, divided among tenants."""

    def __init__(self, bus: Bus, fleet: Fleet, gateway_id: str, most: int) -> None:
        self._bus, self._fleet, self._id = bus, fleet, gateway_id
        self._shares = TenantShares(most)
        self._streams: set[Stream] = set()
        self._woke_s = 0.0

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Stream) -> None:
        """Park a stream. Raises Unavailable where there is no room for its tenant."""
        if not self._shares.take(stream.job.tenant, 1):
            metrics.REFUSED.labels("parked").inc()
            reason = f"no worker serves yet, and {self._shares.held(stream.job.tenant)} requests wait for the one that starts"
            raise Unavailable(reason, retry_after_s=self._fleet.start_s)
        self._streams.add(stream)
        metrics.PARKED.set(len(self._streams))

    def remove(self, stream: Stream) -> None:
        """A worker has it, or it has ended."""
        if stream in self._streams:
            self._streams.remove(stream)
            self._shares.give_back(stream.job.tenant, 1)
            metrics.PARKED.set(len(self._streams))

    def wake(self, waiting: int) -> None:
        """Tell the schedulers that so many requests wait, unless they were told within `WAKE_S`."""
        if now_s() - self._woke_s >= WAKE_S:
            self._woke_s = now_s()
            self._bus.spawn(self._tell(Wake(base_model=self._fleet.base_model, gateway_id=self._id, waiting=waiting)))

    async def _tell(self, wake: Wake) -> None:
        with contextlib.suppress(Unavailable):  # told again after `WAKE_S`
            await self._bus.publish(subjects.WAKE, wake)
