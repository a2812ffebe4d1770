"""The planner's models beside published vLLM runs: who knows what a worker serves, and whether it starves.

    python -m bench planner_models --runs DIR [--samples FILE] [--search TASK:FAMILY] [--write FILE] [--quick]

All models are trained on simulated runs (`bench planner_samples`), with hyperparameters that were chosen on them: `--search`,
whose outcome is `train.CHOSEN`. Measured runs are test data only. SMAPE is the paper's, mean |p - m| / (p + m), half of the
usual. F1 is its macro average over starved and not. The boundary has the runs whose load is .7 to 1.4 of the capacity by the
law: elsewhere "load above capacity" already answers. The twin, which simulates each run, is the ceiling of what can be learned
from it. Without `--runs`, the test runs are simulated ones that were held back.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import f1_score, make_scorer

from bench import report
from bench.planner_samples import OUT, spawn
from bench.watch import Watch
from motet.policies.plan import features
from motet.shared.json_files import FileError
from motet.twin.metrics import STARVED_BELOW
from motet.twin.surrogate import train
from motet.twin.surrogate.models import ATTAINED, OurModels, PaperModels, not_simulated, our_models, paper_models
from motet.twin.surrogate.rules import FILE, Rules, encode
from motet.twin.surrogate.samples import PAPER_TOKENS, SEATS, draw, from_cells, simulate
from motet.twin.surrogate.table import Table, from_measured, from_samples
from motet.twin.vllm.calibrate import Calibration, calibrate
from motet.twin.vllm.client import PORTS, Outcome
from motet.twin.vllm.published import MODELS, fitted, published
from motet.twin.vllm.runs import ANSWERED_SHARE, Measured, Run, predict, read_runs
from motet.twin.vllm.tables import rows

PURPOSES = ("ml-test", "dt-validation")  # the first is the paper's test set
FAMILIES = ("rf", "svm", "knn", "small_tree")
BOUNDARY = (0.7, 1.4)
QUICK_RUNS, QUICK_S, QUICK_WARM_S = 96, 240.0, 60.0
SEARCHED_RUNS = {
    "throughput": {"rf": 300, "svm": 1_700, "knn": 10_000},
    "starvation": {"rf": 1_000, "svm": 600, "knn": 10_000},
}  # of each model at most: a search ends within ten minutes
FREE_RUNS, QUICK_FREE_RUNS = 3000, 200  # that are drawn for the small trees and not simulated
BATCH = 4096
TTFT_EVERY = 3  # of the measured runs, one in so many is simulated for its TTFT
SHORT = {name: name.split("-")[0].rstrip("0123456789.") for name in MODELS}  # llama, qwen


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench alone."""
    parser.add_argument(
        "--runs", type=Path, help="folder with measured runs and calibration tables; without it, held back samples"
    )
    options(parser)


def options(parser: argparse.ArgumentParser) -> None:
    """Those that `bench planner` has, too."""
    parser.add_argument("--samples", type=Path, default=OUT, help=f"simulated runs to train on (default: {OUT})")
    parser.add_argument(
        "--search",
        action="append",
        choices=[f"{task}:{family}" for task, runs in SEARCHED_RUNS.items() for family in runs],
        help="choose hyperparameters anew, print them, and end (repeatable)",
    )
    parser.add_argument("--write", type=Path, help="write the small trees and how good they are (`twin.surrogate.rules`)")


