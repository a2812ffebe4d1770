"""Promise: the twin runs the batches of the live engine under every order of requests."""

from __future__ import annotations

import pytest

from tests.parity.every_policy import Setting, difference, settings


# `make parity` compares the other evictions too
@pytest.mark.parametrize(
    "setting", [one for one in settings() if one.seed == 1 and one.eviction in ("next-use", "gdsf")], ids=str
)
def test_the_twins_worker_runs_the_batches_of_the_live_engine(checkpoint, setting: Setting) -> None:
    assert difference(setting, *checkpoint) == ""
