"""Promise: the page on architecture shows the life of an owned request as the code has it."""

from __future__ import annotations

from pathlib import Path

from motet.policies.owner.life import TRANSITIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


def test_the_table_of_a_requests_life_is_the_codes() -> None:
    section = PAGE.read_text().partition("## A request's owner")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| ")]
    shown = {(phase, what.partition(":")[0], after) for phase, what, after in rows if phase in TRANSITIONS}
    assert shown == {(phase, what, after) for phase, moves in TRANSITIONS.items() for what, after in moves.items()}
