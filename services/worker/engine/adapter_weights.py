"""The host copy of an adapter: a `motet-lora/1` blob seen as tensors, without copying it."""

from __future__ import annotations

import hashlib
import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

from services.worker.engine.model_config import ModelConfig
from shared.adapter_blob import BlobIndex, read_index
from shared.errors import InvalidAdapter

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory, in the blob's own type; the device pool casts while it copies.

    `pairs` is {(layer, module): (scale, A [rank, in], B [out, rank])}. The tensors share the blob's memory (a private
    mapping of the file, or the bytes) and keep it alive.
    """

    digest: str  # SHA-256 of the blob, hexadecimal: the version's identity everywhere
    rank: int  # the largest
    ranks: dict[str, int]  # {module: largest over its layers}: what the device pool charges for
    nbytes: int  # of the blob
    pairs: dict[tuple[int, str], tuple[float, torch.Tensor, torch.Tensor]]
    memory: mmap.mmap | bytearray

    @staticmethod
    def from_blob(blob: Path | bytes, config: ModelConfig, *, digest: str = "") -> HostAdapter:
        """Map the file at a path, or take the bytes, and check that the adapter fits the model.

        The registry has validated it already; this is cheap (the header, and a hash where the caller does not know it) and
        protects the engine from a blob that was registered for another base. Raises InvalidAdapter, or OSError when the
        file cannot be opened.
        """
        buffer = bytearray(blob) if isinstance(blob, bytes) else _map(blob)
        index = read_index(memoryview(buffer), len(buffer))
        _check(index, config)
        dtype = _DTYPES[index.dtype]

        def tensor(at: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
            return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=at[0]).view(shape)

        pairs, ranks = {}, dict[str, int]()
        for pair in index.pairs:
            pairs[pair.layer, pair.module] = (
                pair.scale,
                tensor(pair.a_bytes, pair.a_shape),
                tensor(pair.b_bytes, pair.b_shape),
            )
            ranks[pair.module] = max(pair.rank, ranks.get(pair.module, 0))
        digest = digest or hashlib.sha256(buffer).hexdigest()
        return HostAdapter(digest=digest, rank=index.rank, ranks=ranks, nbytes=len(buffer), pairs=pairs, memory=buffer)

    def rest(self) -> None:
        """Hold no memory of a mapped file until the tensors are read again, which takes it from the system's page cache."""
        if isinstance(self.memory, mmap.mmap):
            self.memory.madvise(mmap.MADV_DONTNEED)


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private: torch wants writable memory
        except ValueError:
            raise InvalidAdapter(f"adapter blob {path.name} is empty") from None


def _check(index: BlobIndex, config: ModelConfig) -> None:
    shapes = config.projection_shapes()
    for pair in index.pairs:
        where = f"layers.{pair.layer}.{pair.module}"
        fan_in, fan_out = shapes[pair.module]
        if pair.layer >= config.num_layers:
            raise InvalidAdapter(f"{where}: the base model has {config.num_layers} layers")
        if pair.rank < 1 or pair.a_shape[1] != fan_in or pair.b_shape[0] != fan_out:
            raise InvalidAdapter(
                f"{where}: A {list(pair.a_shape)} and B {list(pair.b_shape)} do not fit the base's {fan_in} -> {fan_out}"
            )
        if not math.isfinite(pair.scale):
            raise InvalidAdapter(f"{where}: scale {pair.scale} is not finite")
