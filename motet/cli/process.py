"""Supervised child processes, which cannot outlive their parent and write to bounded logs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Protocol

import aiohttp
import msgspec

from motet.cli.lifeline import Bound
from motet.cli.nats_server import NatsServer

LOG_BYTES = 4 * 1024 * 1024  # per file; one older file is kept
TAIL_LINES = 15
NO_ANSWER = "does not answer yet"


def free_port() -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BoundedLog:
    """Appends a child's output to a file of at most LOG_BYTES, and keeps one older file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._sink = self._open()

    def _open(self) -> IO[bytes]:
        return self.path.open("ab", buffering=0)

    @property
    def size(self) -> int:
        """Bytes in the present file."""
        return self._sink.tell()

    def write(self, data: bytes) -> None:
        """Append output; what a full disk has no room for is lost."""
        with contextlib.suppress(OSError):
            if self._sink.tell() + len(data) > LOG_BYTES:
                self._sink.close()
                self.path.replace(self.path.with_suffix(".log.1"))
                self._sink = self._open()
            self._sink.write(data)

    def close(self) -> None:
        self._sink.close()


def tail(path: Path, lines: int = TAIL_LINES, *, since: int = 0) -> str:
    """The last lines of a log file after its first `since` bytes, "" when there are none."""
    try:
        with path.open("rb") as source:
            size = path.stat().st_size
            source.seek(max(since if since <= size else 0, size - 16_384))
            return "\n".join(source.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


class Child(Protocol):
    """The interface that the supervisor drives."""

    name: str
    after: tuple[str, ...]
    stop_rank: int
    rest_s: float  # at least so long after its end it is started again
    log_path: Path
    log_from: int  # bytes that its log had at the latest start

    async def launch(self) -> None:
        """Start the process without waiting until it is ready. Raises OSError when it cannot start."""

    @property
    def pid(self) -> int:
        """Process id of the latest start, 0 before the first."""

    def exit_code(self) -> int | None:
        """The exit status; None while it runs and before the first start."""

    async def not_ready(self) -> list[str]:
        """Reasons why it cannot work yet; empty when it can."""

    def signal(self, number: int) -> None:
        """Send a signal; no effect when the process has ended."""

    def close(self) -> None:
        """Release its resources after its end."""


class ServiceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a service. `argv` gets a free port for /health, /ready and /metrics at every start.

    `after` names children that must be ready first; children with the lowest `stop_rank` are drained first. One whose start
    takes seconds of a core rests `rest_s` before it: its neighbours first take over what it had.
    """

    name: str
    argv: Callable[[int], list[str]]
    env: Mapping[str, str] = {}
    after: tuple[str, ...] = ()
    stop_rank: int = 0
    rest_s: float = 0.0
    pass_fds: tuple[int, ...] = ()  # file descriptors it inherits


class ServiceProcess(Bound):
    """A child that answers /ready on the port it was given."""

    def __init__(self, spec: ServiceSpec, logs: Path, *, echo: Callable[[str, bytes], None] | None = None) -> None:
        self.name, self.after, self.stop_rank, self.rest_s = spec.name, spec.after, spec.stop_rank, spec.rest_s
        self.log_path = logs / f"{spec.name}.log"
        self.log_from = 0
        self._spec, self._echo = spec, echo
        self._log: BoundedLog | None = None
        self._ops_port = 0

    async def launch(self) -> None:
        self._ops_port = free_port()
        if self._log is None:
            self._log = BoundedLog(self.log_path)
        self.log_from = self._log.size
        process = self._run(
            self._spec.argv(self._ops_port),
            env={**os.environ, **self._spec.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=self._spec.pass_fds,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        asyncio.get_running_loop().add_reader(process.stdout.fileno(), self._drain_output, process.stdout)

    def _drain_output(self, pipe: IO[bytes]) -> None:
        try:
            data = os.read(pipe.fileno(), 65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            pipe.close()
        elif self._log is not None:
            self._log.write(data)
            if self._echo is not None:
                self._echo(self.name, data)

    async def not_ready(self) -> list[str]:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session,
                session.get(f"{self.ops_url}/ready") as answer,
            ):
                return [] if answer.status == 200 else list((await answer.json()).get("reasons") or ["not ready"])
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return [NO_ANSWER]

    @property
    def ops_url(self) -> str:
        return f"http://127.0.0.1:{self._ops_port}"

    def close(self) -> None:
        if self._process is not None and self._process.stdout is not None and not self._process.stdout.closed:
            self._drain_output(self._process.stdout)
        if self._log is not None:
            self._log.close()
            self._log = None


class NatsProcess(NatsServer):
    """The embedded NATS server as a child of the supervisor."""

    name = "nats"
    after: tuple[str, ...] = ()
    stop_rank = 0
    rest_s = 0.0
    log_from = 0

    async def launch(self) -> None:
        await self.start()

    async def not_ready(self) -> list[str]:
        return []  # `launch` returns when it accepts connections

    def close(self) -> None:
        """No resources to release."""
