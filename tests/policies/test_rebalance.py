"""Promise: a plan is made when some workers have long queues and others do not, and nothing moves twice in vain."""

from __future__ import annotations

import msgspec
import pytest

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.migration_plan import PlanConfig
from motet.policies.cluster.rebalance import RebalanceConfig, Rebalancer, waits_ms
from motet.policies.times.perf_model import Kernel
from motet.shared.model import PerfModel, RequestBrief, WorkerLimits

PERF = PerfModel(
    prefill_base_ms=10.0,
    prefill_token_ms=0.1,
    prefill_lora_ms=0.0,
    decode_base_ms=30.0,
    decode_row_ms=0.1,
    decode_lora_ms=0.0,
    load_base_ms=1.0,
    load_ms_per_mib=0.1,
)
CONFIG = RebalanceConfig(plan=PlanConfig(eta_ms=0.0))


def cluster(
    *counts: int,
    base: str = "m",
    perf: PerfModel = PERF,
    kv_format: str = "",
    ttft_slo_ms: float = 0.0,
    draining: tuple[int, ...] = (),
) -> ClusterState:
    """Workers of four seats with this many requests each, four of them running."""
    state = ClusterState()
    limits = WorkerLimits(
        base_model=base, max_model_len=4096, max_running=4, max_waiting=1000, block_size=16, kv_blocks_total=1000,
        adapter_bytes_total=1 << 30, max_lora_rank=64, kv_format=kv_format, kv_token_bytes=1024,
    )  # fmt: skip
    for index, count in enumerate(counts):
        worker_id = f"w{index}"
        state.put_worker(worker_id, limits, perf)
        state.heard(worker_id, 0.0, kv_blocks_free=1000 - min(count, 4) * 10, draining=index in draining)
        for number in range(count):
            phase = "running" if number < 4 else "waiting"
            brief = RequestBrief(f"r{index}-{number}", 0, "", 0, 100, 0, 100, phase, 0.0, ttft_slo_ms)
            state.put_request(worker_id, brief, 0.0)
    return state


def ask(one: Rebalancer, state: ClusterState, now_s: float, *, always: bool = False):
    return one.questions(state, now_s, stale_s=3.0, avg_resp_len=100.0, always=always)


def test_a_queue_beside_an_idle_worker_asks_for_a_plan_that_moves_waiting_requests() -> None:
    one, state = Rebalancer(CONFIG), cluster(12, 0)
    (question,) = ask(one, state, 1.0)
    assert question.base_model == "m" and question.pressure.most_ms > 500 and question.pressure.least_ms == 0
    plan = question.answer(CONFIG.plan)
    assert 4 <= len(plan.moves) <= 7
    assert all(int(move.request_id.split("-")[1]) >= 4 for move in plan.moves), "those that wait cost nothing to move"


def test_pressure_everywhere_and_nowhere_asks_for_none() -> None:
    assert not ask(Rebalancer(CONFIG), cluster(12, 12), 1.0)
    assert not ask(Rebalancer(CONFIG), cluster(3, 0), 1.0)
    assert not ask(Rebalancer(CONFIG), cluster(12), 1.0)


def test_a_missed_objective_is_pressure_too() -> None:
    assert not ask(Rebalancer(RebalanceConfig(wait_ms=1e6)), cluster(8, 0), 1.0)
    assert ask(Rebalancer(RebalanceConfig(wait_ms=1e6)), cluster(8, 0, ttft_slo_ms=200.0), 1.0)


def test_the_objectives_of_running_requests_are_no_pressure() -> None:
    """They have their first token. Those that wait have 60 s."""
    state = cluster(8, 0, ttft_slo_ms=200.0)
    for number in range(4, 8):
        state.put_request("w0", RequestBrief(f"r0-{number}", 0, "", 0, 100, 0, 100, "waiting", 0.0, 60_000.0), 0.0)
    assert not ask(Rebalancer(RebalanceConfig(wait_ms=1e6)), state, 1.0)
    state.put_request("w0", RequestBrief("r0-7", 0, "", 0, 100, 0, 100, "waiting", 0.0, 200.0), 0.0)
    (question,) = ask(Rebalancer(RebalanceConfig(wait_ms=1e6)), state, 1.0)
    assert question.pressure.late == 1


