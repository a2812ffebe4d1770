"""The host copy of an adapter: a `motet-lora/2` or `/3` blob in memory, in the layout that the kernels read.

    a file of the engine's type    mapped: its pages are the system's page cache
    any other type, or bytes       written once to anonymous memory of the same layout

In both cases it is a pool of one slot (`kernels.PackedLora`) with a file descriptor through which other processes map the same
bytes: `/proc/<pid>/fd/<fd>` from `data_start` on.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from motet.kernels import PackedLora
from motet.services.worker.engines.model_config import ModelConfig
from motet.shared.adapter_blob import BlobIndex, SiteIndex, read_index, read_site_index
from motet.shared.errors import InvalidAdapter
from motet.shared.image_shapes import ImageShapes

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

ClassShapes = Mapping[str, tuple[int, int, int]]
"""{class: (columns of A, outputs, number of its sites)} of an image model: the `shapes` of its pool."""


def class_shapes(shapes: ImageShapes) -> dict[str, tuple[int, int, int]]:
    """The classes of an image model, for `LoraPool` and `HostAdapter.from_blob`. A site's index is its place in its class."""
    return {name: (sites[0].fan_in, sites[0].size_out, len(sites)) for name, sites in shapes.classes().items()}


@dataclass(frozen=True, slots=True, weakref_slot=True)
class HostAdapter:
    """An adapter in host memory. The file descriptor is open, and the memory mapped, as long as this object lives."""

    digest: str  # SHA-256 of the blob, hexadecimal: the version's identity everywhere
    rank: int  # the largest
    ranks: dict[str, int]  # {module or class: largest over its layers}: what the device pool charges for
    nbytes: int  # of host memory
    blob_bytes: int
    packed: PackedLora  # shares `memory`
    memory: mmap.mmap
    fd: int
    data_start: int  # where `packed.arena` begins in the file, in bytes
    anonymous: bool  # whether the file descriptor alone keeps the memory

    @staticmethod
    def from_blob(
        blob: Path | bytes, config: ModelConfig | ClassShapes, *, dtype: torch.dtype | None = None, digest: str = ""
    ) -> HostAdapter:
        """Map the file at a path, or take the bytes; check that the adapter fits the model, and cast it to `dtype`.

        A decoder (ModelConfig) has `motet-lora/2` blobs, an image model (its classes) `motet-lora/3` blobs.

        The registry has validated the blob already. This check is cheap (the header, and a hash if the caller does not know it)
        and protects the engine from a blob for another base model. Raises InvalidAdapter, or OSError when the file cannot be
        opened.
        """
        anonymous = isinstance(blob, bytes)
        fd = _memory(blob) if isinstance(blob, bytes) else os.open(blob, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = _map(fd)
            blob_bytes = len(memory)
            with memoryview(memory) as view:
                index = _checked(view, blob_bytes, config)
                digest = digest or hashlib.sha256(view).hexdigest()
            data_start, own = index.start, _DTYPES[index.dtype]
            if dtype is not None and dtype != own:
                cast = torch.frombuffer(memory, dtype=own, offset=data_start).to(dtype)
                os.close(fd)
                fd = _memory(cast.view(torch.uint8).numpy().data)
                memory, data_start, own, anonymous = _map(fd), 0, dtype, True
            packed = _packed(index, config, torch.frombuffer(memory, dtype=own, offset=data_start))
        except BaseException:
            os.close(fd)
            raise
        adapter = HostAdapter(
            digest=digest,
            rank=index.rank,
            ranks={part.module: max(part.ranks) for part in index.parts},
            nbytes=len(memory),
            blob_bytes=blob_bytes,
            packed=packed,
            memory=memory,
            fd=fd,
            data_start=data_start,
            anonymous=anonymous,
        )
        weakref.finalize(adapter, os.close, fd)
        return adapter

    def rest(self) -> None:
        """Release the pages of a mapped file. Reading them again takes them from the system's page cache, at little cost.

        Anonymous pages stay: releasing them would free nothing, and the next copy would take three times as long.
        """
        if not self.anonymous:
            self.memory.madvise(mmap.MADV_DONTNEED)


def _memory(data: bytes | memoryview) -> int:
    """Anonymous memory with a file descriptor."""
    fd = os.memfd_create("motet-adapter", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def _map(fd: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)  # private: torch wants writable memory
    except ValueError:
        raise InvalidAdapter("not a safetensors file: the adapter blob is empty") from None


def _checked(view: memoryview, blob_bytes: int, config: ModelConfig | ClassShapes) -> BlobIndex | SiteIndex:
    """The index of a blob that fits the base model. Raises InvalidAdapter."""
    if not isinstance(config, ModelConfig):
        sites = read_site_index(view, blob_bytes)
        _check_classes(sites, config)
        return sites
    index = read_index(view, blob_bytes)
    _check(index, config)
    return index


def _check(index: BlobIndex, config: ModelConfig) -> None:
    if index.layers != config.num_layers:
        raise InvalidAdapter(f"the adapter is for {index.layers} layers, the base model has {config.num_layers} layers")
    shapes = config.projection_shapes()
    for part in index.parts:
        if (part.fan_in, part.fan_out) != shapes[part.module]:
            base = "{} -> {}".format(*shapes[part.module])
            raise InvalidAdapter(f"{part.module}: {part.fan_in} -> {part.fan_out} does not fit the base's {base}")


def _check_classes(index: SiteIndex, shapes: ClassShapes) -> None:
    for part in index.parts:
        if part.module not in shapes:
            raise InvalidAdapter(f"{part.module}: the base model has no such sites")
        own, base = (part.fan_in, part.fan_out, len(part.ranks)), shapes[part.module]
        if own != base:
            told = "{} -> {} at {} sites does not fit the base's {} -> {} at {}".format(*own, *base)
            raise InvalidAdapter(f"{part.module}: {told}")


def _packed(index: BlobIndex | SiteIndex, config: ModelConfig | ClassShapes, arena: torch.Tensor) -> PackedLora:
    return PackedLora.over(
        arena,
        config.projection_shapes() if isinstance(config, ModelConfig) else config,
        layers=index.layers if isinstance(index, BlobIndex) else 0,
        pages={part.module: part.pages for part in index.parts},
        scales={part.module: part.scales for part in index.parts},
    )
