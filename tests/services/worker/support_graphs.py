"""Graphs for a device that has none: a replay launches everything again, from the same buffers into the same result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from motet.services.worker.native.decode_graphs import DecodeGraphs


@dataclass(frozen=True, slots=True)
class Repeated:
    """In place of a graph of `run`."""

    run: Callable[[], torch.Tensor]
    result: torch.Tensor

    def replay(self) -> None:
        """Replace the result."""
        self.result.copy_(self.run())


def repeated(run: Callable[[], torch.Tensor], memory: object) -> Any:
    """In place of `decode_graphs.captured`."""
    result = run()
    return Repeated(run, result), result


def repeated_decodes(runner: Any, scratch_block: int, most_rows: int = 256) -> DecodeGraphs:
    """The decode graphs of a runner."""
    graphs: Any = DecodeGraphs(runner.memory.cache, runner.pool, scratch_block=scratch_block, memory=None, most_rows=most_rows)
    graphs.capture = repeated
    return graphs
