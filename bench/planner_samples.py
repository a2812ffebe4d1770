"""Makes the simulated runs that the planner's learned models are trained on (`twin.surrogate.samples`).

    python -m bench planner_samples [--out build/planner_samples.csv] [--count 8000] [--processes 2]

One line of CSV per run, in the order in which runs end. A file that exists is continued: runs that it has are not made again,
and a last line that was cut off is made anew. Each call ends within ten minutes and prints how many runs the file has. Repeat
it until these are all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from motet.twin.surrogate.samples import COLUMNS, Description, draw, simulate, to_line

RECORDED = False  # what it makes is measured by `planner_models`
OUT = Path(__file__).parents[1] / "build" / "planner_samples.csv"
COUNT, QUICK_COUNT = 8000, 8
AHEAD = 4  # runs of each process that wait
spawn = multiprocessing.get_context("spawn")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--out", type=Path, default=OUT, help=f"CSV to write or continue (default: {OUT})")
    parser.add_argument("--count", type=int, default=COUNT, help=f"runs in all (default: {COUNT})")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="side by side (default: one a core)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the runs that are missing. Returns how many there are and how long one took."""
    count = QUICK_COUNT if args.quick else args.count
    with _out(args.out, quick=args.quick) as path:
        have = made(path)
        runs = [one for one in draw(count) if one.number not in have]
        began_s, new = time.monotonic(), 0
        with path.open("a") as file:
            for line in _lines(iter(runs), args.processes, lambda: args.watch.left_s > 0):
                file.write(line + "\n")
                file.flush()
                new += 1
        took_s = time.monotonic() - began_s
    there = count - len(runs) + new
    print(f"{there} of {count} runs are there; {new} new ones took {took_s:.0f} s")
    return {"runs": there, "of": count, "run_s": round(took_s / max(1, new), 3)}


def made(path: Path) -> set[int]:
    """The numbers of the runs in a file, which gets its header if it has none, and loses a torn last line."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1] or ",".join(COLUMNS) + "\n"
    if whole != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(whole)
    return {int(line.split(",", 1)[0]) for line in whole.splitlines()[1:]}


@contextmanager
def _out(path: Path, *, quick: bool) -> Iterator[Path]:
    if not quick:
        yield path
        return
    with TemporaryDirectory() as folder:
        yield Path(folder) / "samples.csv"


def _lines(runs: Iterator[Description], processes: int, more: Callable[[], bool]) -> Iterator[str]:
    """The lines of runs, as they end. No run is begun after `more` is false."""
    with ProcessPoolExecutor(processes, spawn) as pool:
        open_runs = {pool.submit(_line, one) for one in islice(runs, AHEAD * processes)}
        while open_runs:
            ended, open_runs = wait(open_runs, return_when=FIRST_COMPLETED)
            if more():
                open_runs |= {pool.submit(_line, one) for one in islice(runs, len(ended))}
            yield from (one.result() for one in ended)


def _line(run: Description) -> str:
    return to_line(run, simulate(run))
