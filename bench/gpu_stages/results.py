"""A stage's results: one JSON line per point, on disk as soon as the point is over. Standard library only."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. After `limit_s` it counts as hung; the limit includes what it builds for itself and for later points."""

    name: str  # of its line, unique in its stage
    measure: Callable[[], Line]
    limit_s: float = 90.0


class Results:
    """The results in `<out>/stage-<n>.jsonl`, and those of an earlier run under `have`. A failed point is tried again."""

    def __init__(self, out: Path, stage: int, *, have: Path | None = None) -> None:
        self.path = out / f"stage-{stage}.jsonl"
        earlier = [] if have is None else _read(have / self.path.name)
        own = [] if have is not None and have.resolve() == out.resolve() else _read(self.path)
        known: dict[str, Line] = {line["point"]: line for line in [*earlier, *own] if "point" in line and "error" not in line}
        self.lines = list(known.values())
        self.failed: dict[str, str] = {}  # in this run
        self._began = False

    @property
    def done(self) -> set[str]:
        """The points that need not be measured."""
        return {line["point"] for line in self.lines}

    def measure(self, point: Point) -> None:
        """Measure a point in this process. An exception becomes its result."""
        self.add(measured(point))

    def add(self, line: Line) -> None:
        """Write a point's line."""
        if "error" in line:
            self.failed[line["point"]] = line["error"]
        else:
            self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            if not self._began:
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                head = {"run": now, "commit": report.commit(), "machine": report.machine()}
                file.write(json.dumps(head) + "\n")
                self._began = True
            file.write(json.dumps(line) + "\n")


def measured(point: Point) -> Line:
    """The point's line: its figures, or its traceback as `error`."""
    began_s = time.monotonic()
    try:
        found = point.measure()
    except Exception:
        found = {"error": traceback.format_exc()}
    return {"point": point.name, "took_s": round(time.monotonic() - began_s, 2), **found}


def _read(path: Path) -> list[Line]:
    """The lines of a file that may be missing, or end in the middle of a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    lines = []
    for part in text.splitlines():
        try:
            lines.append(json.loads(part))
        except ValueError:
            continue
    return lines
