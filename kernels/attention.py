"""Paged attention in plain torch: one step's plan, and the attention of one layer. The KV cache itself is in `types.py`.

Old memory of other sequences must not change a result, even if it contains NaN (masked scores have weight 0, but 0 * NaN is
NaN). Two rules ensure that:

- the null block is never written and stays zero; every table is padded with it;
- a block that a step begins and does not fill is cleared before it is written.

The second rule relies on sequences writing a block from offset 0 upwards. Only the compiled kernels read and write a cache in
int8, and they never use memory beyond a sequence's context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from motet.kernels.to_device import fill, send
from motet.kernels.types import KvCache, Library


@dataclass(slots=True)
class _Decode:
    """Consecutive sequences with one row each, rows [start, end).

    They are attended together, over gathered and padded context.
    """

    start: int
    end: int
    blocks: torch.Tensor  # int64 [(end - start) * columns]
    mask: torch.Tensor  # [end - start, 1, 1, columns * block_size] additive, in the cache's type


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
    library: Library | None = None  # has the plan in place of the two above

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
        """A plan from the step's arrays (see `StepBatch`) and the layers' sliding windows in tokens, 0 for full attention.

        Any order of sequences is correct. Neighbours of similar length are fast, since decoding neighbours are attended
        together. Blocks that the step begins and leaves unfinished are cleared here. Only the first ceil(context / block_size)
        entries of a sequence's table row are read.
        """
        device, size = cache.data.device, cache.block_size
        counts = np.diff(seq_starts)
        _clear_begun(cache, seq_starts, kv_slots)
        batch = AttentionBatch(send(kv_slots, device), {}, {}, cache.library)
        if batch.library is not None:
            batch.library.plan(seq_starts, context_lens, block_tables)
            return batch
        several = np.flatnonzero(counts > 1).tolist()
        for window in dict.fromkeys(windows):
            first = np.maximum(context_lens - window, 0) // size if window else np.zeros_like(context_lens)
            blocks = -(-context_lens // size) - first  # whole blocks that a sequence's last row looks at
            batch.decode[window] = [
                _plan_decode(cache, slice(a, b), seq_starts, context_lens, block_tables, first, blocks, window)
                for a, b in _tiles(np.where(counts == 1, blocks, 0), cache.tile_blocks)
            ]
            batch.prefill[window] = [
                _plan_prefill(cache, int(seq_starts[i]), int(counts[i]), int(context_lens[i]), block_tables[i], window)
                for i in several
            ]
        return batch

    @staticmethod
    def reserve(cache: KvCache, *, rows: int, columns: int, windows: Sequence[int], prompts: bool = False) -> AttentionBatch:
        """A plan for `rows` decoding sequences of up to `columns` blocks each, for `update`: its tensors stay in place.

        With `prompts`, which a library must support (`graphs_prompts`), it is for any sequences of together up to `rows` rows.
        """
        device, positions = cache.data.device, columns * cache.block_size
        batch = AttentionBatch(torch.zeros(rows, dtype=torch.int64, device=device), {}, {})
        if cache.library is not None:
            batch.library = cache.library.for_graph(rows, columns, prompts=prompts)
            return batch
        assert not prompts, "without a library their plan has tensors of other shapes for every step"
        for window in dict.fromkeys(windows):
            blocks = torch.full((rows * columns,), cache.null_block, dtype=torch.int64, device=device)
            mask = torch.full((rows, 1, 1, positions), float("-inf"), dtype=cache.data.dtype, device=device)
            batch.decode[window] = [_Decode(0, rows, blocks, mask)]
            batch.prefill[window] = []
        return batch

    def update(
        self,
        cache: KvCache,
        *,
        context_lens: np.ndarray,
        block_tables: np.ndarray,
        kv_slots: np.ndarray,
        seq_starts: np.ndarray | None = None,
    ) -> None:
        """Change a reserved plan to that of this step: as many sequences as reserved, one row each.

        The arrays are those of `build`. `seq_starts` is given where prompts are; `kv_slots` goes on to the reserved rows then.
        """
        if seq_starts is None:
            seq_starts = np.arange(len(kv_slots) + 1, dtype=np.int32)
        if self.library is not None:
            _clear_begun(cache, seq_starts, kv_slots)
            fill(self.kv_slots, kv_slots)
            self.library.plan(seq_starts, context_lens, block_tables)
            return
        step = AttentionBatch.build(
            cache,
            seq_starts=seq_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            kv_slots=kv_slots,
            windows=tuple(self.decode),
        )
        self.kv_slots.copy_(step.kv_slots)
        for window, (mine,) in self.decode.items():
            (theirs,) = step.decode[window]
            rows, seen = mine.end, theirs.mask.shape[-1]
            mine.blocks.fill_(cache.null_block)
            mine.blocks.view(rows, -1)[:, : seen // cache.block_size] = theirs.blocks.view(rows, -1)
            mine.mask.fill_(float("-inf"))
            mine.mask[..., :seen] = theirs.mask


def attend(
    qkv: torch.Tensor, cache: KvCache, layer: int, batch: AttentionBatch, *, heads: int, window: int = 0
) -> torch.Tensor:
    """Store this step's K and V, then attend as `attend_stored` does."""
    cache.write(layer, batch.kv_slots, qkv[:, heads:].unflatten(1, (2, -1)))
    return attend_stored(qkv, cache, layer, batch, heads=heads, window=window)


