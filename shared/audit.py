"""The audit log: who changed which adapter or key, and when. A bounded JetStream stream that cannot be edited.

It is a stream because logs of gateways and registries can disappear with their containers. When it is full, the oldest
entries are removed: a full audit log must not prevent the revocation of a key.
"""

from __future__ import annotations

import asyncio

import msgspec

from motet.shared import streams, subjects
from motet.shared.bus import Bus
from motet.shared.clock import unix_ms
from motet.shared.errors import MotetError, Unavailable
from motet.shared.telemetry import logger

log = logger("motet.audit")
PAGE = 1000


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change. JSON on `motet.v1.audit.<kind>`, where the kind is the action's first word."""

    action: str
    """adapter.registered, .replaced, .aliased, .pinned, .unpinned, .deleted; key.created, .revoked, .rotated."""
    actor: str  # the id of the API key that asked; "" where no keys are used
    object: str  # the adapter's name or the key's id
    tenant: str = ""  # of the object; "" is shared by all
    detail: str = ""
    at_unix_ms: int = 0


class Audit:
    """Writes and reads the audit log."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def record(self, event: AuditEvent) -> None:
        """Append an event that has happened. If the stream cannot be reached, the event is logged as a warning."""
        event = msgspec.structs.replace(event, at_unix_ms=unix_ms())
        try:
            await self._bus.store(subjects.audit(event.action.split(".")[0]), msgspec.json.encode(event), {})
        except MotetError as error:
            log.warning("not in the audit log", extra={"event": msgspec.json.encode(event).decode(), "error": repr(error)})

    async def latest(self, count: int) -> list[AuditEvent]:
        """The last `count` events (at most `PAGE`), newest first. Raises Unavailable."""
        try:
            held = await streams.size_of(self._bus, subjects.STREAM_AUDIT)
            first = max(held.first, held.last - min(count, PAGE) + 1)
            wanted = range(held.last, first - 1, -1) if held.messages else ()
            found = await asyncio.gather(*(self._one(sequence) for sequence in wanted))
        except MotetError as error:
            raise Unavailable(f"the audit log cannot be read: {error.message}") from error
        return [event for event in found if event is not None]

    async def _one(self, sequence: int) -> AuditEvent | None:
        data = await streams.message_at(self._bus, subjects.STREAM_AUDIT, sequence)
        return None if data is None else msgspec.json.decode(data, type=AuditEvent)
