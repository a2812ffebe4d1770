"""Who is alive. Every worker and gateway renews a key in KV `motet_leases`; everybody else watches.

A lease is lost when its key is deleted (a clean goodbye), comes back under another incarnation (a restart), or has not
been renewed for `EXPIRY_S`. While this process itself has no connection to NATS nothing expires, and after a
reconnect every lease gets a fresh `EXPIRY_S`: losing the broker must not look like losing all workers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from nats import errors as nats_errors
from nats.js import errors as js_errors
from nats.js.kv import KV_DEL, KV_PURGE

from shared import subjects
from shared.bus import Bus, decode, encode
from shared.clock import now_s, unix_ms
from shared.messages import Lease
from shared.telemetry import logger

log = logger("motet.leases")
RENEW_S = 0.5
EXPIRY_S = 2.5


class LeaseHolder:
    """Keeps this process's own lease. `kind` is "worker" or "gateway"."""

    def __init__(self, bus: Bus, kind: str, instance_id: str, incarnation: str) -> None:
        self._bus, self._key, self._incarnation = bus, f"{kind}.{instance_id}", incarnation
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Write the lease, then renew it in the background."""
        self._kv = await self._bus.key_value(subjects.KV_LEASES)
        await self._renew()
        self._task = self._bus.spawn(self._keep())

    async def _renew(self) -> None:
        await self._kv.put(self._key, encode(Lease(incarnation=self._incarnation, renewed_unix_ms=unix_ms())))

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._renew()
            except (nats_errors.Error, js_errors.Error, TimeoutError, OSError) as error:
                log.warning("lease not renewed", extra={"key": self._key, "error": repr(error)})

    async def release(self) -> None:
        """Say goodbye: watchers see it at once."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(nats_errors.Error, js_errors.Error, TimeoutError):
                await self._kv.delete(self._key)


class LeaseWatch:
    """Follows all leases of one kind and calls `on_lost(instance_id)` once for each that ends."""

    def __init__(self, bus: Bus, kind: str, on_lost: Callable[[str], None]) -> None:
        self._bus, self._kind, self._on_lost = bus, kind, on_lost
        self._seen: dict[str, tuple[str, float]] = {}  # id -> (incarnation, when last renewed)

    async def start(self) -> None:
        """Read the present leases, then follow them in the background."""
        kv = await self._bus.key_value(subjects.KV_LEASES)
        watcher = await kv.watch(f"{self._kind}.*", inactive_threshold=60.0)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bus.spawn(self._follow(watcher, ready))
        self._bus.spawn(self._expire())
        await asyncio.wait_for(ready, timeout=10.0)

    def alive(self, instance_id: str) -> bool:
        """Whether the lease is held as far as is known here."""
        return instance_id in self._seen

    def ids(self) -> list[str]:
        """Everybody alive."""
        return list(self._seen)

    async def _follow(self, watcher, ready: asyncio.Future[None]) -> None:  # type: ignore[no-untyped-def]
        async for entry in watcher:
            if entry is None:
                if not ready.done():
                    ready.set_result(None)
                continue
            instance_id = entry.key.split(".", 1)[1]
            if entry.operation in (KV_DEL, KV_PURGE) or not entry.value:
                self._lose(instance_id)
                continue
            try:
                lease = decode(entry.value, Lease)
            except msgspec.MsgspecError:
                continue
            if not ready.done() and unix_ms() - lease.renewed_unix_ms > EXPIRY_S * 1000:
                continue  # left behind by a process that died before we started
            known = self._seen.get(instance_id)
            if known is not None and known[0] != lease.incarnation:
                self._lose(instance_id)
            self._seen[instance_id] = (lease.incarnation, now_s())

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S / 2)
            now = now_s()
            if not self._bus.connected:
                self._seen = {i: (inc, now) for i, (inc, _) in self._seen.items()}
                continue
            for instance_id, (_, renewed) in list(self._seen.items()):
                if now - renewed > EXPIRY_S:
                    self._lose(instance_id)

    def _lose(self, instance_id: str) -> None:
        if self._seen.pop(instance_id, None) is not None:
            log.info("lease lost", extra={"kind": self._kind, "id": instance_id})
            self._on_lost(instance_id)
