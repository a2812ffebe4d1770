"""Digests of a base model's embeddings and output layer, read from its checkpoint.

With them the registry recognizes unchanged copies of these tensors in adapter files. The bytes are hashed as they lie in the
checkpoint, so this costs one pass over two tensors. No torch; blocks, so call it in a thread.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from motet.shared.adapter_blob import TensorInfo, read_header
from motet.shared.base_layers import EMBEDDING, OUTPUT, is_tied
from motet.shared.errors import MotetError
from motet.shared.hf_config import UnsupportedModel
from motet.shared.model import TensorDigest

_READ_BYTES = 1 << 22


def base_tensors(directory: Path) -> dict[str, TensorDigest]:
    """Digests of `embed_tokens` and `lm_head`, as far as the directory's safetensors files hold them; else nothing.

    A model that ties its output layer to the embeddings and stores no output layer has the embeddings for both.
    """
    found: dict[str, TensorDigest] = {}
    try:
        for path in sorted(directory.glob("*.safetensors")):
            found |= _of_file(path)
        if EMBEDDING in found and OUTPUT not in found and is_tied(directory):
            found[OUTPUT] = found[EMBEDDING]
    except (OSError, MotetError, UnsupportedModel):
        return {}
    return found


def _of_file(path: Path) -> dict[str, TensorDigest]:
    found = {}
    with path.open("rb") as file:
        tensors, _, start = read_header(file, path.stat().st_size)
        for name, info in tensors.items():
            module = name.removesuffix(".weight").rpartition(".")[2]
            if module in (EMBEDDING, OUTPUT) and name.endswith(".weight"):
                found[module] = _digest(file, start, info)
    return found


def _digest(file: Any, start: int, info: TensorInfo) -> TensorDigest:
    begin, end = info.data_offsets
    digest = hashlib.sha256()
    file.seek(start + begin)
    for at in range(begin, end, _READ_BYTES):
        digest.update(file.read(min(_READ_BYTES, end - at)))
    return TensorDigest(dtype=info.dtype, shape=tuple(info.shape), sha256=digest.hexdigest())
