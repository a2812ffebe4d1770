"""Uploads of adapters: a multipart form into a temporary file, then into the object store.

An upload holds one of `--max-uploads` places, so it has a least rate and a total time: `UPLOAD_S`, and `GRACE_S` plus a second
for every `BYTES_PER_S` that came.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import NamedTuple

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from motet.services.gateway.edge.http import too_large, unread
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import BadRequest, MotetError, Overloaded, Timeout, Unavailable
from motet.shared.objects import Objects

GRACE_S = 30.0
BYTES_PER_S = 64 << 10
UPLOAD_S = 3600.0
FORM = {
    "type": "object",
    "required": ["name", "file"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 128, "description": "The adapter's name"},
        "file": {
            "type": "string",
            "format": "binary",
            "description": "An archive (zip, tar, gzipped tar), or an image adapter's file",
        },
        "replace": {"type": "string", "enum": ["true", "false"], "default": "false"},
        "tenant": {"type": "string", "maxLength": 64, "description": "Tenant that the adapter belongs to; empty: shared"},
    },
}
"""The JSON schema of the form."""


class Form(NamedTuple):
    """The fields of an upload. `tenant`: whose the adapter becomes, None for the caller's; `chat`: whether what it brings for
    chats is used."""

    name: str
    replace: bool
    chat: bool
    tenant: str | None
    file: UploadFile


@contextlib.asynccontextmanager
async def read(request: Request, bytes_max: int) -> AsyncIterator[Form]:
    """The form in a request's body. Raises BadRequest, TooLarge, or Timeout for a client that is too slow."""
    length = request.headers.get("content-length", "")
    if not length.isdecimal():
        raise BadRequest("an upload needs a Content-Length", param="file")
    if int(length) > bytes_max:
        raise too_large(request, f"the upload has {length} bytes, the limit is {bytes_max} (--max-upload-bytes)", "file")
    try:
        form = await _Timed(request.scope, request.receive).form(max_files=1, max_fields=8, max_part_size=4096)
    except MultiPartException as error:
        raise BadRequest(f"the form cannot be read: {error.message}", param="file") from None
    try:
        name, replace = _text(form, "name"), _text(form, "replace", "false")
        tenant = _text(form, "tenant") if "tenant" in form else None
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise BadRequest("expected the archive or weights as a file in the form field `file`", param="file")
        chat = _text(form, "chat", "true")
        for field, value in (("replace", replace), ("chat", chat)):
            if value not in ("true", "false"):
                raise BadRequest(f"{field}: expected true or false, got {value!r}", param=field)
        yield Form(name, replace == "true", chat == "true", tenant, file)
    finally:
        await form.close()


@contextlib.asynccontextmanager
async def stored(bus: Bus, file: UploadFile) -> AsyncIterator[str]:
    """The key of the file in the store of uploads, where it is while this context lasts."""
    store = await Objects.open(bus, subjects.UPLOADS)
    key = secrets.token_hex(16)
    try:
        try:
            await store.put(key, _Readable(file))
        except (Overloaded, Unavailable) as error:
            raise Unavailable(f"the upload cannot be stored: {error.message}") from error
        yield key
    finally:
        with contextlib.suppress(MotetError):  # the store's own expiry removes it then
            await store.delete(key)


class _Timed(Request):
    """A request whose body must come in time."""

    async def stream(self) -> AsyncIterator[bytes]:  # type: ignore[override]
        parts, began_s, size = super().stream(), now_s(), 0
        while True:
            left_s = min(GRACE_S + size / BYTES_PER_S, UPLOAD_S) - (now_s() - began_s)
            try:
                async with asyncio.timeout(left_s):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError:
                slow = f"slower than {BYTES_PER_S >> 10} KiB/s, or takes longer than {UPLOAD_S:g} s"
                raise unread(self, Timeout(f"the upload is {slow}", param="file")) from None
            size += len(part)
            yield part


class _Readable:
    """An uploaded file as the object store reads it: in pieces, off the event loop."""

    def __init__(self, file: UploadFile) -> None:
        self._file = file.file

    def readinto(self, buffer: bytearray) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _text(form: FormData, field: str, default: str | None = None) -> str:
    value = form.get(field, default)
    if not isinstance(value, str):
        raise BadRequest(f"expected the form field `{field}`", param=field)
    return value
