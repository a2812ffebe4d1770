"""Sends token frames to the gateways: one message per gateway and engine step, encoded on the event loop.

A frame that the bus cannot take (it was disconnected for longer than its buffer lasts) is dropped, so that memory stays bounded
while the network is away. Its requests are cancelled at once. When the bus takes messages again, their gateways are told
`worker_lost` and resubmit them, also those whose last frame was lost.

An item that is larger than a message has a picture or a checkpoint. The picture goes to the object store PICTURES, and the item
follows with its name (`large_pictures`). Checkpoints and previews are left out: another worker repeats steps then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from motet.services.worker import metrics
from motet.services.worker.large_pictures import LargePictures
from motet.shared import subjects
from motet.shared.bus import Bus, encode
from motet.shared.errors import Unavailable, WorkerLost
from motet.shared.telemetry import logger
from motet.shared.wire.stream import StreamItem, TokenFrame

log = logger("motet.worker.frames")
MAX_LOST = 65_536
OVERHEAD_BYTES = 4096  # upper bound of what the protocol adds to a payload


class FrameSender:
    """Sends frames in order. `on_lost(request_id, epoch)` is called for each request whose tokens were dropped."""

    def __init__(self, bus: Bus, worker_id: str, on_lost: Callable[[str, int], None]) -> None:
        self._bus, self._worker_id, self._on_lost = bus, worker_id, on_lost
        self._queue: deque[tuple[str, int, list[StreamItem]]] = deque()
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._lost: dict[tuple[str, str], StreamItem] = {}  # (gateway, request) -> the error that is still to be sent
        self._pictures = LargePictures(bus)
        self._task = bus.spawn(self._run())

    def put(self, gateway_id: str, step: int, items: list[StreamItem]) -> None:
        """Queue one gateway's items of one step."""
        self._queue.append((gateway_id, step, items))
        self._empty.clear()
        self._wake.set()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all queued frames were sent or dropped."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
                while self._pictures:
                    await self._pictures.stored()
                    await self._empty.wait()
        except TimeoutError:
            log.warning("frames not sent", extra={"frames": len(self._queue)})

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                gateway_id, step, items = self._queue.popleft()
                if await self._send(gateway_id, step, items) and self._lost:
                    await self._apologise(step)
            self._empty.set()

    async def _send(self, gateway_id: str, step: int, items: list[StreamItem]) -> bool:
        data = encode(TokenFrame(self._worker_id, step, items))
        if len(data) + OVERHEAD_BYTES > self._bus.max_payload:
            if len(items) > 1:
                half = len(items) // 2
                first = await self._send(gateway_id, step, items[:half])
                return await self._send(gateway_id, step, items[half:]) and first
            if items[0].picture is not None or items[0].state:
                return await self._send_large(gateway_id, step, items[0])
        try:
            await self._bus.publish_encoded(subjects.stream(gateway_id), data)
        except Unavailable as error:
            self._give_up(gateway_id, items, error)
            return False
        metrics.FRAMES.inc()
        return True

    async def _send_large(self, gateway_id: str, step: int, item: StreamItem) -> bool:
        """Send an item without its checkpoint or preview; with a picture once that is stored. No other frame waits for it."""
        if item.picture is not None and not item.picture.preview:
            self._pictures.store(replace(item, state=b""), lambda stored: self.put(gateway_id, step, [stored]))
            return True
        return await self._send(gateway_id, step, [replace(item, state=b"", picture=None)])

    def _give_up(self, gateway_id: str, items: list[StreamItem], error: Unavailable) -> None:
        metrics.FRAMES_LOST.inc()
        for item in items:
            key = (gateway_id, item.request_id)
            known = self._lost.get(key)
            if known is not None and known.epoch >= item.epoch:
                continue
            lost = WorkerLost(f"worker {self._worker_id} could not send its tokens: {error.message}")
            if len(self._lost) < MAX_LOST:
                self._lost[key] = StreamItem(item.request_id, item.epoch, item.index, [], finish="error", error=lost.info())
            self._on_lost(item.request_id, item.epoch)

    async def _apologise(self, step: int) -> None:
        owed, self._lost = self._lost, {}
        by_gateway: dict[str, list[StreamItem]] = {}
        for (gateway_id, _), item in owed.items():
            by_gateway.setdefault(gateway_id, []).append(item)
        for gateway_id, items in by_gateway.items():
            await self._send(gateway_id, step, items)
