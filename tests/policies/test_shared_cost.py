"""Promise: Motet's policy counts the time that a request costs all requests, itself included, and keeps objectives."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from motet.policies.cluster import shared_cost
from motet.policies.times.perf_model import decode_ms
from tests.policies.test_cluster_state import brief
from tests.policies.test_dispatch import MIB, ask, choose, cluster, load
from tests.support_worker import PERF, worker_limits

NOW_S = 100.0


def slower(state, worker_id: str, **changed) -> None:
    state.put_worker(worker_id, worker_limits(), msgspec.structs.replace(PERF, **changed))


def motet(state, request, now_s: float = NOW_S):
    for worker_id in state.workers():
        state.set_heard(worker_id, now_s)
    return choose("motet", state, request, now_s).worker_id


def test_the_cost_on_an_idle_worker_is_the_requests_own_time_per_token():
    state = cluster("a")
    cost, breaks = shared_cost.costs(state, ask(), NOW_S, 100.0)
    prefill, copy = 4.0 + 0.1 * 50 + 0.02 * 8, 1.0 + 0.5 * 8
    row = state.row("a")
    assert cost[row] == pytest.approx(decode_ms(PERF, 1.0, 8.0) + (prefill + copy) / 100)
    assert not breaks[row]


@pytest.mark.parametrize(("kernel", "before_ms", "after_ms"), [("mbgmv", 11.40, 12.24), ("bgmv", 11.40, 15.04)])
def test_the_cost_on_a_busy_worker_counts_twice_by_how_much_the_steps_of_the_others_grow(kernel, before_ms, after_ms):
    """Five requests of rank 8 run since long ago, and one of rank 64 comes.

    A decode step takes 10 ms, 0.2 per request and 0.01 per rank. Over the sum of the ranks it grows from 11.40 to 12.24 ms, and
    to 15.04 ms if all six are padded to the largest rank.
    """
    state = cluster("a")
    slower(state, "a", kernel=kernel)
    load(state, "a", 5)
    prefill = 4.0 + 0.1 * 50 + 0.02 * 64
    others = 5 * (prefill / 100 + 2.0 * (after_ms - before_ms))
    own = after_ms + 5 * 4.0 / 100 + prefill / 100
    cost, breaks = shared_cost.costs(state, ask(adapter="", rank=64), NOW_S, 100.0)
    assert cost[state.row("a")] == pytest.approx(others + own) and not breaks[state.row("a")]


def test_an_idle_slow_worker_loses_to_a_busy_fast_one():
    state = cluster("slow", "fast")
    slower(state, "slow", decode_base_ms=40.0)
    load(state, "fast", 6)
    assert motet(state, ask(adapter="")) == "fast"


def test_a_loaded_adapter_outweighs_a_few_other_requests_but_not_many():
    state = cluster("here", "idle")
    state.put_adapter("here", "d8", "device")
    load(state, "idle", 4, rank=16)
    load(state, "here", 5, rank=16)
    assert motet(state, ask(adapter_bytes=64 * MIB)) == "here"
    load(state, "here", 40, rank=16)
    assert motet(state, ask(adapter_bytes=64 * MIB)) == "idle"


def test_a_request_joins_a_prefill_that_is_about_to_begin_and_not_one_that_has_begun():
    state = cluster("joinable", "other")
    for worker_id in ("joinable", "other"):
        load(state, worker_id, 10)
    state.put_request("joinable", brief("q", 8), NOW_S)
    one = ask(adapter="", rank=0)
    slower(state, "joinable", prefill_base_ms=30.0)
    slower(state, "other", prefill_base_ms=30.0)
    assert motet(state, one, NOW_S + 0.001) == "joinable"  # a decode step takes 13 ms
    assert motet(state, one, NOW_S + 0.020) == "other"


def test_workers_whose_requests_have_just_begun_are_spared():
    state = cluster("young", "old")
    for worker_id, began_s in (("young", NOW_S - 0.01), ("old", NOW_S - 10.0)):
        for n in range(10):
            state.put_request(worker_id, brief(f"{worker_id}{n}", 8, "running"), began_s)
    state.drop_request("young", "young9")  # one less: it would win otherwise
    assert motet(state, ask(adapter="", rank=0)) == "old"
    assert motet(state, ask(adapter="", rank=0), NOW_S + 10.0) == "young"


def test_a_high_rank_request_goes_where_ranks_are_high_already_when_batches_are_padded():
    state = cluster("low", "high")
    for worker_id, rank in (("low", 8), ("high", 64)):
        slower(state, worker_id, kernel="bgmv")
        load(state, worker_id, 8, rank=rank)
    assert motet(state, ask(adapter="", rank=64)) == "high"
    assert motet(state, ask(adapter="", rank=8)) == "low"


def test_an_objective_that_breaks_outweighs_a_cheaper_worker():
    state = cluster("slow", "fast")
    slower(state, "slow", decode_base_ms=30.0)
    load(state, "fast", 30)  # 18 ms per token, for all requests there
    assert motet(state, ask(adapter="", tpot_slo_ms=200.0)) == "slow"
    assert motet(state, ask(adapter="", tpot_slo_ms=24.0)) == "fast"


def test_a_patient_request_avoids_a_worker_whose_requests_have_strict_objectives():
    state = cluster("strict", "lax")
    load(state, "strict", 20, tpot=14.5)
    load(state, "lax", 24, tpot=1000.0)
    lazy = ask(adapter="", rank=0, tpot_slo_ms=1000.0)
    assert motet(state, lazy) == "lax"
    load(state, "strict", 20, tpot=1000.0)
    assert motet(state, lazy) == "strict"


def test_the_time_to_first_token_counts_the_queue():
    state = cluster("queue", "busy")
    state.replace_requests("queue", [brief("q", 8, prompt=1000)], NOW_S - 1.0)
    load(state, "busy", 12)
    assert motet(state, ask(adapter="", rank=0, out_tokens=400)) == "queue"  # cheaper for all, and late
    assert motet(state, ask(adapter="", rank=0, out_tokens=400, ttft_slo_ms=80.0)) == "busy"


def test_a_worker_short_of_memory_is_left_alone():
    state = cluster("tight", "roomy")
    load(state, "tight", 4, predicted=500)
    load(state, "roomy", 8, predicted=500)
    state.heard("tight", NOW_S, kv_blocks_free=4, draining=False)
    assert motet(state, ask(adapter="", rank=0)) == "roomy"
    state.heard("tight", NOW_S, kv_blocks_free=400, draining=False)
    assert motet(state, ask(adapter="", rank=0)) == "tight"


def test_a_worker_without_a_free_seat_costs_waiting_time():
    state = cluster("full", "free", max_running=8)
    load(state, "full", 8, predicted=1000)
    load(state, "free", 7, predicted=1000)
    slower(state, "free", decode_base_ms=12.0)
    state.put_worker("full", worker_limits(max_running=8), PERF)
    assert motet(state, ask(adapter="", rank=0, out_tokens=20)) == "free"


def test_who_waits_for_a_seat_passes_the_wait_on_to_as_many_as_there_are():
    """Eight of rank 8 run in eight seats, so one ends every 100 / 8 steps, and eight others follow within 100 tokens."""
    state = cluster("a", max_running=8)
    state.put_worker("a", worker_limits(max_running=8), PERF)
    load(state, "a", 8)
    prefill, step = 4.0 + 0.1 * 50, decode_ms(PERF, 9.0, 64.0)
    room = step * 100 / 8
    others = 8 * ((prefill + room) / 100 + 2.0 * 0.2)
    own = step + 8 * 4.0 / 100 + (prefill + room) / 100
    cost, _ = shared_cost.costs(state, ask(adapter="", rank=0), NOW_S, 100.0)
    assert cost[state.row("a")] == pytest.approx(others + own)


def test_a_queue_for_memory_outweighs_many_running_requests():
    state = cluster("full", "busy")
    load(state, "full", 10, predicted=100)
    state.heard("full", NOW_S, kv_blocks_free=0, draining=False)
    load(state, "busy", 25, predicted=100)
    assert motet(state, ask(adapter="", rank=0, out_tokens=400)) == "busy"
    state.heard("full", NOW_S, kv_blocks_free=400, draining=False)
    assert motet(state, ask(adapter="", rank=0, out_tokens=400)) == "full"


def test_a_long_queue_that_may_have_begun_its_prefill_is_spared_more_than_a_short_one():
    state = cluster("long", "short")
    for worker_id, queued in (("long", 6), ("short", 1)):
        load(state, worker_id, 10 - queued)
        for n in range(queued):
            state.put_request(worker_id, brief(f"{worker_id}{n}", 8, prompt=1), NOW_S)
    cost, _ = shared_cost.costs(state, ask(adapter="", rank=0), NOW_S + 0.005, 1e6)
    assert cost[state.row("long")] > cost[state.row("short")]


def test_requests_for_an_adapter_on_no_worker_go_to_one_place_and_others_spread():
    state = cluster(*(f"w{n}" for n in range(20)))
    cold = Counter(motet(state, ask(n, adapter="unseen")) for n in range(50))
    assert len(cold) == 1
    base = Counter(motet(state, ask(n, adapter="", rank=0)) for n in range(200))
    assert len(base) == 20  # what several schedulers do at once on one state


@pytest.mark.parametrize(("better", "worse"), [("wait", "stall"), ("bridged", "wait"), ("bridged", "stall")])
def test_of_workers_that_lack_the_adapter_the_one_whose_copy_holds_up_fewer_is_chosen(better: str, worse: str) -> None:
    state = cluster("a", "b", "c")
    for worker_id in state.workers():
        state.put_worker(worker_id, msgspec.structs.replace(worker_limits(), copies=worse), PERF)
        load(state, worker_id, 8)
    state.put_worker("b", msgspec.structs.replace(worker_limits(), copies=better), PERF)
    asked = ask(adapter="new", adapter_bytes=64 * MIB)
    cost, _ = shared_cost.costs(state, asked, NOW_S, 100.0)
    assert cost[state.row("b")] < cost[state.row("a")] == cost[state.row("c")]
    assert motet(state, asked) == "b"


def test_a_bridged_copy_does_not_break_an_objective_that_a_waiting_one_breaks() -> None:
    state = cluster("a")
    asked = ask(adapter_bytes=64 * MIB, ttft_slo_ms=20.0)
    for copies, expected in (("wait", True), ("bridged", False)):
        state.put_worker("a", msgspec.structs.replace(worker_limits(), copies=copies), PERF)
        state.put_adapter("a", "d8", "host")
        assert shared_cost.costs(state, asked, NOW_S, 100.0)[1][state.row("a")] == expected


def few_slots(*worker_ids: str, slots: int = 4):
    state = cluster(*worker_ids)
    for worker_id in worker_ids:
        state.put_worker(worker_id, worker_limits(adapter_slots=slots), PERF)
    return state


def test_a_worker_whose_slots_are_all_in_use_gets_no_further_adapter_while_another_has_a_free_one():
    """Both are as loaded, but the requests on one have four adapters, those on the other one."""
    state = few_slots("spread", "alike")
    load(state, "alike", 4, rank=8)
    for rank in (16, 32, 48, 64):
        state.put_request("spread", brief(f"s{rank}", rank, "running"))
    state.put_request("alike", brief("much", 64, "running"))
    state.put_request("alike", brief("more", 64, "running"))
    assert motet(state, ask(adapter="new", rank=8)) == "alike"
    assert motet(state, ask(adapter="d48", rank=48, adapter_bytes=MIB)) == "spread", "one that is in use needs no slot"


def test_an_adapter_stays_at_home_while_that_is_not_much_later():
    state = few_slots("home", "idle")
    state.put_homes("home", ["new"])
    for worker_id in ("home", "idle"):
        state.put_request(worker_id, brief(f"{worker_id}0", 16, "running"))
    load(state, "home", 2, rank=16)
    request = ask(adapter="new", adapter_bytes=64 * MIB)
    assert motet(state, request) == "home"
    state.put_homes("home", [])
    assert motet(state, request) == "idle"
    state.put_homes("home", ["new"])
    load(state, "home", 60, rank=16)
    assert motet(state, request) == "idle", "a home is no filter"
