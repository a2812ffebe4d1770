"""Promise: CI repeats failed tests alone, and its last lines tell tests that passed from those that passed only alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTEST = f"{sys.executable} -m pytest -q -p no:schemathesis -p no:xdist"
MAKE = f"""#!/usr/bin/env bash
case $1 in
    test) {PYTEST} ${{2:+--last-failed --last-failed-no-failures none}} test_some.py ;;
    bench-quick) echo "2 passed in 1s" ;;
    *) true ;;
esac
"""
FLAKY = """
from pathlib import Path

def test_steady(): pass

def test_flaky():
    if not Path("ran").exists():
        Path("ran").touch()
        raise AssertionError("the machine is busy")
"""


def ci(tmp_path: Path, tests: str) -> tuple[int, list[str]]:
    """The status and the output of `.ci/run` in a folder with these tests, where `make check`, `demo` and Docker do nothing."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "test_some.py").write_text(tests)
    (tmp_path / "bin").mkdir()
    for name, text in (("make", MAKE), ("docker", "#!/bin/sh\nexit 1\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(tmp_path / ".ci" / "run")], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_a_test_that_passes_when_repeated_alone_is_named_and_counted_as_such(tmp_path: Path) -> None:
    status, lines = ci(tmp_path, FLAKY)
    assert status == 0
    assert lines[-3:] == [
        "==> failed beside other tests, passed when repeated alone:",
        "      test_some.py::test_flaky",
        "==> 4 passed, 0 failed; only alone: 1",
    ]


def test_a_test_that_fails_twice_ends_the_run_and_is_named_beside_those_that_passed_alone(tmp_path: Path) -> None:
    status, lines = ci(tmp_path, FLAKY + "\ndef test_broken(): assert False\n")
    assert status != 0
    assert lines[-4:] == [
        "      test_some.py::test_flaky",
        "==> failed:",
        "      test_some.py::test_broken",
        "==> 2 passed, 1 failed; only alone: 1",
    ]


def test_a_run_without_failures_names_none(tmp_path: Path) -> None:
    status, lines = ci(tmp_path, "def test_steady(): pass\n")
    assert status == 0 and lines[-1] == "==> 3 passed, 0 failed; only alone: 0"
    assert not any(line.startswith("==> failed") for line in lines)


def test_a_run_that_cannot_be_collected_fails(tmp_path: Path) -> None:
    status, lines = ci(tmp_path, "import nothing_of_this_name\n")
    assert status != 0 and "==> failed:" in lines
