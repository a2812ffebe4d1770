"""Memory that nobody had lately, for benches in which what ran before must not count.

Where a hypervisor takes free memory back ("free page reporting"), a page that was freed a moment ago costs nothing and any
other 10 us: 7 MiB are written to a new file in 2 ms or in 22. Only large pieces are taken back, and small ones are handed out
first, so the first files after another process ended are written ten times faster than those that follow.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

BUDDY = Path("/proc/buddyinfo")  # pieces of 1, 2, 4, ... pages that are free
LARGE = 9  # pieces of 2**9 pages and more are taken back
MOST = 0.1  # of what is free


class Taken:
    """Small pieces of free memory, held until `close`."""

    def __init__(self) -> None:
        self._held: list[mmap.mmap] = []

    def take(self) -> None:
        """Take all small pieces there are now, so that whoever comes next gets large ones."""
        if not BUDDY.exists():
            return
        zones = [line.split()[4:] for line in BUDDY.read_text().splitlines()]
        small = sum(int(pieces) << order for zone in zones for order, pieces in enumerate(zone[:LARGE]))
        pages = min(small, int(MOST * os.sysconf("SC_AVPHYS_PAGES")))
        if pages:
            memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
            memory[:: mmap.PAGESIZE] = bytes(pages)
            self._held.append(memory)

    def close(self) -> None:
        """Give all of it back."""
        while self._held:
            self._held.pop().close()
