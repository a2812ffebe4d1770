"""What kernels hand to each other: the KV cache, the attention library that serves it, a result that is still to be added, and
how rows draw their tokens.

    KvCache.data   [layers, all blocks, block_size, 2, kv_heads, head_dim]      K is index 0 of the fourth axis, V index 1
                   [layers, all blocks, bytes of a block] in int8               layout and scales: cpu/src/kv.h

    all blocks     | blocks of sequences, from 0 up | not used, up to `capacity` | spare blocks | null block |

A token is written as one contiguous row, and a block is read as one contiguous copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from motet.kernels.memory import expect, give_back, lazy_zeros, reserved
from motet.kernels.pages import PhysicalPages

TILE_BYTES = {"cpu": 1 << 20, "cuda": 1 << 28}
"""How much context decoding sequences gather at a time, per layer. On a CPU it is what the L2 cache holds."""


def kv_block_bytes(*, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block of one layer. In int8 this includes the scales: one float32 for each head of a key or value."""
    scale = torch.float32.itemsize if dtype == torch.int8 else 0
    return block_size * 2 * kv_heads * (head_dim * dtype.itemsize + scale)


class KvCache:
    """Keys and values of `blocks` blocks of `block_size` tokens for every layer.

    With `capacity`, `resize` changes how many blocks there are, up to that; on a device it needs `pages`. The `spare` blocks
    before the null block are always there.
    """

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        capacity: int = 0,
        spare: int = 0,
        pages: PhysicalPages | None = None,
    ) -> None:
        self.block_size, self.kv_heads, self.head_dim = block_size, kv_heads, head_dim
        self.blocks = blocks
        self.library: Library | None = None  # what attends instead of the functions of attention.py
        self.null_block = max(blocks, capacity) + spare
        block_bytes = kv_block_bytes(block_size=block_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        self.tile_blocks = max(TILE_BYTES[torch.device(device).type] // block_bytes, 1)
        block = (block_bytes,) if dtype == torch.int8 else (block_size, 2, kv_heads, head_dim)
        shape = (layers, self.null_block + 1, *block)
        self.data = reserved(shape, dtype=dtype, pages=pages) if capacity else lazy_zeros(shape, dtype=dtype, device=device)
        self._blocks = list(self.data)  # [all blocks, block_size, 2, kv_heads, head_dim] per layer
        self._tokens = [] if dtype == torch.int8 else [layer.view(-1, 2, kv_heads, head_dim) for layer in self._blocks]
        if capacity:
            for layer in self._blocks:
                expect(layer[:blocks])
                expect(layer[max(blocks, capacity) :])

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero `blocks`, int64 [n], in every layer."""
        self.data.index_fill_(1, blocks, 0)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in every layer: (from, to), one after another."""
        for block, to in moves:
            self.data[:, to] = self.data[:, block]

    def copy_out(self, blocks: Sequence[int]) -> np.ndarray:
        """A copy of `blocks` in host memory, uint8 [n * bytes of a block]: block after block, and within a block layer after
        layer.
        """
        found = torch.index_select(self.data.transpose(0, 1), 0, self._index(blocks))
        return found.cpu().view(torch.uint8).numpy().reshape(-1)

    def copy_in(self, blocks: Sequence[int], content: bytearray) -> None:
        """Write to `blocks` what `copy_out` of a cache of the same shape and type returned.

        Raises ValueError when the content is not as long as the blocks.
        """
        layers, _, *shape = self.data.shape
        if len(content) != len(blocks) * self.data[:, 0].nbytes:
            raise ValueError(f"{len(content)} bytes are not {len(blocks)} KV blocks")
        host = torch.frombuffer(content, dtype=self.data.dtype).view(len(blocks), layers, *shape)
        self.data.transpose(0, 1).index_copy_(0, self._index(blocks), host.to(self.data.device))

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.data.device)

    def resize(self, blocks: int) -> None:
        """Use only the first `blocks` blocks from now on. The memory of the others is given back."""
        for layer in self._blocks:
            if blocks < self.blocks:
                give_back(layer[blocks : self.blocks])
            else:
                expect(layer[self.blocks : blocks])
        self.blocks = blocks

    def tokens(self, layer: int) -> torch.Tensor:
        """A layer's memory by slot (block * block_size + offset): [slots, 2, kv_heads, head_dim]. Not in int8."""
        return self._tokens[layer]

    def write(self, layer: int, kv_slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store `kv` [rows, 2, kv_heads, head_dim] at `kv_slots`, int64 [rows]."""
        self._tokens[layer].index_copy_(0, kv_slots, kv)

    def read(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """A copy of `blocks`, int64 [n]: [n, block_size, 2, kv_heads, head_dim]."""
        return self._blocks[layer].index_select(0, blocks)


class Library(Protocol):
    """An attention library with a plan for one step at a time."""

    graphs_prompts: bool  # `for_graph` takes `prompts`

    def for_graph(self, rows: int, columns: int, *, prompts: bool = False) -> Library:
        """A plan for exactly `rows` decoding sequences of up to `columns` blocks. A graph captured with it stays valid.

        With `prompts` it is for any sequences of together up to `rows` rows.
        """

    def plan(self, seq_starts: np.ndarray, context_lens: np.ndarray, block_tables: np.ndarray) -> None:
        """Plan a step with these arrays, which are those of `AttentionBatch.build`."""

    def attend(self, q: torch.Tensor, layer: int, window: int) -> torch.Tensor:
        """Attention of q [rows, heads, head_dim], in the same shape. The cache must have this step's K and V already."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is added to a product's result before it is used: `values`, as many as the result's, in its layout and type.

    `adapted`, int32 [rows], is 1 for rows that it counts for. What `values` holds in other rows changes nothing, even NaN.
    """

    values: torch.Tensor
    adapted: torch.Tensor


@dataclass(frozen=True, slots=True)
class DrawRules:
    """How the rows of a batch draw their tokens, see sampling.py."""

    temperature: np.ndarray  # float32 [n], 0 for the argmax
    min_p: np.ndarray  # float32 [n], 0 for off
    top_k: np.ndarray  # int64 [n], 0 for off
    top_p: np.ndarray  # float64 [n], 1 or more for off

    @property
    def drawing(self) -> np.ndarray:
        """Which rows have a temperature, bool [n]."""
        return self.temperature > 0
