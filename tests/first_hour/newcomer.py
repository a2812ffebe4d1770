"""What a newcomer does: clones, types commands, starts the mesh, sends requests. Nothing of Motet is imported."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.first_hour.mistakes import Said

INSTALL_S, START_S, COMMAND_S = 1800.0, 180.0, 120.0


class Newcomer:
    """A person with an empty directory. Meshes that were started end with the context."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.home = directory, directory / "motet"
        self.port = _free_port()
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Newcomer:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def clone(self, source: Path, *, environment: Path | None) -> None:
        """Clone `source`; with an `environment` use that instead of an own one."""
        subprocess.run(["git", "clone", "-q", "--no-local", str(source), str(self.home)], check=True)
        if environment is not None:
            (self.home / ".venv").symlink_to(environment.resolve())
            for path in (*self.home.glob("requirements*.txt"), self.home / "pyproject.toml"):
                os.utime(path, (0, 0))  # older than the environment, so that make does not install again

    def readme_commands(self) -> list[str]:
        """The commands of README's first block."""
        block = re.search(r"```sh\n(.*?)```", (self.home / "README.md").read_text(), re.DOTALL)
        assert block is not None, "README has no commands"
        return [line.split("#")[0].strip() for line in block[1].splitlines() if line.strip()]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"  # as OpenAI's clients are given it

    def serve(self, command: str) -> None:
        """Run README's first command on a free port, and wait until it says that it is ready."""
        self.start([*shlex.split(command), f"ARGS=--port {self.port}"], within_s=INSTALL_S)

    def start(self, words: list[str], *, within_s: float = START_S) -> Said:
        """Start a mesh and wait until it is ready or has ended; what it printed so far."""
        log = self.directory / f"start-{len(self._running)}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                words,
                cwd=self.home,
                env=self._environ(),
                stdout=sink,
                stderr=sink,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._running.append(process)
        until = time.monotonic() + within_s
        while "Ctrl-C drains and stops" not in (text := log.read_text()):
            if process.poll() is not None:
                return Said(log.read_text(), process.returncode)
            if time.monotonic() > until:
                raise TimeoutError(f"{shlex.join(words)} was not ready after {within_s:.0f} s:\n{text[-4000:]}")
            time.sleep(0.1)  # time: between two looks
        return Said(text, 0)

    def end(self) -> None:
        """Ctrl-C for the mesh that was started last."""
        process = self._running.pop()
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)

    def motet(self, *words: str) -> Said:
        """Run the installed command."""
        return self.run([str(self.home / ".venv/bin/python"), "-m", "motet", *words])

    def shell(self, line: str) -> Said:
        """Type a command line."""
        return self.run(["sh", "-c", line])

    def run(self, words: list[str]) -> Said:
        done = subprocess.run(
            words,
            cwd=self.home,
            env=self._environ(),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            stdin=subprocess.DEVNULL,
        )
        return Said((done.stdout + done.stderr).strip(), done.returncode)

    def post(self, path: str, body: dict[str, Any], port: int = 0) -> tuple[int, Any]:
        """Send JSON to the gateway; the status and the answer."""
        url = f"http://127.0.0.1:{port or self.port}{path}"
        ask = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(ask, timeout=COMMAND_S) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def refusal(self, path: str, body: dict[str, Any], port: int = 0) -> Said:
        """The error that a request gets."""
        status, answer = self.post(path, body, port)
        return Said(answer["error"]["message"] if status >= 400 else f"status {status}", status if status >= 400 else 0)

    def _environ(self) -> dict[str, str]:
        mine = {
            name: value for name, value in os.environ.items() if not name.startswith(("MOTET_", "PYTHON", "MAKE", "MFLAGS"))
        }
        return mine | {"MOTET_URL": self.url, "COLUMNS": "200"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