def test_silent_and_draining_workers_take_no_part() -> None:
    assert not ask(Rebalancer(CONFIG), cluster(12, 0), 10.0), "silent"
    assert not ask(Rebalancer(CONFIG), cluster(12, 0, draining=(1,)), 1.0)


def test_a_plan_is_followed_by_a_pause_and_a_moved_request_stays_for_longer() -> None:
    one, state = Rebalancer(CONFIG), cluster(12, 0)
    (question,) = ask(one, state, 1.0)
    plan = question.answer(CONFIG.plan)
    one.moved([plan], 1.0)
    assert not ask(one, state, 1.5)
    (again,) = ask(one, state, 2.5)
    moved = {move.request_id for move in plan.moves}
    assert {held.request_id for replica in again.replicas for held in replica.requests if held.fixed} == moved
    assert not moved & {move.request_id for move in again.answer(CONFIG.plan).moves}


def test_a_dry_run_asks_whatever_the_triggers_say_and_changes_nothing() -> None:
    one, state = Rebalancer(CONFIG), cluster(3, 0)
    (question,) = ask(one, state, 1.0, always=True)
    assert len(question.replicas) == 2
    assert not ask(one, state, 1.0)


def test_a_running_request_costs_the_copy_of_its_blocks_where_that_is_faster_than_its_prefill() -> None:
    linked = msgspec.structs.replace(PERF, kv_base_ms=1.0, kv_ms_per_mib=10.0)
    again_ms, copy_ms = 100 * 0.1, 1.0 + 10.0 * 100 / 1024

    def cost(perf: PerfModel, kv_format: str, config: RebalanceConfig) -> float:
        (question,) = ask(Rebalancer(config), cluster(12, 0, perf=perf, kv_format=kv_format), 1.0)
        running, waiting = question.replicas[0].requests[0], question.replicas[0].requests[-1]
        assert waiting.again_ms == 0.0
        return running.again_ms

    assert cost(linked, "x", CONFIG) == pytest.approx(copy_ms)
    assert cost(linked, "x", RebalanceConfig(kv_travel=False)) == again_ms
    assert cost(linked, "", CONFIG) == again_ms, "the engine cannot"
    assert cost(PERF, "x", CONFIG) == again_ms, "the link is not measured"


def test_blocks_travel_with_running_requests_between_workers_that_compute_alike() -> None:
    linked = msgspec.structs.replace(PERF, kv_base_ms=1.0, kv_ms_per_mib=10.0)
    one, state = Rebalancer(CONFIG), cluster(6, 0, perf=linked, kv_format="x")
    assert one.travels(state, "r0-0", "w0", "w1")
    assert not one.travels(state, "r0-5", "w0", "w1"), "it waits and has no blocks"
    assert not one.travels(state, "gone", "w0", "w1")
    assert not Rebalancer(RebalanceConfig(kv_travel=False)).travels(state, "r0-0", "w0", "w1")
    limits, _ = state.terms("w1")
    state.put_worker("w1", msgspec.structs.replace(limits, kv_format="y"), linked)
    assert not one.travels(state, "r0-0", "w0", "w1")


def test_a_plan_counts_the_work_the_memory_and_the_room_that_workers_report() -> None:
    """A full step of four seats takes 30 + 4 * 0.1 ms, so a token costs 7.6 ms; a queued prompt of 100 tokens 10 ms more.

    A request takes KV memory for its 100 tokens and the 100 that it will produce; the worker has 1000 blocks of 16 tokens.
    """
    state = cluster(6, 1)
    state.put_request("w0", RequestBrief("r0-1", 0, "", 0, 100, 30, 100, "running", 0.0), 0.0)
    state.put_adapter("w0", "on the device", "device")
    state.put_adapter("w0", "on the host", "host")
    (question,) = ask(Rebalancer(CONFIG), state, 1.0, always=True)
    busy, other = question.replicas
    held = {one.request_id: one for one in busy.requests}
    running, longer, waiting = held["r0-0"], held["r0-1"], held["r0-5"]
    assert (busy.worker_id, other.worker_id, len(busy.requests), len(other.requests)) == ("w0", "w1", 6, 1)
    assert (running.work_ms, running.again_ms) == (pytest.approx(760.0), pytest.approx(10.0))
    assert (waiting.work_ms, waiting.again_ms) == (pytest.approx(770.0), 0.0)
    assert (longer.work_ms, longer.again_ms) == (pytest.approx(70 * 7.6), pytest.approx(13.0)), "30 of 100 tokens are there"
    assert running.memory == longer.memory == waiting.memory == 200.0
    assert busy.memory == other.memory == 16_000.0
    assert list(busy.adapters) == ["on the device"]
    assert busy.takes == 1004 - 6 and other.takes == 1004 - 1


