"""Promise: the choice is that of CaraServe's Algorithm 1, and always the same for the same state."""

from __future__ import annotations

import random
import time

import msgspec
import pytest

from bench.rivals import rank_aware
from bench.rivals.rank_aware import PENALTY_MS
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.dispatch import Decision, decide, seconds_until_room
from motet.policies.cluster.worker_load import tokens_to_prefill
from motet.policies.times.perf_model import decode_ms, lora_load, prefill_ms
from motet.shared.model import PerfModel
from tests.policies.test_cluster_state import brief
from tests.support_worker import PERF, worker_limits

BGMV = msgspec.structs.replace(PERF, kernel="bgmv")


def cluster(**perfs: PerfModel) -> ClusterState:
    state = ClusterState()
    for worker_id, perf in perfs.items():
        state.put_worker(worker_id, worker_limits(), perf)
        state.heard(worker_id, 0.0, kv_blocks_free=512, draining=False)
    return state


def ask(rank: int = 16, tokens: int = 50, tpot_slo_ms: float = 200.0) -> Ask:
    return Ask(base_model="demo", rank=rank, tokens=tokens, tpot_slo_ms=tpot_slo_ms)


def choose(state: ClusterState, request: Ask, avg_resp_len: float = 100.0) -> Decision:
    return decide(rank_aware.choose, state, request, 0.0, stale_s=3.0, avg_resp_len=avg_resp_len)


def test_algorithm_1_by_hand():
    """
    a (mbgmv): queue [rank 32, 100 tokens], running [8, 64]
        d_prefill = 0.1 * 50 + 0.02 * 16 = 5.32           d_decode = 0.2 + 0.01 * 16 = 0.36
        total = (5.32 / 100 + 0.36) * 3 = 1.2396          Dec(exists + r) = 10 + 0.2 * 4 + 0.01 * 120 = 12.0
    b (bgmv): queue [8], running [8]
        d_prefill = 0.1 * 50 + 0.02 * (2*16 - 1*8) = 5.48 d_decode = 0.2 + 0.01 * (3*16 - 2*8) = 0.52
        total = (5.48 / 100 + 0.52) * 2 = 1.1496          Dec(exists + r) = 10 + 0.2 * 3 + 0.01 * 48 = 11.08
    """
    state = cluster(a=PERF, b=BGMV)
    state.replace_requests("a", [brief("1", 32, prompt=100), brief("2", 8, "running"), brief("3", 64, "running")])
    state.replace_requests("b", [brief("4", 8), brief("5", 8, "running")])
    chosen = choose(state, ask())
    assert (chosen.worker_id, chosen.candidates, chosen.breaks_slo) == ("b", 2, False)
    assert chosen.total_cost == pytest.approx(1.1496)

    state.set_draining("b")
    chosen = choose(state, ask(tpot_slo_ms=12.1))
    assert (chosen.worker_id, chosen.breaks_slo) == ("a", False)
    assert chosen.total_cost == pytest.approx(1.2396)
    chosen = choose(state, ask(tpot_slo_ms=11.9))
    assert (chosen.worker_id, chosen.breaks_slo) == ("a", True)
    assert chosen.total_cost == pytest.approx((0.4132 + PENALTY_MS) * 3)


def test_a_worker_that_would_break_the_slo_loses_to_a_much_busier_one_that_keeps_it():
    state = cluster(slow=msgspec.structs.replace(PERF, decode_base_ms=60.0), fast=PERF)
    state.put_request("slow", brief("s", 8, "running"))
    state.replace_requests("fast", [brief(str(n), 8, "running") for n in range(40)])
    assert choose(state, ask(tpot_slo_ms=200.0)).worker_id == "slow"
    assert choose(state, ask(tpot_slo_ms=50.0)).worker_id == "fast"


def test_a_high_rank_request_avoids_raising_the_padding_of_others():
    state = cluster(low=BGMV, high=BGMV)
    state.replace_requests("low", [brief(str(n), 8, "running") for n in range(8)])
    state.replace_requests("high", [brief(str(n), 64, "running") for n in range(8)])
    assert choose(state, ask(rank=64)).worker_id == "high"
    assert choose(state, ask(rank=8)).worker_id == "low"


