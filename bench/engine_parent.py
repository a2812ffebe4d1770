"""The parent's side of a contestant of the engine bench: starts it, runs laps, measures its memory, ends it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.vllm_peer import ROOT
from motet.cli.lifeline import dying_with_parent

START_S = 600.0
LAP_S = 900.0
END_S = 20.0


@dataclass(frozen=True, slots=True)
class Lap:
    """Result of one batch: seconds from its first prompt to its last token, and the new tokens of each request."""

    seconds: float
    outputs: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


class Contestant:
    """A child process that speaks bench.engine_child's protocol. A context manager.

    Raises RuntimeError with the end of its log.
    """

    def __init__(self, name: str, argv: list[str], setup: dict[str, Any], environment: dict[str, str]) -> None:
        self.name = name
        self._argv, self._setup, self._environment = argv, setup, environment

    def __enter__(self) -> Contestant:
        self._log = tempfile.NamedTemporaryFile("w+", prefix=f"motet-bench-{self.name}-", suffix=".log")
        self._process = subprocess.Popen(
            self._argv,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            preexec_fn=dying_with_parent(),
        )
        self._ask(self._setup, within_s=START_S)
        return self

    def lap(self, prompts: list[list[int]], adapters: Sequence[int], tokens: int) -> Lap:
        """Generate `tokens` tokens after each prompt. `adapters`: the adapter of each request, -1 for none."""
        answer = self._ask({"prompts": prompts, "adapters": list(adapters), "tokens": tokens}, within_s=LAP_S)
        lap = Lap(answer["seconds"], answer["outputs"])
        if [len(output) for output in lap.outputs] != [tokens] * len(prompts):
            raise RuntimeError(f"{self.name}: not {tokens} tokens each but {sorted({len(o) for o in lap.outputs})}")
        return lap

    def rss_mib(self) -> int:
        """Resident memory of the process with the model: the largest process of the child."""
        return max(rss_bytes(pid) for pid in process_tree(self._process.pid)) >> 20

    def _ask(self, message: dict[str, Any], *, within_s: float) -> dict[str, Any]:
        asking, answering = self._process.stdin, self._process.stdout
        assert asking is not None and answering is not None
        try:
            asking.write(json.dumps(message).encode() + b"\n")
            asking.flush()
            ready, _, _ = select.select([answering], [], [], within_s)
            line = answering.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.name} gave no answer; the end of its log:\n{self._log.read()[-6000:]}")
        return dict(json.loads(line))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        family = process_tree(self._process.pid)
        self._process.stdin.close()
        end(self._process, family, within_s=END_S if error is None else 0.5)
        self._process.stdout.close()
        self._log.close()


def end(process: subprocess.Popen[bytes], family: list[int], *, within_s: float) -> None:
    """Wait until a process that was told to end has ended. Then kill the rest of it and of `family`, its `process_tree`."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    tree = [pid]
    for parent in tree:  # grows while it is walked
        for thread in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):  # it has just ended
                tree += map(int, thread.read_text().split())
    return tree


def rss_bytes(pid: int) -> int:
    """Resident memory of one process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
