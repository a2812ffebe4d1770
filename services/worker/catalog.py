"""The registry's adapters as one worker knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from motet.shared.adapter_watch import AdapterWatch
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import AdapterNotFound
from motet.shared.model import AdapterRef, AdapterVersion

GRACE_S = 0.25  # a gateway may know a new adapter a moment before this worker does


class Catalog:
    """`on_change(versions)` is called with every version, by digest, at the start and after each change."""

    def __init__(self, bus: Bus, on_change: Callable[[Mapping[str, AdapterVersion]], None]) -> None:
        self._on_change = on_change
        self._watch = AdapterWatch(bus, self._changed)

    async def start(self) -> None:
        """Follow the registry."""
        await self._watch.start()
        self._changed()

    def _changed(self) -> None:
        self._on_change(self._watch.digests)

    async def check(self, ref: AdapterRef) -> None:
        """Raises AdapterNotFound when the registry does not have this version."""
        deadline = now_s() + GRACE_S
        while self._watch.by_digest(ref.digest) is None:
            if now_s() > deadline:
                raise AdapterNotFound(f"adapter {ref.name!r} ({ref.digest[:12]}) is not registered", param="model")
            await asyncio.sleep(0.01)
