"""The KV cache events of a vLLM core, which it publishes over ZeroMQ (`vllm.distributed.kv_events.ZmqEventPublisher`).

They come beside the core's outputs: the events of a step may be read before its tokens or after them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

MESSAGES_MAX = 10_000
"""Batches that wait to be read, on each side. vLLM drops further ones, which shows in their numbers."""


@dataclass(eq=False)
class CacheEvents:
    """A socket in a directory that only this user can read. A core that was started again publishes there, too."""

    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=lambda: tempfile.TemporaryDirectory(prefix="motet-kv-"))

    @property
    def endpoint(self) -> str:
        """Where the core publishes."""
        return f"ipc://{Path(self._folder.name, 'events')}"

    async def listen(self, take: Callable[[int, bytes], None]) -> None:
        """Call `take(number, payload)` for each batch, until the task is cancelled. The core need not run yet."""
        import zmq
        from zmq.asyncio import Context

        with Context.instance().socket(zmq.SUB) as socket:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, MESSAGES_MAX)
            socket.subscribe(b"")
            socket.connect(self.endpoint)
            while True:
                _, number, payload = await socket.recv_multipart()
                take(int.from_bytes(number, "big"), payload)

    def close(self) -> None:
        """Remove the directory."""
        self._folder.cleanup()
