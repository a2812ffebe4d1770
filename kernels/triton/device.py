"""The Triton kernels of batched LoRA: shrink (h = x A^T) and expand (y += scale * h B), one launch each per projection group.

    work list (kernels/triton/batch.py)              h, fp32 [splits, positions, slices, ranks]    y
    item = a block of ranks of an adapter --shrink--> plane q holds the q-th part of K --expand-->  += scale * h B
           for a group's rows of x                    of every row that has an adapter              a tile of columns

- A group is rows with the same adapter, whose weights are read once for all of them.
- Groups of up to FEW rows are multiplied row by row with vector instructions: a tile of weights of 16 KiB and more is read at
  once into registers, so that many bytes are in flight. Larger groups, of up to M rows, use tensor cores.
- Parts of K have planes of their own and are added in a fixed order: no atomics on values, so the same batch gives the same
  bits on every run. Expand adds those of few rows. Of more rows the program that ends last adds them and puts the sum
  into the first plane, because many tiles of expand read it; `arrived` counts the programs that have ended.
- What a work item needs to know stands in one line of `items` or `tiles`, so that its loads do not wait for each other. A line
  also says how many there are; those without work say 0. Programs walk the lines with a stride, so one grid, and one CUDA
  graph, serves every batch for which there is `room`.
- EARLY (from sm_90 on): a launch begins before the one ahead of it on the stream is over (programmatic dependent launch). It
  reads weights and work lists, which no kernel writes, waits for the launch ahead, and then reads and writes the rest.
- Rows are gathered by `rows`. Masked elements are never read from the pool, so memory that an adapter does not own cannot
  change a result.

ALIGN promises the compiler that sizes and strides are multiples of it, which it cannot derive from loaded or selected values:
with 8 and more, pool and activations are read in 16-byte pieces. `layer`, `splits`, `room` and `scales_stride` differ between
calls and batches and are not specialized, because Triton would compile the kernel again for a 1 and for multiples of 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAGE_RANKS = tl.constexpr(8)
LINE = tl.constexpr(8)  # numbers of an item or a tile
JOINED = tl.constexpr(16)  # rows whose planes are added at a time


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
def _times_x(a, x, R: tl.constexpr, WIDE: tl.constexpr):
    """a x [R], of a [R, WIDE] and x [WIDE]. In every two columns the second product is fused with the first one, which saves
    registers and leaves no choice to the compiler."""
    even, odd = tl.split(tl.reshape(a, (R, WIDE // 2, 2)))  # of 16 bits: as fp32 they would need too many registers
    x_even, x_odd = tl.split(tl.reshape(x, (WIDE // 2, 2)))
    first = even.to(tl.float32) * x_even.to(tl.float32)[None, :]
    return tl.sum(tl.fma(odd.to(tl.float32), tl.broadcast_to(x_odd.to(tl.float32)[None, :], (R, WIDE // 2)), first), 1)


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
            sums += _times_x(a, xs, R, WIDE)
        tl.store(h_item + (first + m) * h_row + tl.arange(0, R), sums)


@triton.jit
def _join(h_item, h_row, h_plane, splits, first, count, R: tl.constexpr):
    """Put the sum of an item's planes, added in order, into the first one. Four of them are on their way at a time."""
    for m0 in range(0, count, JOINED):
        m = m0 + tl.arange(0, JOINED)
        live = (m < count)[:, None]
        part = h_item + ((first + m) * h_row)[:, None] + tl.arange(0, R)[None, :]
        sums = tl.zeros((JOINED, R), dtype=tl.float32)
        for q in range(0, splits, 4):
            for i in tl.static_range(4):
                sums += tl.load(part + (q + i) * h_plane, mask=live & (q + i < splits), other=0.0)
        tl.debug_barrier()  # several threads may have read the same element
        tl.store(part, sums, mask=live)


