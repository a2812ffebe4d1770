"""The Triton kernels of batched LoRA: shrink (h = x A^T) and expand (y += scale * h B), one launch each per projection group.

    work list (kernels/triton/batch.py)          h, fp32 [splits, positions, slices, ranks]        y
    item i = R ranks of one adapter  --shrink--> plane q holds the q-th part of K    --expand-->   += scale * h B
             for a group's rows of x             of every row that has an adapter                  a tile of N columns

- A group is up to M rows with the same adapter, whose weights are read once for all of them.
- Groups of up to FEW rows are multiplied row by row with vector instructions: a tile of weights of 16 KiB and more is read at
  once into registers, so that many bytes are in flight. Larger groups use tensor cores.
- Parts of K have planes of their own and are added in a fixed order: no atomics on values, so the same batch gives the same
  bits on every run.
- The numbers of items and tiles are in `header` on the device. Programs walk the list with a stride, so one grid, and one CUDA
  graph, serves every batch that fits the buffers.
- What a work item needs to know stands in one line of `items` or `segments`, so that its loads do not wait for each other.
- EARLY (from sm_90 on): a launch begins before the one ahead of it on the stream is over (programmatic dependent launch). It
  reads weights and work lists, which no kernel writes, waits for the launch ahead, and then reads and writes the rest.
- Rows are gathered by `rows`. Masked elements are never read from the pool, so memory that an adapter does not own cannot
  change a result.

ALIGN promises the compiler that sizes and strides are multiples of it, which it cannot derive from loaded or selected values:
with 8 and more, pool and activations are read in 16-byte pieces. `layer`, `splits` and `scales_stride` differ between calls and
batches and are not specialized, because Triton would compile the kernel again for a 1 and for multiples of 16.
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
def _wait(EARLY: tl.constexpr):
    """Wait until the launch ahead is over. Every program does, so that whoever waits for this launch waits for that one too."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _width(s, N0, N1, N2, ALIGN: tl.constexpr):
    """Columns of slice s."""
    return tl.multiple_of(tl.where(s == 0, N0, tl.where(s == 1, N1, N2)), ALIGN)


