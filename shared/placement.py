"""Desired residency: which adapters are at home on each worker (KV `motet_placement`).

    the scheduler that plans ──Placement per worker──> bucket ──> the worker: load into free room
                                                         ├──────> schedulers: a request elsewhere costs more
                                                         └──────> gateways: shown in `/v1/adapters` and `motet status`

The key is the worker's id. The scheduler owns the values. It writes a changed value and deletes the values of workers that are
gone. A registry of an earlier version does not provision the bucket; then nothing is placed, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from motet.shared import subjects
from motet.shared.bus import Bus, decode
from motet.shared.errors import MotetError
from motet.shared.kv_watch import KvWatch
from motet.shared.telemetry import logger

log = logger("motet.placement")


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The adapters (digests) that a worker should keep loaded, the most important first; which scheduler wrote it, and when."""

    owner: str
    digests: tuple[str, ...]
    since_unix_ms: int


class PlacementWatch:
    """Follows the placements that match `pattern`; `on_change()` is called after each change, in the event loop."""

    def __init__(self, bus: Bus, pattern: str, on_change: Callable[[], None] = lambda: None) -> None:
        self._bus, self._on_change = bus, on_change
        self._known: dict[str, Placement] = {}
        self._watch = KvWatch(
            bus, subjects.KV_PLACEMENT, pattern, on_put=self._put, on_delete=self._delete, on_synced=self._synced
        )

    async def start(self) -> None:
        """Follow in the background, as soon as the bucket is there."""
        self._bus.spawn(self._follow())

    async def _follow(self) -> None:
        while True:
            try:
                await self._watch.start()
                return
            except MotetError as error:
                log.info("no placements yet", extra={"error": error.message})

    @property
    def all(self) -> Mapping[str, Placement]:
        """The placements by worker id."""
        return self._known

    def digests(self, worker_id: str) -> tuple[str, ...]:
        """The adapters that a worker should keep loaded."""
        known = self._known.get(worker_id)
        return known.digests if known is not None else ()

    def workers(self, digest: str) -> list[str]:
        """The workers that should keep this adapter loaded."""
        return sorted(worker_id for worker_id, known in self._known.items() if digest in known.digests)

    def _put(self, key: str, value: bytes) -> None:
        try:
            placement = decode(value, Placement)
        except msgspec.MsgspecError as error:
            log.warning("unreadable placement", extra={"worker": key, "error": str(error)})
            return
        if self._known.get(key) != placement:
            self._known[key] = placement
            self._on_change()

    def _delete(self, key: str) -> None:
        if self._known.pop(key, None) is not None:
            self._on_change()

    def _synced(self, keys: set[str]) -> None:
        for key in self._known.keys() - keys:
            self._delete(key)