def test_ties_go_to_the_fewest_requests_then_to_the_smallest_id():
    state = cluster(c=PERF, b=PERF, a=PERF)
    assert choose(state, ask()).worker_id == "a"
    for worker_id in "abc":
        state.put_request(worker_id, brief("r", 8, "running"))
    assert choose(state, ask()).worker_id == "a"
    free = cluster(busy=msgspec.structs.replace(PERF, decode_row_ms=0.0, decode_lora_ms=0.0, prefill_token_ms=0.0), idle=PERF)
    free.replace_requests("busy", [brief("1", 0, "running"), brief("2", 0, "running")])
    assert choose(free, ask(rank=0)).worker_id == "idle"  # both cost nothing


def test_the_choice_equals_a_naive_reading_of_the_algorithm_over_random_states():
    draw = random.Random(11)
    for _ in range(300):
        state = ClusterState()
        perfs: dict[str, PerfModel] = {}
        for number in range(draw.randrange(1, 12)):
            worker_id = f"w{number}"
            perfs[worker_id] = msgspec.structs.replace(
                PERF,
                kernel=draw.choice(["bgmv", "mbgmv"]),
                decode_lora_ms=draw.choice([0.01, 0.02]),
                decode_base_ms=draw.choice([10.0, 30.0]),
            )
            state.put_worker(worker_id, worker_limits(), perfs[worker_id])
            state.heard(worker_id, 0.0, kv_blocks_free=512, draining=False)
            for r in range(draw.randrange(20)):
                phase = draw.choice(["loading", "waiting", "running", "running"])
                state.put_request(worker_id, brief(f"r{r}", draw.choice([0, 8, 16, 64]), phase, prompt=draw.randrange(1, 300)))
            for r in range(draw.randrange(20)):
                state.drop_request(worker_id, f"r{r}")
        request = ask(draw.choice([0, 8, 64]), draw.randrange(1, 500), draw.choice([12.0, 25.0, 200.0]))
        avg_resp_len = draw.choice([1.0, 40.0, 400.0])
        assert choose(state, request, avg_resp_len).worker_id == naive(state, perfs, request, avg_resp_len)


def naive(state: ClusterState, perfs: dict[str, PerfModel], request: Ask, avg_resp_len: float) -> str:
    """Algorithm 1 line by line."""
    scores = []
    for worker_id, perf in perfs.items():
        exists = list(state.requests(worker_id).values())
        queue = [r for r in exists if r.phase != "running"]

        def pre(ranks: list[int], tokens: int, perf: PerfModel = perf) -> float:
            return prefill_ms(perf, float(tokens), lora_load(perf.kernel, ranks))

        def dec(ranks: list[int], perf: PerfModel = perf) -> float:
            return decode_ms(perf, float(len(ranks)), lora_load(perf.kernel, ranks))

        queue_ranks, ranks = [r.rank for r in queue], [r.rank for r in exists]
        queue_tokens = sum(map(tokens_to_prefill, queue))
        d_prefill = pre([*queue_ranks, request.rank], queue_tokens + request.tokens) - pre(queue_ranks, queue_tokens)
        d_decode = dec([*ranks, request.rank]) - dec(ranks)
        cost = d_prefill / avg_resp_len + d_decode
        if dec([*ranks, request.rank]) > request.tpot_slo_ms:
            cost += PENALTY_MS
        scores.append((cost * len(exists), len(exists), worker_id))
    return min(scores)[2]


def test_a_burst_of_equal_requests_spreads_evenly_over_equal_workers():
    state = cluster(**{f"w{n}": PERF for n in range(5)})
    for number in range(100):
        chosen = choose(state, ask(rank=8))
        assert chosen.worker_id is not None
        state.put_request(chosen.worker_id, brief(f"r{number}", 8))
    assert [len(state.requests(w)) for w in state.workers()] == [20] * 5


def test_without_candidates_the_decision_says_why():
    state = cluster(a=PERF)
    state.set_draining("a")
    chosen = choose(state, ask())
    assert chosen.worker_id is None and chosen.screening is not None and chosen.screening.rejected == {"draining": 1}


