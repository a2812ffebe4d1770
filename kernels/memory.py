"""Large zeroed memory that uses no physical pages before they are needed, and gives them back.

    lazy_zeros(shape)       all of it may be used
    reserved(shape)         addresses only; `expect` a part before it is used, `give_back` a part that is not needed any more

On a CPU the system provides zeroed pages on first touch. On a device `reserved` is made of physical pages (kernels/pages.py),
and touching what was not expected is an error of the device.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch

from motet.kernels.pages import PagedRange, PhysicalPages

BUFFER_BYTES = 16 << 20


def lazy_zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """`torch.zeros`. On a CPU it is a mapping of its own, in huge pages where possible, whose pages are allocated when used.

    Huge pages matter because adapters are read from all over their arena, and every page of 4 KiB needs an address translation.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = _mapping(shape, dtype)
    expect(memory)
    return memory


def reserved(shape: Sequence[int], *, dtype: torch.dtype, pages: PhysicalPages | None = None) -> torch.Tensor:
    """Memory of which no part is used yet: of the device that `pages` are of, of the CPU without them.

    Raises MemoryError when the device has no page at all.
    """
    if pages is None:
        memory = _mapping(shape, dtype)
        _small_pages(memory)
        return memory
    there = PagedRange(pages, math.prod(shape) * dtype.itemsize)
    _ranges[there.address] = there
    return there.tensor().view(dtype).view(*shape)


def move_down(memory: torch.Tensor, start: int, to: int, count: int) -> None:
    """Move `count` elements of a flat tensor from `start` to a lower place, which they may overlap."""
    if memory.device.type != "cpu":
        move_by_buffer(memory, start, to, count)
        return
    at, size = memory.data_ptr(), memory.element_size()
    ctypes.memmove(at + to * size, at + start * size, count * size)


def move_by_buffer(memory: torch.Tensor, start: int, to: int, count: int, buffer_bytes: int = BUFFER_BYTES) -> None:
    """`move_down` on a device, whose copies must not overlap: in pieces as long as the distance, or longer through a buffer."""
    piece = max(start - to, buffer_bytes // memory.element_size())
    for first in range(0, count, piece):
        length = min(piece, count - first)
        source = memory[start + first :][:length]
        memory[to + first :][:length].copy_(source.clone() if start - to < length else source)


def give_back(memory: torch.Tensor) -> None:
    """Give back the whole pages of `memory`, a contiguous part of a tensor of `reserved`, or of `lazy_zeros` on a CPU.

    The content is lost.

    On a CPU, when the pages are used again, small ones are allocated, so that a huge page does not bring its neighbours back as
    well; `expect` allows huge pages again.
    """
    if (paged := _range_of(memory)) is not None:
        paged[0].give_back(*paged[1:])
        return
    _advise(memory, mmap.MADV_DONTNEED)
    _small_pages(memory)


def expect(memory: torch.Tensor) -> None:
    """Announce that `memory` will be filled: a part of `reserved` that was not expected before, or was given back.

    On a CPU huge pages are used where the system has them. On a device it raises MemoryError, and changes nothing, when there
    are not enough pages.
    """
    if (paged := _range_of(memory)) is not None:
        paged[0].expect(*paged[1:])
    elif hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(memory, mmap.MADV_HUGEPAGE)


def _mapping(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(count, 1) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)


def _range_of(memory: torch.Tensor) -> tuple[PagedRange, int, int] | None:
    """The range that `memory` is a part of, and which of its bytes; None for the CPU's own memory."""
    there = _ranges.get(memory.untyped_storage().data_ptr())
    if there is None:
        assert memory.device.type == "cpu", "a device's memory can be given back only where it is reserved"
        return None
    start = int(memory.storage_offset()) * memory.itemsize
    return there, start, start + memory.nbytes


def _small_pages(memory: torch.Tensor) -> None:
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        _advise(memory, mmap.MADV_NOHUGEPAGE)


def _advise(memory: torch.Tensor, advice: int) -> None:
    """Advise the system about all pages that lie completely in `memory`. If it does not follow, only memory is wasted."""
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


_libc = ctypes.CDLL(None)
_ranges: WeakValueDictionary[int, PagedRange] = WeakValueDictionary()  # by address
