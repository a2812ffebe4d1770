"""Paged attention in plain torch: the KV cache, one step's plan, and the attention of one layer.

    KvCache.data   [layers, blocks + 1, block_size, 2, kv_heads, head_dim]      K is index 0 of the fourth axis, V index 1

Writing a token is one contiguous row, reading a block one contiguous copy. Two rules keep one sequence's memory out of
another's result, even when a diverged request left NaN behind (masked scores weigh 0, but 0 * NaN is NaN):

- the block after the last is never written and stays zero; every table is padded with it;
- a block that a step begins and does not fill is cleared before it is written.

The second relies on how sequences write: from offset 0 of a block upwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

SPLIT_BLOCKS = 128
"""Decoding sequences are split by length once that saves gathering this many KV blocks per layer."""


class KvCache:
    """Keys and values of `blocks` blocks of `block_size` tokens for every layer."""

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
    ) -> None:
        self.block_size = block_size
        self.null_block = blocks
        self.data = torch.zeros((layers, blocks + 1, block_size, 2, kv_heads, head_dim), dtype=dtype, device=device)
        self._blocks = list(self.data)  # [blocks + 1, block_size, 2, kv_heads, head_dim] per layer
        self._tokens = [layer.view(-1, 2, kv_heads, head_dim) for layer in self._blocks]

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero `blocks`, int64 [n], in every layer."""
        self.data.index_fill_(1, blocks, 0)

    def write(self, layer: int, kv_slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store `kv` [rows, 2, kv_heads, head_dim] at `kv_slots`, int64 [rows] (block * block_size + offset)."""
        self._tokens[layer].index_copy_(0, kv_slots, kv)

    def read(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """A copy of `blocks`, int64 [n]: [n, block_size, 2, kv_heads, head_dim]."""
        return self._blocks[layer].index_select(0, blocks)


@dataclass(slots=True)
class _Decode:
    """Sequences with one row each, attended together over gathered, padded context."""

    rows: torch.Tensor | None  # int64 [n]; None when they are all rows of the step, in order
    blocks: torch.Tensor  # int64 [n * columns]
    mask: torch.Tensor  # [n, 1, 1, columns * block_size] additive, in the cache's type


@dataclass(slots=True)
class _Prefill:
    """One sequence's chunk of rows [start, end). Without `blocks` its context is the chunk itself."""

    start: int
    end: int
    blocks: torch.Tensor | None  # int64 [columns]
    mask: torch.Tensor | None  # [rows, columns * block_size or rows] additive; None for plain causal


@dataclass(slots=True)
class AttentionBatch:
    """One step's attention plan: where rows go and what they look at, per distinct sliding window."""

    kv_slots: torch.Tensor  # int64 [rows]
    decode: dict[int, list[_Decode]]  # by window
    prefill: dict[int, list[_Prefill]]

    @staticmethod
    def build(
        cache: KvCache,
        *,
        seq_starts: np.ndarray,
        context_lens: np.ndarray,
        block_tables: np.ndarray,
        kv_slots: np.ndarray,
        windows: Sequence[int],
    ) -> AttentionBatch:
        """From the step's arrays (see StepBatch) and the layers' sliding windows in tokens, 0 for full attention.

        Blocks that the step begins and leaves unfinished are cleared here. Only the first
        ceil(context / block_size) entries of a sequence's table row are read.
        """
        device, size = cache.data.device, cache.block_size
        counts = np.diff(seq_starts)
        last = kv_slots[seq_starts[1:] - 1]
        begun = (last % size < counts) & (last % size != size - 1)
        if begun.any():
            cache.clear(torch.from_numpy(last[begun] // size).to(device))
        batch = AttentionBatch(torch.from_numpy(kv_slots).to(device), {}, {})
        single = np.flatnonzero(counts == 1)
        several = np.flatnonzero(counts > 1).tolist()
        for window in dict.fromkeys(windows):
            batch.decode[window] = _plan_decode(cache, single, seq_starts, context_lens, block_tables, window)
            batch.prefill[window] = [
                _plan_prefill(cache, int(seq_starts[i]), int(counts[i]), int(context_lens[i]), block_tables[i], window)
                for i in several
            ]
        return batch


def attend(
    qkv: torch.Tensor, cache: KvCache, layer: int, batch: AttentionBatch, *, heads: int, window: int = 0
) -> torch.Tensor:
    """Store this step's K and V, then attend. Returns [rows, heads * head_dim].

    qkv [rows, heads + 2 * kv_heads, head_dim] with rotary embedding already applied: q heads, then k, then v. Query head
    h reads KV head h // (heads // kv_heads). Scores are scaled by head_dim ** -0.5. Row i sees its own sequence's
    positions up to its own and, with `window` > 0, no further back than window - 1.
    """
    rows, _, head_dim = qkv.shape
    kv = qkv[:, heads:].unflatten(1, (2, -1))
    cache.write(layer, batch.kv_slots, kv)
    decode, prefill = batch.decode[window], batch.prefill[window]
    if len(decode) == 1 and decode[0].rows is None:
        return _attend_decode(qkv[:, :heads], cache, layer, decode[0])
    out = qkv.new_empty(rows, heads * head_dim)
    for group in decode:
        assert group.rows is not None
        out.index_copy_(0, group.rows, _attend_decode(qkv[:, :heads].index_select(0, group.rows), cache, layer, group))
    for chunk in prefill:
        out[chunk.start : chunk.end] = _attend_prefill(qkv[:, :heads], kv, cache, layer, chunk)
    return out


def _attend_decode(q: torch.Tensor, cache: KvCache, layer: int, group: _Decode) -> torch.Tensor:
    """q [n, heads, head_dim] -> [n, heads * head_dim]. The query heads of one KV head stand as that head's query rows."""
    n, heads, head_dim = q.shape
    context = cache.read(layer, group.blocks).view(n, -1, *cache.data.shape[3:])  # [n, tokens, 2, kv_heads, head_dim]
    k, v = context[:, :, 0].transpose(1, 2), context[:, :, 1].transpose(1, 2)
    out = F.scaled_dot_product_attention(q.view(n, k.shape[1], -1, head_dim), k, v, attn_mask=group.mask)
    return out.reshape(n, heads * head_dim)


def _attend_prefill(q: torch.Tensor, kv: torch.Tensor, cache: KvCache, layer: int, chunk: _Prefill) -> torch.Tensor:
    context = kv[chunk.start : chunk.end] if chunk.blocks is None else cache.read(layer, chunk.blocks).flatten(0, 1)
    k, v = context[:, 0].transpose(0, 1), context[:, 1].transpose(0, 1)  # [kv_heads, tokens, head_dim]
    out = F.scaled_dot_product_attention(
        q[chunk.start : chunk.end].transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=k.shape[0] != q.shape[1],
    )
    return out[0].transpose(0, 1).flatten(1)


def _plan_decode(
    cache: KvCache,
    seqs: np.ndarray,
    seq_starts: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    window: int,
) -> list[_Decode]:
    size, device = cache.block_size, cache.data.device
    lens = context_lens[seqs].astype(np.int64)
    first = np.maximum(lens - window, 0) // size if window else np.zeros_like(lens)
    blocks = -(-lens // size) - first  # whole blocks each sequence looks at
    plans = []
    for members in _by_length(blocks):
        columns = np.arange(int(blocks[members].max()))[None, :]
        live = columns < blocks[members, None]
        at = np.where(live, columns + first[members, None], 0)
        ids = np.where(live, np.take_along_axis(block_tables[seqs[members]], at, axis=1), cache.null_block)
        positions = np.arange(columns.shape[1] * size)[None, :] + first[members, None] * size
        seen = positions < lens[members, None]
        if window:
            seen &= positions >= lens[members, None] - window
        rows = seq_starts[seqs[members]].astype(np.int64)
        everything = len(rows) == seq_starts[-1] and bool((rows == np.arange(len(rows))).all())
        plans.append(
            _Decode(
                rows=None if everything else torch.from_numpy(rows).to(device),
                blocks=torch.from_numpy(ids.reshape(-1).astype(np.int64)).to(device),
                mask=_additive(seen, cache)[:, None, None, :],
            )
        )
    return plans


def _by_length(blocks: np.ndarray) -> list[np.ndarray]:
    """Indices of `blocks` in groups to be padded to their longest member: one group unless splitting saves enough."""
    if not len(blocks):
        return []
    longest = int(blocks.max())
    short = blocks * 2 <= longest
    if int((longest - blocks[short]).sum()) < SPLIT_BLOCKS:
        return [np.arange(len(blocks))]
    indices = np.flatnonzero(short)
    return [np.flatnonzero(~short), *(indices[group] for group in _by_length(blocks[short]))]


def _plan_prefill(cache: KvCache, start: int, count: int, context: int, table: np.ndarray, window: int) -> _Prefill:
    size, device = cache.block_size, cache.data.device
    before = context - count
    if before == 0 and not (window and count > window):
        return _Prefill(start, start + count, None, None)
    queries = np.arange(before, context)[:, None]
    if before == 0:
        keys, blocks = np.arange(count)[None, :], None
    else:
        first = max(before + 1 - window, 0) // size if window else 0
        ids = table[first : -(-context // size)].astype(np.int64)
        blocks = torch.from_numpy(ids).to(device)
        keys = np.arange(first * size, (first + len(ids)) * size)[None, :]
    seen = keys <= queries
    if window:
        seen &= keys > queries - window
    return _Prefill(start, start + count, blocks, _additive(seen, cache))


def _additive(seen: np.ndarray, cache: KvCache) -> torch.Tensor:
    """0 where `seen`, -inf elsewhere, in the cache's type and on its device."""
    mask = torch.zeros(seen.shape, dtype=cache.data.dtype, device=cache.data.device)
    return mask.masked_fill_(torch.from_numpy(~seen).to(cache.data.device), float("-inf"))