@dataclass(frozen=True, slots=True)
class Data:
    """What models are trained on, and what they are tested on, by purpose."""

    train: Table
    tests: dict[str, Table]
    measured: dict[str, list[tuple[Run, Measured]]]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The same as `figures`."""
    return figures(args)


def figures(args: argparse.Namespace) -> dict[str, Any]:
    """Train, test, print the tables, return the figures."""
    try:
        data = data_of(args)
    except (FileError, FileNotFoundError) as error:
        raise SystemExit(f"planner_models: {error}") from None
    if args.search:
        return _search(data.train, args.search, args.watch)
    if args.write and not data.measured:
        raise SystemExit("planner_models: --write says how good the rules are on measured runs; give --runs")
    began_s = time.monotonic()
    free = {name: not_simulated(name, QUICK_FREE_RUNS if args.quick else FREE_RUNS) for name in MODELS}
    models = {name: paper_models(_of_paper(data.train, name), free[name], train.CHOSEN[name]) for name in MODELS}
    ours = our_models(data.train)
    took_s = time.monotonic() - began_s
    print(f"trained on {len(data.train)} runs ({int(data.train.paper.sum())} with the paper's lengths) in {took_s:.0f} s")
    answers = {purpose: _answers(table, models, ours) for purpose, table in data.tests.items()}
    found = (
        _accuracy(data, answers)
        | _speed(models)
        | _rules(models)
        | _ceiling(data, answers, args)
        | _measured_ttft(data, ours, args)
    )
    if data.measured:
        trees = {name: kept(name, models[name], data, len(free[name])) for name in MODELS}
        if args.write:
            args.write.write_bytes(encode(trees))
        found["rules_are_fresh"] = encode(trees) == FILE.read_bytes()
    if args.runs is not None:
        found["published_is_fresh"] = fitted(args.runs) == {name: published(name) for name in MODELS}
    numbers = found | _held_out(data.train) | {"trained_on": len(data.train)}
    return {name: None if number != number else number for name, number in numbers.items()}  # no run, no figure


# ---- data


def data_of(args: argparse.Namespace) -> Data:
    learned = (
        _quick_samples()
        if args.quick
        else from_samples(from_cells(row) for row in rows(args.samples.parent, args.samples.stem))
    )
    if args.runs is None:
        held = held_back(learned)
        return Data(learned.where(~held), {"held back": learned.where(held)}, {})
    measured = {purpose: read_runs(args.runs, purpose) for purpose in PURPOSES}
    return Data(learned, {purpose: from_measured(runs) for purpose, runs in measured.items()}, measured)


def held_back(table: Table) -> NDArray[np.bool_]:
    """A quarter of the runs, by chance."""
    return np.random.default_rng(0).permutation(len(table)) % 4 == 0


def _quick_samples() -> Table:
    """A few short runs."""
    runs = [replace(one, duration_s=QUICK_S, warm_s=QUICK_WARM_S) for one in draw(QUICK_RUNS)]
    return from_samples((one, simulate(one)) for one in runs)


def _search(table: Table, what: Sequence[str], watch: Watch) -> dict[str, Any]:
    """Choose points of grids, "task:family", by cross-validation on simulated runs. Prints them as `train.CHOSEN` has them."""
    chosen: dict[str, Any] = {name: {"throughput": {}, "starvation": {}} for name in MODELS}
    wanted = [(name, *one.split(":")) for one in what for name in MODELS]
    for number in watch.rounds(len(wanted), "searches"):
        name, task, family = wanted[number]
        of = _of_paper(table, name)
        of = of.where(np.arange(len(of)) < SEARCHED_RUNS[task][family])
        throughput = task == "throughput"
        point, score = train.search(
            (train.THROUGHPUT if throughput else train.STARVATION)[family],
            of.paper_features,
            of.tok_s if throughput else of.starved,
            scoring=make_scorer(smape, greater_is_better=False) if throughput else "f1_macro",
            trees=family == "rf",
        )
        chosen[name][task][family] = point
        print(f"{name} {task} {family}: {point}, {'SMAPE' if throughput else 'F1'} {abs(score):.3f}", flush=True)
    return {"chosen": chosen}


def _of_paper(table: Table, name: str) -> Table:
    """The runs of a profile with the paper's lengths."""
    return table.where(table.paper & (table.profile == name))


def kept(name: str, models: PaperModels, data: Data, free: int) -> Rules:
    """The small trees of a profile, and how good they are on the first measured set."""
    test = _of_paper(data.tests[PURPOSES[0]], name)
    prompt_tokens, output_tokens = PAPER_TOKENS[name]
    return Rules(
        throughput=models.small_throughput,
        starvation=models.small_starvation,
        prompt_tokens=prompt_tokens,
        output_tokens=round(output_tokens * ANSWERED_SHARE[MODELS[name]], 1),
        seats=SEATS,
        simulated_runs=len(_of_paper(data.train, name)),
        forest_runs=free,
        measured_runs=len(test),
        smape_percent=round(smape(models.tok_s("small_tree", test.paper_features), test.tok_s), 2),
        f1=round(macro_f1(test.starved, models.starved("small_tree", test.paper_features)), 3),
    )


