"""Pictures that are too large for a frame: read from the object store before their owner hears of them.

    worker ──put──> object store PICTURES <──read──  Pictures.fetch ──the item with its picture──> OwnerCore
       └──────────── frame with name and SHA-256 ───────┘

So a picture that cannot be read is a lost item: its request goes on at another worker, from its last checkpoint.
"""

from __future__ import annotations

import contextlib
from hashlib import sha256

from msgspec.structs import replace

from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import MotetError, WorkerLost
from motet.shared.objects import Objects, read_bytes
from motet.shared.telemetry import logger
from motet.shared.wire.stream import Picture, StreamItem

log = logger("motet.owner.pictures")
PICTURE_BYTES_MAX = 64 << 20
OPEN_S = 1.0


class Pictures:
    """Reads the large pictures of one gateway, each once: it is deleted then."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._store: Objects | None = None

    async def fetch(self, item: StreamItem) -> StreamItem:
        """The item with the bytes of its picture; if they cannot be had, the error that says that the item is lost."""
        picture = item.picture
        assert picture is not None and picture.object_name, "it is in the object store"
        try:
            data = await self._read(picture)
        except MotetError as error:
            log.warning("picture lost", extra={"request_id": item.request_id, "error": error.message})
            lost = WorkerLost(f"its picture cannot be read: {error.message}")
            return StreamItem(item.request_id, item.epoch, item.index, [], "error", error=lost.info())
        return replace(item, picture=replace(picture, data=data, object_name="", sha256=b""))

    async def _read(self, picture: Picture) -> bytes:
        if self._store is None:
            self._store = await Objects.open(self._bus, subjects.PICTURES, wait_s=OPEN_S)
        data = await read_bytes(self._bus, self._store, picture.object_name, PICTURE_BYTES_MAX)
        if sha256(data).digest() != picture.sha256:
            raise WorkerLost("its content does not match its SHA-256")
        with contextlib.suppress(MotetError):  # otherwise it expires
            await self._store.delete(picture.object_name)
        return data
