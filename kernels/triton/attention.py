"""Paged attention in one launch per layer, for caches on a GPU: blocks are read where they are, nothing is gathered.

    tile     up to BM / G tokens of one sequence, with the G query heads of one KV head as rows of one product
    launch   tiles x KV heads programs; each walks its sequence's context in steps of BN tokens with a running softmax

Tiles and block tables lie in one buffer, sent in one copy per step; how many tiles there are stands there too, so a captured
graph serves every batch of as many rows. What lies past a sequence's context is never read.
"""

from __future__ import annotations

import numpy as np
import torch
import triton

from motet.kernels.attention import KvCache
from motet.kernels.triton.attention_kernel import paged_attention
from motet.kernels.triton.lora import INTERPRETED

HEAD = 4  # elements before the tiles: how many there are
ROWS = {"decode": 16, "prefill": 64}  # BM
CONTEXT = 64  # BN
ROWS_FP32, CONTEXT_FP32 = 16, 16  # no tensor core multiplies fp32 as it is, and registers hold fewer of them
WARPS, STAGES = 4, 2


class PagedAttention:
    """A plan for one step at a time over `cache`.

    With `rows` it is for exactly that many decoding sequences of up to `columns` blocks, and a graph captured with it stays
    valid when it is planned again.
    """

    def __init__(self, cache: KvCache, *, heads: int, rows: int = 0, columns: int = 0) -> None:
        self._cache, self._heads, self._rows, self._columns = cache, heads, rows, columns
        self._group = triton.next_power_of_2(heads // cache.data.shape[4])
        self._fp32 = cache.data.dtype == torch.float32
        self._kind, self._tiles = "decode", rows
        self._buffer = torch.zeros(HEAD + 4 * rows + rows * columns, dtype=torch.int32, device=cache.data.device)

    def for_graph(self, rows: int, columns: int) -> PagedAttention:
        """A separate plan for a captured graph."""
        return PagedAttention(self._cache, heads=self._heads, rows=rows, columns=columns)

    def plan(self, seq_starts: np.ndarray, context_lens: np.ndarray, block_tables: np.ndarray) -> None:
        """Plan a step with these arrays, which are those of `AttentionBatch.build`."""
        counts = np.diff(seq_starts)
        if not self._rows:
            self._kind = "decode" if len(counts) == 0 or counts.max() == 1 else "prefill"
        tokens = self._block_rows // self._group
        each = -(-counts // tokens)
        sequence = np.repeat(np.arange(len(counts)), each)
        within = tokens * (np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each))
        tiles = np.empty((len(sequence), 4), dtype=np.int32)
        tiles[:, 0] = sequence
        tiles[:, 1] = seq_starts[sequence] + within
        tiles[:, 2] = np.minimum(counts[sequence] - within, tokens)
        tiles[:, 3] = context_lens[sequence] - counts[sequence] + within
        if not self._rows:
            self._tiles, self._columns = len(tiles), block_tables.shape[1]
            size = HEAD + tiles.size + block_tables.size
            if size > len(self._buffer):
                self._buffer = self._buffer.new_empty(2 * size)
        at = HEAD + 4 * self._tiles
        size = at + len(counts) * self._columns
        host = torch.empty(size, dtype=torch.int32, pin_memory=self._buffer.is_cuda)  # the caching allocator's
        raw = host.numpy()
        raw[0] = len(tiles)
        raw[HEAD:at].reshape(-1, 4)[: len(tiles)] = tiles
        raw[at:].reshape(len(counts), self._columns)[:, : block_tables.shape[1]] = block_tables
        self._buffer[:size].copy_(host, non_blocking=True)

    def attend(self, q: torch.Tensor, layer: int, window: int) -> torch.Tensor:
        """Attention of q [rows, heads, head_dim], in the same shape. The cache must have this step's K and V already."""
        cache = self._cache
        block_size, _, kv_heads, head_dim = cache.data.shape[2:]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged_attention[(self._tiles, kv_heads)](
            q, q.stride(0), out, cache.data[layer], self._buffer, self._buffer[HEAD:], self._buffer[HEAD + 4 * self._tiles :],
            self._columns, head_dim**-0.5, window,
            HEADS=self._heads, KV_HEADS=kv_heads, G=self._group, D=head_dim, DP=max(triton.next_power_of_2(head_dim), 16),
            BLOCK=block_size, BM=self._block_rows, BN=CONTEXT_FP32 if self._fp32 else CONTEXT,
            UPCAST=INTERPRETED or self._fp32, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        return out

    @property
    def _block_rows(self) -> int:
        return max(ROWS_FP32 if self._fp32 else ROWS[self._kind], self._group)
