"""Follows the schedulers' decisions about numbers of workers: starts and stops workers of a stack (`motet up --workers 1..4`).

    scheduler ──Sized──> Follower ──> Stack.grow / Stack.shrink

A decision is carried out once. It says how many workers there should be, not how many more, so one that was made before a new
worker had told that it starts does no harm. Workers leave in the background.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from motet.cli.stack import Stack
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s, unix_ms
from motet.shared.config import BusConfig
from motet.shared.errors import MotetError
from motet.shared.wire.scale import OLD_MS, Sized

REST_S = 60.0
"""After a worker that could not start."""
AGAIN_S = 5.0
"""After NATS could not be reached."""


class Workers(Protocol):
    """What a follower changes."""

    @property
    def workers(self) -> list[str]:
        """Those that run or start."""

    async def grow(self, count: int) -> None:
        """Start workers until there are so many."""

    async def shrink(self, worker: str) -> None:
        """Let this one drain and stop in the background, or the last one where it is not known."""


class Follower:
    """Carries out decisions within bounds. `say` tells people what is done, and why."""

    def __init__(self, workers: Workers, least: int, most: int, say: Callable[[str], None]) -> None:
        self._workers, self._least, self._most, self._say = workers, least, most, say
        self._since_ms = 0  # only later decisions count
        self._asked = 0  # workers after the last change
        self._rest_until_s = 0.0
        self._last: Sized | None = None
        self._news = asyncio.Event()

    async def run(self, bus_config: BusConfig, base_model: str) -> None:
        """Follow the decisions for a base model. Never returns."""

        def heard(sized: Sized) -> None:
            if sized.base_model == base_model:
                self._last = sized
                self._news.set()

        while True:
            try:
                bus = await Bus.connect(bus_config, "motet-follow", inbox="gateway")
                break
            except MotetError as error:
                self._say(f"numbers of workers cannot be followed: {error.message}; next try in {AGAIN_S:g} s")
                await asyncio.sleep(AGAIN_S)
        try:
            await bus.subscribe(subjects.SCALE, Sized, heard)
            while True:
                await self._news.wait()
                self._news.clear()
                assert self._last is not None
                await self.follow(self._last)
        finally:
            await bus.close()

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
        self._since_ms = sized.at_unix_ms
        self._say(f"workers: {have} -> {desired if desired > have else have - 1} ({sized.decision.reason})")
        if desired > have:
            await self._workers.grow(desired)
        else:
            await self._workers.shrink(sized.decision.leaves)
        self._asked = len(self._workers.workers)


async def followed(stack: Stack, say: Callable[[str], None]) -> None:
    """Wait for a failure of a stack; meanwhile start and stop workers as schedulers decide, if `--workers` is a range."""
    logging.getLogger("motet").addHandler(logging.NullHandler())  # the services say what happens to NATS
    options = stack.options
    if options.workers_most <= options.workers_least:
        await stack.failed()
        return
    follower = Follower(stack, options.workers_least, options.workers_most, say)
    following = asyncio.create_task(follower.run(stack.bus_config("gateway"), options.served_model_name))
    following.add_done_callback(lambda task: None if task.cancelled() else say(f"nothing is followed: {task.exception()!r}"))
    try:
        await stack.failed()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
