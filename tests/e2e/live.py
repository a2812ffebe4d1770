"""A stack as a user starts it: `motet up` as a process, followed through its stack.json."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from motet.cli.stack import StackFacts, read_facts
from motet.examples.demo import BASE, DEMO, PARSER
from tests.support import until

ROOT = Path(__file__).resolve().parents[2]


class LiveStack:
    """One `motet up` on free ports with the demo model."""

    def __init__(self, directory: Path, *flags: str, workers: int = 1, threads: int = 1, env: Mapping[str, str] = {}) -> None:
        self.data_dir = directory / "data"
        self.output = directory / "up.log"
        self.argv = [
            *(sys.executable, "-m", "motet", "up", "--model", str(DEMO / "model"), "--served-model-name", BASE),
            *("--adapters-dir", str(DEMO / "adapters"), "--data-dir", str(self.data_dir), "--port", "0"),
            *("--tool-call-parser", PARSER, "--workers", str(workers), "--threads", str(threads), *flags),
        ]
        self.env = {**os.environ, **env}
        self.cwd = ROOT
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the stack without waiting."""
        with self.output.open("ab") as sink:
            self.process = subprocess.Popen(
                self.argv, cwd=self.cwd, env=self.env, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL
            )

    def facts(self) -> StackFacts:
        """The facts that `motet up` prints. Fails if the stack has ended."""
        process = self.process
        assert process is not None

        def found() -> StackFacts | None:
            assert process.poll() is None, self._said()
            return read_facts(self.data_dir)

        return until(found, within_s=60, every_s=0.05, else_say=self._said)

    def _said(self) -> str:
        return self.output.read_text()[-4000:]

    def wait_ready(self, within_s: float = 90.0) -> StackFacts:
        until(lambda: self.facts().ready, within_s=within_s, every_s=0.05, else_say=self._said)
        return self.facts()

    def pid(self, service: str) -> int:
        return int(self.facts().services[service]["pid"])

    def pids(self) -> list[int]:
        return [int(service["pid"]) for service in self.facts().services.values()]

    def kill(self, service: str) -> int:
        """SIGKILL to a service, as in a crash. Returns its former process id."""
        os.kill(pid := self.pid(service), signal.SIGKILL)
        return pid

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, within_s: float = 60.0) -> int:
        """Send SIGTERM and wait. Returns the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def log(self, service: str) -> str:
        path = self.data_dir / "logs" / f"{service}.log"
        return path.read_text() if path.exists() else ""


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie, whose parent has not waited for it, does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
