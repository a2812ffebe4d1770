"""Matrices of 8- or 4-bit integers with scales, as quantized checkpoints store them, and rounding to them.

whole = round_to(weight, 4)             QuantizedMatrix
whole.floats(torch.float32)             what they stand for
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GROUP = 32
"""Inputs that share a scale in the compiled kernels; group sizes of checkpoints are multiples of it, or whole rows."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantized matrix [out, in]: scale * (value - zero).

    Each output has a scale and a zero point per `group_size` inputs.
    """

    bits: int
    values: torch.Tensor  # uint8 [out, in], below 2 ** bits
    scales: torch.Tensor  # floats [out, groups]
    zeros: torch.Tensor | None  # float32 [out, groups], whole; None: 2 ** (bits - 1) everywhere
    group_size: int

    def floats(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix as floats [out, in], computed in float32 and rounded once."""
        fan_in = self.values.shape[1]
        zeros = self.middle if self.zeros is None else _by_input(self.zeros, self.group_size, fan_in)
        return ((self.values.float() - zeros) * _by_input(self.scales.float(), self.group_size, fan_in)).to(dtype)

    @property
    def middle(self) -> float:
        """The zero point of symmetric numbers."""
        return float(1 << (self.bits - 1))

    @property
    def per_output(self) -> bool:
        """Whether each output has one scale."""
        return self.scales.shape[1] == 1

    def per_group(self, of: torch.Tensor) -> torch.Tensor:
        """`scales` or `zeros` as float16 [out, in / GROUP rounded up], one for each GROUP inputs."""
        groups = -(-self.values.shape[1] // GROUP)
        return _by_input(of, max(self.group_size // GROUP, 1), groups).half().contiguous()


def joined(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Matrices of equal inputs, bits and groups, one below the other.

    If all zero points are in the middle, they become None.
    """
    first = parts[0]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([torch.full_like(p.scales, p.middle).float() if p.zeros is None else p.zeros for p in parts])
        zeros = None if bool((zeros == first.middle).all()) else zeros
    values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    return QuantizedMatrix(first.bits, values, scales, zeros, first.group_size)


def round_to(weight: torch.Tensor, bits: int) -> QuantizedMatrix:
    """`weight` [out, in] as the compiled kernels round it.

    8 bits: one float32 scale per output, 127 steps to either side. 4 bits: one float16 scale per output and GROUP inputs, and
    the first of a group's values that are furthest from zero becomes -8.
    """
    floats = weight.float()
    if bits == 8:
        largest = floats.abs().amax(1, keepdim=True)
        inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
        values = (floats * inverse).round_().add_(128)
        return QuantizedMatrix(8, values.to(torch.uint8), largest / 127, None, weight.shape[1])
    groups = torch.nn.functional.pad(floats, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    sizes = groups.abs()
    places = torch.arange(GROUP).where(sizes == sizes.amax(2, keepdim=True), GROUP).amin(2, keepdim=True)
    scales = (groups.gather(2, places) / -8).half()
    inverse = torch.where(scales != 0, 1 / scales.float(), 0)
    values = (groups * inverse).clamp_(-8, 7).round_().add_(8)
    return QuantizedMatrix(4, values.to(torch.uint8).flatten(1)[:, : weight.shape[1]], scales[:, :, 0], None, GROUP)


def _by_input(per_group: torch.Tensor, group_size: int, count: int) -> torch.Tensor:
    """Repeat a value per group for each of its inputs: [out, groups] -> [out, count]."""
    if per_group.shape[1] == 1:
        return per_group.expand(-1, count)
    return per_group.repeat_interleave(group_size, 1)[:, :count]
