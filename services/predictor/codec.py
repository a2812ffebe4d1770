"""Encoding of what a predictor stores and sends to its fit process: msgpack with arrays, compressed where it is stored."""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

import msgspec
import numpy as np

from motet.policies.lengths.model import LengthModel

T = TypeVar("T")
FORMAT = b"motet-predictor/1\n"
STATE_BYTES_MAX = 256 << 20  # of a state, decompressed


class Task(msgspec.Struct, frozen=True):
    """Finished requests to learn from: packed features and lengths."""

    features: list[bytes]
    tokens: list[int]


class FittedModel(msgspec.Struct, frozen=True):
    """A model, and levels for its calibration (`policies.lengths.calibration`).

    A second model, fitted on four fifths of the requests, gave these levels to the remaining fifth.
    """

    model: LengthModel
    levels: list[float]


def encode(value: Any) -> bytes:
    """A struct with arrays as msgpack."""
    return msgspec.msgpack.encode(value, enc_hook=_array_out)


def decode(data: bytes, kind: type[T]) -> T:
    """The inverse of `encode`. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_array_in)


def compress(value: Any) -> bytes:
    """A struct as it is stored."""
    return FORMAT + zlib.compress(encode(value), 1)


def decompress(data: bytes, kind: type[T]) -> T:
    """The inverse of `compress`. Raises msgspec.MsgspecError, also for what another version has written."""
    if not data.startswith(FORMAT):
        raise msgspec.DecodeError("not the state of this version's predictor")
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(data[len(FORMAT) :], STATE_BYTES_MAX)
    except zlib.error as error:
        raise msgspec.DecodeError(str(error)) from None
    return decode(plain, kind)


def _array_out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    raise NotImplementedError(type(value))


def _array_in(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(kind)
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
