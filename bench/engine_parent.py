"""The parent's side of a contestant of the engine bench: starts it, runs laps, ends it."""

from __future__ import annotations

import json
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
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


class Contestant:
    """A child process that speaks bench.engine_child's protocol. A context manager.

    Raises RuntimeError with the end of its log.
    """

    def __init__(self, name: str, argv: Sequence[str], setup: dict[str, Any], environment: Mapping[str, str]) -> None:
        self.name = name
        self.process = ChildProcess(name, argv, environment, piped=True, end_s=END_S)
        self._setup = setup

    def __enter__(self) -> Contestant:
        self.process.__enter__()
        try:
            self._ask(self._setup, within_s=START_S)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def lap(self, prompts: list[list[int]], adapters: Sequence[int], tokens: int) -> Lap:
        """Generate `tokens` tokens after each prompt. `adapters`: the adapter of each request, -1 for none."""
        answer = self._ask({"prompts": prompts, "adapters": list(adapters), "tokens": tokens}, within_s=LAP_S)
        lap = Lap(answer["seconds"], answer["outputs"])
        if [len(output) for output in lap.outputs] != [tokens] * len(prompts):
            raise RuntimeError(f"{self.name}: not {tokens} tokens each but {sorted({len(o) for o in lap.outputs})}")
        return lap

    def _ask(self, message: dict[str, Any], *, within_s: float) -> dict[str, Any]:
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.__exit__(kind, error, trace)
