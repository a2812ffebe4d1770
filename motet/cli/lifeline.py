"""Child processes that end when their parent ends, so that a crash of the supervisor leaves no processes behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

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


class Bound:
    """A program that runs as a child process, and can be started again when it has ended."""

    _process: subprocess.Popen[bytes] | None = None

    def _run(self, words: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        """Start it, out of reach of the terminal's Ctrl-C, which is for the supervisor alone. `how`: Popen's arguments."""
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=dying_with_parent(), **how
        )
        return self._process

    @property
    def pid(self) -> int:
        """Process id of the latest start, 0 before the first."""
        return 0 if self._process is None else self._process.pid

    def exit_code(self) -> int | None:
        """The exit status; None while it runs and before the first start."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal; no effect when it does not run."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
