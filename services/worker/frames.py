"""Sends token frames to the gateways: one message per gateway and engine step, encoded on the event loop.

A frame that the bus cannot take (it was disconnected for longer than its buffer lasts) is dropped, so that memory stays bounded
while the network is away. Its requests are cancelled at once. When the bus takes messages again, their gateways are told
`worker_lost` and resubmit them, also those whose last frame was lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from motet.services.worker import metrics
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
        self._task = bus.spawn(self._run())

    def put(self, gateway_id: str, step: int, items: list[StreamItem]) -> None:
        """Queue one gateway's items of one step."""
        self._queue.append((gateway_id, step, items))
        self._empty.clear()
        self._wake.set()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all queued frames were sent or dropped."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
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
        if len(data) + OVERHEAD_BYTES > self._bus.max_payload and len(items) > 1:
            half = len(items) // 2
            first = await self._send(gateway_id, step, items[:half])
            return await self._send(gateway_id, step, items[half:]) and first
        try:
            await self._bus.publish_encoded(subjects.stream(gateway_id), data)
        except Unavailable as error:
            self._give_up(gateway_id, items, error)
            return False
        metrics.FRAMES.inc()
        return True

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
