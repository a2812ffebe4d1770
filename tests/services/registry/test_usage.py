"""Promise: a version counts as used while a request runs on it, and for a while after it was last seen anywhere."""

from __future__ import annotations

import pytest

from motet.services.registry.usage import IDLE_S, STALE_S, Usage
from motet.shared.wire.worker_state import WorkerDelta
from tests.services.registry.conftest import brief, snapshot


def delta(seq: int, *, removed: tuple[str, ...] = ()) -> WorkerDelta:
    return WorkerDelta(
        worker_id="w1",
        incarnation="first",
        seq=seq,
        kv_blocks_free=64,
        adapter_bytes_free=1,
        draining=False,
        removed=list(removed),
    )


def test_a_version_that_was_never_used_is_idle_at_once():
    usage = Usage()
    assert usage.idle("a", 0.0)
    usage.apply(snapshot(brief("r1", "a")), 0.0)
    assert usage.idle("b", 0.0) and not usage.idle("a", 0.0)


@pytest.mark.parametrize("how", ["removed by a delta", "missing in the next snapshot", "missing after a restart", "silent"])
def test_a_version_stays_in_use_after_its_last_request_left_its_worker(how: str):
    usage = Usage()
    usage.apply(snapshot(brief("r1", "a")), 100.0)
    if how == "removed by a delta":
        usage.apply(delta(2, removed=("r1",)), 100.0)
    elif how == "missing in the next snapshot":
        usage.apply(snapshot(seq=2), 100.0)
    elif how == "missing after a restart":
        usage.apply(snapshot(incarnation="second"), 100.0 + IDLE_S / 2)
    assert usage.requests("a", 100.0 + STALE_S + 1) == 0
    assert not usage.idle("a", 100.0 + IDLE_S - 1), "a gateway may still be looking for another worker"
    assert usage.idle("a", 100.0 + IDLE_S + 1)


def test_a_request_that_another_worker_took_over_keeps_its_version_in_use():
    usage = Usage()
    usage.apply(snapshot(brief("r1", "a")), 100.0)
    usage.apply(snapshot(brief("r1", "a"), worker="w2"), 130.0)
    usage.apply(snapshot(worker="w2", seq=2), 150.0)
    assert not usage.idle("a", 150.0 + IDLE_S - 1) and usage.idle("a", 150.0 + IDLE_S + 1)


def test_what_was_used_long_ago_takes_no_memory():
    usage = Usage()
    for number in range(100):
        usage.apply(snapshot(brief("r", f"digest-{number}"), seq=number + 1), number * IDLE_S)
    assert len(usage._left_s) <= 3  # private: what it remembers is seen nowhere else


def test_after_a_lost_delta_the_next_snapshot_counts_again():
    usage = Usage()
    usage.apply(snapshot(brief("r1", "a")), 100.0)
    usage.apply(delta(3, removed=("r1",)), 101.0)  # the second was lost: this registry could not keep up
    assert usage.requests("a", 101.0) == 1
    usage.apply(snapshot(seq=4), 102.0)
    assert usage.requests("a", 102.0) == 0
