"""Simulating the workers of a plan: which are simulated, and what counts as a missed objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from motet.twin.planning.check import Result, check
from motet.twin.planning.kinds import Outcome, Part
from motet.twin.planning.loads import Loads
from motet.twin.workload import Lengths
from tests.twin.planning.support import NATIVE, VLLM, Told, good, loads, outcome

KINDS = [VLLM.kind, NATIVE.kind]


def tried(parts: Sequence[tuple[int, Part]], run: Told, seeds: tuple[int, ...] = (1,)) -> list[Result]:
    return check(KINDS, parts, seeds=seeds, warm_s=1.0, duration_s=10.0, run=run)


def renamed(one: Loads) -> Loads:
    return replace(one, names=tuple(f"other-{name}" for name in one.names))


def test_workers_that_differ_in_names_only_are_simulated_once_with_each_seed() -> None:
    one = loads([2.0, 1.0], [8, 16])
    run = Told(lambda _, part: good(part))
    results = tried([(0, Part(setting=1, loads=one)), (0, Part(setting=1, loads=renamed(one)))], run, (1, 2))
    assert [(len(job.parts), job.seed) for job in run.calls[0]] == [(1, 1), (1, 2)]
    assert [result.arrived.tolist() for result in results] == [[2000, 2000]] * 2


@pytest.mark.parametrize(
    "other",
    [
        Part(setting=2, loads=loads([2.0, 1.0], [8, 16])),
        Part(setting=1, loads=loads([2.0, 1.1], [8, 16])),
        Part(setting=1, loads=loads([2.0, 1.0], [8, 8])),
    ],
    ids=["setting", "rate", "rank"],
)
def test_workers_that_differ_in_anything_else_are_simulated_each(other: Part) -> None:
    run = Told(lambda _, part: good(part))
    tried([(0, Part(setting=1, loads=loads([2.0, 1.0], [8, 16]))), (0, other)], run)
    assert len(run.calls[0]) == 2


def test_a_simulation_gets_only_the_lengths_that_its_worker_draws_from() -> None:
    two = replace(loads([1.0, 1.0]), pool=np.array([0, 1]), lengths=(Lengths(np.array([1]), np.array([1])),) * 2)
    run = Told(lambda _, part: good(part))
    tried([(0, Part(setting=0, loads=two.take(np.array([1]), np.array([1.0]))))], run)
    assert len(run.calls[0][0].parts[0].loads.lengths) == 1


def test_workers_that_share_the_load_of_all_are_simulated_in_one_job() -> None:
    parts = [
        (1, Part(setting=0, loads=loads([1.0]))),
        (0, Part(setting=0, loads=loads([5.0]))),
        (1, Part(setting=0, loads=loads([2.0]))),
    ]
    run = Told(lambda _, part: outcome([int(1000 * part.loads.rate[0])]))
    results = tried(parts, run, (1, 2))
    assert sorted(len(job.parts) for job in run.calls[0]) == [1, 1, 2, 2]
    assert [int(result.arrived[0]) for result in results] == [2000, 10_000, 4000], "in the order of the workers"


def test_of_workers_that_share_their_load_one_may_miss_what_another_makes_good() -> None:
    """Which of them served a late request is chance. A worker by itself has no other to make it good."""

    def says(_: int, part: Part) -> Outcome:
        return outcome([1000], attained=[985 if part.loads.rate[0] == 1.0 else 1000])

    parts = [Part(setting=0, loads=loads([1.0])), Part(setting=0, loads=loads([2.0]))]
    together = tried([(1, part) for part in parts], Told(says))
    alone = tried([(0, part) for part in parts], Told(says))
    assert [result.valid for result in together] == [True, True]
    assert [result.valid for result in alone] == [False, True]


def result(arrived: list[int], attained: list[int], served: list[int] | None = None, required: float = 0.99) -> Result:
    done = np.array(attained)
    needed = np.full(len(arrived), required)
    return Result(
        arrived=np.array(arrived),
        served=np.array(arrived if served is None else served),
        attained=done,
        required=needed,
        in_ttft=1.0,
        in_tpot=1.0,
        ttft_p99_ms=1.0,
        tpot_p99_ms=1.0,
    )


@pytest.mark.parametrize(
    ("required", "attained", "valid"),
    [(0.99, 990, True), (0.99, 989, False), (0.9, 900, True), (1.0, 1000, True), (1.0, 999, False)],
)
def test_a_worker_keeps_its_objectives_when_the_required_share_of_its_requests_does(
    required: float, attained: int, valid: bool
) -> None:
    (found,) = tried(
        [(0, Part(setting=0, loads=loads([1.0], share=required)))], Told(lambda *_: outcome([1000], attained=[attained]))
    )
    assert found.valid is valid


def test_an_adapter_with_few_requests_is_not_missing_by_chance() -> None:
    """Of 20 requests one is 5%, which 99% do not allow; of 2,000 the same 5% is more than three standard deviations."""
    found = result([20, 2000, 10_000], [19, 1900, 10_000])
    assert found.missing.tolist() == [False, True, False]
    assert not found.valid
    assert result([20, 10_000], [19, 10_000]).valid


def test_a_worker_is_not_valid_where_an_adapter_misses_however_good_the_others_are() -> None:
    found = result([100, 100_000], [80, 100_000])
    assert found.share > 0.99 and found.missing.tolist() == [True, False] and not found.valid


def test_an_adapter_of_whose_requests_less_than_nine_tenths_were_served_is_starved() -> None:
    found = result([10, 10, 0], [9, 8, 0], served=[9, 8, 0], required=0.5)
    assert found.starved == 1 and not found.valid
    assert found.served_share == pytest.approx(17 / 20)


def test_what_a_worker_misses_is_the_objective_that_fewer_requests_keep() -> None:
    assert replace(result([10], [5]), in_ttft=0.5, in_tpot=0.9).missed == "TTFT"
    assert replace(result([10], [5]), in_ttft=0.9, in_tpot=0.5).missed == "TPOT"


def test_seeds_add_up_and_the_worst_percentile_counts() -> None:
    ttft_ms = iter((10.0, 30.0))
    run = Told(lambda _, part: outcome([100], attained=[99], ttft_ms=next(ttft_ms)))
    (found,) = tried([(0, Part(setting=0, loads=loads([1.0])))], run, (1, 2))
    assert (found.arrived.tolist(), found.attained.tolist(), found.ttft_p99_ms) == ([200], [198], 30.0)
    assert found.in_ttft == pytest.approx(0.99)
