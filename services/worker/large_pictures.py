"""Puts pictures that are larger than a message into the object store, where the gateway that owns their request reads them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from hashlib import sha256

from msgspec.structs import replace

from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import MotetError, WorkerLost
from motet.shared.objects import Objects
from motet.shared.telemetry import logger
from motet.shared.wire.stream import Picture, StreamItem

log = logger("motet.worker.pictures")
OPEN_S = 1.0
PUT_S = 30.0
AT_ONCE = 4


class LargePictures:
    """The pictures of one worker that are on their way to the object store, a few at once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._store: Objects | None = None
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def stored(self) -> None:
        """Wait for those that are on their way now."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def store(self, item: StreamItem, then: Callable[[StreamItem], None]) -> None:
        """Store the item's picture. `then` gets the item with its name, or with the error that says that it is lost.

        A lost picture's request goes on at another worker, from its last checkpoint.
        """
        assert item.picture is not None, "there is something to store"
        task = self._bus.spawn(self._put(item, item.picture, then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _put(self, item: StreamItem, picture: Picture, then: Callable[[StreamItem], None]) -> None:
        name = secrets.token_hex(16)
        try:
            async with self._turns, asyncio.timeout(PUT_S):
                if self._store is None:
                    self._store = await Objects.open(self._bus, subjects.PICTURES, wait_s=OPEN_S)
                await self._store.put(name, picture.data)
        except (MotetError, TimeoutError) as error:
            reason = error.message if isinstance(error, MotetError) else f"not stored within {PUT_S:g} s"
            log.warning("picture not stored", extra={"request_id": item.request_id, "error": reason})
            lost = WorkerLost(f"its picture cannot be stored: {reason}")
            then(StreamItem(item.request_id, item.epoch, item.index, [], "error", error=lost.info()))
            return
        digest = sha256(picture.data).digest()
        then(replace(item, picture=replace(picture, data=b"", object_name=name, sha256=digest)))
