"""The operations of kernels/pointwise.py in one launch each: what they compute and their shapes are described there.

A decode step of few rows is many short kernels; each of these replaces two to eight of torch's. Intermediate values stay in
fp32, so a result may differ from torch's by rounding.
"""

from __future__ import annotations

from functools import cache

import torch
import triton

from motet.kernels.triton import pointwise_kernels as kernels
from motet.kernels.triton.launch import Kernel
from motet.kernels.types import Delta, KvCache

GROUP = 8  # heads of a program of rotate_and_store
COLUMNS = 1024  # of a program of silu_mul
COLUMNS_WARPS = 4


def norm_launch(hidden: int) -> tuple[int, int]:
    """(columns of the one block of a row, warps): 16 elements a thread for hidden sizes up to 8192."""
    block = triton.next_power_of_2(hidden)
    return block, min(max(block // 512, 1), 16)


def head_launch(head_dim: int) -> tuple[int, int]:
    """(half a head as a power of 2, warps): 8 elements a thread of each half for heads of 64 and more."""
    half = triton.next_power_of_2(head_dim // 2)
    return half, max(GROUP * half // 256, 1)


def prepare(
    *, hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, qk_norm: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Compile and load every kernel that a model of these shapes launches: each runs once on a row of zeros."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    x, qkv, gate_up, angles = (
        zeros(1, hidden),
        zeros(1, heads + 2 * kv_heads, head_dim),
        zeros(1, 2 * mlp),
        zeros(1, 1, head_dim),
    )
    cache = KvCache(layers=1, blocks=1, block_size=1, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    adapted = torch.ones(1, dtype=torch.int32, device=device)
    weights = zeros(heads + kv_heads, head_dim) if qk_norm else None
    add_norm(x, None, x[0], eps=1.0)
    for with_delta in (False, True):
        for_x, for_qkv, for_mlp = (Delta(y.clone(), adapted) if with_delta else None for y in (x, qkv, gate_up))
        add_norm(x, x.clone(), x[0].clone(), eps=1.0, delta=for_x)
        rotate_and_store(qkv, angles, angles, cache, 0, slots, heads=heads, qk_norm=weights, eps=1.0, delta=for_qkv)
        silu_mul(gate_up, delta=for_mlp)


def add_norm(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, *, eps: float, delta: Delta | None = None
) -> torch.Tensor:
    """x += y + delta in place (without `y`: x as it is). Returns x / rms(x) * weight in a new tensor."""
    rows, hidden = x.shape
    out = torch.empty_like(x)
    values, adapted = _parts(delta)
    _expect_contiguous(x, y, weight, values)
    _add_norm(hidden)((rows,), x, y, values, adapted, weight, out, eps)
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: KvCache,
    layer: int,
    kv_slots: torch.Tensor,
    *,
    heads: int,
    qk_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    delta: Delta | None = None,
) -> None:
    """Add the delta, normalise and rotate q and k, all in place, and write K and V to the cache at `kv_slots`, int64 [rows]."""
    rows, all_heads, head_dim = qkv.shape
    values, adapted = _parts(delta)
    _expect_contiguous(qkv, cos, sin, qk_norm, values)
    grid = (rows, triton.cdiv(all_heads, GROUP))
    launch = _rotate_and_store(heads, cache.kv_heads, head_dim)
    launch(grid, qkv, values, adapted, cos, sin, qk_norm, eps, cache.tokens(layer), kv_slots)


def silu_mul(gate_up: torch.Tensor, *, delta: Delta | None = None) -> torch.Tensor:
    """silu(gate) * up, [rows, mlp], of gate_up [rows, 2 * mlp]: gate, then up."""
    rows, mlp = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, mlp)
    values, adapted = _parts(delta)
    _expect_contiguous(gate_up, values)
    grid = (rows, triton.cdiv(mlp, COLUMNS))
    _silu_mul(mlp)(grid, gate_up, values, adapted, out)
    return out


@cache
def _add_norm(hidden: int) -> Kernel:
    block, warps = norm_launch(hidden)
    return Kernel(kernels.add_norm, HIDDEN=hidden, BLOCK=block, num_warps=warps)


@cache
def _rotate_and_store(heads: int, kv_heads: int, head_dim: int) -> Kernel:
    half, warps = head_launch(head_dim)
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "GROUP": GROUP, "HALF": half}
    return Kernel(kernels.rotate_and_store, **constants, num_warps=warps)


@cache
def _silu_mul(mlp: int) -> Kernel:
    return Kernel(kernels.silu_mul, MLP=mlp, BLOCK=COLUMNS, num_warps=COLUMNS_WARPS)


def _parts(delta: Delta | None) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    return (None, None) if delta is None else (delta.values, delta.adapted)


def _expect_contiguous(*tensors: torch.Tensor | None) -> None:
    assert all(each is None or each.is_contiguous() for each in tensors), "the kernels derive addresses from shapes alone"
