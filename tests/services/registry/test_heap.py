"""A registry does not keep the memory of adapters that it has stored."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, threading
from pathlib import Path
from motet.services.registry.heap import give_back

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def work():  # many small blocks, the last of them still in use, so that glibc cannot shrink the arena from its end
    blocks = [bytearray(60_000) for _ in range(500)]
    kept.append(blocks[-1])

kept, start = [], resident()
for _ in range(4):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
used = resident()
give_back()
print(used - start, resident() - start)
"""


def test_freed_memory_of_threads_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    before, after = map(float, done.stdout.split())
    assert before > 20 and after < before / 4, done.stdout
