"""Promise: what a bench takes is as much as is free in small pieces, never most of what is free, and given back."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from bench import memory
from bench.memory import MOST, Taken


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "buddyinfo"
    monkeypatch.setattr(memory, "BUDDY", file)
    return file


def test_small_pieces_of_all_zones_are_taken_and_large_ones_left(pieces: Path) -> None:
    pieces.write_text(
        "Node 0, zone    DMA32      2      0      0      0      0      0      0      0      1      0    752\n"
        "Node 0, zone   Normal      1      3      0      0      0      0      0      0      0      9   3591\n"
    )
    taken = Taken()
    taken.take()
    taken.take()
    assert [len(one) for one in taken._held] == [(2 + 256 + 1 + 6) * mmap.PAGESIZE] * 2
    taken.close()
    assert taken._held == []


def test_no_more_is_taken_than_a_share_of_what_is_free(pieces: Path) -> None:
    pieces.write_text(f"Node 0, zone   Normal {10**12} 0 0 0 0 0 0 0 0 0 0\n")
    free_before = os.sysconf("SC_AVPHYS_PAGES")
    taken = Taken()
    taken.take()
    assert 0 < len(taken._held[0]) <= MOST * 1.1 * free_before * mmap.PAGESIZE
    taken.close()


def test_a_system_that_does_not_say_loses_nothing(pieces: Path) -> None:
    taken = Taken()
    taken.take()
    assert taken._held == []
