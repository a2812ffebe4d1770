"""Sends a worker's view to the schedulers: a delta soon after each change, and on heartbeats a snapshot or a delta.

What a snapshot costs everybody who listens is in proportion to the requests in it, so a busy worker sends fewer: with a
thousand workers of 256 requests each a scheduler would otherwise do little else than read them.
"""

from __future__ import annotations

import asyncio
import contextlib

from services.worker.state import StepTimes, WorkerView
from shared import subjects
from shared.bus import Bus
from shared.clock import now_s, unix_ms
from shared.errors import Unavailable

HEARTBEAT_S = 0.5
SNAPSHOT_REQUESTS = 64  # a snapshot on every heartbeat up to so many requests, on every second one up to twice as many, ...
MAX_BEATS = 4  # between two snapshots
DELTA_S = 0.02  # at most one message per this long, heartbeats and `snapshot` aside


class StateReporter:
    """Call `touch` after changing `view`. Silent while NATS is away; the next snapshot tells everything."""

    def __init__(self, bus: Bus, view: WorkerView, times: StepTimes) -> None:
        self.view = view
        self._bus, self._times = bus, times
        self._subject = subjects.state(view.worker_id)
        self._dirty = asyncio.Event()

    def start(self) -> None:
        self._bus.spawn(self._run())

    def touch(self) -> None:
        if self.view.changed:
            self._dirty.set()

    async def snapshot(self) -> None:
        """Send the whole state now."""
        if self._bus.connected:  # otherwise nothing may be marked as sent
            with contextlib.suppress(Unavailable):
                await self._bus.publish(self._subject, self.view.snapshot(self._times.model, unix_ms()))

    async def _delta(self) -> None:
        if self._bus.connected:
            with contextlib.suppress(Unavailable):
                await self._bus.publish(self._subject, self.view.delta(unix_ms()))

    async def _run(self) -> None:
        beat_s, beats = 0.0, 0
        while True:
            self._dirty.clear()
            if now_s() >= beat_s:
                beat_s = now_s() + HEARTBEAT_S
                if beats > 0:
                    beats -= 1
                    await self._delta()
                else:
                    beats = min(len(self.view.requests) // SNAPSHOT_REQUESTS, MAX_BEATS - 1)
                    await self.snapshot()
            elif self.view.changed:
                await self._delta()
            await asyncio.sleep(DELTA_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, beat_s - now_s())):
                    await self._dirty.wait()
