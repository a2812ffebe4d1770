"""Promise: the scheduler's copy follows the workers through restarts, lost messages and silence, and spreads bursts."""

from __future__ import annotations

from typing import get_args

import pytest
from msgspec.structs import replace

from motet.services.scheduler.cluster import WatchedCluster
from motet.services.scheduler.events import Assigning, Heard, LeaseLost, Mark, Marked, NotTaken, Taken, Tick
from motet.shared.model import RequestBrief, Residency
from motet.shared.telemetry import REGISTRY
from motet.shared.wire.prefixes import pack_keys
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot
from tests.support_worker import PERF, brief_of, generate_request, worker_limits

MARKS = get_args(Mark)


def brief(request_id: str, *, epoch: int = 0, rank: int = 8, phase="waiting") -> RequestBrief:
    made = brief_of(generate_request(request_id, rank=rank, epoch=epoch))
    made.phase = phase
    return made


def snapshot(seq: int, *requests: RequestBrief, incarnation: str = "one", draining: bool = False) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker_id="w",
        incarnation=incarnation,
        seq=seq,
        limits=worker_limits(),
        perf=PERF,
        kv_blocks_free=100,
        adapter_bytes_free=7,
        draining=draining,
        requests=list(requests),
        adapters=[Residency("d1", 8, 1, "device"), Residency("d2", 8, 1, "host"), Residency("d3", 8, 1, "disk")],
    )


def delta(
    seq: int, *changed: RequestBrief, removed=(), incarnation: str = "one", draining: bool = False, **more
) -> WorkerDelta:
    return WorkerDelta(
        worker_id="w",
        incarnation=incarnation,
        seq=seq,
        kv_blocks_free=50,
        adapter_bytes_free=7,
        draining=draining,
        changed=list(changed),
        removed=list(removed),
        **more,
    )


@pytest.fixture
def cluster() -> WatchedCluster:
    return WatchedCluster(stale_s=3.0, drop_s=10.0, in_flight_s=3.0)


def has(cluster: WatchedCluster) -> list[str]:
    return sorted(cluster.state.requests("w"))


def gaps() -> float:
    return REGISTRY.get_sample_value("motet_scheduler_state_gaps_total") or 0.0


def test_deltas_upon_a_snapshot_keep_the_copy_true(cluster):
    cluster.on(Heard(snapshot(1, brief("a")), 0.0))
    cluster.on(Heard(delta(2, brief("b"), brief("a", phase="running")), 0.1))
    (status,) = cluster.status(0.1)
    assert (status.running, status.waiting, status.kv_blocks_free) == (1, 1, 50)
    cluster.on(Heard(delta(3, removed=["a", "unknown"], evicted=["d2"], resident=[Residency("d3", 8, 1, "device")]), 0.2))
    (status,) = cluster.status(0.2)
    assert has(cluster) == ["b"]
    assert (status.adapters_on_device, status.adapters_on_host, status.in_flight) == (2, 0, 0)


def test_snapshots_that_list_no_cached_blocks_tell_their_changes(cluster):
    """An idle worker sends nothing else."""
    cluster.on(Heard(replace(snapshot(1), prefixes=pack_keys([1, 2])), 0.0))
    cluster.on(Heard(replace(snapshot(2), cached=pack_keys([3]), uncached=pack_keys([1])), 0.5))
    row, index = cluster.state.row("w"), cluster.state.prefixes
    assert [index.has(row, key) for key in (1, 2, 3)] == [False, True, True]
    assert cluster.unlisted() == [], "its limits announce no prefix cache"


def test_after_a_gap_requests_stay_as_known_until_the_next_snapshot(cluster):
    before = gaps()
    cluster.on(Heard(snapshot(1, brief("a")), 0.0))
    cluster.on(Heard(delta(3, brief("c"), removed=["a"], draining=True), 1.0))
    cluster.on(Heard(delta(4, brief("d")), 2.0))
    assert has(cluster) == ["a"] and gaps() == before + 1
    assert cluster.status(2.0)[0].age_ms == 0 and not cluster.status(2.0)[0].draining
    cluster.on(Heard(snapshot(5, brief("c"), brief("d")), 2.5))
    cluster.on(Heard(delta(6, brief("e")), 2.6))
    assert has(cluster) == ["c", "d", "e"] and gaps() == before + 1


def test_a_snapshot_after_lost_deltas_counts_the_gap_and_heals_it(cluster):
    before = gaps()
    cluster.on(Heard(snapshot(1), 0.0))
    cluster.on(Heard(snapshot(4, brief("a")), 0.5))
    assert has(cluster) == ["a"] and gaps() == before + 1


def test_repeated_and_late_messages_change_nothing(cluster):
    cluster.on(Heard(snapshot(5, brief("a")), 0.0))
    cluster.on(Heard(snapshot(4, brief("old")), 0.1))
    cluster.on(Heard(delta(5, brief("old")), 0.1))
    assert has(cluster) == ["a"]


def test_only_a_snapshot_introduces_a_worker(cluster):
    before = gaps()
    cluster.on(Heard(delta(7, brief("a")), 0.0))
    assert not cluster.knows("w") and gaps() == before + 1
    cluster.on(Heard(snapshot(8), 0.1))
    assert cluster.knows("w")


def test_a_restart_forgets_the_old_incarnation_and_its_late_messages(cluster):
    cluster.on(Heard(snapshot(50, brief("a")), 0.0))
    cluster.on(Heard(snapshot(1, brief("b"), incarnation="two"), 1.0))
    cluster.on(Heard(delta(51, brief("late")), 1.1))
    cluster.on(Heard(snapshot(52, brief("late")), 1.2))
    assert has(cluster) == ["b"]
    cluster.on(Heard(delta(2, brief("c"), incarnation="two"), 1.3))
    assert has(cluster) == ["b", "c"]


