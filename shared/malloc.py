"""Returns freed memory of large buffers to the system, in processes that copy them in threads (gateway, registry, predictor).

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
    """Let the C library return freed buffers of `LARGE_BYTES` or more to the system, and share one arena among threads.

    Returns False where the C library has no `mallopt`. Every large buffer then costs page faults, so a process that computes
    should not call this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)) and bool(mallopt(_M_ARENA_MAX, 1))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A context without garbage collection, for the import of a large library: it makes many objects, all of which stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
