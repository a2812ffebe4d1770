"""Promise: no modules import each other in a circle, wherever the import is written."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Sources = dict[str, str]  # the text of each module


def sources() -> Sources:
    """The modules of `motet` and of `bench`."""
    found = {}
    for folder in ("motet", *(link.name for link in (ROOT / "motet").iterdir() if link.is_symlink()), "bench"):
        above = "motet." if (ROOT / "motet" / folder).is_symlink() else ""
        for path in (ROOT / folder).rglob("*.py"):
            name = above + ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path.read_text()
    return found


def imports(found: Sources) -> dict[str, set[str]]:
    """What each module imports of the others, also in functions and for type checkers only."""
    graph: dict[str, set[str]] = {}
    for name, text in found.items():
        wanted = graph[name] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name}: imports are absolute"
                for alias in node.names:
                    below = f"{node.module}.{alias.name}"
                    wanted.add(below if below in found else str(node.module))
        wanted &= found.keys() - {name}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle of the graph, its first module also last; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # each imports the next
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = imports(sources())
    assert len(graph) > 400 and "motet.policies.step.batch_core" in graph["motet.services.worker.native.engine"], "all are read"
    assert not circle(graph), " -> ".join(circle(graph))


@pytest.mark.parametrize(
    "line",
    [
        "import motet.a",
        "from motet import a",
        "from motet.a import thing",
        "def late():\n    from motet.a import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from motet.a import Thing",
    ],
)
def test_every_kind_of_import_counts(line: str) -> None:
    found = {"motet": "", "motet.a": "from motet.b import thing", "motet.b": line}
    graph = imports(found)
    assert graph["motet.b"] == {"motet.a"}
    assert sorted(circle(graph)[1:]) == ["motet.a", "motet.b"]
    assert not circle(graph | {"motet.b": set()})
