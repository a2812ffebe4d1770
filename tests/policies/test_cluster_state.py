"""Promise: the aggregates a decision reads are those of the requests the workers have, whatever came and went."""

from __future__ import annotations

import random

from policies.cluster_state import ClusterState, tokens_left, tokens_to_prefill
from shared.model import RequestBrief
from tests.support_worker import PERF, worker_limits


def brief(request_id: str, rank: int = 0, phase="waiting", *, prompt=10, output=0, predicted=20) -> RequestBrief:
    return RequestBrief(request_id, 0, f"d{rank}" if rank else "", rank, prompt, output, predicted, phase)


def assert_aggregates_are_true(state: ClusterState) -> None:
    for worker_id in state.workers():
        row = state.table[state.row(worker_id)]
        requests = list(state.requests(worker_id).values())
        queue = [r for r in requests if r.phase != "running"]
        running = [r for r in requests if r.phase == "running"]
        assert row["running"] == len(running)
        assert row["queued"] == len(queue)
        assert row["rank_sum"] == sum(r.rank for r in requests)
        assert row["max_rank"] == max((r.rank for r in requests), default=0)
        assert row["queue_rank_sum"] == sum(r.rank for r in queue)
        assert row["queue_max_rank"] == max((r.rank for r in queue), default=0)
        assert row["queue_tokens"] == sum(map(tokens_to_prefill, queue))
        assert row["running_left"] == sum(map(tokens_left, running))


def test_aggregates_stay_true_over_random_changes():
    draw = random.Random(7)
    state = ClusterState()
    for _ in range(3000):
        worker_id = f"w{draw.randrange(40)}"
        if worker_id not in state:
            state.put_worker(worker_id, worker_limits(), PERF)
        what = draw.random()
        made = brief(
            f"r{draw.randrange(8)}",
            draw.choice([0, 4, 8, 8, 64]),
            draw.choice(["loading", "waiting", "running"]),
            prompt=draw.randrange(1, 500),
            output=draw.randrange(50),
            predicted=draw.randrange(50),
        )
        if what < 0.6:
            state.put_request(worker_id, made)
        elif what < 0.9:
            state.drop_request(worker_id, made.request_id)
        elif what < 0.96:
            state.replace_requests(worker_id, [made, brief("r0", 16), made])
        else:
            state.drop_worker(worker_id)
        if draw.random() < 0.1:
            assert_aggregates_are_true(state)
    assert_aggregates_are_true(state)


def test_rows_of_dropped_workers_are_empty_and_reused():
    state = ClusterState()
    for number in range(100):
        state.put_worker(f"w{number}", worker_limits(), PERF)
        state.put_request(f"w{number}", brief("r", 64))
    size = len(state.table)
    for number in range(100):
        state.drop_worker(f"w{number}")
    state.drop_worker("never seen")
    assert len(state) == 0 and (state.table["base"] == -1).all() and not state.table["rank_sum"].any()
    for number in range(100):
        state.put_worker(f"v{number}", worker_limits(), PERF)
    assert len(state.table) == size and sorted(state.workers()) == sorted(f"v{n}" for n in range(100))
    assert all(state.ids[state.row(w)] == w for w in state.workers())
