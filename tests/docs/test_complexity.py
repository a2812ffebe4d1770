"""Promise: `make check` finds functions that are too long or too complex, in Python and C++, unless they say why they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
REASON = "in one piece" + ": it is planted"  # in two parts: this file has no such function


@pytest.fixture(scope="module")
def lint() -> ModuleType:
    spec = importlib.util.spec_from_file_location("complexity", ROOT / ".ci/complexity.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(lines: int = 1, branches: int = 0, above: str = "", first: str = "") -> str:
    """A module with a method of so many lines, of which each branch takes one."""
    rest = lines - 1 - branches
    body = ["        if x: x += 1"] * branches + ["        x += 1"] * rest
    return "\n".join(["class Planted:", *([f"    {above}"] if above else []), f"    def run(self, x):{first}", *body, ""])


def cpp(lines: int = 3, branches: int = 0, above: str = "") -> str:
    """A header with a template method of so many lines."""
    body = ["    if (x > 1 && x < 9) ++x;"] * (branches // 2) + ["#if LEVEL == 1", "#endif"] * (branches % 2)
    body += ["    ++x;"] * (lines - 2 - len(body))
    head = [
        "template <class T>",
        "struct Planted {",
        *([f"  {above}"] if above else []),
        "  template <int N>",
        "  static T run(T x) {",
    ]
    return "\n".join(
        [*head, *body, "  }", "};", "template <class F>", "void other(F&& f) { f([&](auto x) { return x; }); }", ""]
    )


def test_seventy_lines_and_a_complexity_of_twenty_are_allowed(lint: ModuleType) -> None:
    assert lint.errors("a.py", python(lines=70)) == []
    assert lint.errors("a.h", cpp(lines=70)) == []
    assert lint.errors("a.py", python(lines=30, branches=19)) == []
    assert lint.errors("a.h", cpp(lines=30, branches=19)) == []


def test_a_long_function_is_found(lint: ModuleType) -> None:
    assert lint.errors("a.py", python(lines=71)) == ["a.py:2: run has 71 lines and a complexity of 1"]
    assert lint.errors("a.h", cpp(lines=71)) == ["a.h:4: run has 71 lines and a complexity of 1"]


def test_a_complex_function_is_found(lint: ModuleType) -> None:
    assert lint.errors("a.py", python(lines=30, branches=20)) == ["a.py:2: run has 30 lines and a complexity of 21"]
    assert lint.errors("a.cpp", cpp(lines=30, branches=20)) == ["a.cpp:4: run has 30 lines and a complexity of 21"]


def test_a_reason_on_the_first_line_or_above_it_allows_one(lint: ModuleType) -> None:
    assert lint.errors("a.py", python(lines=71, above=f"# {REASON}")) == []
    assert lint.errors("a.py", python(lines=71, first=f"  # {REASON}")) == []
    assert lint.errors("a.h", cpp(lines=71, above=f"// {REASON}")) == [], "above `template <..>`"
    decorated = python(lines=71, above="@staticmethod").replace("    @static", f"    # {REASON}\n    @static")
    assert lint.errors("a.py", decorated) == []


def test_a_reason_must_be_there_and_needed(lint: ModuleType) -> None:
    assert len(lint.errors("a.py", python(lines=71, above="# in one piece" + ":"))) == 1, "no reason is given"
    assert lint.errors("a.py", python(lines=70, above=f"# {REASON}")) == ["a.py:2: no function needs this reason: delete it"]


def test_every_room_is_looked_at(lint: ModuleType) -> None:
    sources = set(lint.sources())
    assert {"kernels/cpu/src/attention.h", "kernels/cpu/src/motet_cpu.cpp", "policies/step/merge_decision.py"} <= sources
    assert {"services/worker/native/assemble.py", "motet/cli/demo.py", "bench/cluster.py", ".ci/complexity.py"} <= sources
