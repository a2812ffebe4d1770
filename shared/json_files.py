"""Files of JSON with a version, and the error of a file that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


class FileError(ValueError):
    """A file that cannot be used. The message names the line, the field and the reason."""

    def __init__(self, path: Path, line: int, field: str, reason: str) -> None:
        super().__init__(f"{path.name}:{line}: {f'{field}: ' if field else ''}{reason}")
        self.path, self.line, self.field, self.reason = path, line, field, reason


def read_versioned(path: Path, kind: type[T], version_field: str, version: int) -> tuple[str, T]:
    """(text, content) of a file whose `version_field` is this version. Raises FileError naming the line and the field."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(path, 1, "", str(error)) from None
    try:
        tree = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        at = str(error).rpartition("(byte ")[2].rstrip(")")
        line = text.encode()[: int(at)].count(b"\n") + 1 if at.isdigit() else 1
        raise FileError(path, line, "", f"not JSON: {error}") from None
    found = tree.get(version_field) if isinstance(tree, dict) else None
    if found != version:
        reason = f"version {found!r}; this program reads version {version}"
        raise FileError(path, line_of(text, version_field), version_field, reason)
    try:
        return text, msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`")
        raise FileError(path, line_of(text, field), field, reason) from None


def line_of(text: str, field: str) -> int:
    """The line of a field given as a path `a.b`, as good as can be told; 1 when it is not there."""
    at = 0
    for name in field.split("."):
        found = text.find(f'"{name.partition("[")[0]}"', at)
        if found < 0:
            break
        at = found
    return text.count("\n", 0, at) + 1
