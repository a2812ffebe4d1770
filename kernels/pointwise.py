"""The small operations between a layer's matrix products, in plain torch; kernels/triton/pointwise.py fuses them on a GPU.

    add_norm           x += y; the norm of x
    rotate_and_store   qkv: norm q and k (where the family does), rotate them, write K and V to the cache
    silu_mul           silu(gate) * up

`kernels_for(device)` is the module whose functions serve a device. Both have the same signatures.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from motet.kernels.types import Delta, KvCache


def kernels_for(device: torch.device) -> ModuleType:
    """This module on a CPU, the Triton kernels on a GPU (imported only then)."""
    if device.type == "cuda":
        from motet.kernels.triton import pointwise

        return pointwise
    from motet.kernels import pointwise as plain

    return plain


def prepare(
    *, hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, qk_norm: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Does nothing: there is nothing to compile."""


def add_norm(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, *, eps: float, delta: Delta | None = None
) -> torch.Tensor:
    """x += y + delta in place (without `y`: x as it is). Returns x / rms(x) * weight in a new tensor.

    x, y [rows, hidden] contiguous; weight [hidden].
    """
    if y is not None:
        x.add_(_with(y, delta))
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


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
    """Add the delta, normalise and rotate q and k, all in place, and write K and V to the cache at `kv_slots`, int64 [rows].

    qkv [rows, heads + 2 * kv_heads, head_dim] contiguous: q heads, then k, then v. cos, sin [rows,
    1, head_dim]: q becomes q cos + roll(q, head_dim / 2) sin. With `qk_norm` [heads + kv_heads, head_dim] every q and k head
    is divided by its rms and multiplied by its weight first.
    """
    _with(qkv, delta)
    head_dim = qkv.shape[-1]
    qk = qkv[:, : heads + cache.kv_heads]
    if qk_norm is not None:
        qk.copy_(F.rms_norm(qk, (head_dim,), eps=eps).mul_(qk_norm))
    half_turned = qk.roll(head_dim // 2, dims=-1)
    qk.mul_(cos).addcmul_(half_turned, sin)
    cache.write(layer, kv_slots, qkv[:, heads:].unflatten(1, (2, -1)))


def silu_mul(gate_up: torch.Tensor, *, delta: Delta | None = None) -> torch.Tensor:
    """silu(gate) * up, [rows, mlp], of gate_up [rows, 2 * mlp] contiguous: gate, then up. `gate_up` may be changed."""
    gate, up = _with(gate_up, delta).chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _with(y: torch.Tensor, delta: Delta | None) -> torch.Tensor:
    """`y` plus its delta, in place."""
    if delta is not None:
        counts = delta.adapted.view(-1, *[1] * (y.dim() - 1)) != 0
        y.add_(delta.values.view_as(y).masked_fill(~counts, 0.0))
    return y
