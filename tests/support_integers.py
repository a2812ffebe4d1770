"""The integers that the compiled kernels make of weights and activations, computed in torch."""

from __future__ import annotations

import torch


def to_8_bits(x: torch.Tensor) -> torch.Tensor:
    """Every row in 127 equal steps to either side of zero, as fp64."""
    largest = x.float().abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)  # `127 / largest` rounds twice
    return (x.float() * inverse).round().double() * (largest / 127).double()


def to_4_bits(w: torch.Tensor) -> torch.Tensor:
    """Every 32 inputs of an output in 16 steps, of which the largest value is the eighth below zero, as fp64."""
    groups = torch.nn.functional.pad(w.float(), (0, -w.shape[1] % 32)).unflatten(1, (-1, 32))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (largest / -8).half().float()
    inverse = torch.where(scale != 0, torch.ones_like(scale) / scale, 0)
    return ((groups * inverse).clamp(-8, 7).round().double() * scale.double()).flatten(1)[:, : w.shape[1]]
