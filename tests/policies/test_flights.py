from __future__ import annotations

import pytest

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.flights import SNAPSHOTS_WITHOUT, Flights
from motet.shared.model import Phase, RequestBrief, WorkerLimits
from motet.twin.steps import A10_MBGMV


def brief(request_id: str, *, epoch: int = 0, phase: Phase = "waiting") -> RequestBrief:
    return RequestBrief(request_id, epoch, "", 0, 10, 0, 20, phase)


@pytest.fixture
def state() -> ClusterState:
    state = ClusterState()
    limits = WorkerLimits(
        base_model="m",
        max_model_len=100,
        max_running=4,
        max_waiting=4,
        block_size=16,
        kv_blocks_total=10,
        adapter_bytes_total=1,
        max_lora_rank=8,
    )
    state.put_worker("w", limits, A10_MBGMV)
    return state


def test_an_assignment_counts_at_once_and_only_once_when_the_worker_shows_it(state: ClusterState) -> None:
    flights = Flights(state, 3.0)
    flights.expect("w", brief("r"), 0.0)
    assert list(state.requests("w")) == ["r"] and flights.count("w") == len(flights) == 1
    flights.delta("w", [brief("r", phase="running")], [], 0.1)
    assert state.requests("w")["r"].phase == "running" and len(flights) == 0


def test_a_snapshot_from_before_the_assignment_does_not_hide_it(state: ClusterState) -> None:
    flights = Flights(state, 3.0)
    flights.expect("w", brief("r"), 0.0)
    for _ in range(5):
        flights.snapshot("w", [brief("other")], 0.1)
    assert set(state.requests("w")) == {"r", "other"}


def test_an_accepted_request_that_no_snapshot_shows_has_come_and_gone(state: ClusterState) -> None:
    flights = Flights(state, 3.0)
    flights.expect("w", brief("r"), 0.0)
    flights.accepted("w", "r", 0.0)
    for _ in range(SNAPSHOTS_WITHOUT):
        assert "r" in state.requests("w")
        flights.snapshot("w", [], 0.1)
    assert not state.requests("w") and not len(flights)


def test_an_accepted_request_that_is_never_shown_expires(state: ClusterState) -> None:
    flights = Flights(state, 3.0)
    flights.expect("w", brief("accepted"), 0.0)
    flights.expect("w", brief("asked"), 0.0)
    flights.accepted("w", "accepted", 1.0)
    flights.expire(4.0)
    assert len(flights) == 2
    flights.expire(4.1)
    assert list(state.requests("w")) == ["asked"]


def test_a_refused_request_counts_no_more(state: ClusterState) -> None:
    flights = Flights(state, 3.0)
    flights.expect("w", brief("r"), 0.0)
    flights.withdraw("w", "r")
    flights.withdraw("w", "r")
    assert not state.requests("w") and not len(flights)


def test_a_report_of_an_older_epoch_does_not_end_this_flight(state: ClusterState) -> None:
    flights = Flights(state, 3.0)
    flights.expect("w", brief("r", epoch=1), 0.0)
    flights.delta("w", [brief("r", epoch=0, phase="running")], [], 0.1)
    assert state.requests("w")["r"].epoch == 1 and len(flights) == 1


def test_a_request_that_ended_ends_its_flight(state: ClusterState) -> None:
    flights = Flights(state, 3.0)
    flights.expect("w", brief("r"), 0.0)
    flights.delta("w", [], ["r"], 0.1)
    assert not state.requests("w") and not len(flights)


def test_a_forgotten_worker_has_no_flights(state: ClusterState) -> None:
    flights = Flights(state, 3.0)
    flights.expect("w", brief("r"), 0.0)
    state.drop_worker("w")
    flights.forget("w")
    flights.withdraw("w", "r")
    assert not len(flights)
