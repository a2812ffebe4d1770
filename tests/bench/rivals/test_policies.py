"""Promise: the scheduling policies that Motet is compared with are those of their papers and systems."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from bench.rivals import POLICIES
from tests.policies.test_cluster_state import brief
from tests.policies.test_dispatch import MIB, ask, choose, cluster, load
from tests.support_worker import PERF, worker_limits


def test_random_is_even():
    state = cluster(*"abcd")
    load(state, "a", 30)
    counts = Counter(choose("random", state, ask(n)).worker_id for n in range(4000))
    assert all(abs(count - 1000) < 120 for count in counts.values()) and len(counts) == 4


def test_most_idle_takes_the_worker_with_the_fewest_requests_queued_ones_included():
    state = cluster("a", "b", "c")
    load(state, "a", 3)
    load(state, "b", 1)
    state.replace_requests("c", [brief("1", 64), brief("2", 64)])
    assert choose("most-idle", state, ask()).worker_id == "b"


def test_first_fit_fills_the_first_worker_until_it_has_no_seat_or_no_memory():
    state = cluster("b", "a", "c", max_running=2, max_waiting=10)
    assert choose("first-fit", state, ask()).worker_id == "a"
    load(state, "a", 2)
    assert choose("first-fit", state, ask()).worker_id == "b"
    state.heard("b", 0.0, kv_blocks_free=3, draining=False)  # 48 tokens are too few for 50
    assert choose("first-fit", state, ask()).worker_id == "c"
    load(state, "c", 2)
    state.put_request("c", brief("queued", 8))
    assert choose("first-fit", state, ask(tokens=60)).worker_id in ("a", "b")  # no worker has both: the shortest queue


def test_least_pending_weighs_a_queue_against_loading_the_adapter():
    state = cluster("queue", "cold")
    state.put_adapter("queue", "d8", "device")
    state.put_request("queue", brief("1", 8, prompt=10))  # prefill 4 + 0.1 * 10 + 0.02 * 8 = 5.16 ms
    assert choose("least-pending", state, ask(adapter_bytes=12 * MIB)).worker_id == "queue"  # load 1 + 0.5 * 12 = 7 ms
    assert choose("least-pending", state, ask(adapter_bytes=4 * MIB)).worker_id == "cold"  # 3 ms


def test_lora_affinity_goes_from_active_to_room_to_waiting_to_full():
    state = cluster("active", "room", "waiting", "full", max_running=4, max_waiting=10)
    state.put_adapter("active", "d8", "device")
    for worker_id in ("active", "waiting", "full"):
        load(state, worker_id, 4, rank=16)
    state.put_request("waiting", brief("w", 8))
    for expected, cost in (("active", 1.0), ("room", 0.8), ("waiting", 0.6), ("full", 0.0)):
        decision = choose("lora-affinity", state, ask())
        assert (decision.worker_id, decision.total_cost) == (expected, cost)
        state.set_draining(expected)


def test_round_robin_continues_after_the_last_worker_when_workers_come_and_go():
    state, chooser = cluster("a", "b", "c"), POLICIES["round-robin"]()
    assert [choose(chooser, state, ask(n)).worker_id for n in range(4)] == ["a", "b", "c", "a"]
    state.set_draining("b")
    assert [choose(chooser, state, ask(n)).worker_id for n in range(3)] == ["c", "a", "c"]


@pytest.mark.parametrize(("kernel", "running_load", "queue_load"), [("mbgmv", 24, 72), ("bgmv", 128, 128)])
def test_least_pending_is_the_queues_prefill_the_turns_before_a_seat_and_the_adapter(kernel, running_load, queue_load):
    """dLoRA section 5.1: two requests of ranks 8 and 16 run in two seats, and two of ranks 64 and 8 wait."""
    state = cluster("a", max_running=2, max_waiting=10)
    state.put_worker(
        "a", worker_limits(max_running=2, max_waiting=10), msgspec.structs.replace(PERF, kernel=kernel, fetch_base_ms=3.0)
    )
    for number, (rank, phase) in enumerate([(8, "running"), (16, "running"), (64, "waiting"), (8, "waiting")]):
        state.put_request("a", brief(f"r{number}", rank, phase))
    prefill_ms = 4 + 0.1 * 20 + 0.02 * queue_load
    step_ms = 10 + 0.2 * 2 + 0.01 * running_load
    turns_ms = 3 * step_ms * 100 / 2  # three requests have no seat with this one
    loading_ms = 1 + 0.5 * 8 + 3.0
    decision = choose("least-pending", state, ask(adapter="new"))
    assert decision.total_cost == pytest.approx(prefill_ms + turns_ms + loading_ms)
    idle = cluster("a")
    assert choose("least-pending", idle, ask(adapter="new")).total_cost == pytest.approx(5.0)