def test_room_comes_sooner_where_many_requests_run_and_little_is_left():
    state = cluster(a=PERF)
    few = [brief(str(n), 0, "running", output=0, predicted=100) for n in range(2)]
    many = [brief(str(n), 0, "running", output=0, predicted=100) for n in range(40)]
    state.replace_requests("a", few)
    long_wait = seconds_until_room(state, ask(), 0.0, stale_s=3.0)
    assert long_wait == pytest.approx((10.4 * 200 / 4 + 4.0) / 1000)
    state.replace_requests("a", many)
    assert 0.1 <= seconds_until_room(state, ask(), 0.0, stale_s=3.0) < long_wait
    assert seconds_until_room(ClusterState(), ask(), 0.0, stale_s=3.0) == 0.1


@pytest.mark.parametrize("workers", [100, 1000])
def test_a_decision_is_quick_for_many_workers(workers):
    draw = random.Random(3)
    state = cluster(**{f"w{n:04}": PERF for n in range(workers)})
    for worker_id in state.workers():
        for r in range(draw.randrange(30)):
            state.put_request(worker_id, brief(f"r{r}", draw.choice([0, 8, 64]), draw.choice(["waiting", "running"])))
    times = []
    for _ in range(50):
        began = time.perf_counter()
        choose(state, ask())
        times.append(time.perf_counter() - began)
    assert sorted(times)[25] < 0.01


def test_with_linear_costs_and_equal_workers_the_choice_is_the_worker_with_the_fewest_requests():
    """
    MBGMV's cost is linear in ranks and tokens, so a request adds the same to every worker, and `total` is that times the
    requests there. Padded batches (BGMV) are not linear: the same states are decided by ranks.
    """
    draw = random.Random(5)
    chosen = {"mbgmv": 0, "bgmv": 0}
    for _ in range(200):
        ranks = [[draw.choice([8, 16, 64]) for _ in range(draw.randrange(1, 20))] for _ in range(8)]
        rank = draw.choice([8, 64])
        for kernel in chosen:
            state = cluster(**{f"w{n}": msgspec.structs.replace(PERF, kernel=kernel) for n in range(len(ranks))})
            for n, there in enumerate(ranks):
                phases = [draw.choice(["waiting", "running"]) for _ in there]
                state.replace_requests(
                    f"w{n}", [brief(f"{i}", r, phase) for i, (r, phase) in enumerate(zip(there, phases, strict=True))]
                )
            worker = int(choose(state, ask(rank=rank, tpot_slo_ms=1e9)).worker_id[1:])
            chosen[kernel] += len(ranks[worker]) == min(map(len, ranks))
    assert chosen["mbgmv"] == 200
    assert chosen["bgmv"] < 190


@pytest.mark.parametrize(("kernel", "running_load", "queue_load"), [("mbgmv", 24, 72), ("bgmv", 128, 128)])
def test_the_time_until_there_is_room_is_a_turn_and_the_queues_prefill_per_request(kernel, running_load, queue_load):
    """Two requests of ranks 8 and 16 run and have 40 tokens left together; two of ranks 64 and 8 wait."""
    state = ClusterState()
    state.put_worker("a", worker_limits(max_running=2, max_waiting=2), msgspec.structs.replace(PERF, kernel=kernel))
    state.heard("a", 0.0, kv_blocks_free=512, draining=False)
    for number, (rank, phase) in enumerate([(8, "running"), (16, "running"), (64, "waiting"), (8, "waiting")]):
        state.put_request("a", brief(f"r{number}", rank, phase))
    step_ms = 10 + 0.2 * 2 + 0.01 * running_load
    prefill_ms = 4 + 0.1 * 20 + 0.02 * queue_load
    expected_s = (step_ms * 40 / 2 / 2 + prefill_ms / 2) / 1000
    assert seconds_until_room(state, ask(), 0.0, stale_s=3.0) == pytest.approx(expected_s)
    for number in (0, 1):
        state.put_request("a", brief(f"r{number}", 8, "running", predicted=100_000))
    assert seconds_until_room(state, ask(), 0.0, stale_s=3.0) == 60.0, "an answer is never later than a minute"
