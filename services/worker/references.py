"""What adapters answered to the probe at their first load: KV `motet_probes`, a record for each version.

Bases of different quantization round so differently that each kind has a reference of its own. Workers write them, the first
one of a kind for all; the registry deletes them with the version, and when a quarantine ends.
"""

from __future__ import annotations

import msgspec

from motet.policies.worker.probe import Reference
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.kv import Bucket

ATTEMPTS = 20  # workers that write to one record at the same moment
_Record = dict[str, Reference]
"""{kind: reference}."""


class References:
    """The references of one kind, by digest. Methods raise Unavailable when NATS is away."""

    def __init__(self, bus: Bus, kind: str) -> None:
        self._bus, self._kind = bus, kind
        self._bucket: Bucket | None = None

    async def get(self, digest: str) -> Reference | None:
        """The reference of a version; None before its first load."""
        return (await self._read(digest))[0].get(self._kind)

    async def make(self, digest: str, reference: Reference) -> Reference:
        """Store the first reference of a version. Returns the one that counts: another worker may have been faster."""
        bucket = await self._opened()
        for _ in range(ATTEMPTS):
            record, revision = await self._read(digest)
            if self._kind in record:
                return record[self._kind]
            if await bucket.replace(digest, msgspec.json.encode(record | {self._kind: reference}), revision) is not None:
                break
        return reference

    async def _read(self, digest: str) -> tuple[_Record, int]:
        found = await (await self._opened()).get(digest)
        return ({}, 0) if found is None else (msgspec.json.decode(found.value, type=_Record), found.revision)

    async def _opened(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await Bucket.open(self._bus, subjects.KV_PROBES, wait_s=0.0)
        return self._bucket
