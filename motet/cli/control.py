"""The control socket of a stack: lets other command lines give it commands, one per connection.

motet restart ──"restart\n"──► control.sock ──► Stack.restart
              ◄── lines of progress, then "done" or "failed: why"
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from motet.cli.supervisor import StartFailed

DONE, FAILED = "done", "failed: "
COMMAND_S = 5.0  # for a client to say what it wants
Say = Callable[[str], None]


def socket_path(data_dir: Path) -> Path:
    """The control socket of the stack in a data directory."""
    return data_dir / "control.sock"


class ControlSocket:
    """Serves `commands`: name -> function, which gets a function for lines of progress. One command runs at a time."""

    def __init__(self, data_dir: Path, commands: dict[str, Callable[[Say], Awaitable[None]]]) -> None:
        self._path, self._commands = socket_path(data_dir), commands
        self._server: asyncio.Server | None = None
        self._busy = asyncio.Lock()

    async def start(self) -> None:
        """Listen; only the owner of the data directory can connect. Raises OSError."""
        self._path.unlink(missing_ok=True)
        with _short(self._path) as path:
            self._server = await asyncio.start_unix_server(self._serve, path)
        self._path.chmod(0o600)

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(line: str) -> None:
            with contextlib.suppress(OSError):
                writer.write(line.encode() + b"\n")

        try:
            async with asyncio.timeout(COMMAND_S):
                name = (await reader.readline()).decode(errors="replace").strip()
            say(await self._do(name, say))
            await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # it has gone, or says nothing
        finally:
            writer.close()

    async def _do(self, name: str, say: Say) -> str:
        command = self._commands.get(name)
        if command is None:
            return f"{FAILED}unknown command {name!r}"
        if self._busy.locked():
            return f"{FAILED}another command is being carried out"
        async with self._busy:
            try:
                await command(say)
            except StartFailed as error:
                return FAILED + " ".join(str(error).split("\n"))
        return DONE


async def order(data_dir: Path, command: str, say: Say) -> str:
    """Send `command` to the stack in `data_dir`; returns "" when it succeeded, else why not. Raises OSError when none runs."""
    with _short(socket_path(data_dir)) as path:
        reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(command.encode() + b"\n")
        while line := (await reader.readline()).decode().rstrip("\n"):
            if line == DONE:
                return ""
            if line.startswith(FAILED):
                return line.removeprefix(FAILED)
            say(line)
        return "the stack has ended"
    finally:
        writer.close()


class _short:
    """A name of `path` that fits a socket address, which holds about a hundred bytes, for as long as the context lasts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> str:
        self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        return f"/proc/self/fd/{self._folder}/{self._path.name}" if Path("/proc/self/fd").exists() else str(self._path)

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)
