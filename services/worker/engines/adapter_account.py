"""The account of an adapter's file: norms of its matrices, which the probe compares with what is on the device.

It is read from the verified file itself, and not from an engine's copy of it, so that a copy of another file is found.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from motet.policies.worker.probe import Account
from motet.shared.adapter_blob import DTYPE_BYTES, FORMAT, PAGE_RANKS, read_header, read_index, read_site_index


def file_account(path: Path) -> Account:
    """The account of the blob at `path`. Raises InvalidAdapter or OSError."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        _, metadata, _ = read_header(file, size_bytes)
    data = np.memmap(path, mode="r", dtype=np.uint8)
    index = (read_index if metadata.get("format") == FORMAT else read_site_index)(data.data, size_bytes)
    found: dict[str, np.ndarray] = {}
    for part in index.parts:
        count, split = len(part.ranks), PAGE_RANKS * part.fan_in
        page = count * PAGE_RANKS * (part.fan_in + part.fan_out)
        squares = np.zeros((count, 2))
        for number in range(part.pages):
            start = part.start + number * page * DTYPE_BYTES[index.dtype]
            values = _floats(data[start : start + page * DTYPE_BYTES[index.dtype]], index.dtype).reshape(count, -1)
            squares[:, 0] += np.square(values[:, :split]).sum(axis=1)
            squares[:, 1] += np.square(values[:, split:]).sum(axis=1)
        found[part.module] = np.sqrt(squares)
        found[part.module][:, 1] *= np.abs(np.array(part.scales, np.float64))
    return found


def _floats(data: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers of a safetensors type as float32."""
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view("<f4" if dtype == "F32" else "<f2").astype(np.float32)
