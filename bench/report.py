"""Output of results: a table for people, and one JSON line per run with machine, commit and set-up."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned text; numbers to the right."""
    cells = [list(columns), *([_shown(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    text = []
    for line in cells:
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join([line[0].ljust(widths[0]), *padded[1:]]))
    return "\n".join([title, text[0], "  ".join("-" * w for w in widths), *text[1:]])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Elsewhere:
    """Measures the CPU time that other processes use, from the creation of this object on."""

    def __init__(self) -> None:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    def cores(self) -> float:
        """CPU seconds per second of all processes except this one and its ended children."""
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return max(0.0, others_s / (time.monotonic() - self._began_s))


def _busy_s() -> float:
    """CPU seconds in which the machine was not idle. Time that a hypervisor gave to others counts."""
    user, nice, system, _idle, _waiting, *rest = map(int, _lines("/proc/stat")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def machine() -> dict[str, Any]:
    """The machine's properties that the numbers depend on."""
    model = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 1),  # what else was going on, the bench itself included
    }


def commit() -> str:
    """The checked-out commit, with + when files differ from it; "" outside of a repository."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def append(name: str, figures: dict[str, Any]) -> Path:
    """Add one run to bench/results/<name>.jsonl."""
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit(), "machine": machine(), **figures}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return path


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
