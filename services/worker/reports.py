"""Publishes a worker's view: a delta soon after each change, and a snapshot or a delta on each heartbeat (`Cadence`)."""

from __future__ import annotations

import asyncio
import contextlib

from motet.policies.cluster.worker_book import DELTA_S, HEARTBEAT_S, Cadence
from motet.policies.times.step_times import StepTimes
from motet.policies.worker.worker_view import View
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import Unavailable


class StateReporter:
    """Sends the worker's state. Call `touch` after changing `view`.

    Nothing is sent while NATS is away; the next snapshot contains everything.
    """

    def __init__(self, bus: Bus, view: View, times: StepTimes) -> None:
        self.view = view
        self._bus, self._times = bus, times
        self._subject = subjects.state(view.worker_id)
        self._dirty = asyncio.Event()
        self._lists_prefixes = True

    def start(self) -> None:
        self._bus.spawn(self._run())

    def touch(self) -> None:
        """Send a delta soon if the view has changed."""
        if self.view.changed:
            self._dirty.set()

    def list_prefixes(self) -> None:
        """The next heartbeat lists all cached KV blocks."""
        self._lists_prefixes = True

    async def snapshot(self, *, lists_disk: bool = True) -> None:
        """Send the whole state now."""
        if self._bus.connected:  # otherwise nothing may be marked as sent
            lists_prefixes, self._lists_prefixes = self._lists_prefixes, False
            word = self.view.snapshot(self._times.model, lists_disk=lists_disk, lists_prefixes=lists_prefixes)
            with contextlib.suppress(Unavailable):
                await self._bus.publish(self._subject, word)

    async def _delta(self) -> None:
        if self._bus.connected:
            with contextlib.suppress(Unavailable):
                await self._bus.publish(self._subject, self.view.delta())

    async def _run(self) -> None:
        beat_s, cadence = 0.0, Cadence()
        while True:
            self._dirty.clear()
            if now_s() >= beat_s:
                beat_s = now_s() + HEARTBEAT_S
                if cadence.whole(len(self.view.requests)) or self._lists_prefixes:
                    await self.snapshot(lists_disk=cadence.lists_disk)
                else:
                    await self._delta()
            elif self.view.changed:
                await self._delta()
            await asyncio.sleep(DELTA_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, beat_s - now_s())):
                    await self._dirty.wait()
