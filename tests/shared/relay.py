"""A TCP relay between a client and the NATS server, to observe and disturb the connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def recorded(nats_url: str) -> AsyncIterator[tuple[str, bytearray]]:
    """A relay to the server: its URL, and what clients have sent."""
    sent = bytearray()
    port = int(nats_url.rsplit(":", 1)[1])

    async def forward(here: asyncio.StreamReader, there: asyncio.StreamWriter, log: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await here.read(65_536):
                log += data
                there.write(data)
        there.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(forward(reader, to_server, sent), forward(from_server, writer, bytearray()))
        finally:
            for one in (writer, to_server):
                one.close()

    async with await asyncio.start_server(relay, "127.0.0.1") as between:
        yield f"nats://127.0.0.1:{between.sockets[0].getsockname()[1]}", sent
