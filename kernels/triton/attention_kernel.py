"""The kernel of kernels/triton/attention.py: a tile of queries against its sequence's context, block by block."""

from __future__ import annotations

import triton
import triton.language as tl

from motet.kernels.triton.device import _dot


@triton.jit(do_not_specialize=["columns", "window"])
def paged_attention(
    q,
    q_stride,
    out,
    kv,
    count,
    tiles,
    tables,
    columns,
    scale,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attention of all tiles of a step over the paged cache.

    kv [blocks, BLOCK, 2, KV_HEADS, D]; tiles int32 [n, 4]: sequence, first row, tokens, position of the first; tables int32
    [sequences, columns]; window 0 for none. G is the number of query heads of a KV head, rounded up to a power of 2.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    if tile < tl.load(count):
        sequence = tl.load(tiles + 4 * tile)
        first = tl.load(tiles + 4 * tile + 1)
        tokens = tl.load(tiles + 4 * tile + 2)
        position = tl.load(tiles + 4 * tile + 3)
        m = tl.arange(0, BM)
        d = tl.arange(0, DP)
        query_head = head * (HEADS // KV_HEADS) + m % G
        live = (m // G < tokens) & (m % G < HEADS // KV_HEADS)
        row = (first + m // G).to(tl.int64)
        inside = live[:, None] & (d < D)[None, :]
        x = tl.load(q + row[:, None] * q_stride + (query_head * D)[:, None] + d[None, :], mask=inside, other=0.0)
        at = position + m // G
        end = position + tokens
        start = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0) // BN * BN
        best = tl.full((BM,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BM,), dtype=tl.float32)
        acc = tl.zeros((BM, DP), dtype=tl.float32)
        for n0 in range(start, end, BN):
            n = n0 + tl.arange(0, BN)
            there = n < end
            block = tl.load(tables + sequence * columns + n // BLOCK, mask=there, other=0).to(tl.int64)
            line = ((block * BLOCK + n % BLOCK) * (2 * KV_HEADS) + head) * D
            if D == DP:
                k = tl.load(kv + line[None, :] + d[:, None], mask=there[None, :], other=0.0)
                v = tl.load(kv + KV_HEADS * D + line[:, None] + d[None, :], mask=there[:, None], other=0.0)
            else:
                k = tl.load(kv + line[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
                v = tl.load(kv + KV_HEADS * D + line[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
            scores = _dot(x, k, tl.zeros((BM, BN), dtype=tl.float32), UPCAST) * scale
            seen = (n[None, :] <= at[:, None]) & ((n[None, :] > at[:, None] - window) | (window == 0))
            scores = tl.where(seen, scores, float("-inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            least = tl.where(top == float("-inf"), 0.0, top)  # of rows that have seen nothing yet
            weights = tl.exp(scores - least[:, None])
            fade = tl.exp(best - least)
            total = total * fade + tl.sum(weights, 1)
            acc = _dot(weights if UPCAST else weights.to(v.dtype), v, acc * fade[:, None], UPCAST)
            best = top
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        where = out + row[:, None] * (HEADS * D) + (query_head * D)[:, None] + d[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=inside)
