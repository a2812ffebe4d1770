"""The kernels of kernels/triton/pointwise.py. All arithmetic is fp32; what is stored is rounded once.

Shapes are constants, which a model fixes, and no argument is a number that changes from step to step: nothing is compiled
while serving. Loads that do not depend on each other come first, because at few rows a kernel lasts as long as its longest
chain of loads. Without `y`, `values` or `qk_norm` (None) a kernel is compiled without that part.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(at, inside):
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _with_delta(y, values, adapted, row, at, inside):
    """y at `at`, plus its delta where the row counts."""
    if values is None:
        found = _load(y + at, inside)
    else:
        counts = tl.load(adapted + row) != 0
        found = _load(y + at, inside) + _load(values + at, inside & counts)
    return found


@triton.jit(do_not_specialize_on_alignment=["adapted"])
def add_norm(x, y, values, adapted, weight, out, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row. The norm is that of x as it is stored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    at = row * HIDDEN + column
    scale = _load(weight + column, inside)
    total = _load(x + at, inside)
    if y is not None:
        total += _with_delta(y, values, adapted, row, at, inside)
        stored = total.to(x.dtype.element_ty)
        tl.store(x + at, stored, mask=inside)
        total = stored.to(tl.float32)
    total *= tl.rsqrt(tl.sum(total * total, 0) / HIDDEN + eps)
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["adapted", "kv_slots"])
def rotate_and_store(
    qkv,
    values,
    adapted,
    cos,
    sin,
    qk_norm,
    eps,
    kv,
    kv_slots,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program per row and GROUP heads, in two tiles: the first and the second half of every head.

    kv [slots, 2, KV_HEADS, D]: a line of it is the k and v heads of a row. HALF is D / 2, rounded up to a power of 2.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    d = tl.arange(0, HALF)[None, :]
    half = D // 2
    inside = (head < HEADS + 2 * KV_HEADS) & (d < half)
    rotates = head < HEADS + KV_HEADS
    at = row * ((HEADS + 2 * KV_HEADS) * D) + head * D + d
    angle = row * D + 0 * head + d  # as wide as `at`: every thread loads what it multiplies, and nothing is exchanged
    slot = tl.load(kv_slots + row)
    cos_1 = _load(cos + angle, inside)
    cos_2 = _load(cos + angle + half, inside)
    sin_1 = _load(sin + angle, inside)
    sin_2 = _load(sin + angle + half, inside)
    first = _with_delta(qkv, values, adapted, row, at, inside)
    second = _with_delta(qkv, values, adapted, row, at + half, inside)
    x_1 = first
    x_2 = second
    if qk_norm is not None:
        weight_1 = _load(qk_norm + head * D + d, inside & rotates)
        weight_2 = _load(qk_norm + head * D + half + d, inside & rotates)
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / D + eps)[:, None]
        x_1 = first * scale * weight_1
        x_2 = second * scale * weight_2
    first = tl.where(rotates, x_1 * cos_1 + x_2 * sin_1, first).to(qkv.dtype.element_ty)
    second = tl.where(rotates, x_2 * cos_2 + x_1 * sin_2, second).to(qkv.dtype.element_ty)
    tl.store(qkv + at, first, mask=inside)
    tl.store(qkv + at + half, second, mask=inside)
    line = kv + slot * (2 * KV_HEADS * D) + (head - HEADS) * D + d
    tl.store(line, first, mask=inside & (head >= HEADS))
    tl.store(line + half, second, mask=inside & (head >= HEADS))


@triton.jit(do_not_specialize_on_alignment=["adapted"])
def silu_mul(gate_up, values, adapted, out, MLP: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < MLP
    at = row * (2 * MLP) + column
    gate = _with_delta(gate_up, values, adapted, row, at, inside)
    up = _with_delta(gate_up, values, adapted, row, at + MLP, inside)
    tl.store(out + row * MLP + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
