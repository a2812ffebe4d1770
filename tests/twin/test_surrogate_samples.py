"""Runs to learn from: drawn repeatably over the paper's space, most of them near the capacity, and read back unchanged."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import planner_samples
from bench.watch import Watch
from motet.policies.plan.paper import TESTING_POINTS
from motet.twin.surrogate import samples
from motet.twin.surrogate.samples import COLUMNS, Description, draw, from_cells, requests, simulate, to_line
from motet.twin.surrogate.table import from_samples
from motet.twin.traces import FileError
from motet.twin.vllm.tables import rows


def small(**changes: object) -> Description:
    """A short open run of a few adapters."""
    run = next(one for one in draw(16) if not one.paper)
    return replace(run, adapters=6, a_max=8, rates_req_s=(0.8, 0.4), duration_s=40.0, warm_s=10.0, **changes)


def test_a_prefix_of_the_runs_is_drawn_the_same() -> None:
    assert draw(40)[:16] == draw(16)
    assert draw(16, seed=2) != draw(16)


def test_most_runs_are_near_the_capacity_and_all_are_possible() -> None:
    runs = draw(160)
    near = [samples.NEAR[0] <= run.verdict().busy[0] <= samples.NEAR[1] for run in runs]
    assert np.mean(near) == pytest.approx(samples.NEAR_SHARE, abs=0.06)  # their ranks are dealt anew when they are numbered
    for run in runs:
        assert math.isfinite(run.verdict().capacity[0])
        assert len(run.adapter_ranks) == len(run.adapter_rates_req_s) == run.adapters


def test_paper_runs_keep_to_the_papers_grid_and_both_models_have_as_many() -> None:
    runs = draw(64)
    for run in runs:
        if run.paper:
            assert {run.adapters, run.a_max} <= set(TESTING_POINTS)
            assert run.a_max <= run.adapters
            assert run.s_max == max(run.ranks)
    counts = Counter((run.profile, run.paper) for run in runs)
    assert set(counts.values()) == {22, 10}


def test_only_paper_runs_whose_slots_are_scarce_last_an_hour() -> None:
    hours = [run for run in draw(160) if run.duration_s == samples.HOUR_S]
    assert hours
    assert all(run.paper and run.adapters > run.a_max for run in hours)


def test_lengths_of_open_runs_have_the_mean_and_the_deviation_asked_for() -> None:
    run = small(prompt_tokens=200.0, output_tokens=100.0, deviation=0.5)
    work = requests(replace(run, duration_s=2_000.0))
    assert np.mean(work.prompt_tokens) == pytest.approx(200, rel=0.05)
    assert np.std(work.output_tokens) == pytest.approx(50, rel=0.05)


def test_a_run_is_repeated_exactly_and_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = small()
    labels = simulate(run)
    assert simulate(run) == labels
    (tmp_path / "s.csv").write_text(",".join(COLUMNS) + "\n" + to_line(run, labels) + "\n")
    assert [from_cells(row) for row in rows(tmp_path, "s")] == [(run, labels)]


def test_a_bad_cell_of_a_sample_is_named(tmp_path: Path) -> None:
    line = to_line(small(), simulate(small())).split(",")
    for name, text, reason in (
        ("ranks", "8 x", "not a list of numbers"),
        ("a_max", "2.5", "not a whole number"),
        ("tok_s", "", "not a number"),
    ):
        cells = [text if column == name else cell for column, cell in zip(COLUMNS, line, strict=True)]
        (tmp_path / "s.csv").write_text(",".join(COLUMNS) + "\n" + ",".join(cells) + "\n")
        with pytest.raises(FileError, match=rf"s\.csv:2: {name}: .*{reason}"):
            [from_cells(row) for row in rows(tmp_path, "s")]


def test_a_light_load_is_served_and_a_heavy_one_starves() -> None:
    light, heavy = small(prompt_tokens=100.0, output_tokens=50.0), small(prompt_tokens=2_000.0, output_tokens=600.0)
    heavy = replace(heavy, rates_req_s=(6.4,))
    table = from_samples((run, simulate(run)) for run in (light, heavy))
    assert table.starved.tolist() == table.law_starved.tolist() == [False, True]
    assert table.tok_s[0] == pytest.approx(table.asked_tok_s[0], rel=0.02)
    assert table.tok_s[1] < 0.8 * table.asked_tok_s[1]
    assert table.busy[0] < 1 < table.busy[1]


def test_the_bench_continues_a_file_and_makes_a_torn_line_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "samples.csv"
    assert planner_samples.made(path) == set()
    whole = path.read_text() + "3,llama\n"
    path.write_text(whole + "4,qw")
    assert planner_samples.made(path) == {3}
    assert path.read_text() == whole
    path.write_text(whole.splitlines()[0] + "\n")
    monkeypatch.setattr(planner_samples, "draw", lambda count: [replace(small(), number=number) for number in range(count)])
    args = Namespace(out=path, count=2, processes=1, quick=False)
    assert planner_samples.run(Namespace(**vars(args), watch=Watch()))["runs"] == 2
    before = path.read_text()
    assert planner_samples.run(Namespace(**vars(args) | {"count": 3}, watch=Watch()))["runs"] == 3
    assert path.read_text().startswith(before)
    assert planner_samples.made(path) == {0, 1, 2}
