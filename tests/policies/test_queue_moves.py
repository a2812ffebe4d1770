"""Promise: a waiting request moves only to where it is predicted to run much sooner, and only while that comes true."""

from __future__ import annotations

import msgspec
import pytest

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.move_check import FIRST_S, JUDGED, MoveCheck
from motet.policies.cluster.queue_moves import AdapterSizes, QueueMoves
from motet.shared.model import RequestBrief
from tests.policies.test_rebalance import PERF, cluster

MIB = 1 << 20


def ask(one: QueueMoves, state: ClusterState, now_s: float = 1.0, *, always: bool = False):
    return one.questions(state, now_s, stale_s=3.0, avg_resp_len=100.0, always=always)


def test_the_last_of_a_queue_move_to_an_idle_worker_and_none_that_runs() -> None:
    """Four seats: a seat is free every 100 / 4 steps of 30.x ms, so the last of eight waiting requests waits more than 6 s."""
    (question,) = ask(QueueMoves(), cluster(12, 0))
    moved = [move.request_id for move in question.plan.moves]
    assert moved == ["r0-11", "r0-10", "r0-9", "r0-8"], "then the idle worker has no seat left"
    assert {(move.source, move.to) for move in question.plan.moves} == {("w0", "w1")}
    assert all(there < 0.5 * here for here, there in question.plan.waits)
    assert question.pressure.most_ms > 6_000 and question.pressure.least_ms == 0


def test_even_queues_and_free_seats_move_nothing() -> None:
    assert not ask(QueueMoves(), cluster(12, 12))
    assert not ask(QueueMoves(), cluster(3, 0))
    assert not ask(QueueMoves(), cluster(12))


def test_silent_draining_refusing_and_full_workers_get_nothing() -> None:
    assert not ask(QueueMoves(), cluster(12, 0), 10.0), "silent"
    assert not ask(QueueMoves(), cluster(12, 0, draining=(1,)))
    refusing = cluster(12, 0)
    refusing.set_refusing("w1")
    assert not ask(QueueMoves(), refusing)
    full = cluster(12, 0)
    limits, perf = full.terms("w1")
    full.put_worker("w1", msgspec.structs.replace(limits, max_running=0, max_waiting=0), perf)
    assert not ask(QueueMoves(), full)


def test_a_request_that_moved_stays_for_a_while() -> None:
    one, state = QueueMoves(), cluster(12, 0)
    (question,) = ask(one, state)
    one.moved([question.plan], 1.0)
    (again,) = ask(one, state, 2.0)
    assert not {move.request_id for move in again.plan.moves} & {move.request_id for move in question.plan.moves}


def test_a_request_with_tokens_stays() -> None:
    state = cluster(12, 0)
    for number in range(4, 12):
        state.put_request("w0", RequestBrief(f"r0-{number}", 0, "", 0, 100, 5, 100, "waiting", 0.0), 0.0)
    assert not ask(QueueMoves(), state)


def test_the_copy_of_an_adapter_counts_where_it_is_not_on_the_device() -> None:
    """The copy takes 1 + 0.1 ms per MiB; the last of two waiting requests waits some 1.6 s."""
    state = cluster(6, 0)
    for number in (4, 5):
        state.put_request("w0", RequestBrief(f"r0-{number}", 0, "d", 8, 100, 0, 100, "waiting", 0.0), 0.0)
    sizes = AdapterSizes()
    sizes.asked("d", 1_000 * MIB)
    (question,) = ask(QueueMoves(sizes), state)
    here, there = question.plan.waits[0]
    assert question.plan.loads[0] == ("d", "w1") and there > 101.0
    sizes = AdapterSizes()
    sizes.asked("d", 20_000 * MIB)
    assert not ask(QueueMoves(sizes), state), "2 s for the copy"
    state.put_adapter("w1", "d", "device")
    (question,) = ask(QueueMoves(sizes), state)
    assert question.plan.waits[0] == pytest.approx((here, there - 101.0))


def test_sizes_of_unknown_adapters_are_the_mean_of_the_others() -> None:
    sizes = AdapterSizes()
    assert sizes.of("?") == 0.0
    sizes.asked("a", 10)
    sizes.asked("b", 30)
    sizes.asked("b", 30)
    assert (sizes.of("a"), sizes.of("?")) == (10, 20.0)


def test_a_dry_run_remembers_nothing() -> None:
    one, state = QueueMoves(), cluster(12, 0)
    (question,) = ask(one, state, always=True)
    assert len(question.plan.moves) == 4 and question.answer(one.config.plan) is question.plan
    assert len(ask(one, cluster(3, 0), always=True)[0].plan.moves) == 0
    assert one.mechanism(1.0).state == "waiting"


def begun(state: ClusterState, worker_id: str, request_id: str) -> None:
    state.put_request(worker_id, RequestBrief(request_id, 0, "", 0, 100, 0, 100, "running", 0.0), 0.0)


def test_moves_that_gain_nothing_pause_for_twice_as_long_each_time() -> None:
    check, state, now_s = MoveCheck(), cluster(0, 0), 0.0
    for pause_s in (FIRST_S, 2 * FIRST_S):
        for number in range(JUDGED):
            assert check.open(now_s)
            check.moved(f"r{number}", "w1", now_s, (600.0, 100.0))
            begun(state, "w1", f"r{number}")
        now_s += 1.0
        check.look(state, now_s)  # they waited 875 ms instead of 600
        assert not check.open(now_s) and check.left_s(now_s) == pause_s
        now_s += pause_s
    assert check.open(now_s) and check.gained_ms < 0


def test_moves_that_gain_go_on_and_are_told() -> None:
    one, state = QueueMoves(), cluster(0, 0)
    for number in range(JUDGED):
        one.check.moved(f"r{number}", "w1", 0.0, (1_125.0, 100.0))
        begun(state, "w1", f"r{number}")
    one.check.look(state, 0.25)
    assert one.check.open(0.25)
    told = one.mechanism(0.25)
    assert (told.state, told.why) == ("on", "16 moved requests waited 1000 ms less each")


def test_waits_of_those_that_stay_correct_the_predictions() -> None:
    check, state = MoveCheck(), cluster(0, 0)
    for number in range(60):
        check.stays(f"r{number}", "w1", float(number), 1_000.0 * check.longer)
        begun(state, "w1", f"r{number}")
        check.look(state, number + 2.125)
    assert 1.99 < check.longer < 2.01, "they waited 2 s instead of 1"
    check.stays("short", "w1", 100.0, 100.0)
    begun(state, "w1", "short")
    check.look(state, 200.0)
    assert check.longer < 2.01, "looks are too rare for short waits"


def test_requests_that_end_or_lose_their_worker_are_forgotten() -> None:
    check, state = MoveCheck(), cluster(0, 0)
    check.stays("gone", "w1", 0.0, 5_000.0)
    check.stays("lost", "no such worker", 0.0, 5_000.0)
    check.look(state, 1.0)
    assert (check.longer, check.judged) == (1.0, 0)


def test_perf_without_a_step_time_moves_nothing_in_vain() -> None:
    state = cluster(6, 6, perf=msgspec.structs.replace(PERF, prefill_base_ms=0.0))
    assert not ask(QueueMoves(), state)
