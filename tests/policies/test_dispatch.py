"""Promise: every policy chooses among the candidates by its own rule, and the same request on the same state the same way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bench.rivals import POLICIES
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choose, spread
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.dispatch import Decision, decide
from motet.policies.cluster.worker_table import hash_of
from tests.policies.test_cluster_state import brief
from tests.support_worker import PERF, worker_limits

MIB = 1 << 20


def cluster(*worker_ids: str, **limits) -> ClusterState:
    state = ClusterState()
    for worker_id in worker_ids:
        state.put_worker(worker_id, worker_limits(**limits), PERF)
        state.heard(worker_id, 0.0, kv_blocks_free=512, draining=False)
    return state


def ask(number: int = 0, **changed) -> Ask:
    fields = {
        "base_model": "demo",
        "rank": 8,
        "tokens": 50,
        "tpot_slo_ms": 200.0,
        "out_tokens": 100,
        "adapter": "d8",
        "adapter_bytes": 8 * MIB,
        "key": hash_of(str(number)),
    }
    return Ask(**(fields | changed))


def choose(policy: str | Choose, state: ClusterState, request: Ask, now_s: float = 0.0) -> Decision:
    chooser = POLICIES[policy]() if isinstance(policy, str) else policy
    return decide(chooser, state, request, now_s, stale_s=3.0, avg_resp_len=100.0)


def load(state: ClusterState, worker_id: str, running: int, rank: int = 8, **more) -> None:
    state.replace_requests(worker_id, [brief(f"{worker_id}{n}", rank, "running", **more) for n in range(running)])


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_only_candidates_are_chosen_and_without_one_the_decision_says_why(policy):
    state = cluster("a", "b", "c")
    state.set_draining("a")
    state.set_refusing("c")
    assert {choose(policy, state, ask(n)).worker_id for n in range(20)} == {"b"}
    state.set_draining("b")
    refused = choose(policy, state, ask())
    assert refused.worker_id is None and refused.screening is not None
    assert refused.screening.rejected == {"draining": 2, "full": 1}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_request_on_the_same_state_goes_the_same_way(policy):
    def run() -> list[str | None]:
        state, chooser, chosen = cluster(*"abcdefg"), POLICIES[policy](), []
        for number in range(60):
            decision = choose(chooser, state, ask(number, rank=(8, 64)[number % 2]), number / 100)
            assert decision.worker_id is not None
            state.put_request(decision.worker_id, brief(f"r{number}", (8, 64)[number % 2]), number / 100)
            chosen.append(decision.worker_id)
        return chosen

    assert run() == run()


@pytest.mark.parametrize("policy", ["random", "most-idle", "least-pending", "round-robin", "motet"])
def test_no_worker_is_left_out_when_requests_are_spread_over_equal_ones(policy):
    state, chooser = cluster(*"abcde"), POLICIES[policy]()
    counts: Counter[str | None] = Counter()
    for number in range(200):
        now_s = number / 10
        decision = choose(chooser, state, ask(number, adapter="", rank=0), 0.0)
        assert decision.worker_id is not None
        counts[decision.worker_id] += 1
        state.put_request(decision.worker_id, brief(f"r{number}", 0, "running"), now_s)
        if number >= 20:
            for worker_id in state.workers():
                state.drop_request(worker_id, f"r{number - 20}")
    assert set(counts) == set("abcde") and min(counts.values()) > 200 / 5 / 2


@pytest.mark.parametrize("workers", ["ab", "abc", "abcdefg"])
def test_every_worker_is_equally_likely_for_keys_that_follow_each_other(workers):
    state = cluster(*workers)
    rows = np.array([state.row(name) for name in workers])
    counts = Counter(spread(state, rows, key) for key in range(4000))
    assert all(abs(counts[row] - 4000 / len(workers)) < 130 for row in rows.tolist())
