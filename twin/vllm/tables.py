"""CSV tables (plain or gzipped) whose every used cell is checked: a bad one names its file, line and field."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from motet.shared.json_files import FileError


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table; the header is line 1."""

    path: Path
    line: int
    cells: dict[str, str | None]

    def error(self, field: str, reason: str) -> FileError:
        """The error to raise about a cell."""
        return FileError(self.path, self.line, field, reason)

    def text(self, field: str) -> str:
        """The text of a cell. Raises FileError if the column does not exist or the line is too short."""
        value = self.cells.get(field)
        if value is None:
            raise self.error(field, "missing")
        return value

    def number(self, field: str, *, at_least: float = 0.0) -> float:
        """A finite number, `at_least` or more. Raises FileError for anything else."""
        text = self.text(field)
        try:
            value = float(text)
        except ValueError:
            raise self.error(field, f"{text!r} is not a number") from None
        if not math.isfinite(value):
            raise self.error(field, f"{text!r} is not finite")
        if value < at_least:
            raise self.error(field, f"{text} is below {at_least:g}")
        return value

    def integer(self, field: str, *, at_least: int = 0) -> int:
        """A whole number, `at_least` or more. Raises FileError for anything else."""
        value = self.number(field, at_least=at_least)
        if value != int(value):
            raise self.error(field, f"{self.text(field)!r} is not a whole number")
        return int(value)

    def optional(self, field: str) -> float | None:
        """A number; None where the cell is empty (not measured)."""
        return None if self.text(field) == "" else self.number(field)


def find(folder: Path, name: str) -> Path | None:
    """The table `name`.csv or `name`.csv.gz in a folder; None if neither exists."""
    for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz"):
        if path.is_file():
            return path
    return None


def rows(folder: Path, name: str) -> Iterator[Row]:
    """All rows of a table. Raises FileNotFoundError if there is none, FileError for a damaged one."""
    path = find(folder, name)
    if path is None:
        raise FileNotFoundError(f"{folder} has neither {name}.csv nor {name}.csv.gz")
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
        reader = csv.DictReader(file)
        try:
            for cells in reader:
                if None in cells:
                    raise FileError(path, reader.line_num, "(last)", "more cells than the header names")
                yield Row(path, reader.line_num, cells)
        except (csv.Error, EOFError, OSError, UnicodeDecodeError) as error:
            raise FileError(path, reader.line_num + 1, "(line)", f"cannot be read: {error}") from None