@triton.jit
def _shrink_many(
    x, x_stride, a_row, held, h_item, h_row, h_plane, rows, first, count, split, splits, begin, end, arrived, K,
    M: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, WHOLE_K: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """All rows of the group in one product. The last of the item's programs adds up what all found."""
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
    part = h_item + ((first + m) * h_row)[:, None] + tl.arange(0, R)[None, :]
    tl.store(part + split * h_plane, acc, mask=live[:, None])
    if splits > 1:
        tl.debug_barrier()  # every thread's part of the result before the one release
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
        if before == splits - 1:
            tl.store(arrived, 0)
            _join(h_item, h_row, h_plane, splits, first, count, R)


@triton.jit(do_not_specialize=["layer", "splits", "room"])
def lora_shrink(
    x, x_stride, arena, h, h_row, h_plane, rows, items, room, pages, arrived, layer, splits, span, ranks, K, N0, N1, N2,
    M: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, FEW: tl.constexpr, FEW_R: tl.constexpr, WIDE: tl.constexpr,
    ALIGN: tl.constexpr, WHOLE_K: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """h[split, position, slice, ranks of the item] = x A^T over `span` columns of K, for every item and split. Of more than FEW
    rows, h[0] is the sum over splits.

    `span` is a multiple of BK and WIDE, the columns of K that are multiplied at once for many and for few rows. `ranks` is
    the room for ranks in a row of h. arrived int32 [items] is zero between launches.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    n_items = tl.load(items + LINE * tl.minimum(tl.program_id(0) // splits, room - 1) + 7)
    for work in range(tl.program_id(0), n_items * splits, tl.num_programs(0)):
        item = work // splits
        split = work % splits
        line = items + LINE * item
        s = tl.load(line)
        first = tl.load(line + 1)
        count = tl.load(line + 2)
        own_pages = pages + tl.load(line + 3)
        n_pages = tl.load(line + 4)
        rank = tl.multiple_of(tl.load(line + 5), PAGE_RANKS)
        a_layer = arena + tl.multiple_of(layer * PAGE_RANKS * (K + _width(s, N0, N1, N2, ALIGN)).to(tl.int64), 8)
        h_item = h + s * ranks + rank
        begin = tl.multiple_of(split * span, BK)
        end = tl.minimum(begin + span, K)
        if FEW > 0:  # noqa: SIM102 (a constant: without it the branch is not compiled)
            if count <= FEW:
                a_row, held = _a_rows(a_layer, own_pages, n_pages, K, FEW_R)
                _shrink_few(
                    x, x_stride, a_row, held, h_item + split * h_plane, h_row, rows, first, count, begin, end, K,
                    FEW_R, WIDE, WHOLE_K, EARLY,
                )  # fmt: skip
        if count > FEW:
            a_row, held = _a_rows(a_layer, own_pages, n_pages, K, R)
            _shrink_many(
                x, x_stride, a_row, held, h_item, h_row, h_plane, rows, first, count, split, splits, begin, end,
                arrived + item, K, M, R, BK, WHOLE_K, EARLY, UPCAST,
            )  # fmt: skip
    _wait(EARLY)


@triton.jit
def _lines(pages, n_pages, j):
    """The arena lines of the pages of ranks j of a block; `n_pages` is how many there are from `pages` on."""
    return tl.load(pages + j // PAGE_RANKS, mask=j // PAGE_RANKS < n_pages, other=0)


@triton.jit
def _a_rows(a_layer, pages, n_pages, K, R: tl.constexpr):
    """Where the rows of A of a block of up to R ranks begin, and which of them the adapter has."""
    j = tl.arange(0, R)
    return a_layer + _lines(pages, n_pages, j) * 8 + (j % PAGE_RANKS) * K, j // PAGE_RANKS < n_pages


@triton.jit
def _b_tile(b_layer, line, n_pages, j, width, n, inside, ALIGN: tl.constexpr, WHOLE_N: tl.constexpr):
    """Ranks j of a block of B and columns n: [ranks, columns], 0 for ranks that the adapter lacks."""
    held = j // PAGE_RANKS < n_pages
    rank_row = tl.multiple_of(line * 8 + (j % PAGE_RANKS) * width, ALIGN if ALIGN < 8 else 8)
    weights = b_layer + rank_row[:, None] + n[None, :]
    if WHOLE_N:
        b = tl.load(weights, mask=held[:, None], other=0.0)
    else:
        b = tl.load(weights, mask=held[:, None] & inside[None, :], other=0.0)
    return b


@triton.jit
def _by_halves(planes, PLANES: tl.constexpr, R: tl.constexpr):
    """The sum of planes [PLANES, R]. Halves are added to each other, so that which threads hold what does not change a bit:
    steps of few and of many rows have different numbers of threads.
    """
    if PLANES == 1:
        return tl.reshape(planes, (R,))
    else:  # not compiled for 1
        return _by_halves(tl.sum(tl.reshape(planes, (2, PLANES // 2, R)), 0), PLANES // 2, R)


@triton.jit
def _times_h(b, h, R: tl.constexpr, BN: tl.constexpr):
    """h b [BN], of b [R, BN] and h [R], with ranks in pairs as in `_times_x`."""
    first, second = tl.split(tl.permute(tl.reshape(b, (2, R // 2, BN)), (1, 2, 0)))
    h_first, h_second = tl.split(tl.permute(tl.reshape(h, (2, R // 2)), (1, 0)))
    products = first.to(tl.float32) * h_first[:, None]
    return tl.sum(tl.fma(second.to(tl.float32), tl.broadcast_to(h_second[:, None], (R // 2, BN)), products), 0)


@triton.jit
def _expand_few(
    y_slice, y_stride, b_layer, pages, n_pages, width, start, scale, h_slice, h_row, h_plane, splits, rows, first, count,
    R: tl.constexpr, BN: tl.constexpr, PLANES: tl.constexpr, ADD: tl.constexpr,
    ALIGN: tl.constexpr, WHOLE_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Row by row and block by block: R x BN weights at once. A thread has all R ranks of its columns, so that nothing is
    exchanged between threads."""
    j = tl.arange(0, R)
    q = tl.arange(0, PLANES)
    n = start + tl.arange(0, BN)
    inside = n < width
    for m in range(count):
        row = tl.load(rows + first + m).to(tl.int64)
        at = y_slice + row * y_stride + n
        total = tl.zeros((BN,), dtype=tl.float32)
        line = _lines(pages, n_pages, j)
        for page in range(0, n_pages, R // PAGE_RANKS):
            b = _b_tile(b_layer, line, n_pages - page, j, width, n, inside, ALIGN, WHOLE_N)
            following = page + R // PAGE_RANKS
            line = _lines(pages + following, n_pages - following, j)  # nothing waits for it
            _wait(EARLY)
            part = h_slice + (first + m) * h_row + (q * h_plane)[:, None] + (j + page * PAGE_RANKS)[None, :]
            planes = tl.load(part, mask=(q < splits)[:, None], other=0.0)
            total += _times_h(b, _by_halves(planes, PLANES, R), R, BN)
        total *= scale
        if ADD:
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, total.to(y_slice.dtype.element_ty), mask=inside)


@triton.jit
def _times_b(part, b, j, n_pages, live, acc, UPCAST: tl.constexpr):
    """acc + h B, where `part` is where a block of h lies."""
    block = tl.load(part, mask=live[:, None] & (j // PAGE_RANKS < n_pages)[None, :], other=0.0)
    return _dot(block if UPCAST else block.to(b.dtype), b, acc, UPCAST)


@triton.jit
def _expand_many(
    y_slice, y_stride, b_layer, pages, n_pages, width, start, scale, h_slice, h_row, rows, first, count,
    M: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
    ADD: tl.constexpr, ALIGN: tl.constexpr, WHOLE_N: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """All rows of the group in one product for every R ranks. The first weights are requested before the wait."""
    m = tl.arange(0, M)
    j = tl.arange(0, R)
    n = start + tl.arange(0, BN)
    live = m < count
    inside = n < width
    b = _b_tile(b_layer, _lines(pages, n_pages, j), n_pages, j, width, n, inside, ALIGN, WHOLE_N)
    row = tl.load(rows + first + m, mask=live, other=0).to(tl.int64)
    part = h_slice + ((first + m) * h_row)[:, None] + j[None, :]
    _wait(EARLY)
    acc = _times_b(part, b, j, n_pages, live, tl.zeros((M, BN), dtype=tl.float32), UPCAST)
    for page in tl.range(R // PAGE_RANKS, n_pages, R // PAGE_RANKS, num_stages=1):
        line = _lines(pages + page, n_pages - page, j)
        b = _b_tile(b_layer, line, n_pages - page, j, width, n, inside, ALIGN, WHOLE_N)
        acc = _times_b(part + page * PAGE_RANKS, b, j, n_pages - page, live, acc, UPCAST)
    acc *= scale
    y_tile = y_slice + (row * y_stride)[:, None] + n[None, :]
    mask = live[:, None] if WHOLE_N else live[:, None] & inside[None, :]
    if ADD:
        acc += tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_tile, acc.to(y_slice.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer", "splits", "room", "scales_stride"])
def lora_expand(
    y, y_stride, arena, h, h_row, h_plane, rows, tiles, room, pages, scales, scales_stride,
    layer, splits, ranks, K, N0, N1, N2,
    M: tl.constexpr, SOME: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
    FEW: tl.constexpr, FEW_R: tl.constexpr, WIDE: tl.constexpr, PLANES: tl.constexpr,
    ADD: tl.constexpr, ALIGN: tl.constexpr, WHOLE_N: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """y[rows, columns] += scale * h B for every tile of columns. Without ADD y is overwritten instead, with zeros where an
    adapter lacks the projection.

    A tile has BN columns for many rows, of which R ranks are multiplied at once, and WIDE for few, FEW_R at once. Up to SOME of
    many rows are a smaller product.
    """
    n_tiles = tl.load(tiles + LINE * tl.minimum(tl.program_id(0), room - 1) + 7)
    for work in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        line = tiles + LINE * work
        s = tl.load(line)
        first = tl.load(line + 1)
        count = tl.load(line + 2)
        own_pages = pages + tl.load(line + 3)
        n_pages = tl.load(line + 4)
        start = tl.multiple_of(tl.load(line + 5), 16)
        scale = tl.load(scales + layer * scales_stride + tl.load(line + 6))
        width = _width(s, N0, N1, N2, ALIGN)
        y_slice = y + tl.multiple_of(tl.where(s == 0, 0, tl.where(s == 1, N0, N0 + N1)), ALIGN)
        b_layer = arena + tl.multiple_of(layer * PAGE_RANKS * (K + width).to(tl.int64) + PAGE_RANKS * K, 8)
        h_slice = h + s * ranks
        if n_pages > 0 or not ADD:
            if FEW > 0:  # noqa: SIM102
                if count <= FEW:
                    _expand_few(
                        y_slice, y_stride, b_layer, own_pages, n_pages, width, start, scale, h_slice, h_row, h_plane, splits,
                        rows, first, count, FEW_R, WIDE, PLANES, ADD, ALIGN, WHOLE_N, EARLY,
                    )  # fmt: skip
            if count > FEW:
                if M == SOME:  # noqa: SIM114 (a constant: then the branches below are not compiled)
                    _expand_many(
                        y_slice, y_stride, b_layer, own_pages, n_pages, width, start, scale, h_slice, h_row, rows, first, count,
                        M, R, BN, ADD, ALIGN, WHOLE_N, EARLY, UPCAST,
                    )  # fmt: skip
                elif count > SOME:
                    _expand_many(
                        y_slice, y_stride, b_layer, own_pages, n_pages, width, start, scale, h_slice, h_row, rows, first, count,
                        M, R, BN, ADD, ALIGN, WHOLE_N, EARLY, UPCAST,
                    )  # fmt: skip
                else:
                    _expand_many(
                        y_slice, y_stride, b_layer, own_pages, n_pages, width, start, scale, h_slice, h_row, rows, first, count,
                        SOME, R, BN, ADD, ALIGN, WHOLE_N, EARLY, UPCAST,
                    )  # fmt: skip
    _wait(EARLY)
