"""The parent's side of a contestant of the engine bench: starts it, runs laps, ends it."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.rig.processes import ChildProcess

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


@contextmanager
def contestant(name: str, argv: Sequence[str], setup: dict[str, Any], environment: Mapping[str, str]) -> Iterator[Contestant]:
    """A context with a child process that speaks bench.engine_child's protocol and is set up."""
    with ChildProcess(name, argv, environment, piped=True, end_s=END_S) as process:
        one = Contestant(name, process)
        one.ask(setup, within_s=START_S)
        yield one


@dataclass(frozen=True, slots=True)
class Contestant:
    """One side of the bench. Its methods raise RuntimeError with the end of its log."""

    name: str
    process: ChildProcess

    def lap(self, prompts: list[list[int]], adapters: Sequence[int], tokens: int) -> Lap:
        """Generate `tokens` tokens after each prompt. `adapters`: the adapter of each request, -1 for none."""
        answer = self.ask({"prompts": prompts, "adapters": list(adapters), "tokens": tokens}, within_s=LAP_S)
        lap = Lap(answer["seconds"], answer["outputs"])
        if [len(output) for output in lap.outputs] != [tokens] * len(prompts):
            raise RuntimeError(f"{self.name}: not {tokens} tokens each but {sorted({len(o) for o in lap.outputs})}")
        return lap

    def ask(self, message: dict[str, Any], *, within_s: float) -> dict[str, Any]:
        """Send a message and wait for the answer."""
        asking, answering = self.process.asking, self.process.answering
        try:
            asking.write(json.dumps(message).encode() + b"\n")
            asking.flush()
            ready, _, _ = select.select([answering], [], [], within_s)
            line = answering.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if not line:
            raise RuntimeError(f"{self.name} gave no answer; the end of its log:\n{self.process.said()}")
        return dict(json.loads(line))
