"""Adapters as vLLM reads them: a folder in PEFT's layout, made from a blob.

    <folder>/adapter_config.json          r: the largest rank; lora_alpha / r: the scale
    <folder>/adapter_model.safetensors    base_model.model.<prefix>layers.<n>.<block>.<module>.lora_{A,B}.weight

The prefix is "model.", or that of the language model within a model that takes images.

A `motet-peft/1` blob is the second file as it stands; a `motet-lora/2` blob is written out anew. A PEFT adapter has one scale.
When a written adapter's modules have several, each B is multiplied by its own and the folder's scale is 1.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from motet.shared.adapter_blob import PAGE_RANKS, BlobIndex, read_index
from motet.shared.base_shapes import ATTENTION
from motet.shared.peft_blob import is_peft_blob, read_peft_index

PREFIX = "model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PeftAdapter:
    """An adapter on the host. Its folder is deleted with this object."""

    digest: str
    rank: int
    nbytes: int
    blob_bytes: int
    folder: Path
    as_stored: bool = False
    """Whether it names layers of any kind, as the registry stored them. vLLM leaves out silently what it does not know."""


def peft_adapter(blob: Path, folders: Path, digest: str = "", prefix: str = PREFIX) -> PeftAdapter:
    """Write the folder of a blob below `folders`. Raises InvalidAdapter or OSError."""
    data = np.memmap(blob, mode="c", dtype=np.uint8)  # torch wants writable memory
    as_stored = is_peft_blob(data.data, data.size)
    index = read_peft_index(data.data, data.size) if as_stored else read_index(data.data, data.size)
    digest = digest or hashlib.sha256(data.data).hexdigest()
    folder = Path(tempfile.mkdtemp(prefix=digest[:16] + ".", dir=folders))  # of this copy alone: another may come and go
    if isinstance(index, BlobIndex):
        write_peft(data, index, folder, prefix)
    else:
        _link(blob, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(index.config))
    sizes = {"rank": index.rank, "nbytes": data.size, "blob_bytes": data.size}
    adapter = PeftAdapter(digest=digest, folder=folder, as_stored=as_stored, **sizes)
    weakref.finalize(adapter, shutil.rmtree, folder, ignore_errors=True)
    return adapter


def write_peft(data: np.ndarray[Any, Any], index: BlobIndex, folder: Path, prefix: str = PREFIX) -> None:
    """Write both PEFT files. `data`: the blob's bytes."""
    scales = {scale for part in index.parts for scale, rank in zip(part.scales, part.ranks, strict=True) if rank}
    one = scales.pop() if len(scales) == 1 else None
    dtype, tensors = _TYPES[index.dtype], dict[str, torch.Tensor]()
    for part in index.parts:
        shape = part.pages, index.layers, PAGE_RANKS * (part.fan_in + part.fan_out)
        packed = torch.frombuffer(data, dtype=dtype, offset=part.start, count=math.prod(shape)).view(shape)
        block = "self_attn" if part.module in ATTENTION else "mlp"
        for layer, (rank, scale) in enumerate(zip(part.ranks, part.scales, strict=True)):
            if not rank:
                continue
            a = packed[:, layer, : PAGE_RANKS * part.fan_in].reshape(-1, part.fan_in)[:rank]
            b = packed[:, layer, PAGE_RANKS * part.fan_in :].reshape(-1, part.fan_out)[:rank].T
            if one is None:
                b = (b.float() * scale).to(dtype)
            name = f"base_model.model.{prefix}layers.{layer}.{block}.{part.module}"
            tensors |= {f"{name}.lora_A.weight": a.contiguous(), f"{name}.lora_B.weight": b.contiguous()}
    save_file(tensors, folder / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "r": index.rank,
        "lora_alpha": index.rank * (one if one is not None else 1.0),
        "target_modules": list(index.modules),
        "bias": "none",
    }
    (folder / CONFIG).write_text(json.dumps(config))


def _link(blob: Path, path: Path) -> None:
    """Give the blob's file a second name, which stays when the first one is evicted; copy it from another file system."""
    try:
        os.link(blob, path)
    except OSError:
        shutil.copyfile(blob, path)
