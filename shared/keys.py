"""API keys with tenants and roles, in KV `motet_keys`, which every gateway watches.

    key      mtt_<43 random characters>     shown once, when it is made; 256 random bits
    record   <id> -> ApiKey (JSON)          contains the key's SHA-256, never the key

Every change of a record is a compare-and-set on its revision, so two administrators at two gateways cannot undo each other's
changes: a revocation that meets a rotation wins, whichever comes first.

A fast hash suffices: 256 random bits cannot be guessed, however cheap a guess is. Slow hashes are for passwords. Looking up a
key by its digest takes the same time for every guess.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import unix_ms
from motet.shared.config import ConfigError, read_secret
from motet.shared.errors import BadRequest, Conflict, MotetError, NotFound, Unavailable
from motet.shared.kv import Bucket
from motet.shared.kv_watch import KvWatch
from motet.shared.telemetry import logger
from motet.shared.tenancy import TENANT, check_tenant

log = logger("motet.cli.keys")
PREFIX = "mtt_"
KEYS_MAX = 10_000
CHANGE_TRIES = 16  # each failure is somebody else's success
EXPIRED_KEPT_MS = 7 * 24 * 3600 * 1000
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
NAME = re.compile(r"[\w .@:/+-]{0,100}")
Role = Literal["use", "adapters", "admin"]
ROLES: tuple[Role, ...] = ("use", "adapters", "admin")  # each may do what those before it may


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of a key. `digest` is the SHA-256 of its text, in hex."""

    id: str
    digest: str
    tenant: str
    role: Role = "use"
    name: str = ""  # for people
    created_unix_ms: int = 0
    expires_unix_ms: int = 0  # 0: never
    successors_last_ms: int | None = None  # lifetime of the keys that replace it, 0: no end; None: it was never rotated

    @property
    def expired(self) -> bool:
        """Whether the key has expired."""
        return bool(self.expires_unix_ms) and unix_ms() >= self.expires_unix_ms

    @property
    def lifetime_ms(self) -> int:
        """The time that it was made for, which is also its successors'; 0: no end. A rotation does not change it."""
        if self.successors_last_ms is not None:
            return self.successors_last_ms
        return self.expires_unix_ms - self.created_unix_ms if self.expires_unix_ms else 0


_decoder = msgspec.json.Decoder(ApiKey)


