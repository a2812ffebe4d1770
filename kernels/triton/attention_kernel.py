"""The kernel of kernels/triton/attention.py: a tile of queries against its sequence's context, block by block."""

from __future__ import annotations

import triton
import triton.language as tl

from motet.kernels.triton.device import _dot


@triton.jit
def _join(first, shares, parts, sums, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr):
    """The attention [G, DP] of one tile of one token from its `shares` partial results, always in the same order."""
    g = tl.arange(0, G)
    d = tl.arange(0, DP)
    best = tl.full((G,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((G,), dtype=tl.float32)
    acc = tl.zeros((G, DP), dtype=tl.float32)
    for s0 in range(0, shares, CHUNK):
        s = s0 + tl.arange(0, CHUNK)
        there = (s < shares)[:, None]
        part = first + s
        line = (part * G)[:, None] + g[None, :]
        inside = there[:, :, None] & (d < D)[None, None, :]
        peaks = tl.load(sums + (part * (2 * G))[:, None] + g[None, :], mask=there, other=float("-inf"))
        masses = tl.load(sums + (part * (2 * G) + G)[:, None] + g[None, :], mask=there, other=0.0)
        values = tl.load(parts + line[:, :, None] * D + d[None, None, :], mask=inside, other=0.0)
        top = tl.maximum(best, tl.max(peaks, 0))
        weights = tl.exp(peaks - top[None, :])
        fade = tl.exp(best - top)
        total = total * fade + tl.sum(masses * weights, 0)
        acc = acc * fade[:, None] + tl.sum(values * weights[:, :, None], 0)
        best = top
    return acc / total[:, None]


# in one piece: Triton inlines every function anyway, and each part would take and return most of the names above it
@triton.jit(do_not_specialize=["columns", "window"])
def paged_attention(
    q,
    q_stride,
    out,
    kv,
    tiles,
    tables,
    columns,
    scale,
    window,
    parts,
    sums,
    arrived,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LEAST: tl.constexpr,
    CHUNK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attention of all tiles of a step over the paged cache.

    kv [blocks, BLOCK, 2, KV_HEADS, D]; tiles int32 [n, 4]: sequence, first row, tokens, position of the first; tables int32
    [sequences, columns]; window 0 for none. G is the number of query heads of a KV head, rounded up to a power of 2.

    With LEAST > 0 every tile is one token, and the third dimension of the grid divides its context into shares of at least
    LEAST tokens. parts fp32 [programs, G, D] and sums fp32 [programs, 2, G] (greatest score, sum of weights) hold the shares'
    results. arrived int32 [tiles * KV_HEADS] counts them and is zero between launches: the last to arrive clears it.
    """
    head = tl.program_id(0)  # neighbours read the same tokens
    tile = tl.program_id(1)
    sequence = tl.load(tiles + 4 * tile)
    first = tl.load(tiles + 4 * tile + 1)
    tokens = tl.load(tiles + 4 * tile + 2)
    position = tl.load(tiles + 4 * tile + 3)
    end = position + tokens
    start = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0) // BN * BN
    shares = 1
    if LEAST:
        share = tl.maximum(tl.cdiv(tl.cdiv(end - start, tl.num_programs(2)), BN) * BN, LEAST)
        shares = tl.cdiv(end - start, share)
        start += share * tl.program_id(2)
        if start >= end:  # a short context
            return
        end = tl.minimum(end, start + share)
    table = tables + sequence * columns
    n = start + tl.arange(0, BN)
    block = tl.load(table + n // BLOCK, mask=n < end, other=0)
    m = tl.arange(0, BM)
    d = tl.arange(0, DP)
    query_head = head * (HEADS // KV_HEADS) + m % G
    live = (m // G < tokens) & (m % G < HEADS // KV_HEADS)
    row = (first + m // G).to(tl.int64)
    inside = live[:, None] & (d < D)[None, :]
    x = tl.load(q + row[:, None] * q_stride + (query_head * D)[:, None] + d[None, :], mask=inside, other=0.0)
    until = tl.minimum(position + m // G, end - 1)
    since = tl.where(window > 0, position + m // G - window, -1)
    best = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, DP), dtype=tl.float32)
    for n0 in range(start, end, BN):
        n = n0 + tl.arange(0, BN)
        there = (n < end)[:, None]
        line = block.to(tl.int64) * (BLOCK * 2 * KV_HEADS * D) + (n % BLOCK) * (2 * KV_HEADS * D) + head * D
        block = tl.load(table + (n + BN) // BLOCK, mask=n + BN < end, other=0)  # of the next step: nothing waits for it
        if D != DP:
            there = there & (d < D)[None, :]
        k = tl.load(kv + line[:, None] + d[None, :], mask=there, other=0.0)
        v = tl.load(kv + KV_HEADS * D + line[:, None] + d[None, :], mask=there, other=0.0)
        scores = _dot(x, tl.trans(k), tl.zeros((BM, BN), dtype=tl.float32), UPCAST) * scale
        seen = (n[None, :] <= until[:, None]) & (n[None, :] > since[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        least = tl.where(top == float("-inf"), 0.0, top)  # of rows that have seen nothing yet
        weights = tl.exp(scores - least[:, None])
        fade = tl.exp(best - least)
        total = total * fade + tl.sum(weights, 1)
        acc = _dot(weights if UPCAST else weights.to(v.dtype), v, acc * fade[:, None], UPCAST)
        best = top
    if shares == 1:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        where = out + row[:, None] * (HEADS * D) + (query_head * D)[:, None] + d[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=inside)
    elif LEAST:
        pair = tile * KV_HEADS + head
        part = pair * tl.num_programs(2) + tl.program_id(2)
        mine = m < G
        tl.store(parts + (part * G + m)[:, None] * D + d[None, :], acc, mask=mine[:, None] & (d < D)[None, :])
        tl.store(sums + part * (2 * G) + m, best, mask=mine)
        tl.store(sums + part * (2 * G) + G + m, total, mask=mine)
        tl.debug_barrier()  # every thread's part of the result before the one release
        before = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
        if before == shares - 1:
            tl.store(arrived + pair, 0)
            g = tl.arange(0, G)
            result = _join(pair * tl.num_programs(2), shares, parts, sums, G, D, DP, CHUNK)
            where = out + first.to(tl.int64) * (HEADS * D) + ((head * (HEADS // KV_HEADS) + g) * D)[:, None] + d[None, :]
            real = (g < HEADS // KV_HEADS)[:, None] & (d < D)[None, :]
            tl.store(where, result.to(out.dtype.element_ty), mask=real)
