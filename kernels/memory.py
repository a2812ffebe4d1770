"""Large zeroed memory that uses no physical pages before it is written: the system provides zeroed pages on first touch."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch


def lazy_zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """`torch.zeros`. On a CPU it is a mapping of its own, in huge pages where possible, whose pages are allocated when used.

    Huge pages matter because adapters are read from all over their arena, and every page of 4 KiB needs an address translation.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(count, 1) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)


def give_back(memory: torch.Tensor) -> None:
    """Return the whole pages of `memory`, a contiguous part of a tensor of `lazy_zeros` on a CPU, to the system. The content is
    lost.

    When the pages are used again, small ones are allocated, so that a huge page does not bring its neighbours back as well;
    `expect` allows huge pages again.
    """
    _advise(memory, mmap.MADV_DONTNEED)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        _advise(memory, mmap.MADV_NOHUGEPAGE)


def expect(memory: torch.Tensor) -> None:
    """Announce that returned memory will be filled again, in huge pages where the system has them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(memory, mmap.MADV_HUGEPAGE)


def _advise(memory: torch.Tensor, advice: int) -> None:
    """Advise the system about all pages that lie completely in `memory`. If it does not follow, only memory is wasted."""
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


_libc = ctypes.CDLL(None)