def digest_of(key: str) -> str:
    """The digest that is stored for a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """The text of a new key."""
    return PREFIX + secrets.token_urlsafe(32)


def read_key_file(path: str) -> list[ApiKey]:
    """The keys of a file with lines `key tenant [role]`; the default role is `use`. Raises ConfigError."""
    found = []
    for number, line in enumerate(read_secret(path).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in (2, 3):
            raise ConfigError(f"--api-keys-file: line {number} is not `key tenant [role]`")
        key, tenant, role = words[0], words[1], words[2] if len(words) == 3 else "use"
        if not TENANT.fullmatch(tenant):
            raise ConfigError(f"--api-keys-file: line {number}: a tenant has letters, digits, '_' and '-', at most 64")
        if role not in ROLES:
            raise ConfigError(f"--api-keys-file: line {number}: the role is one of {', '.join(ROLES)}")
        found.append(ApiKey(id=f"file:{number}", digest=digest_of(key), tenant=tenant, role=role))
    if not found:
        raise ConfigError(f"--api-keys-file: {path} has no keys")
    return found


def add_to_key_file(path: Path, tenant: str, role: str) -> str:
    """Append a new key to a key file and return it. A file that is created here is readable by its owner only.

    Raises BadRequest.
    """
    check_tenant(tenant)
    key = new_key()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as sink:
        sink.write(f"{key} {tenant} {role}\n")
    return key


class _Stored(NamedTuple):
    record: ApiKey | None  # None: it cannot be read
    revision: int


class KeyStore:
    """A live copy of all stored keys, which can be changed.

    A change takes effect here at once, elsewhere within milliseconds.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._by_id: dict[str, ApiKey] = {}
        self._by_digest: dict[str, ApiKey] = {}
        self._revoked: set[str] = set()  # here, and not yet reported by the watch, which may still report earlier changes
        self._vanished: set[str] = set()  # known once, and gone without a revocation: NATS has lost them
        self._watch = KvWatch(bus, subjects.KV_KEYS, "*", on_put=self._put, on_delete=self._deleted, on_synced=self._reconcile)

    async def start(self) -> None:
        """Start following; returns when all keys are known. Raises Unavailable when the bucket does not appear."""
        await self._watch.start()

    async def stop(self) -> None:
        """Stop following; the last state stays readable."""
        await self._watch.stop()

    def trouble(self) -> str:
        """Why stored keys are missing; "" if none are. A missing key gives no access."""
        if not self._vanished:
            return ""
        return (
            f"{len(self._vanished)} API keys have vanished from the bucket {subjects.KV_KEYS} and were not revoked: NATS has"
            " lost data; restore it or make new keys, then restart the gateways"
        )

    def find(self, key: str) -> ApiKey | None:
        """The record of a key; None if the key is unknown or has expired."""
        found = self._by_digest.get(digest_of(key))
        return found if found is not None and not found.expired else None

    def all(self) -> list[ApiKey]:
        """Every stored key, oldest first."""
        return sorted(self._by_id.values(), key=lambda key: (key.created_unix_ms, key.id))

    async def create(self, *, tenant: str, role: Role = "use", name: str = "", expires_in_s: float = 0.0) -> tuple[ApiKey, str]:
        """Make a key: returns its record and its text, which is not stored. `expires_in_s` 0: it does not expire.

        Raises BadRequest, Conflict when there are too many, or Unavailable.
        """
        check_tenant(tenant)
        if not NAME.fullmatch(name):
            raise BadRequest("name: letters, digits and ` ._@:/+-`, at most 100 characters", param="name")
        if len(self._by_id) >= KEYS_MAX:
            raise Conflict(f"there are {KEYS_MAX} keys, which is the limit: revoke some first")
        now, text = unix_ms(), new_key()
        record = ApiKey(
            id="key_" + secrets.token_hex(8),
            digest=digest_of(text),
            tenant=tenant,
            role=role,
            name=name,
            created_unix_ms=now,
            expires_unix_ms=now + round(expires_in_s * 1000) if expires_in_s else 0,
        )
        if not await self._replace(record, 0):
            raise Conflict(f"there is a key with the id {record.id} already; try again")
        for old in [key for key in self.all() if 0 < key.expires_unix_ms < now - EXPIRED_KEPT_MS]:
            with contextlib.suppress(NotFound):  # another gateway was faster
                await self.revoke(old.id)
        return record, text

    async def revoke(self, key_id: str) -> ApiKey:
        """Delete a key; returns its record. Raises NotFound or Unavailable.

        A record that cannot be read is deleted as well; then only the id of the returned record is known.
        """
        known = await self._stored(key_id)
        if known is None:
            raise NotFound("there is no such key", param="id")
        with _changing("revoked"):
            await (await self._bucket()).delete(key_id)  # whatever its revision: a revocation wins
        self._revoked.add(key_id)
        self._forget(key_id)
        return known.record or ApiKey(id=key_id, digest="", tenant="")

    async def rotate(self, key_id: str, *, overlap_s: float) -> tuple[ApiKey, str]:
        """Make a key with the rights and the lifetime of `key_id`, which stays valid for `overlap_s` seconds.

        Raises NotFound, also when the key is revoked meanwhile, Conflict or Unavailable.
        """
        old, revision = await self._known(key_id)
        lifetime_ms = old.lifetime_ms
        record, text = await self.create(tenant=old.tenant, role=old.role, name=old.name, expires_in_s=lifetime_ms / 1000)
        until = unix_ms() + max(1, round(overlap_s * 1000))
        try:
            for _ in range(CHANGE_TRIES):
                ends = min(until, old.expires_unix_ms or until)
                ending = msgspec.structs.replace(old, expires_unix_ms=ends, successors_last_ms=lifetime_ms)
                if await self._replace(ending, revision):
                    return record, text
                old, revision = await self._known(key_id)
            raise Conflict("the key is being changed by others; try again", param="id")
        except (NotFound, Conflict):
            await self.revoke(record.id)  # a revoked key has no successor
            raise

    async def _known(self, key_id: str) -> tuple[ApiKey, int]:
        """The stored record and its revision. Raises NotFound, also for a record that cannot be read, and Unavailable."""
        stored = await self._stored(key_id)
        if stored is None or stored.record is None:
            raise NotFound("there is no such key", param="id")
        return stored.record, stored.revision

    async def _stored(self, key_id: str) -> _Stored | None:
        """What the bucket has now under this id. Raises Unavailable."""
        if not ID.fullmatch(key_id):
            return None
        with _changing("read"):
            entry = await (await self._bucket()).get(key_id)
        return None if entry is None else _Stored(_decoded(key_id, entry.value), entry.revision)

    async def _replace(self, record: ApiKey, revision: int) -> bool:
        """Store `record` if the stored revision is still `revision` (0: there is none). Raises Unavailable."""
        with _changing("stored"):
            made = await (await self._bucket()).replace(record.id, msgspec.json.encode(record), revision)
        if made is None:
            return False
        if made > self._watch.revision:  # else the watch has reported it, and perhaps what came after it
            self._keep(record)
        return True

    async def _bucket(self) -> Bucket:
        return await Bucket.open(self._bus, subjects.KV_KEYS, wait_s=1.0)

    def _put(self, key_id: str, value: bytes) -> None:
        record = _decoded(key_id, value)
        if record is None or key_id in self._revoked:
            self._forget(key_id)
        else:
            self._keep(record)

    def _deleted(self, key_id: str) -> None:
        self._revoked.discard(key_id)
        self._forget(key_id)

    def _keep(self, record: ApiKey) -> None:
        self._forget(record.id)
        self._vanished.discard(record.id)
        self._by_id[record.id] = self._by_digest[record.digest] = record

    def _forget(self, key_id: str) -> None:
        known = self._by_id.pop(key_id, None)
        if known is not None:
            self._by_digest.pop(known.digest, None)

    def _reconcile(self, keys: set[str]) -> None:
        self._revoked &= keys
        for key_id in self._by_id.keys() - keys:  # a revoked key has left a marker, so it was forgotten before
            log.error("API key vanished from its bucket", extra={"id": key_id})
            self._forget(key_id)
            self._vanished.add(key_id)


def _decoded(key_id: str, value: bytes) -> ApiKey | None:
    """A stored record; None if it cannot be read, perhaps because a newer version wrote it. It then gives no access."""
    try:
        return _decoder.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("unreadable key record", extra={"id": key_id, "error": str(error)})
        return None


@contextlib.contextmanager
def _changing(done: str) -> Iterator[None]:
    try:
        yield
    except MotetError as error:
        raise Unavailable(f"the key cannot be {done}: {error.message}") from error
