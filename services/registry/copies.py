"""Compares an adapter file's copies of the base's embeddings and output layer with the base's own.

PEFT writes such copies by itself (`save_embedding_layers="auto"`) when the vocabulary may have changed. All adapters share the
base, so only unchanged copies are accepted; they are dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from motet.services.registry.tensors import Tensor, as_f32
from motet.shared.adapter_blob import DTYPE_BYTES
from motet.shared.errors import InvalidAdapter
from motet.shared.model import TensorDigest

_CHUNK = 1 << 21  # elements compared at once
_WITHOUT = "save the adapter without it: model.save_pretrained(directory, save_embedding_layers=False)"


def check_copies(copies: Mapping[str, Tensor], weights: BinaryIO, start: int, base: Mapping[str, TensorDigest]) -> None:
    """Raises InvalidAdapter unless every copy has exactly the numbers of the base's tensor, whatever its type.

    `start`: where the data of the open file `weights` begins, in bytes. `base`: by `embed_tokens` and `lm_head`.
    """
    for name, copy in copies.items():
        own = base.get(name)
        if own is None:
            raise InvalidAdapter(
                f"tensor {copy.key}: cannot be compared with the base model's {name}, since neither the registry's directory "
                f"nor a worker tells what that is; {_WITHOUT}"
            )
        if list(own.shape) != copy.info.shape:
            raise InvalidAdapter(
                f"tensor {copy.key}: shape {copy.info.shape}, but the base model's {name} has {list(own.shape)}: an adapter "
                f"cannot change the vocabulary, which all adapters share"
            )
        if _digest(copy, weights, start, own.dtype) != own.sha256:
            raise InvalidAdapter(
                f"tensor {copy.key}: differs from the base model's {name}, which all adapters share; if it was not trained, "
                f"{_WITHOUT}"
            )


def _digest(copy: Tensor, weights: BinaryIO, start: int, dtype: str) -> str:
    """SHA-256 of the copy's numbers as `dtype`; empty where they have no exact form in it."""
    begin, end = copy.info.data_offsets
    digest, size = hashlib.sha256(), _CHUNK * DTYPE_BYTES.get(copy.info.dtype, 1)
    weights.seek(start + begin)
    for at in range(begin, end, size):
        data = weights.read(min(size, end - at))
        if copy.info.dtype == dtype:
            digest.update(data)
            continue
        part = _from_f32(as_f32(data, copy.info.dtype), dtype) if copy.info.dtype in DTYPE_BYTES else None
        if part is None:
            return ""
        digest.update(part.tobytes())
    return digest.hexdigest()


def _from_f32(numbers: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any] | None:
    """The numbers as `dtype`; None where that is not exact."""
    if dtype == "F32":
        return numbers
    if dtype == "BF16":
        bits = numbers.view("<u4")
        return None if (bits & 0xFFFF).any() else (bits >> 16).astype("<u2")
    if dtype == "F16":
        with np.errstate(over="ignore"):
            narrow = numbers.astype("<f2")
        return narrow if np.array_equal(narrow.astype("<f4"), numbers) else None
    return None
