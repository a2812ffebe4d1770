"""A live copy of all adapters (KV `motet_adapters`) for any service, current within milliseconds.

The registry writes a version before the name that points at it, and deletes the name first. So a name that is seen here
always has its version. Replacing an adapter moves the name to another digest; the old version stays until nothing uses it.

A name refers to the tenant's own adapter of that name, if there is one, else to the shared one (shared.tenancy).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from motet.shared import subjects
from motet.shared.adapter_chat import AdapterChat
from motet.shared.bus import Bus
from motet.shared.kv_watch import KvWatch
from motet.shared.model import AdapterEntry, AdapterRef, AdapterVersion, Quarantine
from motet.shared.refused_adapters import KEY as REFUSED
from motet.shared.refused_adapters import RefusedAdapters
from motet.shared.telemetry import logger
from motet.shared.tenancy import SHARED
from motet.shared.wire.registry import AdapterInfo

log = logger("motet.cli.adapters")
NAME, PRIVATE, VERSION, CHAT, QUARANTINE = "name.", "private.", "version.", "chat.", "quarantine."
_entry = msgspec.json.Decoder(AdapterEntry)
_version = msgspec.json.Decoder(AdapterVersion)
_chat = msgspec.json.Decoder(AdapterChat)
_quarantine = msgspec.json.Decoder(Quarantine)
_refused = msgspec.json.Decoder(RefusedAdapters)


def entry_key(name: str, tenant: str = SHARED) -> str:
    """The KV key of an entry; names and tenants have been checked."""
    return f"{PRIVATE}{tenant}.{name}" if tenant else NAME + name


def ref_of(info: AdapterInfo) -> AdapterRef:
    """The version that a name points at, as messages and policies carry it."""
    entry, version = info.entry, info.version
    facts = {"rank": version.rank, "size_bytes": version.size_bytes, "version": entry.version}
    return AdapterRef(name=entry.name, digest=entry.digest, targets=version.targets, **facts)


class AdapterWatch:
    """A live copy of all adapters. After a restart of NATS it catches up, also with deletions.

    `on_change()` is called in the event loop after every change, once the initial state is known. It must not block; it finds
    the new state with `resolve`, `by_digest` or `all`.
    """

    def __init__(self, bus: Bus, on_change: Callable[[], None] | None = None, *, chats: bool = False) -> None:
        """`chats`: also keep what adapters bring for chats."""
        self._keeps_chats = chats
        self._on_change = on_change
        self._entries: dict[tuple[str, str], AdapterEntry] = {}  # by (name, tenant)
        self._versions: dict[str, AdapterVersion] = {}
        self._pinned: set[tuple[str, str]] = set()  # of the entries, those with a pin
        self._following: set[tuple[str, str]] = set()  # of the entries, aliases that follow their target
        self.refused = RefusedAdapters()
        """The adapters of --adapters-dir that are not served, and why."""
        self.quarantined: dict[str, Quarantine] = {}
        """The versions that must not answer, by digest."""
        self._chats: dict[str, bytes] = {}  # by digest, as stored; most adapters of a base share a few
        self._started = False
        self._watch = KvWatch(
            bus, subjects.KV_ADAPTERS, ">", on_put=self._put, on_delete=self._delete, on_synced=self._reconcile
        )

    async def start(self) -> None:
        """Start following; returns when the present state is known. Raises Unavailable when the bucket does not appear."""
        await self._watch.start()
        self._started = True

    async def stop(self) -> None:
        """Stop following; the last state stays readable."""
        await self._watch.stop()

    @property
    def live(self) -> bool:
        """Whether the copy is current: False while NATS is away."""
        return self._watch.live

    def resolve(self, name: str, tenant: str = SHARED) -> AdapterInfo | None:
        """The tenant's own adapter (or alias) of this name, else the shared one; None if there is neither."""
        own = self.exactly(name, tenant) if tenant else None
        return own or self.exactly(name, SHARED)

    def exactly(self, name: str, tenant: str) -> AdapterInfo | None:
        """The adapter (or alias) called `name` that belongs to `tenant`, or to all tenants if that is `SHARED`."""
        entry = self._entries.get((name, tenant))
        version = self._versions.get(entry.digest) if entry is not None else None
        return AdapterInfo(entry=entry, version=version) if entry is not None and version is not None else None

    def by_digest(self, digest: str) -> AdapterVersion | None:
        """The version with this content digest. A replaced version without a name is found until nothing uses it."""
        return self._versions.get(digest)

    def chat(self, digest: str) -> AdapterChat | None:
        """What adapters with this `AdapterVersion.chat` bring for chats."""
        stored = self._chats.get(digest)
        return None if stored is None else _chat.decode(stored)

    @property
    def chats(self) -> Mapping[str, bytes]:
        """Everything that adapters bring for chats, by digest, as stored."""
        return self._chats

    def owned_chats(self, tenant: str) -> set[str]:
        """The digests of what the names of `tenant` bring for chats."""
        digests = {entry.digest for (_, owner), entry in self._entries.items() if owner == tenant}
        return {version.chat for digest in digests if (version := self._versions.get(digest)) is not None and version.chat}

    @property
    def digests(self) -> Mapping[str, AdapterVersion]:
        """A live view of all versions by content digest."""
        return self._versions

    def all(self) -> list[AdapterInfo]:
        """Every name of every tenant, sorted: for operators and metrics, never for a tenant."""
        found = (self.exactly(name, tenant) for name, tenant in sorted(self._entries))
        return [info for info in found if info is not None]

    def visible(self, tenant: str) -> list[AdapterInfo]:
        """The adapters that `tenant` may see and use, sorted by name."""
        names = sorted({name for name, owner in self._entries if owner in (SHARED, tenant)})
        found = (self.resolve(name, tenant) for name in names)
        return [info for info in found if info is not None]

    def pinned(self) -> list[AdapterInfo]:
        """The names with a pin, of every tenant, the oldest pin first."""
        found = [info for name, owner in self._pinned if (info := self.exactly(name, owner)) is not None]
        return sorted(found, key=_pinned_since)

    def following(self) -> list[AdapterEntry]:
        """The aliases that follow their target, of every tenant."""
        return [self._entries[owned] for owned in sorted(self._following)]

    def names(self) -> int:
        """The number of names of all tenants."""
        return len(self._entries)

    def owned(self, tenant: str) -> int:
        """The number of names of `tenant`."""
        return sum(1 for _, owner in self._entries if owner == tenant)

    def owned_bytes(self, tenant: str) -> int:
        """Bytes of the versions that names of `tenant` point at. A version with several names counts once."""
        digests = {entry.digest for (_, owner), entry in self._entries.items() if owner == tenant}
        return sum(self._versions[digest].size_bytes for digest in digests if digest in self._versions)

    def stored_bytes(self) -> int:
        """Bytes of all stored versions."""
        return sum(version.size_bytes for version in self._versions.values())

    def versions(self) -> list[AdapterVersion]:
        """Every stored version."""
        return list(self._versions.values())

    def _put(self, key: str, value: bytes) -> None:
        try:
            if (owned := _owned(key)) is not None:
                entry = _entry.decode(value)
                changed = self._entries.get(owned) != entry
                self._entries[owned] = entry
                (self._pinned.discard if entry.pin is None else self._pinned.add)(owned)
                (self._following.add if entry.follows else self._following.discard)(owned)
            elif key.startswith(VERSION):
                version = _version.decode(value)
                changed = self._versions.get(version.digest) != version
                self._versions[key.removeprefix(VERSION)] = version
            elif key.startswith(QUARANTINE):
                changed, self.quarantined[key.removeprefix(QUARANTINE)] = True, _quarantine.decode(value)
            elif key.startswith(CHAT):
                if not self._keeps_chats:
                    return
                _chat.decode(value)
                changed, self._chats[key.removeprefix(CHAT)] = False, value
            elif key == REFUSED:
                changed, self.refused = True, _refused.decode(value)
            else:
                return
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("unreadable adapter record", extra={"key": key, "error": str(error)})
            return
        if changed:
            self._changed()

    def _delete(self, key: str) -> None:
        gone: object = None
        if (owned := _owned(key)) is not None:
            gone = self._entries.pop(owned, None)
            self._pinned.discard(owned)
            self._following.discard(owned)
        elif key.startswith(VERSION):
            gone = self._versions.pop(key.removeprefix(VERSION), None)
        elif key.startswith(QUARANTINE):
            gone = self.quarantined.pop(key.removeprefix(QUARANTINE), None)
        elif key.startswith(CHAT):
            self._chats.pop(key.removeprefix(CHAT), None)
        elif key == REFUSED and self.refused != RefusedAdapters():
            gone, self.refused = self.refused, RefusedAdapters()
        if gone is not None:
            self._changed()

    def _reconcile(self, keys: set[str]) -> None:
        known = [entry_key(*owned) for owned in self._entries] + [VERSION + digest for digest in self._versions] + [REFUSED]
        known += [QUARANTINE + digest for digest in self.quarantined]
        known += [CHAT + digest for digest in self._chats]
        for key in known:
            if key not in keys:
                self._delete(key)

    def _changed(self) -> None:
        if self._started and self._on_change is not None:
            self._on_change()


def _pinned_since(info: AdapterInfo) -> tuple[int, str, str]:
    assert info.entry.pin is not None, "it is pinned"
    return info.entry.pin.since_unix_ms, info.entry.tenant, info.entry.name


def _owned(key: str) -> tuple[str, str] | None:
    """(name, tenant) of an entry's key, None for other records."""
    if key.startswith(NAME):
        return key.removeprefix(NAME), SHARED
    if key.startswith(PRIVATE):
        tenant, _, name = key.removeprefix(PRIVATE).partition(".")
        return name, tenant
    return None
