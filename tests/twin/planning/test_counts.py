"""How many workers the law proposes when they must be alike, may be lost, or are all to be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from motet.policies.plan.fleet import CannotServe, Kind, Packed
from motet.policies.plan.packing import pack
from motet.twin.planning.counts import Question, alike, divided, workers_for
from motet.twin.planning.planner import Goal, offered
from tests.twin.planning.support import NATIVE, VLLM, loads

KINDS = offered([VLLM], Goal())
NATIVES = offered([NATIVE], Goal())
DEMAND = loads([9.0] * 16, [8, 16] * 8).demand


def packed(kind: int, setting: int) -> Packed:
    facts = {
        name: 0.0 for name in ("strain", "capacity", "busy", "batch", "adapters_in_use", "miss_share", "tpot_ms", "ttft_ms")
    }
    return Packed(kind=kind, rows=(0,), shares=(1.0,), setting=setting, limit="KV", **facts)


def test_workers_of_one_setting_get_the_one_that_most_have() -> None:
    asked: list[int] = []

    def propose(kinds: Sequence[Kind]) -> list[Packed]:
        asked.append(len(kinds[0].settings))
        return [packed(0, 0)] if len(kinds[0].settings) == 1 else [packed(0, 3), packed(0, 5), packed(0, 5)]

    found = alike(propose, NATIVES, frozenset({0}))
    assert [worker.setting for worker in found] == [5], "settings keep their numbers"
    assert asked == [len(NATIVES[0].settings), 1]


def test_where_that_setting_does_not_serve_all_it_is_the_next() -> None:
    def propose(kinds: Sequence[Kind]) -> list[Packed]:
        if len(kinds[0].settings) > 1:
            return [packed(0, 3), packed(0, 5), packed(0, 5)]
        if kinds[0].settings.kv_tokens[0] == NATIVES[0].settings.kv_tokens[5]:
            raise CannotServe("too little memory")
        return [packed(0, 0)]

    assert [worker.setting for worker in alike(propose, NATIVES, frozenset({0}))] == [3]


def test_where_no_single_setting_serves_all_the_first_reason_is_given() -> None:
    def propose(kinds: Sequence[Kind]) -> list[Packed]:
        if len(kinds[0].settings) > 1:
            return [packed(0, 3), packed(0, 5), packed(0, 5)]
        raise CannotServe(f"KV {kinds[0].settings.kv_tokens[0]:.0f}")

    with pytest.raises(CannotServe, match=f"KV {NATIVES[0].settings.kv_tokens[5]:.0f}"):
        alike(propose, NATIVES, frozenset({0}))


def test_kinds_that_need_not_be_alike_keep_their_settings() -> None:
    workers = [packed(0, 3), packed(0, 5)]
    assert alike(lambda _: workers, NATIVES, frozenset()) == workers


def test_a_divided_worker_is_two_with_half_of_each_adapters_load() -> None:
    (one,) = pack(loads([4.0, 2.0]).demand, KINDS).workers
    found = divided(loads([4.0, 2.0]).demand, KINDS, [one], 3)
    assert sorted(worker.shares for worker in found) == [(0.25, 0.25), (0.25, 0.25), (0.5, 0.5)]
    assert all(worker.rows == (0, 1) and worker.strain < one.strain for worker in found)


def test_no_more_workers_are_made_by_dividing_than_are_allowed() -> None:
    (one,) = pack(loads([4.0]).demand, KINDS).workers
    with pytest.raises(CannotServe, match="3 workers are needed, and 2 are allowed"):
        divided(loads([4.0]).demand, [replace(KINDS[0], most=2)], [one], 3)


@pytest.mark.parametrize("lost", [1, 3])
def test_surviving_workers_serve_every_adapter_whole_and_take_every_rank(lost: int) -> None:
    workers = workers_for(DEMAND, KINDS, Question(survive=lost))
    shares = np.zeros(16)
    for worker in workers:
        shares[list(worker.rows)] += worker.shares
        assert KINDS[0].settings.max_rank[worker.setting] >= 16
    assert shares == pytest.approx(np.ones(16))
    most = (len(workers) - lost) / len(workers)
    assert max(worker.busy for worker in workers) <= 0.95 * most + 1e-9, "each has room for its part of what is lost"


def test_with_one_worker_less_the_law_could_not_survive() -> None:
    workers = workers_for(DEMAND, KINDS, Question(survive=1))
    fewer = [replace(KINDS[0], most=len(workers) - 1)]
    with pytest.raises(CannotServe, match=f"{len(workers) - 1} workers are allowed"):
        workers_for(DEMAND, fewer, Question(survive=1))


def test_spread_over_all_workers_each_is_strained_less() -> None:
    few = workers_for(DEMAND, KINDS, Question())
    many = workers_for(DEMAND, [replace(KINDS[0], most=len(few) + 3)], Question(spread=True))
    assert len(many) == len(few) + 3
    assert max(worker.strain for worker in many) < max(worker.strain for worker in few)


def test_spread_without_a_number_uses_as_many_workers_as_the_plan_of_the_fewest() -> None:
    few = workers_for(DEMAND, KINDS, Question())
    assert len(workers_for(DEMAND, KINDS, Question(spread=True))) == len(few)


def test_adapters_fewer_than_workers_are_on_several() -> None:
    workers = workers_for(loads([3.0]).demand, [replace(KINDS[0], most=3)], Question(spread=True))
    assert sum(sum(worker.shares) for worker in workers) == pytest.approx(1.0) and len(workers) == 3
