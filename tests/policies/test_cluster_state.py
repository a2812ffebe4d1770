"""Promise: the sums that a decision reads are those of the workers' requests, whatever was added and removed."""

from __future__ import annotations

import random
from math import inf

import pytest

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.holders import IN_USE, ON_DEVICE, ON_HOST
from motet.policies.cluster.worker_load import tokens_left, tokens_to_prefill
from motet.shared.model import PictureBrief, RequestBrief
from tests.support_worker import PERF, worker_limits


def brief(
    request_id: str, rank: int = 0, phase="waiting", *, prompt=10, output=0, predicted=20, tpot=0.0, **more
) -> RequestBrief:
    return RequestBrief(request_id, 0, f"d{rank}" if rank else "", rank, prompt, output, predicted, phase, tpot, **more)


def assert_aggregates_are_true(state: ClusterState) -> None:
    for worker_id in state.workers():
        row = {name: column[state.row(worker_id)] for name, column in state.table.items()}
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
        assert row["exists"] == len(requests)
        assert row["exists"] + row["extra_rows"] == sum(r.rows for r in requests)
        load = sum(r.rows * r.rank for r in requests)
        rows_ms = PERF.decode_row_ms * sum(r.rows for r in requests)
        assert row["step_ms"] == pytest.approx(PERF.decode_base_ms + rows_ms + PERF.decode_lora_ms * load)
        to_come = sum(map(tokens_left, queue)) + sum(map(tokens_left, running)) / 2
        assert row["kv_tokens_promised"] == row["queue_tokens"] + to_come
        assert row["tightest_tpot_ms"] == min((r.tpot_slo_ms for r in requests if r.tpot_slo_ms), default=inf)
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
            tpot=draw.choice([0.0, 50.0, 200.0]),
            picture=draw.choice([None, None, *map(PictureBrief, (0.5, 1.0, 2.0, 8.0))]),
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
        assert len(state.ids) == max(16, 1 << number.bit_length()), "it doubles from 16"
        state.put_request(f"w{number}", brief("r", 64))
    size = len(state.ids)
    for number in range(100):
        state.drop_worker(f"w{number}")
    state.drop_worker("never seen")
    assert (
        set(state.ids) == {""} and len(state) == 0 and (state.table["base"] == -1).all() and not state.table["rank_sum"].any()
    )
    for number in range(100):
        state.put_worker(f"v{number}", worker_limits(), PERF)
    assert len(state.ids) == size and sorted(state.workers()) == sorted(f"v{n}" for n in range(100))
    assert all(state.ids[state.row(w)] == w for w in state.workers())


def holders(state: ClusterState, digest: str) -> dict[str, int]:
    held = state.holders(digest)
    if held is None:
        return {}
    assert held.loaded.tolist() == [bool(bits & (ON_DEVICE | IN_USE)) for bits in held.bits.tolist()]
    return {state.ids[row]: bits for row, bits in zip(held.rows.tolist(), held.bits.tolist(), strict=True)}


def test_where_an_adapter_is_follows_tiers_and_the_requests_that_use_it():
    state = ClusterState()
    for worker_id in ("a", "b"):
        state.put_worker(worker_id, worker_limits(), PERF)
    state.replace_adapters("a", {"d8": "device", "d16": "host"})
    state.put_adapter("b", "d8", "disk")
    assert holders(state, "d8") == {"a": ON_DEVICE | ON_HOST}
    state.put_request("b", brief("1", 8))
    state.put_request("b", brief("2", 8))
    assert holders(state, "d8") == {"a": ON_DEVICE | ON_HOST, "b": IN_USE}
    state.drop_request("b", "1")
    state.put_adapter("b", "d8", "host")
    assert holders(state, "d8") == {"a": ON_DEVICE | ON_HOST, "b": IN_USE | ON_HOST}
    state.replace_requests("b", [])
    state.replace_adapters("a", {"d16": "host"})
    assert holders(state, "d8") == {"b": ON_HOST} and holders(state, "d16") == {"a": ON_HOST}
    state.drop_adapter("b", "d8")
    state.drop_worker("a")
    assert holders(state, "d8") == holders(state, "d16") == {}


