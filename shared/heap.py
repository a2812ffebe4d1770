"""Returns freed memory of large buffers to the system, in processes that copy them in threads (registry, predictor).

glibc gives every thread its own arena, and once a large buffer was freed, it takes buffers of that size from the arenas too.
Freed buffers then stay with the process, and its memory grows (a registry of 62 MiB to between 66 and 72).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
LARGE_BYTES = 128 * 1024


def return_large_buffers() -> bool:
    """From now on buffers of `LARGE_BYTES` and more go back to the system when they are freed, and threads share one arena.

    Costs page faults for every large buffer: not for a process that computes. False where the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)) and bool(mallopt(_M_ARENA_MAX, 1))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for no garbage inside. For the import of a large library: it makes many objects, all of which stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
