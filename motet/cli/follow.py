"""Follows the schedulers' decisions about numbers of workers: starts and stops workers of a stack (`motet up --workers 1..4`).

    scheduler ──Sized, asked for every POLL_S──> Follower ──> Stack.grow / Stack.shrink

A decision is carried out once: after a change only a later one counts. It says how many workers there should be, not how many
more, so one that was made before a new worker had told that it starts does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s, unix_ms
from motet.shared.config import BusConfig
from motet.shared.errors import MotetError
from motet.shared.wire.admin import ClusterStatus, StatusReply, StatusRequest
from motet.shared.wire.scale import Sized

POLL_S = 2.0
OLD_MS = 60_000
"""A decision of this age says nothing about now."""
REST_S = 60.0
"""After a worker that could not start."""


class Workers(Protocol):
    """What a follower changes."""

    @property
    def workers(self) -> list[str]:
        """Those that run or start."""

    async def grow(self, count: int) -> None:
        """Start workers until there are so many."""

    async def shrink(self, worker: str) -> None:
        """Let one drain and stop."""


class Follower:
    """Carries out decisions within bounds. `say` tells people what is done, and why."""

    def __init__(self, workers: Workers, least: int, most: int, say: Callable[[str], None]) -> None:
        self._workers, self._least, self._most, self._say = workers, least, most, say
        self._since_ms = 0  # only later decisions count
        self._asked = 0  # workers after the last change
        self._rest_until_s = 0.0

    async def run(self, bus_config: BusConfig, base_model: str) -> None:
        """Ask a scheduler every `POLL_S`. Never returns."""
        bus = await Bus.connect(bus_config, "motet-follow", inbox="gateway")
        try:
            while True:
                await asyncio.sleep(POLL_S)
                for sized in await self._told(bus):
                    if sized.base_model == base_model:
                        await self.follow(sized)
        finally:
            await bus.close()

    async def _told(self, bus: Bus) -> list[Sized]:
        """The last decisions; none while nobody decides."""
        asked = StatusRequest(scale=True)
        try:
            reply = await bus.request(subjects.SCHEDULER_STATUS, asked, StatusReply, timeout_s=POLL_S)
        except (MotetError, msgspec.MsgspecError):
            return []
        return [decisions[-1] for decisions in reply.scale if decisions] if isinstance(reply, ClusterStatus) else []

    async def follow(self, sized: Sized) -> None:
        """Carry out a decision, unless it is too old or was carried out before."""
        now_ms, have = unix_ms(), len(self._workers.workers)
        if sized.at_unix_ms <= self._since_ms or now_ms - sized.at_unix_ms > OLD_MS:
            return
        if have < self._asked:
            self._say(f"{have} of {self._asked} workers run: one could not start; the next try in {REST_S:g} s")
            self._asked, self._rest_until_s = have, now_s() + REST_S
        desired = min(max(sized.decision.desired, self._least), self._most)
        if desired == have or (desired > have and now_s() < self._rest_until_s):
            return
        self._say(f"workers: {have} -> {desired if desired > have else have - 1} ({sized.decision.reason})")
        if desired > have:
            await self._workers.grow(desired)
        else:
            leaves = sized.decision.leaves
            await self._workers.shrink(leaves if leaves in self._workers.workers else self._workers.workers[-1])
        self._asked, self._since_ms = len(self._workers.workers), unix_ms()
