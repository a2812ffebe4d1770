"""A nats-server of the bench's own, on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from motet.cli.nats_server import NatsServer
from motet.shared.bus import Bus
from motet.shared.config import BusConfig
from motet.shared.provision import provision


@contextmanager
def nats_server(directory: Path) -> Iterator[str]:
    """A context with a nats-server that keeps its data below `directory`; yields its URL."""
    server = NatsServer(directory / "nats")
    try:
        yield asyncio.run(server.start())
    finally:
        server.stop()


@asynccontextmanager
async def private_bus(directory: Path) -> AsyncIterator[tuple[str, Bus]]:
    """A context with a nats-server whose streams and buckets are there; yields its URL and a connection to it."""
    server = NatsServer(directory / "nats")
    try:
        url = await server.start()
        bus = await Bus.connect(BusConfig(nats_url=url), "bench")
        try:
            await provision(bus)
            yield url, bus
        finally:
            await bus.close()
    finally:
        server.stop()
