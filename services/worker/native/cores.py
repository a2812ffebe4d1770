"""Chooses the CPU cores of a step's threads, apart from those of CPU LoRA processes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager


def step_cores(assist_cores: Collection[int]) -> set[int]:
    """The allowed cores without those of the CPU LoRA processes; all allowed cores if that leaves none."""
    allowed = os.sched_getaffinity(0)
    return allowed.difference(assist_cores) or allowed


@contextmanager
def on_cores(cores: set[int] | None) -> Iterator[None]:
    """A context in which this thread runs on `cores`; None changes nothing. Threads started in it stay on these cores."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
