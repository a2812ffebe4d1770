"""A CPU LoRA process. The worker starts this file by its path. It imports no other module of Motet, so that it stays small.

    python -I -S assist_process.py LIBRARY CHANNEL_FD CPU PARENT_PID

LIBRARY is the compiled kernels of the worker, CHANNEL_FD the memory file that both share (kernels/cpu/src/channel.h), CPU
the core to stay on, -1 for any. It ends when the worker tells it to, or has ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def main(library: str, fd: int, cpu: int, parent_pid: int) -> None:
    """Serve one channel until `stop`."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_NAME, b"motet-assist", 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        return  # it went before we asked to go with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the worker's to handle
    if cpu >= 0:
        os.sched_setaffinity(0, {cpu})
    memory = mmap.mmap(fd, 0)
    serve = ctypes.CDLL(library).motet_assist_serve
    serve.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    serve(ctypes.addressof(ctypes.c_char.from_buffer(memory)), parent_pid)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
