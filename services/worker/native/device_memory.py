"""The memory of a native backend: KV cache and adapter pool of one model on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from motet.kernels import KvCache, LoraPool
from motet.kernels.device import numbered
from motet.kernels.device.driver import DriverError
from motet.kernels.device.virtual_memory import physical_pages
from motet.kernels.memory import expect, reserved
from motet.kernels.pages import PhysicalPages
from motet.kernels.types import kv_block_bytes
from motet.services.worker.engines.model_config import ModelConfig, read_model_config
from motet.services.worker.native.backend import BackendOptions
from motet.services.worker.native.checkpoint import parameters
from motet.services.worker.native.loader import M, Makers, ModelWeights, load_weights, random_weights, resolve_dtype
from motet.shared.config import ConfigError

S = TypeVar("S")  # what a matrix is made of


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A model's configuration with the KV cache and the adapter pool that were made for it."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    cache: KvCache
    pool: LoraPool
    elastic: bool = False
    """Whether KV cache and adapter pool share the memory."""
    pages: PhysicalPages | None = None
    """What elastic memory of a device consists of; None on a CPU."""
    probe_blocks: tuple[int, ...] = ()
    """The spare blocks for probes of adapters, before those of the backend."""

    def divide(self, kv_blocks: int, lora_bytes: int, moves: Sequence[tuple[int, int]]) -> None:
        """Divide the memory anew between KV cache and adapter pool, after copying blocks, (from, to) in order.

        Call it between steps. What shrinks comes first, so that both together never exceed the budget.
        """
        with torch.inference_mode():
            self.cache.move(moves)
            if kv_blocks < self.cache.blocks:
                self.cache.resize(kv_blocks)
            self.pool.resize(lora_bytes)
            self.cache.resize(kv_blocks)

    def room(self, elements: int) -> torch.Tensor | None:
        """Memory for a merged copy of the weights, of their type: from KV blocks that were lent where it is elastic. None on a
        CPU, where the copy takes it matrix by matrix. Raises MemoryError when a GPU has no room."""
        if self.pages is not None:
            room = reserved((elements,), dtype=self.dtype, pages=self.pages)
            expect(room)
            return room
        if self.device.type == "cpu":
            return None
        try:
            return torch.empty(elements, dtype=self.dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{elements * self.dtype.itemsize} bytes for merged weights") from error


def reserve(options: BackendOptions, *, spare_blocks: int = 0, int8_kv: bool = False) -> DeviceMemory:
    """Make the KV cache and the adapter pool. The cache gets `spare_blocks` more than the engine knows of, and those
    for probes before them.

    `int8_kv`: the steps support a cache of 8 bits. Raises UnsupportedModel, and ConfigError when a cache or shared memory is
    asked for that is not supported. Where the memory is elastic, cache and pool are each reserved at the
    size of both together, and each uses only its part.
    """
    config = read_model_config(options.model_dir)
    probe_blocks = -(-options.probe_tokens // options.block_size)
    spare_blocks += probe_blocks
    dtype, device = resolve_dtype(options.dtype, config), numbered(torch.device(options.device))
    kv_cache_dtype = options.kv_cache_dtype
    if kv_cache_dtype != "auto" and not int8_kv:
        raise ConfigError(
            f"--kv-cache-dtype {kv_cache_dtype}: only the compiled CPU kernels read such a KV cache, and they are not in use"
            f" here (device {device}, or MOTET_KERNELS chooses others)"
        )
    block_bytes = kv_bytes_per_block(config, dtype=options.dtype, block_size=options.block_size, kv_cache_dtype=kv_cache_dtype)
    both = options.kv_blocks * block_bytes + options.lora_bytes if options.elastic else 0
    pages = pages_of(device) if both else None
    if pages is not None:
        pages.prepare(both + edge_bytes(config.num_layers, block_bytes, pages.page_bytes, spare_blocks=spare_blocks))
    cache = KvCache(
        layers=config.num_layers,
        blocks=options.kv_blocks,
        block_size=options.block_size,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.int8 if kv_cache_dtype == "int8" else dtype,
        device=device,
        capacity=both // block_bytes,
        spare=spare_blocks,
        pages=pages,
    )
    pool = LoraPool(
        config.projection_shapes(),
        layers=config.num_layers,
        slots=options.max_loras,
        max_rank=options.max_lora_rank,
        bytes_total=options.lora_bytes,
        dtype=dtype,
        device=device,
        capacity=both,
        pages=pages,
    )
    first = cache.null_block - spare_blocks
    probes = tuple(range(first, first + probe_blocks))
    return DeviceMemory(config, dtype, device, cache, pool, elastic=both > 0, pages=pages, probe_blocks=probes)


def pages_of(device: torch.device) -> PhysicalPages | None:
    """For elastic memory of `device`; None on a CPU. Raises ConfigError where its driver cannot map memory."""
    try:
        return physical_pages(device)
    except DriverError as error:
        raise ConfigError(f"--device-memory shared: {error}; fixed needs no virtual memory of the driver") from None


def edge_bytes(layers: int, block_bytes: int, page_bytes: int, *, spare_blocks: int) -> int:
    """What elastic memory of a device needs beyond its budget, whatever the division: the spare blocks and the null block, and
    pages of which a part is not used. Each layer's blocks begin and end within a page, the pool and a merged copy end so."""
    return (spare_blocks + 1) * block_bytes + (2 * (layers + 1) + 2) * page_bytes


def weights_of(options: BackendOptions, memory: DeviceMemory, makers: Makers[M]) -> ModelWeights[M]:
    """The checkpoint's weights, or random ones, in the memory's type and on its device. Raises UnsupportedModel."""
    makers = _reporting(makers, parameters(memory.config), options.loaded)
    if options.load_format == "dummy":
        return random_weights(memory.config, memory.dtype, memory.device, makers)
    return load_weights(options.model_dir, memory.config, memory.dtype, memory.device, makers)


def _reporting(makers: Makers[M], total: int, loaded: Callable[[float], None]) -> Makers[M]:
    """Makers that report the share of `total` elements of which matrices have been made, packing included."""
    done = 0

    def counted(make: Callable[[S, torch.Tensor | None], M], size: Callable[[S], int]) -> Callable[[S, torch.Tensor | None], M]:
        def made(source: S, bias: torch.Tensor | None) -> M:
            nonlocal done
            matrix = make(source, bias)
            done += size(source)
            loaded(min(1.0, done / total))
            return matrix

        return made

    def elements(parts: Sequence[torch.Tensor]) -> int:
        return sum(part.numel() for part in parts)

    return replace(
        makers,
        linear=counted(makers.linear, elements),
        head=counted(makers.head or makers.linear, elements),
        whole=counted(makers.whole, lambda numbers: numbers.values.numel()) if makers.whole is not None else None,
    )


def kv_bytes_per_block(config: ModelConfig, *, dtype: str, block_size: int, kv_cache_dtype: str = "auto") -> int:
    """Bytes of one KV block over all layers, for sizing `kv_blocks` from a memory budget."""
    kind = torch.int8 if kv_cache_dtype == "int8" else resolve_dtype(dtype, config)
    layer = kv_block_bytes(block_size=block_size, kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=kind)
    return config.num_layers * layer