def test_a_new_incarnations_delta_ends_the_old_one_even_before_its_snapshot(cluster):
    cluster.on(Heard(snapshot(50, brief("a")), 0.0))
    cluster.on(Heard(delta(2, incarnation="two"), 1.0))
    assert not cluster.knows("w")


def test_a_lost_lease_removes_the_worker_for_good_unless_it_is_held_again(cluster):
    cluster.on(Heard(snapshot(1), 0.0))
    cluster.on(LeaseLost("w"))
    cluster.on(LeaseLost("w"))
    cluster.on(Heard(snapshot(2), 0.1))
    assert not cluster.knows("w")
    cluster.on(Heard(snapshot(3), 0.2, lease_held=True))
    assert cluster.knows("w")


def test_silent_workers_turn_stale_then_are_forgotten_and_may_come_back(cluster):
    cluster.on(Heard(snapshot(1), 0.0))
    assert (cluster.stale(2.9), cluster.stale(3.1)) == (0, 1)
    assert cluster.status(3.1)[0].stale
    cluster.on(Tick(9.9))
    assert cluster.knows("w")
    cluster.on(Tick(10.1))
    assert not cluster.knows("w") and len(cluster.state) == 0
    cluster.on(Heard(snapshot(2), 11.0))
    assert cluster.knows("w")


def test_without_a_connection_no_workers_silence_counts(cluster):
    cluster.on(Heard(snapshot(1), 0.0))
    cluster.on(Tick(60.0, connected=False))
    assert cluster.knows("w") and cluster.stale(62.0) == 0 and cluster.stale(64.0) == 1


def test_an_assignment_counts_at_once_and_exactly_once(cluster):
    cluster.on(Heard(snapshot(1, brief("a")), 0.0))
    cluster.on(Assigning("w", brief("b"), 100.0))
    assert has(cluster) == ["a", "b"] and cluster.in_flight() == 1
    cluster.on(Heard(snapshot(2, brief("a")), 0.1))  # sent before it arrived there
    assert has(cluster) == ["a", "b"]
    cluster.on(Taken("w", "b", 0.1))
    cluster.on(Heard(delta(3, brief("b", phase="running")), 0.2))
    assert has(cluster) == ["a", "b"] and cluster.in_flight() == 0
    assert cluster.status(0.2)[0].running == 1
    cluster.on(Heard(snapshot(4, brief("a")), 0.3))
    assert has(cluster) == ["a"]


def test_a_refused_assignment_stops_counting(cluster):
    cluster.on(Heard(snapshot(1), 0.0))
    cluster.on(Assigning("w", brief("b"), 100.0))
    cluster.on(NotTaken("w", "b"))
    cluster.on(NotTaken("w", "b"))
    cluster.on(NotTaken("gone", "b"))
    assert has(cluster) == [] and cluster.in_flight() == 0


def test_an_accepted_assignment_that_two_snapshots_do_not_show_came_and_went(cluster):
    cluster.on(Heard(snapshot(1), 0.0))
    cluster.on(Assigning("w", brief("b"), 100.0))
    for seq in (2, 3, 4):
        cluster.on(Heard(snapshot(seq), 0.1))
    assert has(cluster) == ["b"]  # the worker has not answered: it may still come
    cluster.on(Taken("w", "b", 0.2))
    cluster.on(Heard(snapshot(5), 0.3))
    assert has(cluster) == ["b"]
    cluster.on(Heard(snapshot(6), 0.4))
    assert has(cluster) == [] and cluster.in_flight() == 0


def test_an_assignment_that_never_shows_up_times_out(cluster):
    cluster.on(Heard(snapshot(1), 0.0))
    cluster.on(Assigning("w", brief("b"), 100.0))
    cluster.on(Taken("w", "b", 0.0))
    cluster.on(Tick(2.9))
    assert has(cluster) == ["b"]
    cluster.on(Tick(3.1))
    assert has(cluster) == [] and cluster.in_flight() == 0


def test_a_request_that_ended_between_two_states_stops_counting_when_its_removal_is_told(cluster):
    cluster.on(Heard(snapshot(1), 0.0))
    cluster.on(Assigning("w", brief("b"), 100.0))
    cluster.on(Heard(delta(2, removed=["b"]), 0.1))
    assert has(cluster) == [] and cluster.in_flight() == 0


def test_an_older_epoch_in_the_state_does_not_hide_the_new_assignment(cluster):
    cluster.on(Heard(snapshot(1, brief("b", epoch=0)), 0.0))
    cluster.on(Assigning("w", brief("b", epoch=1), 100.0))
    cluster.on(Heard(delta(2, brief("b", epoch=0, phase="running")), 0.1))
    cluster.on(Heard(snapshot(3, brief("b", epoch=0)), 0.2))
    assert cluster.in_flight() == 1 and cluster.state.requests("w")["b"].epoch == 1
    cluster.on(Heard(delta(4, brief("b", epoch=1)), 0.3))
    assert cluster.in_flight() == 0


def test_the_marks_of_a_worker_are_cleared_by_its_next_message(cluster):
    held = lambda what: cluster.state.table[what][cluster.state.row("w")]  # noqa: E731 - read anew each time
    cluster.on(Heard(snapshot(1), 100.0))
    for mark in MARKS:
        cluster.on(Marked("w", mark, 100.0))
    assert cluster.status(100.0)[0].stale and held("refusing") and held("draining")
    cluster.on(Heard(delta(2), 100.1))
    assert not cluster.status(100.1)[0].stale and not held("refusing") and not held("draining")
    for mark in MARKS:
        cluster.on(Marked("never seen", mark, 100.1))
