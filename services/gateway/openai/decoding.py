"""JSON bodies into structs; an error names the field that is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from motet.services.gateway.openai import fields
from motet.services.gateway.openai.nesting import TOO_DEEP, deep_field
from motet.shared.errors import BadRequest

KEYS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r"^(.*?) - at (?:`key` in )?`\$\.?(.*?)`$", re.DOTALL)
_REASON_CHARS_MAX = 4096  # a field's name may have megabytes
_MISSING = re.compile(r"missing required field `(\w+)`")
_UNKNOWN = re.compile(r"contains unknown field `(.*?)`", re.DOTALL)


class _UnknownField(BadRequest):
    """A field of the body itself that its struct does not have."""


def known(body: bytes, decoder: Any, unserved: Mapping[str, fields.Unserved]) -> Any:
    """`body` by `decoder`, where it may also have harmless fields of `unserved`."""
    try:
        return decode(body, decoder)
    except _UnknownField:
        served = fields.check(decode(body, KEYS), unserved)
    try:
        return decode(msgspec.json.encode(served), decoder)
    except _UnknownField as error:
        close = get_close_matches((error.param or "")[:64], decoder.type.__struct_encode_fields__, n=1, cutoff=0.75)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise BadRequest(error.message + hint, param=error.param) from None


def decode(body: bytes, decoder: Any) -> Any:
    """`body` by a msgspec JSON decoder. Raises BadRequest with the field in `param`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        if len(text) > _REASON_CHARS_MAX:
            text = text[:_REASON_CHARS_MAX] + "`" + text[-_REASON_CHARS_MAX:].partition("`")[2]
        found = _AT.match(text)
        reason, param = (found[1], found[2].replace("[...]", "")) if found else (text, "")
        if unknown := _UNKNOWN.search(reason):
            name = f"{param}.{unknown[1]}" if param else unknown[1]
            raise (BadRequest if param else _UnknownField)(f"{name}: there is no such field", param=name) from None
        if missing := _MISSING.search(reason):
            param = f"{param}.{missing[1]}" if param else missing[1]
        raise BadRequest(f"{param}: {reason}" if param else reason, param=param or None) from None
    except RecursionError:
        field = deep_field(body)
        raise BadRequest(f"{field or 'the request body'}: {TOO_DEEP}", param=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
