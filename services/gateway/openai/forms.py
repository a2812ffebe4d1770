"""multipart/form-data bodies, read from memory: few parts, each a text or a file. No HTTP here.

The whole body is there already, with its bound. A file here is a copy of its part of the body, and goes to no disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from motet.shared.errors import BadRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

PARTS_MAX = 64
TEXT_BYTES_MAX = 256 << 10


class FormText(NamedTuple):
    """A field with a text."""

    name: str
    text: str


class FormFile(NamedTuple):
    """A field with a file."""

    name: str
    data: bytes


def read_form(body: bytes, content_type: str) -> list[FormText | FormFile]:
    """The fields in a body with this Content-Type header. Raises BadRequest naming the field."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise BadRequest("content-type: multipart/form-data without a boundary", param="content-type")
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise BadRequest(f"the form cannot be read: {error}") from None
    if not reader.complete:
        raise BadRequest("the form cannot be read: it is cut off")
    return reader.fields


class _Reader:
    """Collects what the parser finds."""

    def __init__(self) -> None:
        self.fields: list[FormText | FormFile] = []
        self.complete = False
        self._header, self._value = bytearray(), bytearray()
        self._headers: dict[str, str] = {}
        self._parts: list[memoryview] = []

    def callbacks(self) -> MultipartCallbacks:
        """What the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, begin, end: self._header.extend(data[begin:end]),
            "on_header_value": lambda data, begin, end: self._value.extend(data[begin:end]),
            "on_header_end": self._header_ends,
            "on_part_data": lambda data, begin, end: self._parts.append(memoryview(data)[begin:end]),
            "on_part_end": self._end,
            "on_end": self._all_read,
        }

    def _begin(self) -> None:
        if len(self.fields) >= PARTS_MAX:
            raise BadRequest(f"the form has more than {PARTS_MAX} fields")
        self._headers, self._parts = {}, []

    def _header_ends(self) -> None:
        self._headers[self._header.decode("latin-1").lower()] = self._value.decode("latin-1")
        self._header, self._value = bytearray(), bytearray()

    def _end(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", ""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if not name or len(name) > 200:
            raise BadRequest("a part of the form has no name")
        if b"filename" in options or b"filename*" in options:
            self.fields.append(FormFile(name, b"".join(self._parts)))
            return
        if sum(map(len, self._parts)) > TEXT_BYTES_MAX:
            raise BadRequest(f"{name}: a text of a form may have {TEXT_BYTES_MAX} bytes", param=name)
        try:
            self.fields.append(FormText(name, b"".join(self._parts).decode("utf-8")))
        except UnicodeDecodeError:
            raise BadRequest(f"{name}: not UTF-8", param=name) from None

    def _all_read(self) -> None:
        self.complete = True
