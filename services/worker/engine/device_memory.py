"""The memory of a native backend: KV cache and adapter pool of one model on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from motet.kernels import KvCache, LoraPool
from motet.kernels.attention import kv_block_bytes
from motet.kernels.device import numbered
from motet.services.worker.engine.backend import BackendOptions
from motet.services.worker.engine.loader import M, Makers, ModelWeights, load_weights, random_weights, resolve_dtype
from motet.services.worker.engine.model_config import ModelConfig, read_model_config
from motet.shared.config import ConfigError


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

    def divide(self, kv_blocks: int, lora_bytes: int, moves: Sequence[tuple[int, int]]) -> None:
        """Divide the memory anew between KV cache and adapter pool, after copying blocks, (from, to) in order.

        Call it between steps.
        """
        with torch.inference_mode():
            self.cache.move(moves)
            self.pool.resize(lora_bytes)
        self.cache.resize(kv_blocks)


def reserve(options: BackendOptions, *, spare_blocks: int = 0, int8_kv: bool = False) -> DeviceMemory:
    """Make the KV cache and the adapter pool. The cache gets `spare_blocks` more than the engine knows of.

    `int8_kv`: the steps support a cache of 8 bits. Raises UnsupportedModel, and ConfigError when an unsupported cache is asked
    for. Where the memory is elastic, cache and pool are each reserved at the size of both together, and each uses only its
    part.
    """
    config = read_model_config(options.model_dir)
    dtype, device = resolve_dtype(options.dtype, config), numbered(torch.device(options.device))
    kv_cache_dtype = options.kv_cache_dtype
    if kv_cache_dtype != "auto" and not int8_kv:
        raise ConfigError(
            f"--kv-cache-dtype {kv_cache_dtype}: only the compiled CPU kernels read such a KV cache, and they are not in use"
            f" here (device {device}; see the warning above, or MOTET_KERNELS)"
        )
    block_bytes = kv_bytes_per_block(config, dtype=options.dtype, block_size=options.block_size, kv_cache_dtype=kv_cache_dtype)
    both = options.kv_blocks * block_bytes + options.lora_bytes if options.elastic and device.type == "cpu" else 0
    cache = KvCache(
        layers=config.num_layers,
        blocks=options.kv_blocks + spare_blocks,
        block_size=options.block_size,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.int8 if kv_cache_dtype == "int8" else dtype,
        device=device,
        capacity=both // block_bytes,
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
    )
    return DeviceMemory(config, dtype, device, cache, pool, elastic=both > 0)


def weights_of(options: BackendOptions, memory: DeviceMemory, makers: Makers[M]) -> ModelWeights[M]:
    """The checkpoint's weights, or random ones, in the memory's type and on its device. Raises UnsupportedModel."""
    if options.load_format == "dummy":
        return random_weights(memory.config, memory.dtype, memory.device, makers)
    return load_weights(options.model_dir, memory.config, memory.dtype, memory.device, makers)


def kv_bytes_per_block(config: ModelConfig, *, dtype: str, block_size: int, kv_cache_dtype: str = "auto") -> int:
    """Bytes of one KV block over all layers, for sizing `kv_blocks` from a memory budget."""
    kind = torch.int8 if kv_cache_dtype == "int8" else resolve_dtype(dtype, config)
    layer = kv_block_bytes(block_size=block_size, kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=kind)
    return config.num_layers * layer
