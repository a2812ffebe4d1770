"""Restarts the embedded NATS when a full disk has made streams unwritable.

nats-server keeps the first write error of a stream until it is restarted, also after the disk has room again. Its health
endpoint names such streams, those that only publishers write to included.

    healthy ──► streams with a write error ── no room on the disk ──► told once, waited for
                    └── room ──► SIGTERM; the supervisor starts it again, with everything that was acknowledged
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from motet.cli.nats_server import NatsServer

LOOK_S = 2.0
ROOM_BYTES = 16 << 20  # two of its files
REST_S = (10.0, 300.0)  # after a restart, doubled each time: a disk that is full again at once is the operator's


def has_room(directory: Path, size_bytes: int = ROOM_BYTES) -> bool:
    """Whether a file of this size can be written. Free bytes alone do not show quotas."""
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            os.posix_fallocate(probe.fileno(), 0, size_bytes)
    except OSError:
        return False
    return True


async def keep_writable(server: NatsServer, end: Callable[[int], None], say: Callable[[str], None]) -> None:
    """Look at the server's health until cancelled. `end(signal)` ends its process, which is then started again."""
    rest_s, said = REST_S[0], ""
    while True:
        await asyncio.sleep(LOOK_S)
        broken = await server.write_errors()
        if not broken:
            said = ""
            continue
        note = f"{', '.join(broken)}: nothing is stored since the disk of {server.data_dir} was full"
        if not await asyncio.to_thread(has_room, server.data_dir):
            if said != note:
                say(f"{note}; NATS is restarted when {ROOM_BYTES >> 20} MiB are free")
                said = note
            continue
        say(f"{note}; there is room again, so NATS is restarted")
        end(signal.SIGTERM)
        await asyncio.sleep(rest_s)
        rest_s, said = min(2 * rest_s, REST_S[1]), ""
