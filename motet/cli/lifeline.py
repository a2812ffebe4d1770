"""Ends child processes when their parent ends, so that a crash of the supervisor leaves no processes behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def dying_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` that makes the kernel kill the child when this process dies. None where this is not possible.

    Linux only. The kernel watches the thread that forked, so start children from a thread that stays alive.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died between the fork and the line above
            os._exit(1)

    return bind