# ---- accuracy


@dataclass(frozen=True, slots=True)
class Answers:
    """What everybody says of the runs of a table: by name, throughput and whether they starve. Columns [runs]."""

    tok_s: dict[str, NDArray[np.float64]]
    starved: dict[str, NDArray[np.bool_]]


def _answers(table: Table, models: dict[str, PaperModels], ours: OurModels) -> Answers:
    tok_s = {"law": table.law_tok_s, "ours": ours.tok_s(table)}
    starved = {"load > capacity": table.busy > 1.0, "law": table.law_starved, "ours": ours.starved(table)}
    for family in FAMILIES:
        tok_s[family], starved[family] = np.full(len(table), np.nan), np.zeros(len(table), bool)
    for name, of in models.items():
        mine = np.flatnonzero(table.profile == name)
        for family in FAMILIES if len(mine) else ():
            tok_s[family][mine] = of.tok_s(family, table.paper_features[mine])
            starved[family][mine] = of.starved(family, table.paper_features[mine])
    return Answers(tok_s, starved)


def _accuracy(data: Data, answers: dict[str, Answers]) -> dict[str, Any]:
    """Tables and figures of throughput and starvation."""
    figures: dict[str, Any] = {}
    lines, near_lines = [], []
    for name in MODELS:
        for purpose, table in data.tests.items():
            for label, chosen in (("all", table.profile == name), ("unflagged", (table.profile == name) & ~table.flagged)):
                said = answers[purpose]
                f1 = {who: macro_f1(table.starved[chosen], found[chosen]) for who, found in said.starved.items()}
                error = {who: smape(found[chosen], table.tok_s[chosen]) for who, found in said.tok_s.items()}
                counts = [int(chosen.sum()), int(table.starved[chosen].sum())]
                lines += [[f"{SHORT[name]} {purpose} {label}", *counts, *f1.values()]]
                near_lines += [[f"{SHORT[name]} {purpose} {label}", *counts, *error.values()]]
                if label == "all" and purpose == next(iter(data.tests)):
                    figures |= {f"f1_{who}_{SHORT[name]}": round(one, 3) for who, one in f1.items() if " " not in who}
                    figures |= {f"smape_{who}_{SHORT[name]}": round(one, 2) for who, one in error.items()}
    first = next(iter(answers.values()))
    print(report.table("F1 of starvation (macro)", ["", "runs", "starved", *first.starved], lines))
    print(
        report.table("SMAPE of throughput, percent, the paper's definition", ["", "runs", "starved", *first.tok_s], near_lines)
    )
    return figures


