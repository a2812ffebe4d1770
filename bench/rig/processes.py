"""Child processes of a bench, and what the system says of them.

They end with the context that started them, or with the bench.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from bench import ROOT
from motet.cli.lifeline import dying_with_parent

START_S = 120.0
END_S = 30.0
SPAWNED_END_S = 15.0
LOG_LINES = 60

spawn = multiprocessing.get_context("spawn")


class ChildProcess:
    """A process whose output goes to a log: `log`, else a file that is deleted with it. A context manager, from start to end.

    `piped`: its standard input and output are pipes to the bench, and it ends when its input is closed; another one is told to
    end by SIGTERM. After `end_s` what is left of it and of its descendants is killed.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path | None = None,
        piped: bool = False,
        end_s: float = END_S,
    ) -> None:
        self.name, self.end_s = name, end_s
        self._argv, self._environment, self._piped, self._log = argv, environment, piped, log

    def __enter__(self) -> Self:
        self._sink: IO[bytes] = (
            self._log.open("ab")
            if self._log is not None
            else tempfile.NamedTemporaryFile("ab", prefix=f"motet-bench-{self.name}-", suffix=".log")
        )
        self._process = subprocess.Popen(
            self._argv,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE if self._piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._piped else self._sink,
            stderr=self._sink,
            preexec_fn=dying_with_parent(),
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        family = self.tree()
        if self._piped:
            with suppress(BrokenPipeError):  # it has ended with something unread
                self.asking.close()
        else:
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self.end_s if error is None else min(0.5, self.end_s))
        self._process.kill()
        for pid in family[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if self._piped:
            self.answering.close()
        self._sink.close()

    @property
    def asking(self) -> IO[bytes]:
        """The standard input of a piped process."""
        assert self._process.stdin is not None, "it is piped"
        return self._process.stdin

    @property
    def answering(self) -> IO[bytes]:
        """The standard output of a piped process."""
        assert self._process.stdout is not None, "it is piped"
        return self._process.stdout

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def wait(self, within_s: float) -> int:
        """Wait for its end; returns its exit status. Raises subprocess.TimeoutExpired."""
        return self._process.wait(within_s)

    def said(self, lines: int = LOG_LINES) -> str:
        """The end of its log."""
        from motet.cli.process import tail  # it brings aiohttp, which would count as memory of benches that only spawn

        return tail(Path(self._sink.name), lines)

    def tree(self) -> list[int]:
        """The ids of the process and of all its descendants."""
        return process_tree(self._process.pid)

    def cpu_s(self) -> float:
        """CPU seconds that all of them have used so far."""
        return sum(map(cpu_s, self.tree()))

    def rss_mib(self) -> tuple[int, int]:
        """Resident memory: of the largest of them, which has the model, and of all together."""
        sizes = list(map(rss_bytes, self.tree()))
        return max(sizes) >> 20, sum(sizes) >> 20

    def pin(self, core: int) -> None:
        """From now on all threads of the process run on this core."""
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def with_variables(options: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with MOTET_* variables for `options`, which have names without the prefix."""
    return os.environ | {f"MOTET_{name.upper()}": value for name, value in options.items()}


class Spawned(NamedTuple):
    """A process that `spawned` started. `first`: the first message that it sent through the pipe."""

    pid: int
    pipe: Connection
    first: Any


@contextmanager
def spawned(target: Callable[..., None], *args: Any, within_s: float = START_S) -> Iterator[Spawned]:
    """A context with a process that runs `target(pipe, *args)` and sends something when it is ready. SIGTERM ends it.

    Raises RuntimeError when nothing comes within `within_s`.
    """
    here, there = spawn.Pipe()
    process = spawn.Process(target=target, args=(there, *args))
    process.start()
    there.close()  # so that the end of the process is the end of the pipe
    try:
        first = _first(here, within_s)
        if first is None or process.pid is None:
            raise RuntimeError(f"{target.__name__} did not start")
        yield Spawned(process.pid, here, first)
    finally:
        process.terminate()
        process.join(SPAWNED_END_S)
        if process.is_alive():
            process.kill()
            process.join()
        here.close()


def _first(pipe: Connection, within_s: float) -> Any:
    """The first message; None if the other end is closed or silent."""
    with suppress(EOFError):
        return pipe.recv() if pipe.poll(within_s) else None
    return None


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    tree = [pid]
    for parent in tree:  # grows while it is walked
        for thread in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):  # it has just ended
                tree += map(int, thread.read_text().split())
    return tree


def cpu_s(pid: int) -> float:
    """CPU seconds a process has used, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    """Resident memory of one process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