def test_where_adapters_are_stays_true_over_random_changes():
    draw = random.Random(5)
    state = ClusterState()
    for _ in range(3000):
        worker_id, digest, what = f"w{draw.randrange(6)}", f"d{draw.choice([4, 8])}", draw.randrange(7)
        if worker_id not in state:
            state.put_worker(worker_id, worker_limits(), PERF)
        made = brief(f"r{draw.randrange(4)}", draw.choice([0, 4, 8]), draw.choice(["waiting", "running"]))
        if made.rank and draw.random() < 0.5:
            made.picture = PictureBrief(1.0, ("d4",) if made.rank == 8 else ("d8",))
        match what:
            case 0 | 1:
                state.put_request(worker_id, made)
            case 2:
                state.drop_request(worker_id, made.request_id)
            case 3:
                state.put_adapter(worker_id, digest, draw.choice(["device", "host", "disk"]))
            case 4:
                state.drop_adapter(worker_id, digest)
            case 5:
                state.replace_requests(worker_id, [made])
                state.replace_adapters(worker_id, {digest: "device"})
            case 6 if draw.random() < 0.1:
                state.drop_worker(worker_id)
        tiers = {"device": ON_DEVICE | ON_HOST, "host": ON_HOST, "disk": 0}
        for one in ("d4", "d8"):
            expected = {}
            for w in state.workers():
                used = any(one in r.adapter_digests for r in state.requests(w).values())
                bits = tiers.get(state.adapters(w).get(one, "disk"), 0) | (IN_USE if used else 0)
                if bits:
                    expected[w] = bits
            assert holders(state, one) == expected


def test_a_workers_own_count_of_tokens_left_replaces_the_schedulers():
    state = ClusterState()
    state.put_worker("a", worker_limits(), PERF)
    state.put_request("a", brief("1", 8, "running", predicted=100))
    state.change_requests("a", (), (), 0.0, running_left=40)
    assert state.table["running_left"][state.row("a")] == 40
    state.drop_request("a", "1")
    assert state.table["running_left"][state.row("a")] == 0


def test_homes_are_known_for_workers_that_come_later_and_forgotten_with_a_worker() -> None:
    state = ClusterState()
    state.put_homes("late", ["d", "e"])
    assert state.homes.of("d") is None
    for worker_id in ("here", "late"):
        state.put_worker(worker_id, worker_limits(), PERF)
    state.put_homes("here", ["d"])
    assert sorted(state.homes.of("d")) == sorted([state.row("here"), state.row("late")])
    state.put_homes("here", [])
    assert list(state.homes.of("d")) == [state.row("late")]
    state.drop_worker("late")
    assert state.homes.of("d") is None and state.homes.of("e") is None
    state.put_worker("late", worker_limits(), PERF)
    assert list(state.homes.of("e")) == [state.row("late")], "it came back"


def test_the_table_counts_adapters_that_are_loaded_and_those_that_requests_use() -> None:
    state = ClusterState()
    state.put_worker("w", worker_limits(), PERF)
    row = state.row("w")

    def counts() -> tuple[float, float]:
        return state.table["adapters_loaded"][row], state.table["adapters_used"][row]

    state.replace_adapters("w", {"d8": "device", "idle": "device", "cold": "host"})
    assert counts() == (2, 0)
    state.put_request("w", brief("r1", 8))
    state.put_request("w", brief("r2", 16))
    assert counts() == (3, 2), "that of r2 is about to be loaded"
    state.drop_adapter("w", "idle")
    state.drop_request("w", "r2")
    assert counts() == (1, 1)
    state.drop_adapter("w", "d8")
    assert counts() == (1, 1), "it is in use"
    state.replace_requests("w", [])
    assert counts() == (0, 0)
