"""The Triton kernels: one shrink item, one expand item, and the three launches made of them.

    work list (kernels/triton/batch.py)           h, fp32 [split_k, items, M, R]        y
    item i = 16 ranks of one adapter  --shrink--> plane q holds the q-th part of K  --expand--> += scale * h B
             for <= M rows of x                   and is written whole: nothing to zero         a tile of N columns

- An item reads R ranks (R / 8 pages) of one projection's A once for up to M rows that share the adapter.
- Split-K parts lie in planes of their own and are added in the order 0, 1, ..: no atomics on values, so the same batch
  gives the same bits on every run.
- The number of items is in `header` on the device. Programs walk the list with a stride (or take tickets), so one grid, and one
  CUDA graph, serves every batch that fits the buffers.
- The ticketed launch does shrink and expand: tickets are given out in order, shrink items first, and an expand item waits until
  its segment's counter shows that all its planes are complete. A program with a shrink ticket is running and does not wait, so
  every wait ends, even if the device runs only one program at a time (as the interpreter does). The counter's release and
  acquire order the planes; no line of a plane is read before it is complete.
- Rows are gathered by `rows`. Masked elements are never read from the pool, so memory that an adapter does not own cannot
  change a result.

ALIGN promises the compiler that sizes and strides are multiples of it, which it cannot derive from loaded or selected values:
with 8 and more, pool and activations are read in 16-byte pieces. `layer` and `scales_stride` differ between calls and batches
and are not specialized, because Triton would compile the kernel again for a 1 and for multiples of 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAGE_RANKS = tl.constexpr(8)


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    if UPCAST:  # fp32 pools, and the interpreter, whose bf16 arithmetic is wrong
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _width(s, N0, N1, N2, ALIGN: tl.constexpr):
    """Columns of slice s."""
    return tl.multiple_of(tl.where(s == 0, N0, tl.where(s == 1, N1, N2)), ALIGN)


@triton.jit
def _members(group, rows, groups, M: tl.constexpr):
    """The rows of one group: (row numbers int64 [M], which of them exist [M])."""
    m = tl.arange(0, M)
    first = tl.load(groups + 2 * group)
    live = m < tl.load(groups + 2 * group + 1)
    return tl.load(rows + first + m, mask=live, other=0).to(tl.int64), live


@triton.jit
def _shrink_item(
    item,
    split,
    split_k,
    n_items,
    x,
    x_stride,
    arena,
    h,
    rows,
    groups,
    item_segment,
    item_pages,
    layer,
    K,
    N0,
    N1,
    N2,
    S: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    ALIGN: tl.constexpr,
    WHOLE_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """h[split, item] = x[rows] A^T over every split_k-th block of K, beginning with the split-th. Returns the segment."""
    segment = tl.load(item_segment + item)
    row, live = _members(segment // S, rows, groups, M)
    j = tl.arange(0, R)
    line = tl.load(item_pages + item * (R // PAGE_RANKS) + j // PAGE_RANKS)  # -1: beyond the adapter's rank
    held = line >= 0
    at_layer = layer * PAGE_RANKS * (K + _width(segment % S, N0, N1, N2, ALIGN)).to(tl.int64)
    a_row = arena + tl.multiple_of(at_layer, 8) + line * 8 + (j % PAGE_RANKS) * K
    x_row = x + row * x_stride
    k = tl.arange(0, BK)
    acc = tl.zeros((M, R), dtype=tl.float32)
    for k0 in range(split * BK, K, BK * split_k):
        if WHOLE_K:
            xs = tl.load(x_row[:, None] + (k0 + k)[None, :], mask=live[:, None], other=0.0)
            a = tl.load(a_row[None, :] + (k0 + k)[:, None], mask=held[None, :], other=0.0)
        else:
            inside = k0 + k < K
            xs = tl.load(x_row[:, None] + (k0 + k)[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            a = tl.load(a_row[None, :] + (k0 + k)[:, None], mask=held[None, :] & inside[:, None], other=0.0)
        acc = _dot(xs, a, acc, UPCAST)
    plane = h + (split * n_items + item).to(tl.int64) * (M * R)
    tl.store(plane + tl.arange(0, M)[:, None] * R + j[None, :], acc, mask=live[:, None])
    return segment


@triton.jit
def _expand_item(
    group,
    tile,
    split_k,
    n_items,
    y,
    y_stride,
    arena,
    h,
    rows,
    groups,
    segments,
    item_pages,
    scales,
    layer,
    K,
    N0,
    N1,
    N2,
    S: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    UNROLL: tl.constexpr,
    ALIGN: tl.constexpr,
    WHOLE_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """y[rows, one tile of BN columns] += scale * h B over the blocks of ranks of the tile's projection."""
    t0 = tl.cdiv(N0, BN)
    t1 = t0 + tl.cdiv(N1, BN)
    s = (tile >= t0).to(tl.int32) + (tile >= t1).to(tl.int32)
    width = _width(s, N0, N1, N2, ALIGN)
    column = tl.multiple_of(tl.where(s == 0, 0, tl.where(s == 1, N0, N0 + N1)), ALIGN)  # of y
    n = (tile - tl.where(s == 0, 0, tl.where(s == 1, t0, t1))) * BN + tl.arange(0, BN)
    segment = group * S + s
    first = tl.load(segments + 2 * segment)
    blocks = tl.load(segments + 2 * segment + 1)
    if blocks > 0:
        row, live = _members(group, rows, groups, M)
        scale = tl.load(scales + segment)
        m = tl.arange(0, M)
        j = tl.arange(0, R)
        at_layer = tl.multiple_of(layer * PAGE_RANKS * (K + width).to(tl.int64) + PAGE_RANKS * K, 8)
        b_column = arena + at_layer + n
        y_tile = y + row[:, None] * y_stride + (column + n)[None, :]
        inside = n < width
        planes = tl.zeros((M, R), dtype=tl.int32) + split_k  # a block: the interpreter cannot mask by a scalar
        acc = tl.zeros((M, BN), dtype=tl.float32)
        for block in range(blocks):
            item = first + block
            line = tl.load(item_pages + item * (R // PAGE_RANKS) + j // PAGE_RANKS)
            held = line >= 0
            rank_row = tl.multiple_of(line * 8 + (j % PAGE_RANKS) * width, ALIGN if ALIGN < 8 else 8)
            part = h + item.to(tl.int64) * (M * R) + m[:, None] * R + j[None, :]
            mask = live[:, None] & held[None, :]
            sums = tl.load(part, mask=mask, other=0.0)
            if UNROLL:  # a small tile has registers for all planes at once: one wait instead of split_k
                for q in tl.static_range(1, 8):
                    plane = part + q * n_items.to(tl.int64) * (M * R)
                    sums += tl.load(plane, mask=mask & (planes > q), other=0.0)
            else:
                for q in range(1, split_k):
                    sums += tl.load(part + q * n_items.to(tl.int64) * (M * R), mask=mask, other=0.0)
            if WHOLE_N:
                b = tl.load(b_column[None, :] + rank_row[:, None], mask=held[:, None], other=0.0)
            else:
                b = tl.load(b_column[None, :] + rank_row[:, None], mask=held[:, None] & inside[None, :], other=0.0)
            acc = _dot(sums if UPCAST else sums.to(b.dtype), b, acc, UPCAST)
        mask = live[:, None] if WHOLE_N else live[:, None] & inside[None, :]
        before = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_tile, (before + acc * scale).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer"])
def lora_shrink(
    x,
    x_stride,
    arena,
    h,
    rows,
    groups,
    item_segment,
    item_pages,
    header,
    layer,
    K,
    N0,
    N1,
    N2,
    S: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    ALIGN: tl.constexpr,
    WHOLE_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """First of two launches: every item of every split of K."""
    n_items = tl.load(header)
    split_k = tl.load(header + 2)
    for work in range(tl.program_id(0), n_items * split_k, tl.num_programs(0)):
        _shrink_item(
            work // split_k, work % split_k, split_k, n_items,
            x, x_stride, arena, h, rows, groups, item_segment, item_pages, layer, K, N0, N1, N2,
            S, M, R, BK, ALIGN, WHOLE_K, UPCAST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "scales_stride"])
def lora_expand(
    y,
    y_stride,
    arena,
    h,
    rows,
    groups,
    segments,
    item_pages,
    scales,
    scales_stride,
    header,
    layer,
    K,
    N0,
    N1,
    N2,
    S: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    UNROLL: tl.constexpr,
    ALIGN: tl.constexpr,
    WHOLE_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Second of two launches: every column tile of every group of rows."""
    n_items = tl.load(header)
    split_k = tl.load(header + 2)
    tiles = tl.cdiv(N0, BN) + tl.cdiv(N1, BN) + tl.cdiv(N2, BN)
    for work in range(tl.program_id(0), tl.load(header + 1) * tiles, tl.num_programs(0)):
        _expand_item(
            work // tiles, work % tiles, split_k, n_items,
            y, y_stride, arena, h, rows, groups, segments, item_pages, scales + layer * scales_stride, layer, K, N0, N1, N2,
            S, M, R, BN, UNROLL, ALIGN, WHOLE_N, UPCAST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "scales_stride"])
def lora_ticketed(
    x,
    x_stride,
    y,
    y_stride,
    arena,
    h,
    rows,
    groups,
    segments,
    item_segment,
    item_pages,
    scales,
    scales_stride,
    header,
    counters,
    layer,
    K,
    N0,
    N1,
    N2,
    S: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    UNROLL: tl.constexpr,
    ALIGN: tl.constexpr,
    WHOLE_K: tl.constexpr,
    WHOLE_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Both halves in one launch.

    counters int32 [2 + segments]: next ticket, programs that have left, and per segment the planes written. They are
    zero between launches: the last program to leave clears them.
    """
    n_items = tl.load(header)
    n_groups = tl.load(header + 1)
    split_k = tl.load(header + 2)
    tiles = tl.cdiv(N0, BN) + tl.cdiv(N1, BN) + tl.cdiv(N2, BN)
    n_shrink = n_items * split_k
    n_all = n_shrink + n_groups * tiles
    ticket = tl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    while ticket < n_all:
        if ticket < n_shrink:
            segment = _shrink_item(
                ticket // split_k, ticket % split_k, split_k, n_items,
                x, x_stride, arena, h, rows, groups, item_segment, item_pages, layer, K, N0, N1, N2,
                S, M, R, BK, ALIGN, WHOLE_K, UPCAST,
            )  # fmt: skip
            tl.debug_barrier()  # every thread's part of the plane before the one release
            tl.atomic_add(counters + 2 + segment, 1, sem="release", scope="gpu")
        else:
            group = (ticket - n_shrink) // tiles
            tile = (ticket - n_shrink) % tiles
            t0 = tl.cdiv(N0, BN)
            segment = group * S + (tile >= t0).to(tl.int32) + (tile >= t0 + tl.cdiv(N1, BN)).to(tl.int32)
            planes = tl.load(segments + 2 * segment + 1) * split_k
            written = tl.atomic_add(counters + 2 + segment, 0, sem="acquire", scope="gpu")
            while written < planes:
                written = tl.atomic_add(counters + 2 + segment, 0, sem="acquire", scope="gpu")
            _expand_item(
                group, tile, split_k, n_items,
                y, y_stride, arena, h, rows, groups, segments, item_pages, scales + layer * scales_stride, layer, K, N0, N1, N2,
                S, M, R, BN, UNROLL, ALIGN, WHOLE_N, UPCAST,
            )  # fmt: skip
        ticket = tl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    left = tl.atomic_add(counters + 1, 1, sem="acq_rel", scope="gpu")
    if left == tl.num_programs(0) - 1:
        used = 2 + n_groups * S
        for i in range(0, used, 128):
            at = i + tl.arange(0, 128)
            tl.store(counters + at, tl.zeros((128,), dtype=tl.int32), mask=at < used)
