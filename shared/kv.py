"""A KV bucket: values under keys, each with the revision of its last change.

Every method raises Unavailable when JetStream does not answer, and Overloaded when the bucket is full.
"""

from __future__ import annotations

from typing import NamedTuple

from nats.js import errors as js_errors
from nats.js.kv import KeyValue

from motet.shared.bus import Bus, reaching

WRONG_REVISION = (10071, 10164)  # JetStream's error codes for a key that has changed meanwhile


class KvEntry(NamedTuple):
    """A value and its revision."""

    value: bytes
    revision: int


class Bucket:
    """One bucket. Make one with `await Bucket.open(...)`."""

    def __init__(self, bus: Bus, name: str, keys: KeyValue) -> None:
        self._stores, self._name, self._keys = bus.stores, f"bucket {name}", keys

    @classmethod
    async def open(cls, bus: Bus, name: str, *, wait_s: float = 15.0) -> Bucket:
        """The bucket, once the registry has provisioned it. Raises Unavailable after `wait_s`."""
        return cls(bus, name, await bus.key_value(name, wait_s=wait_s))

    async def get(self, key: str) -> KvEntry | None:
        """The value of `key`; None if there is none."""
        with reaching(self._name):
            try:
                found = await self._keys.get(key)
            except (js_errors.KeyNotFoundError, js_errors.InvalidKeyError):  # a client may ask for any text
                return None
            return KvEntry(found.value or b"", found.revision or 0)

    async def put(self, key: str, value: bytes) -> int:
        """Write `value`, replacing any earlier one; returns its revision."""
        with self._stores.writing(self._name), reaching(self._name):
            return await self._keys.put(key, value)

    async def replace(self, key: str, value: bytes, revision: int) -> int | None:
        """Write `value` if the key's revision is still `revision` (0: the key has no value).

        Returns the new revision, None if the key has changed.
        """
        with self._stores.writing(self._name), reaching(self._name):
            try:
                return await (self._keys.update(key, value, last=revision) if revision else self._keys.create(key, value))
            except js_errors.KeyWrongLastSequenceError:
                return None

    async def delete(self, key: str, revision: int | None = None) -> bool:
        """Delete `key`, with `revision` only if that is still the key's revision. Returns False if the key has changed."""
        with self._stores.writing(self._name), reaching(self._name):
            try:
                return await self._keys.delete(key, last=revision)
            except js_errors.APIError as error:
                if revision is None or error.err_code not in WRONG_REVISION:
                    raise
                return False
