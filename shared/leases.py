"""Leases: every worker and gateway renews a key in KV `motet_leases`, and others watch the keys.

A lease is lost when its key is deleted (a clean stop), when it comes back with another incarnation (a restart), or when it was
not renewed for `EXPIRY_S`. Losing NATS must not look like losing all workers. So nothing expires while this process receives
nothing from NATS (no connection, a hung server, or its own event loop stood still), or while no lease can be renewed (a cluster
elects a new leader for the bucket). Afterwards every lease gets a new `EXPIRY_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from motet.shared import subjects
from motet.shared.bus import Bus, decode, encode
from motet.shared.clock import now_s, unix_ms
from motet.shared.errors import MotetError
from motet.shared.kv import Bucket
from motet.shared.kv_watch import KvWatch
from motet.shared.telemetry import logger
from motet.shared.wire.worker_state import Lease

log = logger("motet.leases")
RENEW_S = 0.5
EXPIRY_S = 2.5
UNWRITABLE_S = 1.5  # no renewal at all for this long: the bucket's trouble, not its holders'


class LeaseHolder:
    """Keeps this process's own lease. `kind` is "worker" or "gateway"."""

    def __init__(self, bus: Bus, kind: str, instance_id: str, incarnation: str) -> None:
        self._bus, self._key, self._incarnation = bus, f"{kind}.{instance_id}", incarnation
        self._task: asyncio.Task[None] | None = None
        self.renewed_s = 0.0  # when the bucket last took a renewal

    async def start(self) -> None:
        """Write the lease, then renew it in the background."""
        self._kv = await Bucket.open(self._bus, subjects.KV_LEASES)
        await self._renew()
        self._task = self._bus.spawn(self._keep())

    async def _renew(self) -> None:
        await self._kv.put(self._key, encode(Lease(incarnation=self._incarnation, renewed_unix_ms=unix_ms())))
        self.renewed_s = now_s()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                # a write that went down with a broker must not hold up the first one to the next broker
                await asyncio.wait_for(self._renew(), timeout=RENEW_S)
            except (MotetError, TimeoutError) as error:
                log.warning("lease not renewed", extra={"key": self._key, "error": repr(error)})

    async def release(self) -> None:
        """Delete the lease: watchers see it at once."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(MotetError):
                await self._kv.delete(self._key)


class _Held(NamedTuple):
    incarnation: str
    renewed_unix_ms: int  # by the holder's clock: tells one renewal from a repeated one
    seen_s: float  # by ours


class LeaseWatch:
    """Follows all leases of one kind and calls `on_lost(instance_id)` once for each that ends.

    `own` is this process's own lease: while it cannot be renewed, no other lease expires. Without `own`, every kind is
    followed, and nothing expires while no renewal arrives at all.
    """

    def __init__(self, bus: Bus, kind: str, on_lost: Callable[[str], object], own: LeaseHolder | None = None) -> None:
        self._bus, self._kind, self._on_lost, self._own = bus, kind, on_lost, own
        self._seen: dict[str, _Held] = {}
        self._renewal_s = 0.0  # when the last renewal of any lease came
        self._watch = KvWatch(
            bus,
            subjects.KV_LEASES,
            f"{kind}.*" if own is not None else "*.*",
            on_put=self._renewed,
            on_delete=self._deleted,
            # a key can have aged out while the broker was away and its holder live: `_expire` decides, not absence
            on_synced=lambda keys: None,
        )

    async def start(self) -> None:
        """Read the present leases, then follow them in the background."""
        await self._watch.start()
        self._bus.spawn(self._expire())

    def alive(self, instance_id: str) -> bool:
        """Whether the lease is held, as far as this process knows."""
        return instance_id in self._seen

    def ids(self) -> list[str]:
        """The ids of all held leases."""
        return list(self._seen)

    def _deleted(self, key: str) -> None:
        kind, instance_id = key.split(".", 1)
        if kind == self._kind:
            self._lose(instance_id)

    def _renewed(self, key: str, value: bytes) -> None:
        self._renewal_s = now_s()
        kind, instance_id = key.split(".", 1)
        if kind != self._kind:
            return
        try:
            lease = decode(value, Lease)
        except msgspec.MsgspecError as error:
            log.warning("unreadable lease", extra={"key": key, "error": str(error)})
            return
        known = self._seen.get(instance_id)
        if known is None and not self._watch.live and unix_ms() - lease.renewed_unix_ms > EXPIRY_S * 1000:
            return  # left behind by a process that died before we looked
        if known is not None and known.incarnation == lease.incarnation and known.renewed_unix_ms == lease.renewed_unix_ms:
            return  # the same renewal again, after the watch was interrupted
        if known is not None and known.incarnation != lease.incarnation:
            self._lose(instance_id)
        self._seen[instance_id] = _Held(lease.incarnation, lease.renewed_unix_ms, now_s())

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S / 2)
            now = now_s()
            renewal_s = self._renewal_s if self._own is None else self._own.renewed_s
            if not self._watch.live or now - renewal_s > UNWRITABLE_S:
                self._seen = {i: held._replace(seen_s=now) for i, held in self._seen.items()}
                continue
            for instance_id, held in list(self._seen.items()):
                if now - held.seen_s > EXPIRY_S:
                    self._lose(instance_id)

    def _lose(self, instance_id: str) -> None:
        if self._seen.pop(instance_id, None) is not None:
            log.info("lease lost", extra={"kind": self._kind, "id": instance_id})
            self._on_lost(instance_id)
