"""Binds a child's life to its parent's, so that no crash of the supervisor leaves processes behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def dying_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn`: the kernel kills the child when this process dies, however it dies. None where it cannot.

    Only Linux has this. The kernel watches the thread that forked, so start children from a thread that stays.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died between the fork and the line above
            os._exit(1)

    return bind
