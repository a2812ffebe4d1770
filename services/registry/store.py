"""Adapters in JetStream: blobs by digest, version records and names, safe with several registries at once.

    motet_blobs      <digest>            the bytes; equal content is stored once
    motet_adapters   holds.<digest>      Holds: which entries claim this digest (the registry's own bookkeeping)
                     refused             RefusedAdapters: what --adapters-dir holds and cannot be served
                     forgotten           Forgotten: what --adapters-dir holds and is not registered again
                     version.<digest>    AdapterVersion
                     quarantine.<digest>    Quarantine: why a version must not answer, as a worker's probe found
                     chat.<digest>       AdapterChat: what versions bring for chats; many may bring the same
                     name.<name>         AdapterEntry that all tenants share
                     private.<tenant>.<name>    AdapterEntry of one tenant; several tenants may use the same name

A name never points at a missing blob, whenever a registry crashes. Two orders of writes and compare-and-set guarantee it:

    publish   hold -> blob -> chat -> version -> name             a crash leaves at most a hold, which the sweep removes later
    collect   holds marked `deleting` -> version -> blob -> holds     only without holders; the sweep completes it after a crash

Every entry has its own hold (a new id) for each version that it keeps, so removing one never removes another's claim on equal
content (`claims`). A registry that finds `deleting` waits until the deletion is complete. Every write of a record carries the
revision that was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from motet.services.registry.claims import ATTEMPTS, HOLDS, Claims, Holds, reachable
from motet.services.registry.files import quoted, too_large
from motet.shared import subjects
from motet.shared.adapter_chat import AdapterChat
from motet.shared.adapter_watch import CHAT, QUARANTINE, VERSION, entry_key
from motet.shared.bus import Bus
from motet.shared.clock import unix_ms
from motet.shared.errors import AdapterExists, AdapterInUse, AdapterNotFound, BadRequest, Conflict, MotetError, Unavailable
from motet.shared.model import ADAPTER_NAME_RULE, AdapterEntry, AdapterVersion, Pin, Quarantine, is_adapter_name
from motet.shared.objects import Objects, read_object
from motet.shared.refused_adapters import KEY as REFUSED
from motet.shared.refused_adapters import RefusedAdapters
from motet.shared.tenancy import SHARED, qualified
from motet.shared.wire.registry import AdapterInfo

FORGOTTEN, FORGOTTEN_MAX = "forgotten", 1000
CHUNK_BYTES = 1 << 20  # each is acknowledged before the next one is sent
PUT_S = 300.0  # a blob that is not stored by then is given up


class Forgotten(msgspec.Struct, frozen=True):
    """Names in --adapters-dir that were removed for good."""

    names: tuple[str, ...] = ()


def check_name(name: str, base_model: str) -> None:
    """Raises BadRequest when `name` is not a valid adapter name."""
    if not is_adapter_name(name):
        raise BadRequest(f"adapter name {quoted(name)}: {ADAPTER_NAME_RULE}", param="name")
    if name == base_model:
        raise BadRequest(f"adapter name {quoted(name)} is the base model's name", param="name")


class AdapterStore(Claims):
    """The only writer of adapters. Any number of registries may each have one.

    `idle(digest)` says whether no request needs a version, including requests that are moving between two workers. A name keeps
    `older_versions` of its earlier versions.
    """

    def __init__(self, bus: Bus, idle: Callable[[str], bool], older_versions: int = 0) -> None:
        super().__init__(bus, idle)
        self._older_versions = older_versions

    async def start(self) -> None:
        """Open the buckets. Raises Unavailable when they do not appear."""
        await super().start()
        self._uploads = await Objects.open(self._bus, subjects.UPLOADS)

    async def put_refused(self, refused: RefusedAdapters) -> None:
        """Publish which adapters of --adapters-dir are not served. Raises Unavailable."""
        with reachable():
            await self._kv.put(REFUSED, msgspec.json.encode(refused))

    # ---- quarantine

    async def quarantine(self, why: Quarantine) -> bool:
        """Keep a version from answering. Returns whether it was free until now. Raises AdapterNotFound."""
        with reachable():
            if (await self._read(VERSION + why.digest, AdapterVersion))[0] is None:
                raise AdapterNotFound(f"there is no version {why.digest[:12]}", param="digest")
            return await self._write(QUARANTINE + why.digest, why, 0) is not None

    async def release(self, digest: str) -> bool:
        """End the quarantine of a version, if there is one, and forget its reference.

        Returns whether it was quarantined.
        """
        with reachable():
            found, revision = await self._read(QUARANTINE + digest, Quarantine)
            await self._probes.delete(digest)
            if found is None:
                return False
            return await self._kv.delete(QUARANTINE + digest, revision)

    # ---- verbs

    async def check_free(self, name: str, tenant: str = SHARED) -> None:
        """Raises AdapterExists when `name` is taken. A cheap check before any work."""
        with reachable():
            if (await self._read(entry_key(name, tenant), AdapterEntry))[0] is not None:
                raise _exists(name)

    async def publish(
        self,
        name: str,
        version: AdapterVersion,
        blob: bytes,
        *,
        replace: bool,
        tenant: str = SHARED,
        left_out: tuple[str, ...] = (),
        chat: AdapterChat | None = None,
    ) -> tuple[AdapterInfo, str]:
        """Store `blob` and let `tenant`'s `name` point at it. `left_out` is noted with the name. `chat`: what
        `version.chat` is the digest of.

        Returns the entry and "registered", "replaced" or "unchanged". Raises AdapterExists when the name is taken and `replace`
        is not set, also when another client took it meanwhile.
        """
        facts = {"source": version.source, "left_out": left_out}
        with reachable():
            async with asyncio.timeout(PUT_S + 30.0):
                for _ in range(ATTEMPTS):
                    present, revision = await self._read(entry_key(name, tenant), AdapterEntry)
                    if present is not None and not replace:
                        raise _exists(name)
                    if present is not None and present.digest == version.digest and present.alias_of is None:
                        stored, _ = await self._read(VERSION + version.digest, AdapterVersion)
                        if stored is not None and await self._blobs.whole(version.digest, len(blob)):
                            return AdapterInfo(entry=present, version=stored), "unchanged"
                    hold = await self._claim(version.digest, qualified(name, tenant))
                    try:
                        await self._put_blob(version.digest, blob)
                        if chat is not None:  # written again, so that no sweep takes it for unused
                            await self._kv.put(CHAT + version.chat, msgspec.json.encode(chat))
                        version = await self._put_version(version)
                    except BaseException:
                        with contextlib.suppress(MotetError, TimeoutError):  # then the sweep does it
                            await self._release(version.digest, hold)
                        raise
                    # From here on a failure leaves the hold: the name may have been written though the answer was lost.
                    own = present if present is not None and present.alias_of is None else None
                    older = _older(own)[: self._older_versions] if own is not None else ()
                    entry = _entry(present, name=name, digest=version.digest, hold=hold, tenant=tenant, older=older, **facts)
                    if await self._replace(present, entry, revision):
                        return AdapterInfo(entry=entry, version=version), "replaced" if present else "registered"
                    await self._release(version.digest, hold)
        raise Conflict(f"adapter {quoted(name)} keeps being changed by other clients", param="name")

    async def alias(self, name: str, target: str, tenant: str = SHARED, *, follows: bool = False) -> AdapterInfo:
        """Let `tenant`'s `name` point at the version that `target` refers to for this tenant now.

        `follows` is only stored: whoever changes the target calls this again for each alias that follows it. A name that is an
        adapter of its own is not overwritten.
        """
        with reachable():
            for _ in range(ATTEMPTS):
                aimed = None
                if is_adapter_name(target):
                    aimed, _ = await self._read(entry_key(target, tenant), AdapterEntry)
                    if aimed is None and tenant:
                        aimed, _ = await self._read(entry_key(target), AdapterEntry)
                if aimed is None:
                    raise AdapterNotFound(f"there is no adapter {quoted(target)}", param="target")
                present, revision = await self._read(entry_key(name, tenant), AdapterEntry)
                if present is not None and present.alias_of is None:
                    raise _exists(name)
                same = ("alias_of", target), ("digest", aimed.digest), ("follows", follows)
                if present is not None and all(getattr(present, field) == value for field, value in same):
                    version, _ = await self._read(VERSION + aimed.digest, AdapterVersion)
                    if version is not None:
                        return AdapterInfo(entry=present, version=version)
                hold = await self._claim(aimed.digest, qualified(name, tenant))
                version, _ = await self._read(VERSION + aimed.digest, AdapterVersion)
                facts: dict[str, Any] = {"digest": aimed.digest, "source": aimed.source, "left_out": aimed.left_out}
                facts |= {"alias_of": target, "follows": follows}
                entry = _entry(present, name=name, hold=hold, tenant=tenant, **facts)
                if version is not None and await self._replace(present, entry, revision):
                    return AdapterInfo(entry=entry, version=version)
                await self._release(aimed.digest, hold)
        raise Conflict(f"adapter {quoted(target)} keeps being changed by other clients", param="target")

    async def rollback(self, name: str, version: int, tenant: str = SHARED) -> tuple[AdapterInfo, bool]:
        """Let `tenant`'s `name` point at its kept `version` again; 0: the one before the present one.

        Returns the entry and whether it has changed. The present version is kept in its place. Raises AdapterNotFound when the
        name does not have that version, BadRequest for an alias.
        """
        with reachable():
            for _ in range(ATTEMPTS):
                entry, revision = await self._entry_of(name, tenant)
                if entry.alias_of is not None:
                    raise BadRequest(
                        f"{quoted(name)} is an alias of {quoted(entry.alias_of)}, which has the versions", param="name"
                    )
                wanted = version or max((one.version for one in entry.older if one.version < entry.version), default=0)
                back = next((one for one in entry.older if one.version == wanted), None)
                if back is not None:
                    older = tuple(one for one in _older(entry) if one.version != back.version)
                    after = msgspec.structs.replace(back, pin=entry.pin, older=older, updated_unix_ms=unix_ms())
                elif wanted == entry.version:
                    after = entry
                else:
                    kept = ", ".join(str(one.version) for one in sorted(entry.older, key=lambda one: one.version)) or "none"
                    asked = f"version {version}" if version else "version before it"
                    raise AdapterNotFound(
                        f"adapter {quoted(name)} has version {entry.version} and no {asked}; kept older versions: {kept}",
                        param="version",
                    )
                record, _ = await self._read(VERSION + after.digest, AdapterVersion)
                if record is None:
                    raise Unavailable(f"version {after.version} of adapter {quoted(name)} is lost")
                if after is entry or await self._replace(entry, after, revision):
                    return AdapterInfo(entry=after, version=record), after is not entry
        raise Conflict(f"adapter {quoted(name)} keeps being changed by other clients", param="name")

    async def pin(self, name: str, workers: tuple[str, ...], tenant: str = SHARED) -> tuple[AdapterInfo, bool]:
        """Pin `tenant`'s `name` to these workers; without workers, unpin it. Returns the entry and whether it has changed.

        Raises AdapterNotFound.
        """
        with reachable():
            for _ in range(ATTEMPTS):
                entry, revision = await self._entry_of(name, tenant)
                version, _ = await self._read(VERSION + entry.digest, AdapterVersion)
                if version is None:
                    raise AdapterNotFound(f"there is no adapter {quoted(name)}", param="name")
                if workers == (entry.pin.workers if entry.pin is not None else ()):
                    return AdapterInfo(entry=entry, version=version), False
                since_unix_ms = entry.pin.since_unix_ms if entry.pin is not None else unix_ms()
                pin = Pin(workers=workers, since_unix_ms=since_unix_ms) if workers else None
                entry = msgspec.structs.replace(entry, pin=pin)
                if await self._point(entry, revision):
                    return AdapterInfo(entry=entry, version=version), True
        raise Conflict(f"adapter {quoted(name)} keeps being changed by other clients", param="name")

    async def remove(
        self, name: str, *, requests: Callable[[str], int], force: bool, tenant: str = SHARED
    ) -> AdapterInfo | None:
        """Delete `tenant`'s `name`, and its version unless another name holds it.

        Returns the deleted entry, None if its version was lost. A recently used version is removed later, by the sweep, because
        its requests may be moving to another worker. Raises AdapterNotFound, or AdapterInUse when the version would go while
        `requests(digest)` is not zero.
        """
        with reachable():
            for _ in range(ATTEMPTS):
                entry, revision = await self._entry_of(name, tenant)
                version, _ = await self._read(VERSION + entry.digest, AdapterVersion)
                holds, _ = await self._read(HOLDS + entry.digest, Holds)
                last = holds is None or not holds.holders.keys() - entry.claims.keys()
                running = requests(entry.digest)
                if last and running and not force:
                    raise AdapterInUse(
                        f"{running} requests run on adapter {quoted(name)}; force deletes it anyway", param="name"
                    )
                if not await self._kv.delete(entry_key(name, tenant), revision):
                    continue
                for hold, digest in entry.claims.items():
                    await self._release(digest, hold)
                    if self._idle(digest):
                        await self._collect(digest)
                return AdapterInfo(entry=entry, version=version) if version is not None else None
        raise Conflict(f"adapter {quoted(name)} keeps being changed by other clients", param="name")

    async def forgotten(self) -> frozenset[str]:
        """The names of --adapters-dir that are not registered from there."""
        with reachable():
            record, _ = await self._read(FORGOTTEN, Forgotten)
            return frozenset(record.names) if record is not None else frozenset()

    async def forget(self, name: str, *, forget: bool = True) -> None:
        """Add a name to those that are not registered from --adapters-dir, or take it off."""
        with reachable():
            for _ in range(ATTEMPTS):
                record, revision = await self._read(FORGOTTEN, Forgotten)
                names = record.names if record is not None else ()
                if (name in names) == forget:
                    return
                if forget and len(names) >= FORGOTTEN_MAX:
                    raise Conflict(f"{FORGOTTEN_MAX} names are forgotten already: take their directories out of --adapters-dir")
                after = (*names, name) if forget else tuple(one for one in names if one != name)
                if await self._write(FORGOTTEN, Forgotten(after), revision) is not None:
                    return
        raise Conflict("the list of forgotten adapters keeps being changed by other clients")

    async def fetch_upload(self, name: str, max_bytes: int) -> BinaryIO:
        """An uploaded archive as an anonymous temporary file, at its beginning. Raises BadRequest or TooLarge."""
        with reachable():
            info = await self._uploads.info(name)
            if info is None:
                raise BadRequest(f"there is no upload {quoted(name)}, or it has expired", param="location")
            if (info.size or 0) > max_bytes:
                raise too_large("the upload", info.size or 0, max_bytes)
            file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller's
            try:
                async with asyncio.timeout(PUT_S):
                    await read_object(self._bus, self._uploads, name, file)
            except BaseException:
                file.close()
                raise
        file.seek(0)
        return file

    async def drop_upload(self, name: str) -> None:
        """Delete a processed upload. If this fails, the upload expires later."""
        with contextlib.suppress(MotetError):
            await self._uploads.delete(name)

    # ---- records

    async def _entry_of(self, name: str, tenant: str) -> tuple[AdapterEntry, int]:
        """`tenant`'s entry of this name and its revision. Raises AdapterNotFound."""
        entry, revision = await self._read(entry_key(name, tenant), AdapterEntry) if is_adapter_name(name) else (None, 0)
        if entry is None:
            raise AdapterNotFound(f"there is no adapter {quoted(name)}", param="name")
        return entry, revision

    async def _replace(self, present: AdapterEntry | None, entry: AdapterEntry, revision: int) -> bool:
        """Write `entry` in the place of `present` and drop the claims that only `present` had; False if it has changed."""
        if not await self._point(entry, revision):
            return False
        if present is not None:
            for hold, digest in present.claims.items():
                if hold not in entry.claims:
                    await self._release(digest, hold)
        return True

    async def _point(self, entry: AdapterEntry, revision: int) -> bool:
        return await self._write(entry_key(entry.name, entry.tenant), entry, revision) is not None

    async def _put_version(self, version: AdapterVersion) -> AdapterVersion:
        """Write the version record unless there is one; returns the stored record."""
        if await self._write(VERSION + version.digest, version, 0) is None:
            stored, _ = await self._read(VERSION + version.digest, AdapterVersion)
            return stored or version
        return version

    async def _put_blob(self, digest: str, blob: bytes) -> None:
        """Store the bytes unless they are complete. Needs a hold, so that no registry deletes them meanwhile."""
        if not await self._blobs.whole(digest, len(blob)):
            async with asyncio.timeout(PUT_S):
                await self._blobs.put(digest, blob, chunk_bytes=min(CHUNK_BYTES, self._bus.max_payload // 2))


def _entry(present: AdapterEntry | None, **facts: Any) -> AdapterEntry:
    """The entry that replaces `present`, with the next version number, and is pinned where that was."""
    pin, version = None, 1
    if present is not None:
        pin, version = present.pin, 1 + max([present.version, *(one.version for one in present.older)])
    return AdapterEntry(version=version, updated_unix_ms=unix_ms(), pin=pin, **facts)


def _older(entry: AdapterEntry) -> tuple[AdapterEntry, ...]:
    """The earlier versions of a name once `entry` has been replaced."""
    return (msgspec.structs.replace(entry, pin=None, older=()), *entry.older)


def _exists(name: str) -> AdapterExists:
    return AdapterExists(f"adapter {quoted(name)} exists already; replace it or choose another name", param="name")
