"""Promise: every `MOTET_*` variable that is read is an option of a service or is in the table of other variables."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from motet.cli.options import config_of
from motet.cli.up_options import StackConfig
from motet.shared.config import fields
from motet.shared.variables import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("services", "policies", "kernels", "shared", "twin", "motet/cli", "bench", "tests", "docs", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
OTHERS = [
    *(ROOT / name for name in ("Makefile", "README.md", "CONTRIBUTING.md")),
    *(path for path in sorted((ROOT / "compose").iterdir()) if path.is_file()),
    *sorted((ROOT / "docs").glob("*.md")),
]
SERVICES = ("gateway", "predictor", "scheduler", "registry", "worker")
OPTIONS = {option.variable for config in (StackConfig, *map(config_of, SERVICES)) for option in fields(config)}
TABLE = {name for names in VARIABLES.values() for name in names}
NAME = re.compile(r"\bMOTET_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
STREAMS = re.compile(r"MOTET_(REQUESTS|RESULTS|DEAD|AUDIT)(_\w+)?")  # names of JetStream streams
MACROS = {"MOTET_LEVEL"}  # -D for the C++ compiler


def words_of(path: Path) -> Iterator[str]:
    """Names in strings of the code, without docstrings and comments."""
    text = path.read_text()
    if not NAME.search(text):
        return
    begins = True  # a statement: a string there is a docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.COMMENT):
            continue
        if token.type != tokenize.NAME and not begins:
            yield from NAME.findall(token.string)
        begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def variables(names: Iterator[str] | list[str]) -> set[str]:
    return {name for name in names if not STREAMS.fullmatch(name) and name not in MACROS}


def test_no_variable_is_declared_twice() -> None:
    assert not OPTIONS & TABLE
    assert len(TABLE) == sum(map(len, VARIABLES.values()))


def test_every_variable_that_a_file_names_is_declared() -> None:
    undeclared = {}
    for path in [*SOURCES, *OTHERS]:
        found = words_of(path) if path.suffix == ".py" else NAME.findall(path.read_text())
        if names := variables(found) - OPTIONS - TABLE:
            undeclared[str(path.relative_to(ROOT))] = sorted(names)
    assert not undeclared


def test_every_variable_of_the_table_is_read_somewhere() -> None:
    table = ROOT / "shared" / "variables.py"
    read = {name for path in SOURCES if path != table for name in words_of(path)}
    read |= {name for path in OTHERS if path.suffix != ".md" for name in NAME.findall(path.read_text())}
    assert not TABLE - read
