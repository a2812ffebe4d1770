"""Pools of classes of sites with random adapters, and what their kernels are compared with."""

from __future__ import annotations

import numpy as np
import torch

from motet.kernels import LoraPool, PackedLora

Adapter = dict[tuple[int, str], tuple[float, torch.Tensor, torch.Tensor]]

CLASSES = {
    "unet.attn1.to_q 40x48": (40, 48, 5),
    "unet.conv1 27x13": (27, 13, 1),  # a convolution of 3 channels, unfolded
    "unet.ff.net.0.proj 33x200": (33, 200, 3),
    "unet.conv2 576x64": (576, 64, 2),
    "text_encoder.mlp.fc1 16x7": (16, 7, 4),
}
"""Each class has its own number of sites. One has more inputs than are prepared at once."""

SLOTS = 6


def random_adapter(draw: np.random.Generator, dtype: torch.dtype = torch.float32, *, missing: float = 0.4) -> Adapter:
    """Random pairs at some of the sites, each of its own rank. Some classes have none at all."""
    pairs: Adapter = {}
    for name, (fan_in, fan_out, sites) in CLASSES.items():
        if draw.random() < 0.2:
            continue
        for site in range(sites):
            if draw.random() >= missing:
                rank = int(draw.choice([1, 4, 8, 12, 16, 24, 32, 64]))
                seeded = torch.Generator().manual_seed(int(draw.integers(1 << 30)))
                a = torch.randn(rank, fan_in, generator=seeded).to(dtype)
                b = torch.randn(fan_out, rank, generator=seeded).to(dtype)
                pairs[site, name] = (float(draw.choice([0.25, 0.7, 2.0])), a, b)
    return pairs or random_adapter(draw, dtype, missing=missing)


def load(pool: LoraPool, slot: int, adapter: Adapter) -> None:
    pool.load(slot, PackedLora.pack(adapter, CLASSES))


def make_pool(*, bytes_total: int = 16 << 20, dtype: torch.dtype = torch.float32, max_rank: int = 64) -> LoraPool:
    """A pool whose free memory is NaN, so that reading beyond an adapter's own pages shows in the result."""
    pool = LoraPool(CLASSES, slots=SLOTS, max_rank=max_rank, bytes_total=bytes_total, dtype=dtype)
    pool.arena.fill_(float("nan"))
    return pool


def filled_pool(draw: np.random.Generator, dtype: torch.dtype = torch.float32) -> tuple[LoraPool, dict[int, Adapter]]:
    """A pool with an adapter in each slot but the last, some loaded where others were before."""
    pool = make_pool(dtype=dtype)
    held = {slot: random_adapter(draw, dtype) for slot in range(SLOTS - 1)}
    for slot, adapter in held.items():
        load(pool, slot, adapter)
    for slot in (0, 2):
        pool.free(slot)
        for start, end in pool.holes:
            pool.arena[start * 8 : end * 8] = float("nan")
    for slot in (2, 0):
        held[slot] = random_adapter(draw, dtype)
        load(pool, slot, held[slot])
    return pool, held


def random_rows(draw: np.random.Generator, rows: int, adapters: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots and weights [rows, adapters], of loaded slots or none; some rows stand in runs."""
    slots = draw.integers(-1, SLOTS - 1, (rows, adapters)).astype(np.int32)
    weights = draw.choice([1.0, 0.8, -0.3], (rows, adapters)).astype(np.float32)
    runs = np.sort(draw.integers(0, rows, rows))
    return (slots[runs], weights[runs]) if draw.random() < 0.5 else (slots, weights)


def formula(
    y: torch.Tensor, x: torch.Tensor, held: dict[int, Adapter], where: tuple[int, str], slots: np.ndarray, weights: np.ndarray
) -> torch.Tensor:
    """y + sum over k of weight * scale * (x A^T) B^T, row by row in fp64."""
    result = y.double()
    for row in range(len(slots)):
        for slot, weight in zip(slots[row].tolist(), weights[row].tolist(), strict=True):
            if slot >= 0 and where in held[slot]:
                scale, a, b = held[slot][where]
                result[row] += weight * scale * (b.double() @ (a.double() @ x[row].double()))
    return result


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert not got.isnan().any()
    assert (got.double() - want).abs().max() <= 3e-6 * max(want.abs().max().item(), 1.0)
