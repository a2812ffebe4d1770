"""Adapters as vLLM reads them: a folder in PEFT's layout, made from a `motet-lora/2` blob.

    <folder>/adapter_config.json          r: the largest rank; lora_alpha / r: the scale
    <folder>/adapter_model.safetensors    base_model.model.<prefix>layers.<n>.<block>.<module>.lora_{A,B}.weight

The prefix is "model.", or that of the language model within a model that takes images.

A PEFT adapter has one scale. When an adapter's modules have several, each B is multiplied by its own and the folder's scale is
1.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motet.shared.adapter_blob import PAGE_RANKS, BlobIndex, read_index

PREFIX = "model."
_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PeftAdapter:
    """An adapter on the host. Its folder is deleted with this object."""

    digest: str
    rank: int
    nbytes: int
    blob_bytes: int
    folder: Path


def peft_adapter(blob: Path, folders: Path, digest: str = "", prefix: str = PREFIX) -> PeftAdapter:
    """Write the folder of a blob below `folders`. Raises InvalidAdapter or OSError."""
    data = np.memmap(blob, mode="r", dtype=np.uint8)
    index = read_index(data.data, data.size)
    digest = digest or hashlib.sha256(data.data).hexdigest()
    folder = Path(tempfile.mkdtemp(prefix=digest[:16] + ".", dir=folders))  # of this copy alone: another may come and go
    write_peft(data, index, folder, prefix)
    adapter = PeftAdapter(digest=digest, rank=index.rank, nbytes=data.size, blob_bytes=data.size, folder=folder)
    weakref.finalize(adapter, shutil.rmtree, folder, ignore_errors=True)
    return adapter


def write_peft(data: np.ndarray[Any, Any], index: BlobIndex, folder: Path, prefix: str = PREFIX) -> None:
    """Write both PEFT files. `data`: the blob's bytes."""
    scales = {scale for part in index.parts for scale, rank in zip(part.scales, part.ranks, strict=True) if rank}
    one = scales.pop() if len(scales) == 1 else None
    header: dict[str, object] = {}
    tensors: list[bytes] = []
    at = 0
    for part in index.parts:
        width = PAGE_RANKS * (part.fan_in + part.fan_out)
        kind = np.dtype(_TYPES[index.dtype])
        size = part.pages * index.layers * width * kind.itemsize
        packed = data[part.start : part.start + size].view(kind).reshape(part.pages, index.layers, width)
        block = "self_attn" if part.module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
        for layer, (rank, scale) in enumerate(zip(part.ranks, part.scales, strict=True)):
            if not rank:
                continue
            a = packed[:, layer, : PAGE_RANKS * part.fan_in].reshape(-1, part.fan_in)[:rank]
            b = packed[:, layer, PAGE_RANKS * part.fan_in :].reshape(-1, part.fan_out)[:rank].T
            if one is None:
                b = _times(b, scale)
            name = f"base_model.model.{prefix}layers.{layer}.{block}.{part.module}"
            for letter, matrix in (("A", a), ("B", b)):
                raw = np.ascontiguousarray(matrix).tobytes()
                where = [at, at + len(raw)]
                header[f"{name}.lora_{letter}.weight"] = {
                    "dtype": index.dtype,
                    "shape": list(matrix.shape),
                    "data_offsets": where,
                }
                tensors.append(raw)
                at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "adapter_model.safetensors").write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *tensors]))
    config = {
        "peft_type": "LORA",
        "r": index.rank,
        "lora_alpha": index.rank * (one if one is not None else 1.0),
        "target_modules": list(index.modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _times(matrix: np.ndarray[Any, Any], scale: float) -> np.ndarray[Any, Any]:
    if matrix.dtype != np.uint16:
        return (matrix.astype(np.float32) * np.float32(scale)).astype(matrix.dtype)
    wide = (matrix.astype(np.uint32) << 16).view(np.float32) * np.float32(scale)  # bfloat16 is a float32's upper half
    bits = wide.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
