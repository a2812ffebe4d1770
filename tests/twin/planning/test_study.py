"""A plan written as JSON, read again and judged on another load; and why an adapter is where it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from motet.shared.plan import Plan, read_plan, write_plan
from motet.twin.planning.kinds import Part
from motet.twin.planning.loads import Loads
from motet.twin.planning.planner import Breaking, Goal, Made, Offer, make, tried
from motet.twin.planning.study import checked, explained, parts_of, written
from tests.twin.planning.support import GOOD, NATIVE, SHORT, VLLM, Told, loads, outcome

FEWEST = Goal()
MIXED = loads([18.0, 6.0, 2.0, 0.4] * 4, [8, 8, 16, 32] * 4)


def plan_of(made: Made, offer: Offer, *, breaks: Breaking | None = None, goal: Goal = FEWEST) -> Plan:
    return written(made, [offer], goal, SHORT if made.results else None, bound=1.5, breaks=breaks)


def planned(one: Loads, offer: Offer = VLLM) -> tuple[Made, Plan]:
    made = make(one, [offer], FEWEST, SHORT, GOOD)
    return made, plan_of(made, offer)


def contents(parts: list[tuple[int, Part]]) -> list[tuple[int, int, dict[str, float]]]:
    """(kind, setting, rate by adapter) of each worker."""
    return [
        (kind, part.setting, dict(zip(part.loads.names, np.round(part.loads.rate, 9).tolist(), strict=True)))
        for kind, part in parts
    ]


@pytest.mark.parametrize("offer", [VLLM, NATIVE], ids=["vllm", "native"])
def test_a_plan_that_was_written_and_read_has_the_same_workers_on_the_same_load(tmp_path: Path, offer: Offer) -> None:
    one = MIXED if offer is VLLM else MIXED.faster(0.15)
    made, plan = planned(one, offer)
    write_plan(tmp_path / "plan.json", plan)
    parts, unknown = parts_of(read_plan(tmp_path / "plan.json"), one, [offer])
    assert contents(parts) == contents(made.parts)
    assert len(parts) > 1 and unknown == 0.0


def test_copies_of_an_adapter_keep_their_shares_of_its_rate() -> None:
    """One adapter that needs more than a worker, at half of the load for which it was planned."""
    made, plan = planned(loads([150.0, 1.0]))
    parts, _ = parts_of(plan, loads([75.0, 1.0]), [VLLM])
    rates = [part.loads.rate[part.loads.names.index("a0")] for _, part in parts if "a0" in part.loads.names]
    assert len(rates) > 1
    assert sum(rates) == pytest.approx(75.0)
    assert len(made.workers) == len(parts)


def test_adapters_that_the_plan_does_not_have_go_to_the_least_busy_worker_and_are_counted() -> None:
    _, plan = planned(loads([60.0, 10.0]))
    assert len(plan.workers) > 1
    now = replace(loads([60.0, 10.0, 20.0]), names=("a0", "a1", "new"))
    parts, unknown = parts_of(plan, now, [VLLM])
    assert unknown == pytest.approx(20.0 / 90.0)
    homes = [part for _, part in parts if "new" in part.loads.names]
    others = [float(part.loads.rate.sum()) for _, part in parts if "new" not in part.loads.names]
    assert len(homes) == 1 and homes[0].loads.rate.sum() - 20.0 <= min(others)


def test_a_worker_whose_adapters_are_not_asked_for_any_more_has_no_part() -> None:
    _, plan = planned(loads([60.0, 50.0]))
    parts, _ = parts_of(plan, loads([60.0]), [VLLM])
    assert len(plan.workers) > len(parts)


def test_a_kind_of_the_plan_that_is_not_offered_is_named() -> None:
    _, plan = planned(loads([1.0]))
    with pytest.raises(ValueError, match=r"the plan has workers of vllm:llama-3\.1-8b@h100; give them with --worker"):
        parts_of(plan, loads([1.0]), [NATIVE])


# ---- what is written


def test_native_workers_are_all_started_with_the_same_flags() -> None:
    """`motet up --workers N` starts equal workers, so each has slots for the one with the most adapters."""
    one = loads([6.0] * 2 + [0.001] * 150)
    _, plan = planned(one, NATIVE)
    counts = {len(worker.adapters) for worker in plan.workers}
    assert len(counts) > 1
    (flags,) = {worker.flags for worker in plan.workers}
    assert f"--max-loras {max(counts)} " in flags


def test_a_plan_says_what_was_asked_and_what_the_twin_found() -> None:
    goal = Goal(headroom=0.1)
    made = make(MIXED, [VLLM], goal, SHORT, GOOD)
    plan = plan_of(made, VLLM, goal=goal, breaks=Breaking(holds_to=1.25, worker=0, missed="TPOT"))
    assert (plan.objective, plan.headroom, plan.bound, plan.cost) == ("workers", 0.1, 1.5, float(len(made.workers)))
    found = plan.checked
    assert found is not None and found.valid and found.after_loss is None
    assert (found.attained, found.seeds, found.seconds) == (1.0, 1, 60.0)
    assert (found.holds_to, found.breaks_first, found.breaks_by) == (1.25, 1, "TPOT")
    first = plan.workers[0].adapters
    assert [adapter.rate for adapter in first] == sorted((adapter.rate for adapter in first), reverse=True)


def test_a_plan_that_was_not_simulated_has_nothing_checked() -> None:
    plan = plan_of(make(MIXED, [VLLM], Goal(), None, GOOD), VLLM)
    assert plan.checked is None
    assert {worker.attained for worker in plan.workers} == {None}


def test_what_is_attained_after_a_loss_is_written_and_counts() -> None:
    goal = Goal(survive=1)
    made = make(MIXED, [VLLM], goal, SHORT, GOOD)
    found = plan_of(made, VLLM, goal=goal).checked
    assert found is not None and (found.after_loss, found.valid) == (1.0, True)
    assert made.left is not None
    late = Told(lambda _, part: outcome([1000] * len(part.loads), attained=[500] * len(part.loads)))
    left = replace(made.left, results=tuple(tried(made.left.parts, [VLLM], SHORT, late)))
    found = plan_of(replace(made, left=left), VLLM, goal=goal).checked
    assert found is not None and (found.attained, found.after_loss, found.valid) == (1.0, 0.5, False)


def test_the_worst_adapter_is_the_one_with_the_smallest_share_of_those_that_were_asked_for() -> None:
    parts = [(0, Part(setting=0, loads=loads([1.0, 1.0, 1.0])))]
    run = Told(lambda _, part: outcome([100, 100, 0], attained=[99, 90, 0]))
    found = checked(parts, tried(parts, [VLLM], SHORT, run), SHORT)
    assert (found.worst_adapter, found.worst_attained) == ("a1", 0.9)
    assert found.attained == pytest.approx(189 / 200)


# ---- why


def test_an_adapter_is_explained_by_what_binds_with_it_and_without_it() -> None:
    made = make(MIXED, [VLLM], Goal(), None, GOOD)
    lines = explained(made, [VLLM], "a0")
    home = next(place for place, worker in enumerate(made.workers, start=1) if 0 in worker.rows)
    assert lines[0].startswith("a0: rank 8, 18 requests/s of ")
    assert len(lines) == 1 + len(made.workers)
    assert lines[home].startswith(f"On worker {home} (vllm:llama-3.1-8b@h100): ") and "without it" in lines[home]
    assert all(line.startswith("With it worker ") for at, line in enumerate(lines[1:], start=1) if at != home)


def test_an_adapter_whose_rank_a_worker_does_not_take_is_not_on_it() -> None:
    """Of two workers one takes rank 8 only."""
    made = make(loads([40.0, 30.0], [8, 32]), [VLLM], Goal(), None, GOOD)
    ranks = [int(VLLM.kind.settings.max_rank[worker.setting]) for worker in made.workers]
    assert sorted(ranks) == [8, 32]
    lines = explained(made, [VLLM], "a1")
    assert f"Not on worker {ranks.index(8) + 1} (vllm:llama-3.1-8b@h100), whose largest rank is 8." in lines


def test_an_adapter_that_is_alone_on_its_worker_leaves_nothing() -> None:
    made = make(loads([5.0]), [VLLM], Goal(), None, GOOD)
    assert explained(made, [VLLM], "a0")[1].endswith("; nothing without it.")


def test_copies_are_explained_by_what_one_worker_cannot_serve() -> None:
    made = make(loads([150.0]), [VLLM], Goal(), None, GOOD)
    assert f"One worker cannot serve it alone, so {len(made.workers)} workers share its requests." in explained(
        made, [VLLM], "a0"
    )


def test_an_unknown_adapter_is_said() -> None:
    with pytest.raises(ValueError, match="the plan has no adapter 'zz'"):
        explained(make(loads([5.0]), [VLLM], Goal(), None, GOOD), [VLLM], "zz")
