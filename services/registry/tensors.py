"""The tensors of an adapter's file: read one at a time, checked for NaN, as numbers of the blob's type. Numpy only."""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec
import numpy as np

from motet.shared.adapter_blob import TensorInfo
from motet.shared.errors import InvalidAdapter

MAX_NAME_CHARS = 512  # of a tensor
_EXPONENT = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
_NUMPY = {"F32": "<f4", "F16": "<u2", "BF16": "<u2"}
_CHUNK = 1 << 22  # elements checked at once, so that the check itself needs little memory


class Tensor(msgspec.Struct, frozen=True):
    key: str
    info: TensorInfo


def read_tensor(weights: BinaryIO, start: int, tensor: Tensor, file: str) -> memoryview:
    """Its bytes. `start`: where the file's data begins. `file`: its name, for people. Raises InvalidAdapter when cut off."""
    begin, end = tensor.info.data_offsets
    weights.seek(start + begin)
    data = weights.read(end - begin)
    if len(data) != end - begin:
        raise InvalidAdapter(f"{file} changed while it was read")
    return memoryview(data)


def check_finite(tensor: Tensor, data: memoryview) -> None:
    """Raises InvalidAdapter for NaN and infinite weights: floats with all exponent bits set."""
    kind, exponent = _EXPONENT[tensor.info.dtype]
    bits: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]] = np.frombuffer(data, dtype=kind)
    for begin in range(0, bits.size, _CHUNK):
        bad = (bits[begin : begin + _CHUNK] & exponent) == exponent
        if bad.any():
            where = [int(at) for at in np.unravel_index(begin + int(bad.argmax()), tensor.info.shape)]
            raise InvalidAdapter(f"tensor {tensor.key}: NaN or infinity at {where}")


def numbers(tensor: Tensor, data: memoryview, dtype: str) -> np.ndarray[Any, Any]:
    """The weights for a blob of `dtype`, in their shape: in their own type, or as F32, which is exact for F16 and BF16."""
    own = tensor.info.dtype
    found: np.ndarray[Any, Any] = np.frombuffer(data, dtype=_NUMPY[own]) if own == dtype else as_f32(data, own)
    return found.reshape(tensor.info.shape)


def as_f32(data: bytes | memoryview, dtype: str) -> np.ndarray[Any, Any]:
    """Numbers of a type in `DTYPE_BYTES` as float32, which is exact."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype("<f4")