@pytest.mark.parametrize(("kernel", "queue_load", "load"), [("mbgmv", 24, 56), ("bgmv", 48, 112)])
def test_the_expected_wait_is_the_queues_prefill_and_the_time_until_seats_and_memory_are_free(
    kernel: Kernel, queue_load: int, load: int
) -> None:
    """Four requests of rank 8 run, three of ranks 16, 4 and 4 wait; answers have 100 tokens.

    The load of LoRA is the sum of ranks, or the number of rows times the largest rank.
    """
    perf = msgspec.structs.replace(PERF, kernel=kernel, prefill_lora_ms=0.02, decode_lora_ms=0.05)
    ahead_ms, step_ms = 10 + 0.1 * 300 + 0.02 * queue_load, 30 + 0.1 * 7 + 0.05 * load

    def wait_ms(*, seats: int = 4, blocks_free: int = 900, running: int = 4, ranks: tuple[int, ...] = (16, 4, 4)) -> float:
        state = ClusterState()
        limits = WorkerLimits(
            base_model="m", max_model_len=4096, max_running=seats, max_waiting=1000, block_size=16, kv_blocks_total=1000,
            adapter_bytes_total=1 << 30, max_lora_rank=64,
        )  # fmt: skip
        state.put_worker("w", limits, perf)
        state.heard("w", 0.0, kv_blocks_free=blocks_free, draining=False)
        for number, rank in enumerate((8,) * running + ranks):
            phase = "running" if number < running else "waiting"
            state.put_request("w", RequestBrief(f"r{number}", 0, "", rank, 100, 0, 100, phase, 0.0), 0.0)
        return float(waits_ms(state, 100.0)[state.row("w")])

    assert wait_ms() == pytest.approx(ahead_ms + 4 * step_ms * 100 / 4), "4 of 8 lack a seat; one is free every L / 4 steps"
    assert wait_ms(seats=64) == pytest.approx(ahead_ms), "there are seats and memory"
    assert wait_ms(seats=64, ranks=()) == 0.0
    # tokens that are lacking: prompts and answers of the queue, half of what the others will add, less those that are free
    lacking, used = 300 + 300 + 200 - 80, 16_000 - 80
    assert wait_ms(seats=64, blocks_free=5) == pytest.approx(ahead_ms + lacking / used * step_ms * 100)
    assert wait_ms(blocks_free=5) == pytest.approx(ahead_ms + (1 + lacking / used) * step_ms * 100), "seats, then memory"


def test_the_plan_of_requests_with_adapters_loads_them_where_they_go() -> None:
    state = cluster(4, 0)
    for number in range(4):
        state.put_request("w0", RequestBrief(f"r0-{number}", 0, "d8", 8, 100, 0, 100, "running", 0.0), 0.0)
    (question,) = ask(Rebalancer(CONFIG), state, 1.0, always=True)
    assert question.answer(PlanConfig(gamma=1.0, eta_ms=0.0, least_gain=0.0)).loads == (("d8", "w1"),)


def test_requests_leave_a_worker_whose_memory_they_would_overflow() -> None:
    """Six requests need 6 * 200 of 16 * 1000 tokens, and 6 * 4,000 if their answers are long: 8,000 too many."""
    state = cluster(4, 0)
    config = PlanConfig(gamma=1.0, eta_ms=0.0, swap_ms=1.0, top=1, least_gain=0.0)
    (question,) = ask(Rebalancer(CONFIG), state, 1.0, always=True)
    assert question.answer(config).before_ms == pytest.approx(4 * 760.0)
    for number in range(4):
        state.put_request("w0", RequestBrief(f"r0-{number}", 0, "", 0, 100, 0, 5900, "running", 0.0), 0.0)
    (question,) = ask(Rebalancer(CONFIG), state, 1.0, always=True)
    assert question.answer(config).before_ms == pytest.approx(4 * 5900 * 7.6 + 1.0 * (4 * 6000 - 16_000))
