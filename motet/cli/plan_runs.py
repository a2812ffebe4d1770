"""Runs the simulations of a plan in processes, one per core, and shows how far they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from rich.console import Console

from motet.twin.planning.check import Job, Run, run
from motet.twin.planning.kinds import Outcome

FEW = 2
"""So few simulations are not worth the start of processes."""


@contextmanager
def processes() -> Iterator[Run]:
    """Something that runs simulations on all cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(cores, mp_context=get_context("forkserver")) as pool:

        def run_all(jobs: Sequence[Job]) -> Iterator[list[Outcome]]:
            return iter(map(run, jobs)) if cores == 1 or len(jobs) < FEW else pool.map(run, jobs)

        yield run_all


class Telling:
    """One line on standard error that says what is being done; nothing where that is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("") if self._console.is_terminal else None

    def __enter__(self) -> Telling:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
