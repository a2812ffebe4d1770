"""The two batched LoRA kernels of the field's performance models (CaraServe, arXiv 2401.11240, section 5), to compare with.

Both treat every row for itself, so rows that share an adapter read it again each time:

- padded BGMV (Punica): every adapter is stored and computed at the pool's largest rank; cost grows with
  rows * max(rank);
- MBGMV (S-LoRA): every row at its adapter's own rank; cost grows with the sum of the rows' ranks.

They share Motet's kernels; what differs is the work list (one row per group) and the storage.
"""

from __future__ import annotations

import numpy as np
import torch

from motet.kernels.pool import LoraPool, Pairs
from motet.kernels.triton.lora import LoraBatch


def mbgmv(pool: LoraPool, row_slot: np.ndarray) -> LoraBatch:
    """Per-token MBGMV over a pool of true ranks; padded BGMV when the pool holds `padded` adapters."""
    return LoraBatch.build(pool, row_slot, group_rows=1)


def padded(pairs: Pairs, rank: int) -> dict[tuple[int, str], tuple[float, torch.Tensor, torch.Tensor]]:
    """The same adapter stored at `rank`, filled up with zeros."""

    def grown(matrix: torch.Tensor, dim: int) -> torch.Tensor:
        missing = list(matrix.shape)
        missing[dim] = rank - matrix.shape[dim]
        return torch.cat([matrix, matrix.new_zeros(missing)], dim=dim)

    return {key: (scale, grown(a, 0), grown(b, 1)) for key, (scale, a, b) in pairs.items()}
