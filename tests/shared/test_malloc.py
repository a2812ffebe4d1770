"""Promise: freed memory goes back to the system, so a process's memory does not grow with its number of threads."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CHILD = """
import sys, threading
from pathlib import Path
from motet.shared.malloc import return_large_buffers

def rss_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)

def work():
    bytes(1 << 20)  # once this is freed, glibc takes buffers of its size from the heap
    buffers = [bytes(200_000) for _ in range(40)]
    pin = bytes(40_000)
    del buffers
    freed.wait()
    seen.wait()

if sys.argv[1] == "returned":
    assert return_large_buffers()
before, freed, seen = rss_mib(), threading.Barrier(9), threading.Barrier(9)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
freed.wait()
print(rss_mib() - before)
seen.wait()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_large_buffers_that_threads_have_freed_go_back_to_the_system() -> None:
    assert grown_mib("returned") < 2 < grown_mib("kept")


def grown_mib(how: str) -> float:
    done = subprocess.run([sys.executable, "-c", CHILD, how], capture_output=True, text=True, timeout=60, check=True)
    return float(done.stdout)
