"""The short version of `make fuzz`: malformed input changes no answer and ends no service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import adapters, bus, messages, owner
from tests.fuzz.mesh import FuzzMesh


def test_no_history_of_frames_and_losses_changes_what_a_stream_shows() -> None:
    assert owner.fuzz(300, 1) >= 300


def test_every_message_survives_the_wire_and_nonsense_is_refused() -> None:
    assert messages.fuzz(100, 1) > 100


@pytest.mark.timeout(300)
async def test_nonsense_on_the_bus_and_malformed_uploads_leave_the_mesh_as_it_was(tmp_path: Path) -> None:
    mesh = FuzzMesh(tmp_path)
    try:
        await mesh.start()
        sent, trouble = await bus.fuzz(mesh, 800, 1)
        assert sent > 700 and not trouble, trouble
        corpus = adapters.corpus(mesh)
        accepted, wrong = await adapters.fuzz(mesh, corpus[:: len(corpus) // 6])
        assert not accepted and not wrong, wrong
        assert not (trouble := await mesh.restarted()), trouble
    finally:
        mesh.stop()
