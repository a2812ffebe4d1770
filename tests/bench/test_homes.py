"""Promise: rivals of homes place as their systems do, and what moves is counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import homes
from bench.homes import Case, moves, workload
from bench.rivals.homes import min_cost_flow, rendezvous, replicas
from motet.policies.cluster.homes import bytes_to_load, of_adapters

LOAD = {f"a{place:03}": 1.0 / place for place in range(1, 101)}
SIZE = dict.fromkeys(LOAD, 1)
WORKERS = [f"w{number}" for number in range(8)]


def test_replicas_are_in_proportion_to_load_and_at_least_one() -> None:
    assert replicas({"a": 6.0, "b": 1.0, "c": 1.0, "idle": 0.0}, 4) == {"a": 3, "b": 1, "c": 1}


def test_a_worker_that_comes_takes_by_hashing_only_what_it_wins() -> None:
    before, after = rendezvous(LOAD, WORKERS), rendezvous(LOAD, [*WORKERS, "w8"])
    assert {one: len(there) for one, there in of_adapters(before).items()} == replicas(LOAD, 8)
    for worker in WORKERS:
        assert set(after[worker]) <= set(before[worker]) | {one for one, count in replicas(LOAD, 9).items() if count > 1}


def test_the_flow_moves_nothing_without_a_reason_and_no_more_than_the_new_worker_gets() -> None:
    before = min_cost_flow(LOAD, SIZE, WORKERS, {})
    assert max(map(len, before.values())) - min(map(len, before.values())) <= 8
    assert bytes_to_load(min_cost_flow(LOAD, SIZE, WORKERS, before), SIZE, before) == 0
    after = min_cost_flow(LOAD, SIZE, [*WORKERS, "w8"], before)
    assert 0 < bytes_to_load(after, SIZE, before) <= sum(replicas(LOAD, 9).values()) / 9


def test_homes_move_fewer_bytes_than_both_and_are_more_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "REPLANS", 7)
    found = moves(4, seed=3)
    moved, uneven = ({name: pair[at] for name, pair in found.items()} for at in (0, 1))
    assert moved["homes"] <= min(moved["rendezvous"], moved["min_cost_flow"])
    assert uneven["homes"] < min(uneven["rendezvous"], uneven["min_cost_flow"])


def test_a_recorded_order_is_kept_and_the_most_popular_adapter_is_the_first(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = [f"2024-01-01 00:00:{second:02},{name}" for second, name in enumerate("xyyzyx")]
    file.write_text("gmt_create,lora_ids\n" + "\n".join(rows) + "\n")
    drawn = workload(Case(policy="motet", workers=4, rate=5.0, seconds=5.0, seed=1, order=file)).adapter
    cycle = [1, 0, 0, 2, 0, 1]
    start = next(at for at in range(6) if list(drawn[:6]) == list(np.roll(cycle, -at)))
    assert list(drawn) == [cycle[(start + at) % 6] for at in range(len(drawn))]