def smape(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    """The paper's, in percent. It is symmetric."""
    return float(np.mean(np.abs(predicted - measured) / (predicted + measured))) * 100 if len(measured) else float("nan")


def macro_f1(true: NDArray[np.bool_], said: NDArray[np.bool_]) -> float:
    """The mean of the F1 of starved and of not starved."""
    return float(f1_score(true, said, average="macro", zero_division=0.0)) if len(true) else float("nan")


def near(table: Table) -> NDArray[np.bool_]:
    """The runs at the boundary."""
    return (table.busy > BOUNDARY[0]) & (table.busy < BOUNDARY[1])


def _held_out(table: Table) -> dict[str, Any]:
    """Objectives and the P99 of TTFT, for any lengths: open runs that were held back from training.

    The measured runs do not say how many requests met an objective. Their TTFT is in `_measured_ttft`.
    """
    held = held_back(table)
    test = table.where(held & ~table.paper)
    ours = our_models(table.where(~held))
    met = test.attained_share >= ATTAINED
    f1 = {"law": macro_f1(met, test.law_attained), "ours": macro_f1(met, ours.attains(test))}
    ttft_ms = {"law": test.law_ttft_ms, "ours": ours.ttft_p99_ms(test)}
    within = {who: within_2x(one, test.ttft_p99_ms) for who, one in ttft_ms.items()}
    lines = [[who, len(test), int(met.sum()), f1[who], within[who]] for who in f1]
    columns = ["", "runs", "met", "F1 of objectives", "P99 of TTFT within 2 x"]
    print(report.table("simulated runs of any lengths, held back", columns, lines))
    return {f"f1_objectives_{who}": round(one, 3) for who, one in f1.items()} | {
        f"ttft_within_2x_{who}": round(one, 3) for who, one in within.items()
    }


# ---- the boundary


def _ceiling(data: Data, answers: dict[str, Answers], args: argparse.Namespace) -> dict[str, Any]:
    """F1 at the boundary, of all test sets together. The twin simulates these runs, as long as there is time."""
    twin = _twin_starved(data, args) if data.measured else {}
    figures: dict[str, Any] = {}
    lines = []
    for name in MODELS:
        for label in ("all", "unflagged"):
            chosen = {
                purpose: near(table) & (table.profile == name) & ~(table.flagged & (label == "unflagged"))
                for purpose, table in data.tests.items()
            }
            true = np.concatenate([table.starved[chosen[purpose]] for purpose, table in data.tests.items()])
            f1 = {
                who: macro_f1(true, np.concatenate([answers[purpose].starved[who][chosen[purpose]] for purpose in data.tests]))
                for who in next(iter(answers.values())).starved
            }
            if twin:
                f1["twin"] = macro_f1(true, np.concatenate([twin[purpose][chosen[purpose]] for purpose in data.tests]))
            lines.append([f"{SHORT[name]} {label}", len(true), int(true.sum()), *f1.values()])
            if label == "all":
                figures |= {f"f1_boundary_{who}_{SHORT[name]}": round(one, 3) for who, one in f1.items() if " " not in who}
    columns = ["", "runs", "starved", *next(iter(answers.values())).starved, *(["twin"] if twin else [])]
    print(report.table("F1 of starvation at the boundary (macro), all test sets together", columns, lines))
    return figures


def _twin_starved(data: Data, args: argparse.Namespace) -> dict[str, NDArray[np.bool_]]:
    """Whether the twin starves, of the runs at the boundary; empty if there was no time for all of them."""
    calibrations = calibrate(args.runs)
    wanted = [(purpose, int(i)) for purpose, table in data.tests.items() for i in np.flatnonzero(near(table))]
    runs = [data.measured[purpose][i][0] for purpose, i in wanted]
    outcomes = _simulated(args.watch, "boundary runs", runs, [calibrations[run.model] for run in runs])
    found = {purpose: np.zeros(len(table), bool) for purpose, table in data.tests.items()}
    for (purpose, i), outcome in zip(wanted, outcomes, strict=False):
        found[purpose][i] = outcome.total_tok_s < STARVED_BELOW * data.tests[purpose].asked_tok_s[i]
    return found if len(outcomes) == len(wanted) else {}


def _simulated(watch: Watch, what: str, runs: Sequence[Run], calibrations: Sequence[Calibration]) -> list[Outcome]:
    """What the twin says of runs, as many as there is time for."""
    cores, outcomes = len(os.sched_getaffinity(0)), list[Outcome]()
    with ProcessPoolExecutor(cores, spawn) as pool:
        for first in watch.rounds(-(-len(runs) // cores), f"groups of {what} in the twin"):
            some = slice(first * cores, (first + 1) * cores)
            outcomes += pool.map(predict, runs[some], calibrations[some])
    return outcomes


# ---- the measured P99 of TTFT


def _measured_ttft(data: Data, ours: OurModels, args: argparse.Namespace) -> dict[str, Any]:
    """Whose P99 of TTFT is within a factor of 2 of the measured one, of runs whose client had ports: one in `TTFT_EVERY`.

    The client also measured what vLLM's front end does for the measuring: it answers scrapes and loads a tokenizer for each
    adapter. The law and ours leave this out. *Front end* is the twin's P99 with it less the one without, so it has the
    calibration's constants and nothing of the measured latencies.
    """
    calibrations = calibrate(args.runs) if data.measured else {}
    tables, runs = [], list[Run]()
    for purpose, measured in data.measured.items():
        chosen = np.flatnonzero(~data.tests[purpose].flagged)[::TTFT_EVERY]
        tables.append(data.tests[purpose].where(np.isin(np.arange(len(data.tests[purpose])), chosen)))
        runs += [measured[i][0] for i in chosen]
    of = [calibrations[run.model] for run in runs]
    serving = [replace(one, api=one.api.serving(PORTS)) for one in of]
    outcomes = _simulated(args.watch, "runs with their TTFT", runs * 2, of + serving)
    if not runs or len(outcomes) < 2 * len(runs):
        return {}
    client_ms, serving_ms = np.array([one.ttft_p99_ms for one in outcomes]).reshape(2, -1)
    true_ms, law_ms, ours_ms = np.concatenate(
        [np.stack([one.ttft_p99_ms, one.law_ttft_ms, ours.ttft_p99_ms(one)]) for one in tables], axis=1
    )
    says = {"law": law_ms, "ours": ours_ms, "twin": client_ms, "twin_serving": serving_ms}
    says |= {f"{who}_front_end": says[who] + client_ms - serving_ms for who in ("law", "ours")}
    stable = law_ms < features.LONGEST_MS
    lines: list[list[object]] = []
    for label, some in (("all", stable | True), ("the law has a TTFT", stable), ("queues grow by the law", ~stable)):
        lines.append([label, int(some.sum()), *(within_2x(one[some], true_ms[some]) for one in says.values())])
    print(report.table("P99 of TTFT within 2 x of the measured one, unflagged runs", ["", "runs", *says], lines))
    return {f"ttft_measured_{who}": round(within_2x(one, true_ms), 3) for who, one in says.items()} | {
        f"ttft_measured_stable_{who}": round(within_2x(one[stable], true_ms[stable]), 3) for who, one in says.items()
    }


def within_2x(predicted: NDArray[np.float64], true: NDArray[np.float64]) -> float:
    """The share of values that are within a factor of 2."""
    return float(np.mean((predicted > true / 2) & (predicted < true * 2)))


# ---- speed and rules


def _speed(models: dict[str, PaperModels]) -> dict[str, Any]:
    """Time of a prediction in a batch, on rows that differ."""
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.uniform(0, top, BATCH) for top in (400, 600, 1.6, 32, 32, 12, 400)])
    of = models[next(iter(models))]
    askers: dict[str, Callable[[], Any]] = {
        "small tree, flat arrays": lambda: of.small_starvation.predict(x),
        "small tree of throughput, flat arrays": lambda: of.small_throughput.predict(x),
        "random forest, flat arrays": lambda: forest.predict(x),
        "random forest, scikit-learn": lambda: of.throughput["rf"].predict(x),
        "SVM, scikit-learn": lambda: of.throughput["svm"].predict(x),
        "nearest neighbour, scikit-learn": lambda: of.throughput["knn"].predict(x),
    }
    forest = train.trees(of.throughput["rf"], "tokens/s", of.small_throughput.features)
    times_us = {who: _best_us(ask) / BATCH for who, ask in askers.items()}
    print(
        report.table(
            f"microseconds a prediction, batches of {BATCH}", ["", "us"], [[who, one] for who, one in times_us.items()]
        )
    )
    small = [one for who, one in times_us.items() if who.startswith("small")]
    return {
        "us_per_prediction": round(max(small), 3),
        "us_per_prediction_forest": round(times_us["random forest, flat arrays"], 2),
    }


def _best_us(ask: Callable[[], Any], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        ask()
        times.append(time.perf_counter() - began_s)
    return min(times) * 1e6


def _rules(models: dict[str, PaperModels]) -> dict[str, Any]:
    """The rules of the small trees, as an operator reads them."""
    figures = {}
    for name, of in models.items():
        for task, tree in (("throughput", of.small_throughput), ("starvation", of.small_starvation)):
            found = list(tree.rules())
            lines: Sequence[Sequence[object]] = [[", ".join(conditions), value] for conditions, value in found]
            print(report.table(f"{SHORT[name]}, rules of {task}: {tree.target}", ["if", "then"], lines))
            figures[f"rules_{task}_{SHORT[name]}"] = len(found)
    return figures
