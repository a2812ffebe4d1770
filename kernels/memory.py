"""Large zeroed tensors that cost nothing until they are used."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Zeros [*shape]. On a CPU, memory comes page by page when it is first touched, in huge pages where the system has them.

    Huge pages matter: adapters are read from all over their arena, and every page of 4 KiB is an address translation.
    """
    count = math.prod(shape)
    if torch.device(device).type != "cpu" or not count:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)
