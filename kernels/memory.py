"""Large zeroed memory that takes no pages before it is written: the system provides zeroed pages on first touch."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch


def lazy_zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """`torch.zeros`; on a CPU a mapping of its own, in huge pages where the system has them, of which no page is taken yet.

    Huge pages matter: adapters are read from all over their arena, and every page of 4 KiB is an address translation.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(count, 1) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)
