"""A plugin with a fault: what goes to a native engine's device lacks a module, where a file of the data directory says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FLAG = "MOTET_TEST_FAULT"
"""Variable with the path of a file. While the file exists, each load has the fault."""


def plant() -> None:
    """Replace the load. Only a worker can import torch in time, so every other service stays as it is."""
    import sys

    if "worker" not in sys.argv:
        return
    from bench.probe_faults import ignored_module
    from motet.services.worker.native.runner import ModelRunner

    begin, flag = ModelRunner.begin_load, Path(os.environ[FLAG])

    def begin_load(self: ModelRunner, slot: int, weights: Any) -> None:
        begin(self, slot, ignored_module(weights) if flag.exists() else weights)

    ModelRunner.begin_load = begin_load  # type: ignore[method-assign]


plant()
