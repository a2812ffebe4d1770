"""Promise: the twin runs the batches of the live engine under every order of requests."""

from __future__ import annotations

import pytest

from bench.rivals import QUEUES
from tests.parity.every_policy import Setting, difference, settings

EVICTIONS = ("next-use", "gdsf")


def sampled(setting: Setting) -> bool:
    """One eviction for each order of requests and kind of memory, in turn: `make parity` compares all of them."""
    turn = [*QUEUES].index(setting.queues) + setting.shared + setting.merge
    return setting.seed == 1 and setting.eviction == EVICTIONS[turn % len(EVICTIONS)]


@pytest.mark.parametrize("setting", [one for one in settings() if sampled(one)], ids=str)
def test_the_twins_worker_runs_the_batches_of_the_live_engine(checkpoint, setting: Setting) -> None:
    assert difference(setting, *checkpoint) == ""
