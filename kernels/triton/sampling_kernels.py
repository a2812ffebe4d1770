"""The kernels of kernels/triton/sampling.py.

    key       the bits of (the row's largest logit - a logit) as an integer: 0 for the largest, growing as probabilities fall
    weight    2^40 times the probability relative to the row's largest, rounded down to an integer of 64 bits
    measure   what a threshold is found by: 1 for top_k, the weight for top_p
    bracket   (low, high]: the threshold is one of these keys, and `base` is the measure of all keys up to `low`

Sums over more than a tile are of integers, so no result depends on an order or on other rows. Rows whose largest logit is not
finite are left to `pick_token`, which returns its id. Programs of a tile load its logits before they know whether they need
them: nothing then waits for two loads in turn.

`rules` float64 [n, 4]: log2(e) / temperature, 0 for the argmax; the largest distance from the row's largest logit that min_p
leaves; top_k, 0 for off; top_p, at least 1 for off. VOCAB is the row stride of `logits` and TILES = ceil(VOCAB / TILE), which
PADDED is to a power of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

SECTIONS = tl.constexpr(16)  # of a row's keys, of which one becomes the bracket
PARTS = tl.constexpr(8)  # of the bracket in each pass of `select_key`
WEIGHT_OF_LARGEST = tl.constexpr(1099511627776.0)  # 2^40
NEVER = tl.constexpr(0x7F800000)  # the key of minus infinity, whose weight is 0
NEAR = tl.constexpr(60.0)  # logits further below the largest do not say where most are


@triton.jit
def _rule(rules, row):
    """(scale, limit, top_k, top_p) of a row; `limit` is a key."""
    scale = tl.load(rules + 4 * row).to(tl.float32)
    limit = tl.load(rules + 4 * row + 1).to(tl.float32).to(tl.int32, bitcast=True)
    return scale, limit, tl.load(rules + 4 * row + 2).to(tl.int64), tl.load(rules + 4 * row + 3)


@triton.jit
def _mirrored(bits):
    """From a float's bits to an integer of the same order, in which -0 equals 0, and back."""
    return tl.where(bits < 0, -0x80000000 - bits, bits)


@triton.jit
def _largest(peaks, row, TILES: tl.constexpr, PADDED: tl.constexpr):
    """(logit, id) of a row's first largest one; NaN counts as largest."""
    t = tl.arange(0, PADDED)
    packed = tl.max(tl.load(peaks + row * TILES + t, mask=t < TILES, other=-0x7FFFFFFFFFFFFFFF), 0)
    token = 0x7FFFFFFF - (packed & 0x7FFFFFFF)
    return _mirrored((packed >> 32).to(tl.int32)).to(tl.float32, bitcast=True), token.to(tl.int32)


