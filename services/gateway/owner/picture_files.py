"""Pictures that are fetched later, each under an id that only its tenant can use.

id       url-<random>.png      of an answer with URLs: bucket `motet_picture_files`, --picture-ttl-s
         res-<random>.png      of a durable result: bucket `motet_result_pictures`, seven days
object   <tenant>.<id>
"""

from __future__ import annotations

import re
import secrets
from typing import Literal, NamedTuple

from motet.services.gateway.owner.pictures import PICTURE_BYTES_MAX
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import NotFound, Unavailable
from motet.shared.model import PictureFormat
from motet.shared.objects import Objects, read_bytes

Use = Literal["url", "res"]
TYPES: dict[PictureFormat, str] = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
_BUCKETS: dict[Use, str] = {"url": subjects.PICTURE_FILES, "res": subjects.RESULT_PICTURES}
_ID = re.compile(r"(?P<use>url|res)-[0-9a-f]{32}\.(?P<format>png|jpeg|webp)")


class PictureFile(NamedTuple):
    """A stored picture."""

    data: bytes
    media_type: str


class PictureFiles:
    """The stored pictures of all tenants."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._stores: dict[Use, Objects] = {}

    async def keep(self, tenant: str, use: Use, data: bytes, form: PictureFormat) -> str:
        """Store a picture; returns its id. Raises Overloaded when the store is full, or Unavailable."""
        picture_id = f"{use}-{secrets.token_hex(16)}.{form}"
        store = await self._store(use)
        await store.put(self.object_name(tenant, picture_id), data)
        return picture_id

    async def read(self, tenant: str, picture_id: str) -> PictureFile:
        """A picture of this tenant. Raises NotFound, also when its time is over, or Unavailable."""
        found = _ID.fullmatch(picture_id)
        if found is None:
            raise _unknown()
        use, form = found["use"], found["format"]
        store, name = await self._store(use), self.object_name(tenant, picture_id)  # type: ignore[arg-type]
        if await store.info(name) is None:  # reading would ask several times
            raise _unknown()
        try:
            data = await read_bytes(self._bus, store, name, PICTURE_BYTES_MAX)
        except NotFound:
            raise _unknown() from None
        return PictureFile(data, TYPES[form])  # type: ignore[index]

    @staticmethod
    def object_name(tenant: str, picture_id: str) -> str:
        """The name of the object in its bucket."""
        return f"{tenant}.{picture_id}"

    @staticmethod
    def bucket(use: Use) -> str:
        """The bucket for pictures of this use."""
        return _BUCKETS[use]

    async def _store(self, use: Use) -> Objects:
        store = self._stores.get(use)
        if store is None:
            try:
                store = self._stores[use] = await Objects.open(self._bus, _BUCKETS[use], wait_s=1.0)
            except Unavailable as error:
                raise Unavailable(f"pictures cannot be stored: {error.message}", retry_after_s=1.0) from None
        return store


def _unknown() -> NotFound:
    return NotFound("there is no such picture, or its time is over", param="id")
