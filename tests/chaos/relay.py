"""TCP relays between processes and their NATS servers, which can cut a connection or go silent as a network does.

They run in a separate process. In the test process every byte between services would wait for the work of 200 clients, and the
measured pauses would include that wait.

    harness ──"cut 3", one line per command──► relay process ──answers to "open" and "ports"──► harness
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import uvloop


class RelayProcess:
    """`await start()`, then `await open(host, port)` for each relay. When the process ends, all relays close."""

    _process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        here = Path(__file__).parents[2]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.relay"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(here)},
            start_new_session=True,  # a Ctrl-C is for the harness, which ends this process last
        )
        self._one_question = asyncio.Lock()

    async def open(self, host: str, port: int) -> Relay:
        """A relay to `host:port`."""
        number, near = await self.ask("open", host, port)
        return Relay(self, number, near)

    def tell(self, *words: object) -> None:
        """Send a command that has no answer. Commands take effect in their order."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())

    async def ask(self, *words: object) -> list[int]:
        assert self._process is not None and self._process.stdout is not None
        async with self._one_question:
            self.tell(*words)
            return [int(value) for value in json.loads(await self._process.stdout.readline())]

    async def stop(self) -> None:
        """Close every relay."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()


class Relay:
    """One relay, as the harness controls it."""

    def __init__(self, process: RelayProcess, number: int, port: int) -> None:
        self._process, self._number = process, number
        self.url = f"nats://127.0.0.1:{port}"

    def cut(self) -> None:
        """Close the connections at both ends, and refuse new ones until `heal`."""
        self._process.tell("cut", self._number)

    def silence(self) -> None:
        """Let no byte pass until `heal`, without closing a connection. The held-back bytes arrive then."""
        self._process.tell("silence", self._number)

    def heal(self) -> None:
        self._process.tell("heal", self._number)

    async def far_ports(self) -> list[int]:
        """The local ports of the relay's connections to the target."""
        return await self._process.ask("ports", self._number)


class Line:
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

    def cut(self) -> None:
        """Close the connections at both ends, and refuse new ones until `heal`."""
        self._refusing = True
        for writer in list(self._writers):
            writer.transport.abort()

    def silence(self) -> None:
        """Let no byte pass until `heal`, without closing a connection. The held-back bytes arrive then."""
        self._open.clear()

    def heal(self) -> None:
        self._refusing = False
        self._open.set()

    def far_ports(self) -> list[int]:
        """The local ports of the relay's connections to the target."""
        names = [writer.get_extra_info("sockname") for writer in self._far]
        return [name[1] for name in names if name]

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


async def _serve_commands() -> None:
    """Carry out the lines of standard input until it ends."""
    lines: list[Line] = []
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        match line.decode().split():
            case ["open", host, port]:
                lines.append(Line(host, int(port)))
                await lines[-1].start()
                print(json.dumps([len(lines) - 1, lines[-1].port]), flush=True)
            case ["ports", number]:
                print(json.dumps(lines[int(number)].far_ports()), flush=True)
            case ["cut", number]:
                lines[int(number)].cut()
            case ["silence", number]:
                lines[int(number)].silence()
            case ["heal", number]:
                lines[int(number)].heal()


if __name__ == "__main__":
    uvloop.run(_serve_commands())
