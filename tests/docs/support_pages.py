"""The tables of a page of docs/."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIGRATION = ROOT / "docs" / "migrate-from-vllm.md"


def table(page: Path, heading: str) -> list[list[str]]:
    """The rows of the first table after `heading`, without its two header lines. Cells have no surrounding blanks."""
    _, rest = page.read_text().split(f"{heading}\n", 1)
    lines = rest[rest.index("\n|") + 1 :].splitlines()
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]
