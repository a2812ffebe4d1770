"""KV caches of one layer for tests: the values that a cache of each type stores, and their layout."""

from __future__ import annotations

import torch

from motet.kernels.types import KvCache


def stored(kv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`kv` [..., head_dim] as read back from a cache of this type, in fp64."""
    if dtype != torch.int8:
        return kv.to(dtype).double()
    numbers, scales = rounded(kv)
    return numbers.double() * scales.double()[..., None]


def rounded(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers in -127..127, and the scale of each vector, float32 [...]."""
    most = kv.float().abs().amax(-1)
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most, 0.0)  # not 127 / most, which rounds twice
    return (kv.float() * inverse[..., None]).round().to(torch.int8), most / 127


class Layer:
    """One layer of a cache whose memory is NaN (in int8 the scales), as a diverged request could leave it."""

    def __init__(self, *, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        cache = KvCache(layers=1, blocks=blocks, block_size=block_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        self.data, self.dtype = cache.data[0], dtype
        if dtype != torch.int8:
            self.tokens = self.data.view(-1, 2, kv_heads, head_dim)
            self.data.fill_(float("nan"))
            return
        heads = self.data.view(len(self.data), kv_heads, -1)
        end = 2 * block_size * head_dim
        self.numbers = heads[..., :end].unflatten(2, (2, block_size, head_dim))  # [blocks, kv heads, 2, block size, head size]
        self.scales = heads[..., end:].view(torch.float32).unflatten(2, (2, block_size))
        self.numbers.fill_(127)
        self.scales.fill_(float("nan"))
        self.block_size = block_size

    def put(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Keys and values [n, 2, kv heads, head size] of tokens, int64 [n] slots."""
        if self.dtype != torch.int8:
            self.tokens[slots] = kv.to(self.dtype)
            return
        numbers, scales = rounded(kv)
        block, offset = slots // self.block_size, slots % self.block_size
        self.numbers[block, :, :, offset] = numbers.transpose(1, 2)
        self.scales[block, :, :, offset] = scales.transpose(1, 2)

    def get(self, slots: torch.Tensor) -> torch.Tensor:
        """What is stored, fp64 [n, 2, kv heads, head size]."""
        if self.dtype != torch.int8:
            return self.tokens[slots].double()
        block, offset = slots // self.block_size, slots % self.block_size
        found = self.numbers[block, :, :, offset].double() * self.scales[block, :, :, offset].double()[..., None]
        return found.transpose(1, 2)