@triton.jit
def _shrink_few(
    x, x_stride, a_row, held, h_item, h_row, rows, first, count, begin, end, K,
    R: tl.constexpr, WIDE: tl.constexpr, WHOLE_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Row by row: a tile of R x WIDE weights at once."""
    k = tl.arange(0, WIDE)
    for m in range(count):
        row = tl.load(rows + first + m).to(tl.int64)
        sums = tl.zeros((R,), dtype=tl.float32)
        for k0 in range(begin, end, WIDE):
            if WHOLE_K:
                a = tl.load(a_row[:, None] + (k0 + k)[None, :], mask=held[:, None], other=0.0)
                _wait(EARLY)
                xs = tl.load(x + row * x_stride + k0 + k)
            else:
                inside = k0 + k < K
                a = tl.load(a_row[:, None] + (k0 + k)[None, :], mask=held[:, None] & inside[None, :], other=0.0)
                _wait(EARLY)
                xs = tl.load(x + row * x_stride + k0 + k, mask=inside, other=0.0)
            sums += tl.sum(a.to(tl.float32) * xs.to(tl.float32)[None, :], 1)
        tl.store(h_item + (first + m) * h_row + tl.arange(0, R), sums)


@triton.jit
def _shrink_many(
    x, x_stride, a_row, held, h_item, h_row, rows, first, count, begin, end, K,
    M: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, WHOLE_K: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """All rows of the group in one product."""
    _wait(EARLY)
    m = tl.arange(0, M)
    live = m < count
    x_row = x + tl.load(rows + first + m, mask=live, other=0).to(tl.int64) * x_stride
    k = tl.arange(0, BK)
    acc = tl.zeros((M, R), dtype=tl.float32)
    for k0 in range(begin, end, BK):
        if WHOLE_K:
            xs = tl.load(x_row[:, None] + (k0 + k)[None, :], mask=live[:, None], other=0.0)
            a = tl.load(a_row[None, :] + (k0 + k)[:, None], mask=held[None, :], other=0.0)
        else:
            inside = k0 + k < K
            xs = tl.load(x_row[:, None] + (k0 + k)[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            a = tl.load(a_row[None, :] + (k0 + k)[:, None], mask=held[None, :] & inside[:, None], other=0.0)
        acc = _dot(xs, a, acc, UPCAST)
    tl.store(h_item + ((first + m) * h_row)[:, None] + tl.arange(0, R)[None, :], acc, mask=live[:, None])


@triton.jit(do_not_specialize=["layer", "splits"])
def lora_shrink(
    x, x_stride, arena, h, h_row, h_plane, rows, items, item_pages, header, layer, splits, span, ranks, K, N0, N1, N2,
    M: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr,
    ALIGN: tl.constexpr, WHOLE_K: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """h[split, position, slice, ranks of the item] = x A^T over `span` columns of K, for every item and split.

    `span` is a multiple of BK and WIDE, the columns of K that are multiplied at once for many and for few rows. `ranks` is
    the room for ranks in a row of h.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    n_items = tl.load(header)
    for work in range(tl.program_id(0), n_items * splits, tl.num_programs(0)):
        item = work // splits
        split = work % splits
        s = tl.load(items + 4 * item)
        first = tl.load(items + 4 * item + 1)
        count = tl.load(items + 4 * item + 2)
        block = tl.load(items + 4 * item + 3)
        j = tl.arange(0, R)
        line = tl.load(item_pages + item * (R // PAGE_RANKS) + j // PAGE_RANKS)  # -1: beyond the adapter's rank
        held = line >= 0
        at_layer = layer * PAGE_RANKS * (K + _width(s, N0, N1, N2, ALIGN)).to(tl.int64)
        a_row = arena + tl.multiple_of(at_layer, 8) + line * 8 + (j % PAGE_RANKS) * K
        h_item = h + split * h_plane + s * ranks + block * R
        begin = tl.multiple_of(split * span, BK)
        end = tl.minimum(begin + span, K)
        if FEW == 0:
            _shrink_many(
                x, x_stride, a_row, held, h_item, h_row, rows, first, count, begin, end, K,
                M, R, BK, WHOLE_K, EARLY, UPCAST,
            )  # fmt: skip
        elif count <= FEW:
            _shrink_few(
                x, x_stride, a_row, held, h_item, h_row, rows, first, count, begin, end, K, R, WIDE, WHOLE_K, EARLY
            )  # fmt: skip
        else:
            _shrink_many(
                x, x_stride, a_row, held, h_item, h_row, rows, first, count, begin, end, K,
                M, R, BK, WHOLE_K, EARLY, UPCAST,
            )  # fmt: skip
    _wait(EARLY)


@triton.jit
def _load_b(layer_at, line, j, width, n, inside, ALIGN: tl.constexpr, WHOLE_N: tl.constexpr):
    """Rows of B [ranks, columns]: rank j of a block lies in the page at `line`, -1 beyond the adapter's rank."""
    held = line >= 0
    rank_row = tl.multiple_of(line * 8 + (j % PAGE_RANKS) * width, ALIGN if ALIGN < 8 else 8)
    weights = layer_at + rank_row[:, None] + n[None, :]
    if WHOLE_N:
        b = tl.load(weights, mask=held[:, None], other=0.0)
    else:
        b = tl.load(weights, mask=held[:, None] & inside[None, :], other=0.0)
    return b


@triton.jit
def _expand_few(
    y, y_stride, arena, at_layer, column, tile, width, scale, h_segment, h_row, h_plane, splits, rows, item_pages,
    item, blocks, first, count,
    R: tl.constexpr, BN: tl.constexpr, PLANES: tl.constexpr, ADD: tl.constexpr,
    ALIGN: tl.constexpr, WHOLE_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Row by row and block by block: R x BN weights at once. A thread has all R ranks of its columns, so that nothing is
    exchanged between threads."""
    j = tl.arange(0, R)
    q = tl.arange(0, PLANES)
    n = tile * BN + tl.arange(0, BN)
    inside = n < width
    for m in range(count):
        row = tl.load(rows + first + m).to(tl.int64)
        at = y + row * y_stride + column + n
        total = tl.zeros((BN,), dtype=tl.float32)
        for block in range(blocks):
            line = tl.load(item_pages + (item + block) * (R // PAGE_RANKS) + j // PAGE_RANKS)
            b = _load_b(arena + at_layer, line, j, width, n, inside, ALIGN, WHOLE_N)
            _wait(EARLY)
            part = h_segment + (first + m) * h_row + (q * h_plane)[:, None] + (block * R + j)[None, :]
            planes = tl.load(part, mask=(q < splits)[:, None], other=0.0)
            total += tl.sum(b.to(tl.float32) * tl.sum(planes, 0)[:, None], 0)
        total *= scale
        if ADD:
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _planes_sum(part, live, h_plane, splits):
    """The planes of a tile of h, added in order; four of them are on their way at a time."""
    sums = tl.zeros(part.shape, dtype=tl.float32)
    for q in range(0, splits, 4):
        for i in tl.static_range(4):
            sums += tl.load(part + (q + i) * h_plane, mask=live & (q + i < splits), other=0.0)
    return sums


@triton.jit
def _expand_many(
    y, y_stride, arena, at_layer, column, tile, width, scale, h_segment, h_row, h_plane, splits, rows, item_pages,
    item, blocks, first, count,
    M: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, BN: tl.constexpr,
    ADD: tl.constexpr, ALIGN: tl.constexpr, WHOLE_N: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """All rows of the group in one product for every RANKS ranks and BN columns of the tile."""
    _wait(EARLY)
    m = tl.arange(0, M)
    j = tl.arange(0, RANKS)
    live = m < count
    row = tl.load(rows + first + m, mask=live, other=0).to(tl.int64)
    part = h_segment + ((first + m) * h_row)[:, None] + j[None, :]
    sums = _planes_sum(part, live[:, None] & (j < blocks * R)[None, :], h_plane, splits)
    for n0 in range(tile * COLUMNS, tl.minimum(tile * COLUMNS + COLUMNS, width), BN):
        n = n0 + tl.arange(0, BN)
        inside = n < width
        acc = tl.zeros((M, BN), dtype=tl.float32)
        for block in range(0, blocks, RANKS // R):
            exists = block + j // R < blocks
            if blocks > RANKS // R:  # they take turns
                sums = _planes_sum(part + block * R, live[:, None] & exists[None, :], h_plane, splits)
            line = tl.load(item_pages + (item + block) * (R // PAGE_RANKS) + j // PAGE_RANKS, mask=exists, other=-1)
            b = _load_b(arena + at_layer, line, j, width, n, inside, ALIGN, WHOLE_N)
            acc = _dot(sums if UPCAST else sums.to(b.dtype), b, acc, UPCAST)
        acc *= scale
        y_tile = y + (row * y_stride)[:, None] + (column + n)[None, :]
        mask = live[:, None] if WHOLE_N else live[:, None] & inside[None, :]
        if ADD:
            acc += tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_tile, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer", "splits", "scales_stride"])
def lora_expand(
    y, y_stride, arena, h, h_row, h_plane, rows, segments, tiles, item_pages, scales, scales_stride, header,
    layer, splits, ranks, K, N0, N1, N2,
    S: tl.constexpr, M: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, BN: tl.constexpr,
    FEW: tl.constexpr, WIDE: tl.constexpr, PLANES: tl.constexpr,
    ADD: tl.constexpr, ALIGN: tl.constexpr, WHOLE_N: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """y[rows, columns] += scale * h B for every tile of columns. Without ADD y is overwritten instead, with zeros where an
    adapter lacks the projection.

    A tile has COLUMNS columns for many rows, of which BN are multiplied at once with RANKS ranks, and WIDE for few.
    """
    for work in range(tl.program_id(0), tl.load(header + 1), tl.num_programs(0)):
        segment = tl.load(tiles + 2 * work)
        tile = tl.load(tiles + 2 * work + 1)
        s = segment % S
        item = tl.load(segments + 4 * segment)
        blocks = tl.load(segments + 4 * segment + 1)
        first = tl.load(segments + 4 * segment + 2)
        count = tl.load(segments + 4 * segment + 3)
        scale = tl.load(scales + layer * scales_stride + segment)
        width = _width(s, N0, N1, N2, ALIGN)
        column = tl.multiple_of(tl.where(s == 0, 0, tl.where(s == 1, N0, N0 + N1)), ALIGN)  # of y
        at_layer = tl.multiple_of(layer * PAGE_RANKS * (K + width).to(tl.int64) + PAGE_RANKS * K, 8)
        h_segment = h + s * ranks
        if blocks > 0 or not ADD:
            if FEW == 0:  # noqa: SIM114 (a constant: then the branches below are not compiled)
                _expand_many(
                    y, y_stride, arena, at_layer, column, tile, width, scale, h_segment, h_row, h_plane, splits, rows,
                    item_pages, item, blocks, first, count,
                    M, R, RANKS, COLUMNS, BN, ADD, ALIGN, WHOLE_N, EARLY, UPCAST,
                )  # fmt: skip
            elif count > FEW:
                _expand_many(
                    y, y_stride, arena, at_layer, column, tile, width, scale, h_segment, h_row, h_plane, splits, rows,
                    item_pages, item, blocks, first, count,
                    M, R, RANKS, COLUMNS, BN, ADD, ALIGN, WHOLE_N, EARLY, UPCAST,
                )  # fmt: skip
            else:
                _expand_few(
                    y, y_stride, arena, at_layer, column, tile, width, scale, h_segment, h_row, h_plane, splits, rows,
                    item_pages, item, blocks, first, count, R, WIDE, PLANES, ADD, ALIGN, WHOLE_N, EARLY,
                )  # fmt: skip
    _wait(EARLY)
