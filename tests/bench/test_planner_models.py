"""The planner's models: they learn from simulated runs, and their figures are those of the paper's definitions."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import planner_models
from bench.planner_models import Data, macro_f1, near, smape, within_2x
from bench.watch import Watch
from motet.twin.surrogate import train
from motet.twin.surrogate.models import not_simulated, our_models, paper_models
from motet.twin.surrogate.rules import decode, encode
from motet.twin.surrogate.samples import Labels, draw
from motet.twin.surrogate.table import STARVED_BELOW, Table, from_samples

NAME = "llama-3.1-8b@h100"


def pretended(count: int) -> Table:
    """Drawn runs of which the law is right up to 15%, so that models have something to learn."""
    found = []
    for run in draw(count):
        verdict, demand = run.verdict(), run.demand()
        wrong = 1.15 if run.a_max < run.adapters else 1.0
        share = min(1.0, wrong / float(verdict.busy[0]))
        labels = dict.fromkeys(Labels.__dataclass_fields__, 1.0) | {
            "arrived_tok_s": demand.tokens_s,
            "tok_s": share * demand.tokens_s,
            "served_share": share,
            "ttft_p99_ms": 100.0 * run.adapters,
            "attained_share": float(verdict.busy[0] < 0.9),
        }
        found.append((run, Labels(**labels)))
    return from_samples(found)


@pytest.fixture(scope="module")
def table() -> Table:
    return pretended(240)


def test_the_papers_error_is_half_of_the_usual_one_and_f1_is_a_mean() -> None:
    assert smape(np.array([110.0, 100.0]), np.array([90.0, 100.0])) == pytest.approx(100 * (20 / 200) / 2)
    true, said = np.array([1, 1, 0, 0], bool), np.array([1, 0, 0, 0], bool)
    assert macro_f1(true, said) == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert np.isnan(smape(np.array([]), np.array([])))


def test_a_prediction_is_within_a_factor_of_2_on_either_side() -> None:
    assert within_2x(np.array([51.0, 199.0, 49.0, 201.0]), np.full(4, 100.0)) == 0.5


def test_the_boundary_is_where_the_load_is_near_the_capacity(table: Table) -> None:
    busy = table.busy[near(table)]
    assert 0 < len(busy) < len(table)
    assert (busy.min(), busy.max()) >= (0.7, 0.7)
    assert busy.max() <= 1.4


def test_models_learn_what_the_law_gets_wrong(table: Table) -> None:
    held = planner_models.held_back(table)
    learned, test = our_models(table.where(~held)), table.where(held & table.paper)
    law, ours = smape(test.law_tok_s, test.tok_s), smape(learned.tok_s(test), test.tok_s)
    assert ours < 0.6 * law
    assert np.mean(learned.starved(test) == test.starved) > np.mean(test.law_starved == test.starved)


def test_the_papers_models_and_the_small_tree_learn_too_and_rules_are_few(table: Table) -> None:
    mine = table.where(table.paper & (table.profile == NAME))
    models = paper_models(mine, not_simulated(NAME, 100), train.CHOSEN[NAME])
    for family in planner_models.FAMILIES:
        assert np.mean(models.starved(family, mine.paper_features) == mine.starved) > 0.9
    assert smape(models.tok_s("rf", mine.paper_features), mine.tok_s) < 5
    assert smape(models.tok_s("svm", mine.paper_features), mine.tok_s) < 5
    assert smape(models.tok_s("small_tree", mine.paper_features), mine.tok_s) < 15
    for tree in (models.small_throughput, models.small_starvation):
        assert 1 < len(list(tree.rules())) <= train.MOST_RULES


def test_the_grids_are_those_of_appendix_b_without_repetition() -> None:
    for families, sizes in ((train.THROUGHPUT, (468, 636, 2)), (train.STARVATION, (312, 636, 2))):
        for name, size in zip(("rf", "svm", "knn"), sizes, strict=True):
            points = families[name].points
            assert len({tuple(sorted(point.items(), key=str)) for point in points}) == len(points) == size
    for chosen in train.CHOSEN.values():
        for task, families in (("throughput", train.THROUGHPUT), ("starvation", train.STARVATION)):
            for name, point in chosen[task].items():
                assert {k: v for k, v in point.items() if k != "n_estimators"} in families[name].points


def test_runs_for_the_small_trees_are_others_than_those_that_were_simulated() -> None:
    free = not_simulated(NAME, 64)
    assert free.shape == (22, 7)
    simulated = [tuple(row) for row in pretended(64).paper_features.tolist()]
    assert np.mean([tuple(row) in simulated for row in free.tolist()]) < 0.2


def test_a_search_prefers_what_predicts() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (200, 2))
    flat = train.Family(train.THROUGHPUT["rf"].make, [{"max_depth": 10}, {"max_depth": 10, "min_samples_leaf": 128}])
    point, score = train.search(flat, x, 10 * x[:, 0] + x[:, 1], scoring="r2", trees=True)
    assert "min_samples_leaf" not in point
    assert score > 0.8


def test_an_svm_learns_over_decades_and_answers_far_away_with_a_number() -> None:
    rates = np.geomspace(1, 1000, 60)
    x = np.column_stack([np.full((60, 1), 8.0), rates, np.zeros((60, 1)), np.full((60, 3), 16.0), np.full((60, 1), 8.0)])
    model = train.fit(train.THROUGHPUT["svm"], {"C": 1000, "kernel": "rbf", "epsilon": 1}, x, 400 * rates, trees=False)
    assert model.predict(x) == pytest.approx(400 * rates, rel=0.1)
    assert np.isfinite(model.predict(x * 1e6)).all() and (model.predict(x * 1e6) > 0).all()


def test_the_nearest_run_is_one_of_nearly_the_same_rate_whatever_its_ranks() -> None:
    near, far = [64.0, 10.0, 0.1, 32.0, 20.0, 8.0, 32.0], [64.0, 14.0, 0.1, 16.0, 16.0, 0.0, 32.0]
    model = train.fit(train.THROUGHPUT["knn"], {"p": 2}, np.array([near, far]), np.array([1.0, 2.0]), trees=False)
    assert model.predict([[64.0, 10.5, 0.1, 16.0, 16.0, 0.0, 32.0]]) == [1.0]


def test_a_search_of_a_scaled_model_names_points_as_the_grid_does() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 2, (120, 7))
    few = replace(train.THROUGHPUT["svm"], points=[{"kernel": "linear", "C": 1000}, {"kernel": "linear", "C": 1e-6}])
    assert train.search(few, x, np.exp(x[:, 0]), scoring="r2", trees=False)[0] == {"kernel": "linear", "C": 1000}


def test_the_bench_counts_flagged_runs_apart_and_says_who_is_right(
    table: Table, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    held = planner_models.held_back(table)
    test = table.where(held & table.paper)
    flagged = replace(test, flagged=np.arange(len(test)) % 2 == 0)
    data = Data(table.where(~held), {"set": flagged}, {})
    monkeypatch.setattr(planner_models, "data_of", lambda args: data)
    args = Namespace(runs=None, search=None, write=None, quick=True, watch=Watch())
    figures = planner_models.run(args)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    counts = {line[2]: int(line[3].replace(",", "")) for line in lines if line[:2] == ["llama", "set"]}
    mine = flagged.where(flagged.profile == NAME)
    assert counts == {"all": len(mine), "unflagged": int((~mine.flagged).sum())}
    law = macro_f1(mine.starved, mine.law_tok_s < STARVED_BELOW * mine.asked_tok_s)
    assert figures["f1_law_llama"] == round(law, 3)
    assert figures["us_per_prediction"] < 5
    with pytest.raises(SystemExit, match="--write says how good the rules are on measured runs; give --runs"):
        planner_models.run(Namespace(**vars(args) | {"write": tmp_path / "rules.json"}))


def test_what_ships_says_what_it_was_learned_from_and_how_good_it_is(table: Table) -> None:
    held = planner_models.held_back(table)
    data = Data(table.where(~held), {planner_models.PURPOSES[0]: table.where(held)}, {})
    mine = data.train.where(data.train.paper & (data.train.profile == NAME))
    models = paper_models(mine, not_simulated(NAME, 100), train.CHOSEN[NAME])
    found = decode(encode({NAME: planner_models.kept(NAME, models, data, free=34)}))[NAME]
    test = table.where(held & table.paper & (table.profile == NAME))
    assert (found.simulated_runs, found.forest_runs, found.measured_runs) == (len(mine), 34, len(test))
    assert found.smape_percent == pytest.approx(smape(found.throughput.predict(test.paper_features), test.tok_s), abs=0.005)
    assert found.f1 == pytest.approx(macro_f1(test.starved, found.starvation.predict(test.paper_features) > 0.5), abs=5e-4)
