"""The fused operations between a layer's products against the formulas in fp64; interpreted where there is no GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from motet.kernels import KvCache
from motet.kernels import pointwise as plain
from motet.kernels.triton import pointwise
from motet.kernels.triton.launch import Kernel
from motet.kernels.types import Delta

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5
NAN = float("nan")


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random content before NaN: what lies behind the last row shows if it is read."""
    memory = torch.full((np.prod(shape, dtype=int) + 64,), NAN, dtype=dtype, device=DEVICE)
    memory[:-64] = torch.randn(len(memory) - 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return memory[:-64].view(shape)


def poisoned_delta(like: torch.Tensor) -> tuple[Delta, torch.Tensor]:
    """A delta for every other row whose other rows are NaN; and what it adds, in fp64."""
    values = draw(*like.shape, dtype=like.dtype, seed=7)
    adapted = (torch.arange(len(like), device=DEVICE) % 2).int()
    values[adapted == 0] = NAN
    return Delta(values, adapted), values.double().nan_to_num(0.0)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize(
    ("hidden", "dtype"), [(1, torch.float32), (64, torch.float32), (131, torch.bfloat16), (3000, torch.float16)]
)
def test_the_sum_is_kept_and_its_norm_returned(hidden: int, with_delta: bool, dtype: torch.dtype) -> None:
    x, y = draw(5, hidden, dtype=dtype, seed=1), draw(5, hidden, dtype=dtype, seed=2)
    weight = draw(hidden, dtype=dtype, seed=3)
    delta, added = poisoned_delta(y) if with_delta else (None, 0.0)
    total = x.double() + y.double() + added
    h = pointwise.add_norm(x, y, weight, eps=EPS, delta=delta)
    check(x, total)
    check(h, x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double())


@pytest.mark.parametrize("dtype", TYPES)
def test_without_anything_to_add_the_sum_stays_as_it_is(dtype: torch.dtype) -> None:
    x, weight = draw(3, 72, dtype=dtype), draw(72, dtype=dtype, seed=3)
    before = x.clone()
    h = pointwise.add_norm(x, None, weight, eps=EPS)
    assert torch.equal(x, before)
    check(h, x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double())


@pytest.mark.parametrize(("with_delta", "normed"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [(4, 2, 16, torch.float32), (7, 1, 24, torch.bfloat16), (1, 1, 2, torch.float16), (12, 4, 128, torch.bfloat16)],
)
def test_heads_are_normed_and_rotated_and_only_named_slots_are_written(
    heads: int, kv_heads: int, head_dim: int, with_delta: bool, normed: bool, dtype: torch.dtype
) -> None:
    rows, rotated, half = 5, heads + kv_heads, head_dim // 2
    qkv = draw(rows, rotated + kv_heads, head_dim, dtype=dtype)
    weights = draw(rotated, head_dim, dtype=dtype, seed=4) if normed else None
    angles = torch.rand(rows, 1, half, generator=torch.Generator().manual_seed(5)) * 6
    cos = torch.cat([angles.cos()] * 2, dim=-1).to(DEVICE, dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(DEVICE, dtype)
    cache = KvCache(layers=3, blocks=6, block_size=8, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=DEVICE)
    cache.data.fill_(NAN)
    slots = torch.tensor([3, 40, 17, 0, 41], device=DEVICE)
    delta, added = poisoned_delta(qkv) if with_delta else (None, 0.0)

    want = qkv.double() + added
    qk = want[:, :rotated]
    if weights is not None:
        qk = qk / (qk.square().mean(-1, keepdim=True) + EPS).sqrt() * weights.double()
    want[:, :rotated] = qk * cos.double() + qk.roll(half, dims=-1) * sin.double()

    pointwise.rotate_and_store(qkv, cos, sin, cache, 1, slots, heads=heads, qk_norm=weights, eps=EPS, delta=delta)
    check(qkv, want)
    assert torch.equal(cache.tokens(1)[slots].flatten(1, 2), qkv[:, heads:])
    cache.tokens(1)[slots] = NAN
    assert cache.data.isnan().all()


@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize(
    ("mlp", "dtype"), [(1, torch.float32), (88, torch.float16), (1024, torch.bfloat16), (1501, torch.float32)]
)
def test_the_gate_is_activated_and_multiplied(mlp: int, with_delta: bool, dtype: torch.dtype) -> None:
    gate_up = draw(4, 2 * mlp, dtype=dtype).mul_(3)
    delta, added = poisoned_delta(gate_up) if with_delta else (None, 0.0)
    gate, up = (gate_up.double() + added).chunk(2, dim=-1)
    check(pointwise.silu_mul(gate_up, delta=delta), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_gate_far_from_zero_gives_no_nan(dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[-2000.0, 2000.0, 0.0, 2.0, 2.0, 2.0]], dtype=dtype, device=DEVICE)
    with np.errstate(over="ignore"):  # the interpreter's
        found = pointwise.silu_mul(gate_up)
    assert found.tolist() == [[0.0, 4000.0, 0.0]]


@pytest.mark.parametrize("with_delta", [False, True])
def test_plain_torch_says_the_same(with_delta: bool) -> None:
    heads, kv_heads, head_dim, dtype = 4, 2, 16, torch.float32

    def results(on: ModuleType) -> list[torch.Tensor]:
        x, y, qkv = draw(6, 40, dtype=dtype), draw(6, 40, dtype=dtype, seed=1), draw(6, 8, head_dim, dtype=dtype, seed=2)
        gate_up, weight = draw(6, 50, dtype=dtype, seed=3), draw(40, dtype=dtype, seed=4)
        cos, sin = (draw(6, 1, head_dim, dtype=dtype, seed=seed) for seed in (5, 6))
        qk_norm = draw(heads + kv_heads, head_dim, dtype=dtype, seed=8)
        cache = KvCache(layers=1, blocks=2, block_size=8, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=DEVICE)
        slots = torch.tensor([5, 4, 9, 8, 0, 15], device=DEVICE)
        of = {name: poisoned_delta(t)[0] if with_delta else None for name, t in (("y", y), ("qkv", qkv), ("gate_up", gate_up))}
        h = on.add_norm(x, y, weight, eps=EPS, delta=of["y"])
        on.rotate_and_store(qkv, cos, sin, cache, 0, slots, heads=heads, qk_norm=qk_norm, eps=EPS, delta=of["qkv"])
        return [x, h, qkv, cache.data, on.silu_mul(gate_up, delta=of["gate_up"])]

    for got, want in zip(results(pointwise), results(plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_step_without_rows_is_none() -> None:
    x, qkv = torch.empty(0, 16, device=DEVICE), torch.empty(0, 4, 8, device=DEVICE)
    angles, slots = torch.empty(0, 1, 8, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    cache = KvCache(layers=1, blocks=1, block_size=8, kv_heads=1, head_dim=8, dtype=torch.float32, device=DEVICE)
    assert pointwise.add_norm(x, x.clone(), torch.ones(16, device=DEVICE), eps=EPS).shape == (0, 16)
    pointwise.rotate_and_store(qkv, angles, angles, cache, 0, slots, heads=2)
    assert pointwise.silu_mul(x).shape == (0, 8)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_every_kernel_is_launched_at_the_start_with_and_without_a_delta(qk_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[tuple[str, bool]] = set()

    launch = Kernel.__call__

    def noted(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        types = [each.dtype for each in arguments if isinstance(each, torch.Tensor)]
        launched.add((kernel.kernel.fn.__name__, torch.int32 in types))
        launch(kernel, grid, *arguments)

    monkeypatch.setattr(Kernel, "__call__", noted)
    names = ("add_norm", "rotate_and_store", "silu_mul")
    shapes = {"hidden": 40, "heads": 4, "kv_heads": 2, "head_dim": 24, "mlp": 33}
    pointwise.prepare(**shapes, qk_norm=qk_norm, dtype=torch.bfloat16, device=torch.device(DEVICE))
    assert launched == {(name, delta) for name in names for delta in (False, True)}


def test_a_device_has_its_own_operations() -> None:
    assert plain.kernels_for(torch.device("cpu")) is plain
    assert plain.kernels_for(torch.device("cuda", 0)) is pointwise
