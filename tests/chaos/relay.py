"""A TCP relay between one process and its broker, which can cut the line or go silent as a network does."""

from __future__ import annotations

import asyncio
import contextlib


class Relay:
    """Forwards connections to `host:port`. `cut` closes them and refuses new ones; `silence` holds every byte back."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._far: set[asyncio.StreamWriter] = set()  # those towards the target
        self._open = asyncio.Event()
        self._open.set()
        self._refusing = False
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port of the loopback address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Both ends see their connection closed, and nobody gets a new one until `heal`."""
        self._refusing = True
        for writer in list(self._writers):
            writer.transport.abort()

    def silence(self) -> None:
        """No byte passes and nobody is told, until `heal`; then what was held back arrives."""
        self._open.clear()

    def heal(self) -> None:
        self._refusing = False
        self._open.set()

    def far_ports(self) -> list[int]:
        """The ports from which it is connected to the target."""
        names = [writer.get_extra_info("sockname") for writer in self._far]
        return [name[1] for name in names if name]

    async def stop(self) -> None:
        self.cut()
        self._open.set()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            if self._refusing:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        self._far.add(far_writer)
        try:
            await asyncio.wait(
                {asyncio.ensure_future(self._pump(reader, far_writer)), asyncio.ensure_future(self._pump(far_reader, writer))},
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._far.discard(far_writer)
            for one in (writer, far_writer):
                self._writers.discard(one)
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                if writer.is_closing():  # cut meanwhile
                    return
                writer.write(data)
                await writer.drain()
