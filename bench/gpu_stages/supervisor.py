"""Runs a stage's points in a child process. If it crashes, loses the GPU or hangs, results are kept and another child
continues.

    supervisor -> child    stdin: one line of JSON, the points to skip and the seconds there are
    child -> supervisor    stdout, lines of JSON: {"points": [..]}, {"begin": name, "limit_s": s}, {"line": {..}}

If a child ends in the middle of a point, or exceeds the point's time limit, only that point is lost, and the next child runs
the others. Standard library only.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from bench.gpu_stages.results import Line, Point, Results, measured

START_S = 120.0  # from a child's start to its first point
GRACE_S = 15.0  # of a point that is under way when the budget ends
LEAST_S = 4.0  # of the budget, for another child
UNHEALTHY = 3  # exit status of a child that cannot go on
STARTS = 2  # of children that never come to a point
START = "start"  # in place of a point's name


def supervise(command: Sequence[str], results: Results, *, budget_s: float, log: Path) -> list[str]:
    """Run children of `command` until every point is done or the budget is spent. Returns the points that are left.

    What children write to stderr goes to `log`.
    """
    until_s = time.monotonic() + budget_s
    names: list[str] = []
    bad_starts = 0
    while until_s - time.monotonic() > LEAST_S:
        child = _Child(command, log, {"skip": sorted(results.done | results.failed.keys()), "until_s": until_s})
        began_any = False
        while (message := child.next(until_s)) is not None:
            names = message.get("points", names)
            began_any = began_any or "begin" in message
            if "line" in message:
                results.add(message["line"])
                _tell(message["line"])
        why = child.end()
        if why is None or child.out_of_time:
            break
        if child.point is not None:
            results.add({"point": child.point, "error": why})
            _tell({"point": child.point, "error": why})
        if not began_any:
            bad_starts += 1
            results.failed[START] = why
            if bad_starts == STARTS:
                break
    return [name for name in names if name not in results.done and name not in results.failed]


def serve(points: Callable[[], Sequence[Point]], *, healthy: Callable[[], bool]) -> None:
    """The child's side: measure the remaining points while there is time. Other output goes to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    told = json.loads(sys.stdin.readline())
    skipped, until_s = set(told["skip"]), told["until_s"]

    def say(message: Line) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    found = points()
    say({"points": [point.name for point in found]})
    for point in found:
        if point.name in skipped:
            continue
        if time.monotonic() > until_s - LEAST_S / 2:
            break
        say({"begin": point.name, "limit_s": point.limit_s})
        faulthandler.dump_traceback_later(0.8 * point.limit_s)  # of all threads, into the log
        line = measured(point)
        faulthandler.cancel_dump_traceback_later()
        say({"line": line})
        if "error" in line and not healthy():
            os._exit(UNHEALTHY)
    out.flush()
    os._exit(0)  # without waiting for threads that still run


class _Child:
    """A child process and its messages."""

    def __init__(self, command: Sequence[str], log: Path, told: Line) -> None:
        self.point: str | None = None  # under way
        self.out_of_time = False
        self._began_s = 0.0  # of the point
        self._due_s = time.monotonic() + START_S
        self._late = ""
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, start_new_session=True, text=True
            )
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        self._said: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=_forward, args=(self._process.stdout, self._said), daemon=True)
        self._reader.start()

    def next(self, until_s: float) -> Line | None:
        """The child's next message; None when it has ended, is late, or the budget is spent."""
        over_s = until_s + GRACE_S
        wait_s = min(self._due_s, over_s) - time.monotonic()
        try:
            text = self._said.get(timeout=max(wait_s, 0.01))
        except queue.Empty:
            self.out_of_time = time.monotonic() >= over_s
            self._late = f"no end within {self._due_s - self._began_s:.0f} s" if self.point else "no start"
            return None
        if text is None:
            return None
        message: Line = json.loads(text)
        if "begin" in message:
            self.point, self._began_s = message["begin"], time.monotonic()
            self._due_s = self._began_s + message["limit_s"]
        if "line" in message:
            self.point, self._due_s = None, time.monotonic() + START_S
        return message

    def end(self) -> str | None:
        """End the child and all processes that it started. Returns why it ended too early, or None."""
        if not self._late:
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._late = "its process did not end"
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        if self._late:
            return f"{self._late}; the log has the stacks"
        return None if status == 0 else f"its process ended with status {status}; see the log"


def _forward(pipe: IO[str], to: queue.Queue[str | None]) -> None:
    for text in pipe:
        to.put(text)
    to.put(None)


def _tell(line: Line) -> None:
    if "error" in line:
        print(f"{line['point']}: FAILED: {line['error'].strip().splitlines()[-1]}", flush=True)
        return
    shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in line.items() if key != "point"}
    print(f"{line['point']}: {str(shown)[:600]}", flush=True)
