"""The keys by which schedulers know KV blocks that can be reused: of a prompt, and of what a worker has cached.

A key is 60 bits of a hash over a block's tokens and all before it, the adapter and the tenant's scope
(`policies.memory.kv_blocks.short_key`). Packed, it takes eight bytes, little-endian.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from sys import byteorder

import msgspec

WORD_BYTES = 8


class PrefixKeys(msgspec.Struct, frozen=True, array_like=True):
    """The packed keys of a prompt's blocks, in order, from `tokens` to `tokens`."""

    tokens: int
    keys: bytes


def pack_keys(keys: Iterable[int]) -> bytes:
    """Keys as bytes."""
    packed = array("Q", keys)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_keys(data: bytes) -> array[int]:
    """The inverse of `pack_keys`. A broken word at the end is left out."""
    packed = array("Q")
    packed.frombytes(data[: len(data) // WORD_BYTES * WORD_BYTES])
    if byteorder == "big":
        packed.byteswap()
    return packed
