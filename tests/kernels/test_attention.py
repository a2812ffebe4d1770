"""Paged attention against the formula in fp64: scattered blocks, chunks, windows, grouped heads, poisoned memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from motet.kernels import AttentionBatch, KvCache, attend

BLOCK = 4
HEAD_DIM = 16
BLOCKS = 64


def formula(qkv: torch.Tensor, heads: int, kv_heads: int, window: int) -> torch.Tensor:
    """One whole sequence, [tokens, all heads, head_dim] -> [tokens, heads * head_dim], in fp64."""
    q, k, v = qkv.double().split([heads, kv_heads, kv_heads], dim=1)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    at = torch.arange(len(qkv))
    seen = at[None, :] <= at[:, None]
    if window:
        seen &= at[None, :] > at[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


def poisoned_cache(kv_heads: int) -> KvCache:
    """A cache whose writable blocks are NaN, as a diverged request could leave them."""
    cache = KvCache(layers=1, blocks=BLOCKS, block_size=BLOCK, kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=torch.float32)
    cache.data[:, : cache.null_block] = float("nan")
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_blocks_that_are_copied_out_of_one_cache_and_into_another_are_the_same_there(dtype: torch.dtype) -> None:
    one, other = (
        KvCache(layers=3, blocks=9, block_size=BLOCK, kv_heads=2, head_dim=HEAD_DIM, dtype=dtype, capacity=20) for _ in "ab"
    )
    one.data.random_(-100, 100)
    content = one.copy_out([7, 0, 3])
    assert content.shape == (3 * one.data[:, 0].nbytes,)
    other.copy_in([2, 8, 5], bytearray(content))
    assert torch.equal(other.data[:, [2, 8, 5]], one.data[:, [7, 0, 3]])
    assert not other.data[:, [0, 1, 3, 4, 6, 7]].any()
    with pytest.raises(ValueError, match="are not 2 KV blocks"):
        other.copy_in([1, 2], bytearray(content))


@pytest.mark.parametrize("window", [0, 1, 5, 9])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tile_blocks", [1, 6, 1000])
def test_chunks_and_decodes_of_mixed_lengths_follow_the_formula(window: int, kv_heads: int, tile_blocks: int) -> None:
    heads, draw = 4, random.Random(window * 10 + kv_heads)
    cache = poisoned_cache(kv_heads)
    cache.tile_blocks = tile_blocks
    free = draw.sample(range(BLOCKS), BLOCKS)
    lengths = [1, 3, 4, 11, 19, 30, 2, 8]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(n, heads + 2 * kv_heads, HEAD_DIM, generator=generator) for n in lengths]
    outputs = [torch.empty(0, heads * HEAD_DIM) for _ in lengths]
    done, tables = [0] * len(lengths), [[free.pop() for _ in range(-(-n // BLOCK))] for n in lengths]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        live = [i for i, n in enumerate(lengths) if done[i] < n]
        draw.shuffle(live)
        takes = [min(draw.choice([1, 1, 2, 7]), lengths[i] - done[i]) for i in live]
        table = np.zeros((len(live), 8), dtype=np.int32)
        slots = []
        for row, (i, take) in enumerate(zip(live, takes, strict=True)):
            table[row, : len(tables[i])] = tables[i]
            slots += [tables[i][p // BLOCK] * BLOCK + p % BLOCK for p in range(done[i], done[i] + take)]
        batch = AttentionBatch.build(
            cache,
            seq_starts=np.cumsum([0, *takes]).astype(np.int32),
            context_lens=np.array([done[i] + take for i, take in zip(live, takes, strict=True)], dtype=np.int32),
            block_tables=table,
            kv_slots=np.array(slots, dtype=np.int64),
            windows=[window],
        )
        rows = torch.cat([inputs[i][done[i] : done[i] + take] for i, take in zip(live, takes, strict=True)])
        out = attend(rows, cache, 0, batch, heads=heads, window=window)
        for i, take, part in zip(live, takes, out.split(takes), strict=True):
            outputs[i] = torch.cat([outputs[i], part])
            done[i] += take
    for qkv, output in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(output.double(), formula(qkv, heads, kv_heads, window), rtol=1e-5, atol=1e-5)


def test_layers_with_different_windows_share_one_step() -> None:
    heads, kv_heads, tokens = 2, 2, 13
    cache = KvCache(layers=2, blocks=BLOCKS, block_size=BLOCK, kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=torch.float32)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    for start, end in ((0, 12), (12, 13)):
        batch = AttentionBatch.build(
            cache,
            seq_starts=np.array([0, end - start], dtype=np.int32),
            context_lens=np.array([end], dtype=np.int32),
            block_tables=np.arange(4, dtype=np.int32)[None],
            kv_slots=np.arange(start, end, dtype=np.int64),
            windows=[0, 6],
        )
        for layer, window in enumerate((0, 6)):
            out = attend(qkv[start:end], cache, layer, batch, heads=heads, window=window)
            want = formula(qkv, heads, kv_heads, window)[start:end]
            torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
