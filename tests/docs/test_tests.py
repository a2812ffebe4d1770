"""Promise: tests look at what others can see, and wait for what happens. Where one cannot, its line says why."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
MOST = 60  # lines of all tests with a private name of another object
PRIVATE, TIME = "# private: ", "# time: "
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}  # public in spite of their names
SUSPECT = re.compile(
    r"""(?<!\bself)(?<!\bcls)\._[A-Za-z]|["'.]_\w+["']|import .*\b_[A-Za-z]|^\s+_\w+,?$|sleep\(""", re.MULTILINE
)
"""In every text with a place to be found: most files need not be parsed."""
BY_NAME = {"getattr", "setattr", "delattr", "hasattr", "object"}  # functions and methods that take an attribute's name


def private(name: str) -> bool:
    last = name.rsplit(".", 1)[-1]
    return last.startswith("_") and not last.endswith("__") and last != "_" and last not in NAMED_TUPLE


def own(node: ast.expr) -> bool:
    """Whether it is the object itself that looks."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def private_names(tree: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """Where a private name of something else is used, also as a string."""
    for node in ast.walk(tree):
        if (isinstance(node, ast.Attribute) and private(node.attr) and not own(node.value)) or (
            isinstance(node, ast.ImportFrom) and any(private(alias.name) for alias in node.names)
        ):
            yield node
        elif isinstance(node, ast.Call) and called(node) in BY_NAME:
            names = [one.value for one in node.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if any(map(private, names)):
                yield node


def is_zero(node: ast.Call) -> bool:
    return bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0


def sleeps(tree: ast.AST) -> Iterator[ast.Call]:
    """Where time passes: `sleep(0)` only lets others run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) == "sleep" and not is_zero(node):
            yield node


def without(reason: str, nodes: Iterator[ast.stmt | ast.expr], text: str) -> tuple[list[int], list[int]]:
    """The lines on which the nodes begin, and those of them whose node has no reason beside it."""
    lines = text.splitlines()
    ends: dict[int, int] = {}
    for node in nodes:
        ends[node.lineno] = max(ends.get(node.lineno, 0), node.end_lineno or node.lineno)
    found = sorted(ends)
    return found, [at for at in found if not any(one.partition(reason)[2].strip() for one in lines[at - 1 : ends[at]])]


def checked(text: str) -> tuple[int, list[int], list[int]]:
    """The number of lines with private names, those without a reason, and sleeps without a reason."""
    if not SUSPECT.search(text):
        return 0, [], []
    tree = ast.parse(text)
    lines, bare = without(PRIVATE, private_names(tree), text)
    return len(lines), bare, without(TIME, sleeps(tree), text)[1]


def test_private_names_and_sleeps_are_few_and_say_why() -> None:
    total, bare = 0, []
    for path in sorted(TESTS.rglob("*.py")):
        count, unexplained, asleep = checked(path.read_text())
        total += count
        bare += [f"{path.relative_to(TESTS)}:{line}: a private name without `{PRIVATE}why`" for line in unexplained]
        bare += [f"{path.relative_to(TESTS)}:{line}: a sleep without `{TIME}why`; else `eventually`" for line in asleep]
    assert not bare, "\n".join(bare)
    assert 0 < total <= MOST, f"{total} lines of tests use private names: test what others see"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("other._name", (1, [1], [])),
        ("other._name  # private: why", (1, [], [])),
        ("other._name  # private:", (1, [1], [])),
        ("call(\n    other._name\n)  # private: why", (1, [2], [])),
        ("sleep(\n    1\n)  # time: why", (0, [], [])),
        ("other._one._two", (1, [1], [])),
        ("from motet.a import _name", (1, [1], [])),
        ("from motet.a import (\n    name,\n    _name,\n)", (1, [1], [])),
        ("monkeypatch.setattr(module, '_name', 1)", (1, [1], [])),
        ("monkeypatch.setattr('module._name', 1)", (1, [1], [])),
        ("getattr(other, '_name')", (1, [1], [])),
        ("self._name + super()._name + cls._name + entry._replace(a=1) + other.__dict__", (0, [], [])),
        ("time.sleep(1)", (0, [], [1])),
        ("await asyncio.sleep(delay_s)", (0, [], [1])),
        ("sleep(1)  # noqa: X - time: why", (0, [], [1])),
        ("sleep(1)  # time: why", (0, [], [])),
        ("await asyncio.sleep(0)", (0, [], [])),
    ],
)
def test_every_form_is_found(line: str, what: tuple[int, list[int], list[int]]) -> None:
    assert checked(line) == what