@triton.jit
def _logits(logits, row, token, VOCAB: tl.constexpr):
    return tl.load(logits + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf"))


@triton.jit
def _keys(x, top):
    return (top - x).to(tl.int32, bitcast=True)


@triton.jit
def _weights(keys, scale):
    """Not rounded yet."""
    distance = keys.to(tl.float32, bitcast=True)
    return tl.exp2(-distance * scale) * WEIGHT_OF_LARGEST


@triton.jit
def _finite(top):
    return (top > float("-inf")) & (top < float("inf"))


@triton.jit
def _searched(scale, top_k, top_p, top):
    """Whether the row needs a threshold for top_k or top_p."""
    return (scale > 0.0) & ((top_k > 0) | (top_p < 1.0)) & _finite(top)


@triton.jit
def peak_tiles(logits, peaks, means, VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr):
    """Per row and tile: the first largest logit, packed so that the largest integer is it; the mean of the logits near it."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    x = _logits(logits, row, token, VOCAB)
    ordered = tl.where(x != x, 0x7FFFFFFF, _mirrored(x.to(tl.int32, bitcast=True)))
    largest = tl.max(ordered, 0)
    first = tl.min(tl.where(ordered == largest, token, 0x7FFFFFFF), 0)
    tl.store(peaks + row * TILES + tile, (largest.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64))
    near = x >= _mirrored(largest).to(tl.float32, bitcast=True) - NEAR
    mean = tl.sum(tl.where(near, x, 0.0), 0) / tl.maximum(tl.sum(near.to(tl.int32), 0), 1)
    tl.store(means + row * TILES + tile, mean)


@triton.jit
def measure_tiles(
    logits, rules, peaks, means, pivots, table, gathered,
    VOCAB: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Divide the keys of a row in SECTIONS. `pivots` int32 [n, SECTIONS] are their ends, the last is what min_p leaves. `table`
    float32 [n, TILES, SECTIONS] is the measure of every tile up to each of them, rounded, always in the same way.

    Most logits lie around the mean of a row, so the sections are narrow there. They only say how few keys `gather_keys` leaves.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1)
    x = _logits(logits, row, tile * TILE + tl.arange(0, TILE), VOCAB)
    scale, limit, top_k, top_p = _rule(rules, row)
    top, _ = _largest(peaks, row, TILES, PADDED)
    if not _searched(scale, top_k, top_p, top):
        return
    t = tl.arange(0, PADDED)
    mean = tl.load(means + row * TILES + t, mask=t < TILES, other=float("-inf"))
    near = mean >= top - NEAR
    spread = tl.maximum(top - tl.sum(tl.where(near, mean, 0.0), 0) / tl.maximum(tl.sum(near.to(tl.int32), 0), 1), 0.0)
    keys = _keys(x, top)
    measure = tl.where(keys <= limit, tl.where(top_k > 0, 1.0, _weights(keys, scale)), 0.0)
    s = tl.arange(0, SECTIONS)
    ends = tl.full((SECTIONS,), 0, dtype=tl.int32) + limit
    found = tl.zeros((SECTIONS,), dtype=tl.float32)
    for i in tl.static_range(SECTIONS - 1):
        part = (i - SECTIONS / 2) / (SECTIONS / 2)
        end = tl.minimum((spread * (1 + 0.3 * part + 0.55 * part * part * part)).to(tl.int32, bitcast=True), limit)
        ends = tl.where(s == i, end, ends)
        found = tl.where(s == i, tl.sum(tl.where(keys <= end, measure, 0.0), 0), found)
    found = tl.where(s == SECTIONS - 1, tl.sum(measure, 0), found)
    tl.store(table + (row * TILES + tile) * SECTIONS + s, found)
    if tile == 0:
        tl.store(pivots + row * SECTIONS + s, ends)
        tl.store(gathered + row, 0)


@triton.jit
def _goal(total, top_p):
    """The measure that the likeliest tokens must reach: top_p of `total`, and at least the largest one's."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * tl.maximum(top_p, 0.0)).to(tl.int64), 1)


@triton.jit
def _bracket(pivots, table, row, limit, top_k, top_p, TILES: tl.constexpr, PADDED: tl.constexpr):
    """(low, high, base, goal) of the section with the threshold; `low` is `high` if all tokens are less than the goal."""
    t = tl.arange(0, PADDED)[:, None]
    s = tl.arange(0, SECTIONS)
    sums = tl.sum(tl.load(table + (row * TILES + t) * SECTIONS + s[None, :], mask=t < TILES, other=0.0).to(tl.int64), 0)
    ends = tl.load(pivots + row * SECTIONS + s)
    goal = tl.where(top_k > 0, top_k, _goal(tl.max(sums, 0), top_p))
    short = sums < goal
    low = tl.max(tl.where(short, ends, -1), 0)
    return low, tl.min(tl.where(short, limit, ends), 0), tl.max(tl.where(short, sums, 0), 0), goal


@triton.jit
def gather_keys(
    logits, rules, peaks, pivots, table, gathered, found,
    VOCAB: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Copy the keys that `select_key` needs to `found` int32 [n, ROOM], in any order: those of the bracket, or all up to its
    end where a second search follows, for top_p. `gathered` int32 [n] counts them, also beyond ROOM."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    x = _logits(logits, row, tile * TILE + tl.arange(0, TILE), VOCAB)
    scale, limit, top_k, top_p = _rule(rules, row)
    top, _ = _largest(peaks, row, TILES, PADDED)
    if not _searched(scale, top_k, top_p, top):
        return
    low, high, _, _ = _bracket(pivots, table, row, limit, top_k, top_p, TILES, PADDED)
    low = tl.where((top_k > 0) & (top_p < 1.0), -1, low)
    keys = _keys(x, top)
    wanted = (keys > low) & (keys <= high)
    ends = tl.cumsum(wanted.to(tl.int32), 0)
    count = tl.max(ends, 0)
    if count > 0:
        first = tl.atomic_add(gathered + row, count, sem="relaxed")
        at = first + ends - 1
        tl.store(found + row.to(tl.int64) * ROOM + at, keys, mask=wanted & (at < ROOM))


@triton.jit
def _some_keys(logits, found, row, at, count, top, whole, VOCAB: tl.constexpr, ROOM: tl.constexpr):
    """Keys of the row, gathered or, where these are too many, of the `whole` row."""
    if whole:
        keys = _keys(_logits(logits, row, at, VOCAB), top)
    else:
        keys = tl.load(found + row.to(tl.int64) * ROOM + at, mask=at < count, other=NEVER)
    return keys


@triton.jit
def select_key(
    logits, rules, peaks, pivots, table, gathered, found, cuts,
    VOCAB: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """cuts[row] = the largest key that may be drawn. Each pass over the keys divides the bracket by PARTS."""
    row = tl.program_id(0)
    scale, limit, top_k, top_p = _rule(rules, row)
    top, _ = _largest(peaks, row, TILES, PADDED)
    if not _searched(scale, top_k, top_p, top):
        return
    low, high, base, goal = _bracket(pivots, table, row, limit, top_k, top_p, TILES, PADDED)
    count = tl.load(gathered + row)
    whole = count > ROOM
    count = tl.where(whole, VOCAB, count)
    counting = top_k > 0
    s = tl.arange(0, PARTS)
    searches = tl.where(counting & (top_p < 1.0), 2, 1)
    while searches > 0:
        while high - low > 1:
            step = (high - low + PARTS - 1) // PARTS
            sums = tl.zeros((PARTS,), dtype=tl.int64)
            for first in range(0, count, CHUNK):
                keys = _some_keys(logits, found, row, first + tl.arange(0, CHUNK), count, top, whole, VOCAB, ROOM)
                measure = tl.where((keys > low) & (keys <= high), tl.where(counting, 1, _weights(keys, scale).to(tl.int64)), 0)
                for i in tl.static_range(PARTS):
                    sums += tl.where(s == i, tl.sum(tl.where(keys <= low + (i + 1) * step, measure, 0), 0), 0)
            short = base + sums < goal
            part = tl.sum(short.to(tl.int32), 0)
            base += tl.max(tl.where(short, sums, 0), 0)
            first_key = low
            low = tl.minimum(first_key + part * step, high)
            high = tl.where(part == PARTS, high, tl.minimum(first_key + tl.minimum(part + 1, PARTS) * step, high))
        searches -= 1
        if searches > 0:
            total = tl.zeros((1,), dtype=tl.int64)
            for first in range(0, count, CHUNK):
                keys = _some_keys(logits, found, row, first + tl.arange(0, CHUNK), count, top, whole, VOCAB, ROOM)
                total += tl.sum(tl.where(keys <= high, _weights(keys, scale).to(tl.int64), 0), 0)
            goal = _goal(tl.max(total, 0), top_p)
            base = base * 0
            low = low * 0 - 1
            counting = counting & False
    tl.store(cuts + row, high)


@triton.jit
def _drawable(keys, cuts, row, scale, limit, top_k, top_p):
    """The weights of a row's tokens, 0 for what the rules forbid."""
    until = limit
    if (top_k > 0) | (top_p < 1.0):
        until = tl.load(cuts + row)
    return tl.where(keys <= until, _weights(keys, scale).to(tl.int64), 0)


@triton.jit
def weigh_tiles(
    logits, rules, peaks, cuts, sums, VOCAB: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr
):
    """sums int64 [n, TILES]: the weight of each tile's tokens that may be drawn."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    x = _logits(logits, row, tile * TILE + tl.arange(0, TILE), VOCAB)
    scale, limit, top_k, top_p = _rule(rules, row)
    top, _ = _largest(peaks, row, TILES, PADDED)
    if (scale == 0.0) | (not _finite(top)):
        return
    keys = _keys(x, top)
    tl.store(sums + row * TILES + tile, tl.sum(_drawable(keys, cuts, row, scale, limit, top_k, top_p), 0))


@triton.jit
def pick_token(
    logits, rules, peaks, cuts, sums, noise, out,
    VOCAB: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out int32 [n, 2]: each row's token, and the bits of its largest logit.

    A row that draws takes the first token at which the sum of the weights exceeds noise[row] times all of them: the tile by the
    tiles' sums, then the token inside. The sums are exact, so it has weight.
    """
    row = tl.program_id(0)
    scale, limit, top_k, top_p = _rule(rules, row)
    top, token = _largest(peaks, row, TILES, PADDED)
    if (scale > 0.0) & _finite(top):
        t = tl.arange(0, PADDED)
        each = tl.load(sums + row * TILES + t, mask=t < TILES, other=0)
        total = tl.sum(each, 0)
        target = tl.minimum((tl.load(noise + row) * total.to(tl.float64)).to(tl.int64), total - 1)
        passed = tl.cumsum(each, 0) <= target
        tile = tl.sum(passed.to(tl.int32), 0)
        target -= tl.sum(tl.where(passed, each, 0), 0)
        keys = _keys(_logits(logits, row, tile * TILE + tl.arange(0, TILE), VOCAB), top)
        ends = tl.cumsum(_drawable(keys, cuts, row, scale, limit, top_k, top_p), 0)
        token = tile * TILE + tl.sum((ends <= target).to(tl.int32), 0)
    tl.store(out + 2 * row, token)
    tl.store(out + 2 * row + 1, top.to(tl.int32, bitcast=True))
