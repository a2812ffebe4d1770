"""Finds functions that are too long or too complex to be read in one go; `make check` fails on them.

    .venv/bin/python .ci/complexity.py

A function has at most 70 lines and a cyclomatic complexity of at most 20, in Python and C++. Complexity is one more than the
number of branches, loops, `and` and `or`, and `#if`, as lizard counts them. A function inside another counts as one of its own;
its lines count for both.

A function that reads better in one piece says why, in a comment on its first line or above it: `in one piece: <reason>`. A
reason that no function needs any more is an error too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import lizard

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("bench", "docs", "examples", "kernels", "motet/cli", "policies", "services", "shared", "tests", "twin", ".ci")
SUFFIXES = (".py", ".h", ".cpp")
MOST_LINES = 70
MOST_COMPLEXITY = 20
REASON = re.compile(r"(#|//) in one piece: \S")
ABOVE = re.compile(r"\s*(@|template <)")  # what stands between a function's first line and the comment above it


def main() -> int:
    found = [error for path in sources() for error in errors(path, (ROOT / path).read_text())]
    for error in found:
        print(error)
    limits = f"{MOST_LINES} lines and a complexity of {MOST_COMPLEXITY}"
    print(
        f"Functions: {len(found)} errors. {limits} are the limits; .ci/complexity.py says what to do"
        if found
        else f"Functions: none has more than {limits}"
    )
    return bool(found)


def sources() -> Iterator[str]:
    """The files to look at, as paths from the root."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in SUFFIXES:
                yield str(path.relative_to(ROOT))


def errors(path: str, text: str) -> list[str]:
    """What is wrong with the functions of a file."""
    lines, found, used = text.splitlines(), [], set()
    for function in lizard.analyze_file.analyze_source_code(path, text).function_list:
        length, complexity = function.end_line - function.start_line + 1, function.cyclomatic_complexity
        if length <= MOST_LINES and complexity <= MOST_COMPLEXITY:
            continue
        name = re.split(r"::|\.", function.name)[-1]
        reason = reason_of(lines, function.start_line)
        if reason:
            used.add(reason)
        else:
            found.append(f"{path}:{function.start_line}: {name} has {length} lines and a complexity of {complexity}")
    found += [
        f"{path}:{number}: no function needs this reason: delete it"
        for number, line in enumerate(lines, start=1)
        if REASON.search(line) and number not in used
    ]
    return found


def reason_of(lines: list[str], start: int) -> int:
    """The number of the line that has the reason of a function whose first line is `start`; 0 if there is none."""
    if REASON.search(lines[start - 1]):
        return start
    above = start - 1
    while above and ABOVE.match(lines[above - 1]):
        above -= 1
    return above if above and REASON.search(lines[above - 1]) else 0


if __name__ == "__main__":
    sys.exit(main())
