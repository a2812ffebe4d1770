"""Gives freed memory back to the system.

A registration reads and converts an adapter in a thread of its own, and glibc keeps the freed pages of each thread's arena.
After a thousand adapters the process would hold several megabytes that nothing uses, after one large adapter much more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def _find() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None  # another C library, which has no such call
    return trim


_trim = _find()


def give_back() -> None:
    """Return free pages of the heap to the system. Takes milliseconds; other threads wait when they allocate meanwhile."""
    if _trim is not None:
        _trim(0)
