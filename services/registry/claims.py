"""The claims on adapter versions, and the sweeps that delete what nobody claims or uses. `store` tells which records there are.

Times are taken by this registry's own monotonic clock, from when it first saw a record, so a clock that jumps deletes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import msgspec

from motet.services.registry.usage import IDLE_S
from motet.shared import subjects
from motet.shared.adapter_watch import CHAT, QUARANTINE, VERSION, entry_key
from motet.shared.bus import Bus
from motet.shared.clock import now_s, unix_ms
from motet.shared.errors import Overloaded, Unavailable
from motet.shared.kv import Bucket
from motet.shared.kv_watch import KvWatch
from motet.shared.model import AdapterEntry, AdapterVersion
from motet.shared.objects import Objects
from motet.shared.telemetry import logger

log = logger("motet.registry.store")
HOLDS = "holds."
ATTEMPTS = 20
DELETING_S = 10.0  # how long a deletion may take before others take it over (at three times this)
UNUSED_S = IDLE_S  # a replaced version waits this long for requests that are on their way
LOST_HOLD_S = 15 * 60.0  # a hold without an entry is from a crash when it was there for longer than this

_R = TypeVar("_R", bound=msgspec.Struct)


class Holds(msgspec.Struct, frozen=True):
    """The claims on one digest: {hold id: holder}. `since_unix_ms` is the time of the last change, for people.

    A holder is an entry: its name, with the prefix `<tenant>:` if it is private.
    """

    digest: str
    holders: dict[str, str]
    since_unix_ms: int
    deleting: bool = False


class _Seen:
    """A record as this registry saw it, and since when, by its own monotonic clock."""

    __slots__ = ("born_s", "holds", "since_s")

    def __init__(self, holds: Holds, before: _Seen | None) -> None:
        now = now_s()
        self.holds = holds
        self.since_s: float = before.since_s if before is not None and before.holds == holds else now
        self.born_s: dict[str, float] = {
            hold: before.born_s.get(hold, now) if before is not None else now for hold in holds.holders
        }

    @property
    def stuck(self) -> bool:
        """Whether this is an abandoned deletion."""
        return self.holds.deleting and now_s() - self.since_s > 3 * DELETING_S


@contextlib.contextmanager
def reachable() -> Iterator[None]:
    """A context that raises Unavailable when JetStream or the registry's disk is full or does not answer."""
    try:
        yield
    except Overloaded as error:
        raise Unavailable("the adapter store is full: delete adapters, or give NATS more room", retry_after_s=60.0) from error
    except OSError as error:
        if isinstance(error, TimeoutError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise Unavailable(f"the adapter store does not answer: {error.strerror or error!r}") from error
        raise Unavailable("the registry's disk has no room for the upload", retry_after_s=60.0) from error


class Claims:
    """Versions in the store, and who holds them. `idle(digest)` says whether no request needs a version."""

    def __init__(self, bus: Bus, idle: Callable[[str], bool]) -> None:
        self._bus, self._idle = bus, idle
        self._holds: dict[str, _Seen] = {}
        self._unused_chats: dict[str, tuple[int, float]] = {}  # digest -> revision, and since when it is unused on our clock
        self._orphans: dict[str, float] = {}  # interrupted uploads, and since when on our clock
        self._watch = KvWatch(
            bus,
            subjects.KV_ADAPTERS,
            HOLDS + "*",
            on_put=self._saw_holds,
            on_delete=lambda key: self._forget_holds({key}),
            on_synced=lambda keys: self._forget_holds({HOLDS + digest for digest in self._holds} - keys),
        )

    async def start(self) -> None:
        """Open the buckets. Raises Unavailable when they do not appear."""
        self._kv = await Bucket.open(self._bus, subjects.KV_ADAPTERS)
        self._probes = await Bucket.open(self._bus, subjects.KV_PROBES)
        self._blobs = await Objects.open(self._bus, subjects.BLOBS)
        await self._watch.start()

    def _saw_holds(self, key: str, value: bytes) -> None:
        digest = key.removeprefix(HOLDS)
        self._holds[digest] = _Seen(msgspec.json.decode(value, type=Holds), self._holds.get(digest))

    def _forget_holds(self, keys: set[str]) -> None:
        for key in keys:
            self._holds.pop(key.removeprefix(HOLDS), None)

    def claims(self, digest: str) -> dict[str, str]:
        """The claims on a version as far as this registry has seen them: {hold id: holder}."""
        seen = self._holds.get(digest)
        return seen.holds.holders if seen is not None else {}

    async def sweep(self) -> int:
        """Delete versions that nothing holds or uses, and clean up after crashes; returns the number of deleted versions.

        Safe to run in every registry at once, and to interrupt.
        """
        gone = 0
        for digest, seen in list(self._holds.items()):
            unused = not seen.holds.deleting and not seen.holds.holders and now_s() - seen.since_s > UNUSED_S
            with reachable():
                if seen.stuck or (unused and self._idle(digest)):
                    gone += await self._collect(digest)
                for hold, holder in seen.holds.holders.items():
                    if now_s() - seen.born_s[hold] > LOST_HOLD_S:
                        await self._drop_lost(digest, hold, holder)
                        seen.born_s[hold] = now_s()  # looked at; once more after as long
        return gone

    async def _drop_lost(self, digest: str, hold: str, holder: str) -> None:
        tenant, _, name = holder.rpartition(":")
        entry, _ = await self._read(entry_key(name, tenant), AdapterEntry)
        if entry is None or entry.claims.get(hold) != digest:
            log.info("lost claim dropped", extra={"digest": digest, "adapter": holder})
            await self._release(digest, hold)

    async def sweep_orphans(self) -> int:
        """Free the chunks of interrupted blob uploads; returns the number of uploads.

        Chunks that were seen without their blob for `LOST_HOLD_S` come from a crash: no upload takes that long.
        """
        gone = 0
        with reachable():
            self._orphans = {upload: self._orphans.get(upload, now_s()) for upload in await self._blobs.orphans()}
            for upload in [u for u, since_s in self._orphans.items() if now_s() - since_s > LOST_HOLD_S]:
                log.info("cut-off upload dropped", extra={"upload": upload})
                await self._blobs.drop_chunks(upload)
                del self._orphans[upload]
                gone += 1
        return gone

    async def sweep_chats(self, unused: Collection[str]) -> int:
        """Delete what no version brings any more. `unused`: digests of chats without a version, as a watch sees them.

        Only one that nobody has written for `LOST_HOLD_S` is deleted: a registration writes it before its version.
        """
        gone = 0
        with reachable():
            seen, self._unused_chats = self._unused_chats, {}
            for digest in unused:
                found = await self._kv.get(CHAT + digest)
                if found is None:
                    continue
                revision, since_s = seen.get(digest, (0, 0.0))
                if revision != found.revision:
                    self._unused_chats[digest] = (found.revision, now_s())
                elif now_s() - since_s <= LOST_HOLD_S:
                    self._unused_chats[digest] = (revision, since_s)
                else:
                    gone += await self._kv.delete(CHAT + digest, revision)
        return gone

    # ---- holds

    async def _claim(self, digest: str, holder: str) -> str:
        """Add a hold on `digest`. Waits while another registry deletes it."""
        hold = f"{unix_ms()}-{secrets.token_hex(6)}"
        deadline = now_s() + 5 * DELETING_S
        while now_s() < deadline:
            holds, revision = await self._read(HOLDS + digest, Holds)
            if holds is not None and holds.deleting:
                seen = self._holds.get(digest)
                if seen is not None and seen.holds == holds and seen.stuck:
                    await self._collect(digest)
                else:
                    await asyncio.sleep(0.05)
                continue
            holders = (holds.holders if holds is not None else {}) | {hold: holder}
            if await self._write(HOLDS + digest, Holds(digest, holders, unix_ms()), revision) is not None:
                return hold
        raise Unavailable(f"version {digest[:12]} is being deleted, and the deletion does not end", retry_after_s=DELETING_S)

    async def _release(self, digest: str, hold: str) -> None:
        for _ in range(ATTEMPTS):
            holds, revision = await self._read(HOLDS + digest, Holds)
            if holds is None or hold not in holds.holders:
                return
            rest = {key: holder for key, holder in holds.holders.items() if key != hold}
            if await self._write(HOLDS + digest, Holds(digest, rest, unix_ms()), revision) is not None:
                return

    async def _collect(self, digest: str) -> bool:
        """Delete a version without holders: True if this call deleted it."""
        holds, revision = await self._read(HOLDS + digest, Holds)
        if holds is None or holds.holders:
            return False
        version, version_revision = await self._read(VERSION + digest, AdapterVersion)
        began = now_s()
        marked = await self._write(HOLDS + digest, Holds(digest, {}, unix_ms(), deleting=True), revision)
        if marked is None:
            return False
        if version is not None and not await self._kv.delete(VERSION + digest, version_revision):
            return False
        if now_s() - began > DELETING_S:
            return False  # too slow: another registry may have taken over, finished, and stored it again
        await self._blobs.delete(digest)
        await self._kv.delete(QUARANTINE + digest)
        await self._probes.delete(digest)
        if not await self._kv.delete(HOLDS + digest, marked):
            return False
        log.info("version deleted", extra={"digest": digest})
        return True

    # ---- records

    async def _read(self, key: str, kind: type[_R]) -> tuple[_R | None, int]:
        """A record and its revision; (None, 0) when there is none."""
        found = await self._kv.get(key)
        return (None, 0) if found is None else (msgspec.json.decode(found.value, type=kind), found.revision)

    async def _write(self, key: str, record: msgspec.Struct, revision: int) -> int | None:
        """Replace exactly `revision` (0: no record): returns the new revision, or None if the revision has changed."""
        return await self._kv.replace(key, msgspec.json.encode(record), revision)
