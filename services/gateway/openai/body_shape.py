"""Bounds what is in a JSON body before anything decodes it.

A body of 4 MiB can have a million empty lists. Decoding them is one call that keeps the interpreter's lock for a second, in
whichever thread it runs, and everything after it looks at each of them. Texts and token ids, which are what long requests are
made of, are cheap. So a body may have few lists, objects and keys, and many numbers and texts (`LIMITS`).

Bodies of up to `SMALL_BYTES` are not looked at: nothing in them takes long. In others the bytes that could begin each are
counted first, which takes milliseconds and decides about nearly all of them. Only if there are too many, e.g. commas in a long
text, are those outside of texts counted.
"""

from __future__ import annotations

import numpy as np

from motet.services.gateway.openai.nesting import TOO_DEEP, deep_field
from motet.shared.errors import BadRequest

SMALL_BYTES = 64 << 10
CONTAINERS_MAX = 32_768
KEYS_MAX = 65_536
TEXTS_MAX = 131_072
VALUES_MAX = 1 << 20
LIMITS = {"lists and objects": CONTAINERS_MAX, "keys": KEYS_MAX, "texts": TEXTS_MAX, "values": VALUES_MAX}
_OPEN, _COMMA, _COLON = 1, 2, 3
_KINDS = np.zeros(256, np.uint8)
for _byte, _kind in ((b"[", _OPEN), (b"{", _OPEN), (b",", _COMMA), (b":", _COLON)):
    _KINDS[_byte[0]] = _kind


def check(body: bytes) -> None:
    """Raises BadRequest when the body has more of something than `LIMITS` allow. What is no JSON may pass."""
    if len(body) <= SMALL_BYTES:
        return
    opened = body.count(b"[") + body.count(b"{")
    found = (opened, body.count(b":"), body.count(b'"') // 2, body.count(b",") + opened)
    if any(count > most for count, most in zip(found, LIMITS.values(), strict=True)):
        found = _outside_texts(body)
    for count, (what, most) in zip(found, LIMITS.items(), strict=True):
        if count > most:
            if field := deep_field(body):
                raise BadRequest(f"{field}: {TOO_DEEP}", param=field)
            raise BadRequest(f"the request body has {count} {what}, the limit is {most}")


def _outside_texts(body: bytes) -> tuple[int, int, int, int]:
    """The counts that `LIMITS` bound, without what is inside of texts."""
    if b"\\" in body:  # without what is escaped, a quote begins or ends a text
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    data = np.frombuffer(body, np.uint8)
    quotes = data == ord('"')
    kinds = _KINDS[data] * ~np.bitwise_xor.accumulate(quotes)
    containers, keys, commas = (int(np.count_nonzero(kinds == kind)) for kind in (_OPEN, _COLON, _COMMA))
    return containers, keys, int(np.count_nonzero(quotes)) // 2, commas + containers