def attend_stored(
    qkv: torch.Tensor, cache: KvCache, layer: int, batch: AttentionBatch, *, heads: int, window: int = 0
) -> torch.Tensor:
    """Attend. The cache has this step's K and V already. Returns [rows, heads * head_dim].

    qkv [rows, heads + 2 * kv_heads, head_dim] with rotary embedding already applied: q heads, then k, then v. Query head
    h reads KV head h // (heads // kv_heads). Scores are scaled by head_dim ** -0.5. Row i sees its own sequence's
    positions up to its own and, with `window` > 0, no further back than window - 1.
    """
    rows, _, head_dim = qkv.shape
    q = qkv[:, :heads]
    if batch.library is not None:
        return batch.library.attend(q, layer, window).flatten(1)
    kv = qkv[:, heads:].unflatten(1, (2, -1))
    out = qkv.new_empty(rows, heads, head_dim)
    for tile in batch.decode[window]:
        out[tile.start : tile.end] = _attend_decode(q[tile.start : tile.end], cache, layer, tile)
    for chunk in batch.prefill[window]:
        out[chunk.start : chunk.end] = _attend_prefill(q, kv, cache, layer, chunk)
    return out.flatten(1)


def _attend_decode(q: torch.Tensor, cache: KvCache, layer: int, tile: _Decode) -> torch.Tensor:
    """Attention of q [n, heads, head_dim], in the same shape. The query heads of one KV head are computed as its query rows."""
    n, heads, head_dim = q.shape
    context = cache.read(layer, tile.blocks).view(n, -1, *cache.data.shape[3:])  # [n, tokens, 2, kv_heads, head_dim]
    k, v = context[:, :, 0].transpose(1, 2), context[:, :, 1].transpose(1, 2)
    out = F.scaled_dot_product_attention(q.view(n, k.shape[1], -1, head_dim), k, v, attn_mask=tile.mask)
    return out.reshape(n, heads, head_dim)


def _attend_prefill(q: torch.Tensor, kv: torch.Tensor, cache: KvCache, layer: int, chunk: _Prefill) -> torch.Tensor:
    """Attention of one chunk, [end - start, heads, head_dim]. `q` and `kv` are those of the whole step."""
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
    return out[0].transpose(0, 1)


def _clear_begun(cache: KvCache, seq_starts: np.ndarray, kv_slots: np.ndarray) -> None:
    """Zero the blocks that the step begins and leaves unfinished."""
    size, last = cache.block_size, kv_slots[seq_starts[1:] - 1]
    begun = (last % size < np.diff(seq_starts)) & (last % size != size - 1)
    if begun.any():
        cache.clear(send(last[begun] // size, cache.data.device))


def _tiles(blocks: np.ndarray, tile_blocks: int) -> list[tuple[int, int]]:
    """Half-open ranges of sequences to attend together, from the blocks of each (0: not a decoding sequence).

    The gathered blocks of a tile, with every sequence padded to the longest, stay within `tile_blocks`, unless a single
    sequence has more.
    """
    tiles: list[tuple[int, int]] = []
    start = longest = 0
    for i, count in enumerate([*blocks.tolist(), 0]):
        if i > start and (count == 0 or max(longest, count) * (i + 1 - start) > tile_blocks):
            tiles.append((start, i))
            start = i
            longest = 0
        if count == 0:
            start = i + 1
        longest = max(longest, count)
    return tiles


def _plan_decode(
    cache: KvCache,
    members: slice,
    seq_starts: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    first: np.ndarray,
    blocks: np.ndarray,
    window: int,
) -> _Decode:
    size, device = cache.block_size, cache.data.device
    lens, skipped, used = (array[members, None].astype(np.int64) for array in (context_lens, first, blocks))
    columns = np.arange(int(used.max()))[None, :]
    live = columns < used
    ids = np.take_along_axis(block_tables[members], np.where(live, columns + skipped, 0), axis=1)
    positions = np.arange(columns.shape[1] * size)[None, :] + skipped * size
    seen = positions < lens
    if window:
        seen &= positions >= lens - window
    return _Decode(
        start=int(seq_starts[members.start]),
        end=int(seq_starts[members.stop]),
        blocks=torch.from_numpy(np.where(live, ids, cache.null_block).reshape(-1).astype(np.int64)).to(device),
        mask=_additive(seen, cache)[:, None, None, :],
    )


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
