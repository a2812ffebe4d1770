"""The digital twin's vLLM flavour beside published vLLM runs on an H100: throughput, inter-token latency and TTFT of each run.

    python -m bench twin_vllm --runs DIR [--calibration DIR] [--purpose dt-validation] [--quick]

Constants are fitted at start from the calibration and overhead tables; then each run is predicted from its description alone:
model, A_max, S_max, rates, ranks, mean lengths of the prompt pool, duration, seed. MAPE is mean |predicted / measured - 1|;
the paper's SMAPE is mean |predicted - measured| / (predicted + measured), about half of it. Errors of TTFT are not averaged but
given as median and 99th percentile over the runs, because near saturation a step that is 1% too long can make a queue.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from motet.shared.json_files import FileError
from motet.twin.vllm.calibrate import Calibration, calibrate
from motet.twin.vllm.client import Outcome
from motet.twin.vllm.runs import Measured, PaperTwin, Run, predict, published_twin, read_runs

QUICK_EVERY = 8
BATCH_EDGES = (20, 100, 300)  # running requests, for the table of where the error sits
TTFTS = ("ttft_mean_ms", "ttft_median_ms", "ttft_p99_ms", "ttft_penalised_ms")  # of a run, as its client reports them


@dataclass(frozen=True, slots=True)
class Result:
    """One run: as asked, measured and predicted, and the prediction of the paper's twin."""

    run: Run
    measured: Measured
    predicted: Outcome
    paper: PaperTwin | None


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--runs", type=Path, required=True, help="folder with runs.csv[.gz] and adapters.csv[.gz]")
    parser.add_argument("--calibration", type=Path, help="folder with the overhead tables; the runs' folder by default")
    parser.add_argument("--purpose", default="dt-validation", help="which runs of the table (default: dt-validation)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Fit, predict every run, print the tables, return the figures."""
    began = time.perf_counter()
    try:
        fitted = calibrate(args.calibration or args.runs)
        runs = read_runs(args.runs, args.purpose)
        paper = published_twin(args.runs)
    except (FileError, FileNotFoundError) as error:
        raise SystemExit(f"twin_vllm: {error}") from None
    _print_fit(fitted, time.perf_counter() - began)
    results = []
    slowest_s = 0.0
    chosen = runs[:: QUICK_EVERY if args.quick else 1]
    mixed = np.random.default_rng(0).permutation(len(chosen)).tolist()  # a bench that is cut short has runs of every kind
    mixed.sort(key=lambda i: chosen[i][1].ports_exhausted)  # and first of all those that count
    for number in args.watch.rounds(len(chosen), "runs"):
        asked, measured = chosen[mixed[number]]
        if asked.model not in fitted:
            raise ValueError(f"run {asked.run_id}: the calibration tables do not know the model {asked.model}")
        started = time.process_time()
        results.append(Result(asked, measured, predict(asked, fitted[asked.model]), paper.get(asked.run_id)))
        slowest_s = max(slowest_s, time.process_time() - started)
    _print_results(results)
    figures = _figures(results)
    took_s = time.perf_counter() - began
    print(f"{len(results)} runs in {took_s:.0f} s; the slowest simulated hour took {slowest_s:.2f} s")
    return {**figures, "purpose": args.purpose, "slowest_run_s": round(slowest_s, 2)}


def _print_fit(fitted: dict[str, Calibration], took_s: float) -> None:
    print(f"fitted in {took_s:.1f} s; mean error of the fit by kind of measurement, percent")
    for model, calibration in fitted.items():
        print(f"  {model}: " + ", ".join(f"{kind} {error:.1f}" for kind, error in calibration.errors.items()))
        steps = calibration.steps
        print("    ms per unit: " + ", ".join(f"{term} {ms:.4g}" for term, ms in steps.ms.items()))
        print(f"    load {steps.load_full_ms:.1f} / {steps.load_padded_ms:.1f} ms, scan {steps.scan_us:.2f} us")


def _groups(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """The totals, then groups that show where the error is: by model, and without flagged runs unless the name says so."""
    unflagged = _unflagged(results)
    yield from _by_model("unflagged", unflagged)
    yield from _by_model("client out of ports", [r for r in results if r.measured.ports_exhausted])
    yield from _by_model("not starved", [r for r in unflagged if not r.measured.starved])
    yield from _by_model("starved", [r for r in unflagged if r.measured.starved])
    yield from _by_model("all adapters fit", [r for r in unflagged if len(r.run.rates_req_s) <= r.run.a_max])
    yield from _by_model("more adapters than slots", [r for r in unflagged if len(r.run.rates_req_s) > r.run.a_max])
    for s_max in sorted({r.run.s_max for r in unflagged}):
        yield from _by_model(f"S_max {s_max}", [r for r in unflagged if r.run.s_max == s_max])
    for low, high in zip((0, *BATCH_EDGES), (*BATCH_EDGES, math.inf), strict=True):
        yield from _by_model(f"batch from {low}", [r for r in unflagged if low <= r.predicted.running_mean < high])


def _unflagged(results: Sequence[Result]) -> list[Result]:
    return [r for r in results if not r.measured.ports_exhausted]


def _by_model(label: str, results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    for model in sorted({r.run.model for r in results}):
        yield f"{model.split('-')[0]} {label}", [r for r in results if r.run.model == model]


def _print_results(results: Sequence[Result]) -> None:
    lines = [
        [
            r.run.run_id + (" *" if r.measured.ports_exhausted else ""),
            r.measured.total_tok_s,
            r.predicted.total_tok_s,
            (r.predicted.total_tok_s / r.measured.total_tok_s - 1) * 100,
            r.measured.itl_mean_ms,
            r.predicted.itl_mean_ms,
            (r.predicted.itl_mean_ms / r.measured.itl_mean_ms - 1) * 100,
            r.measured.ttft_mean_ms,
            r.predicted.ttft_mean_ms,
            (r.predicted.ttft_mean_ms / r.measured.ttft_mean_ms - 1) * 100,
        ]
        for r in results
    ]
    columns = ["run (* client out of ports)", "tok/s", "predicted", "error %", "ITL ms", "predicted", "error %"]
    columns += ["TTFT ms", "predicted", "error %"]
    print(report.table("runs", columns, lines))
    lines = []
    for label, chosen in _groups(results):
        lines.append([label, len(chosen), *_errors(chosen), *_paper_errors(chosen)])
    columns = ["", "runs", "tok/s MAPE", "bias", "SMAPE", "ITL MAPE", "bias", "SMAPE"]
    columns += ["paper tok/s MAPE", "SMAPE", "paper ITL MAPE", "SMAPE"]
    print(report.table("errors in percent; right: the paper's own twin on the same runs", columns, lines))
    lines = []
    for label, chosen in (("unflagged", _unflagged(results)), *_groups(results)):
        errors = [error for pairs in _ttft_pairs(chosen) for error in _spread(pairs)]
        lines.append([label, len(chosen), *("-" if error is None else error for error in errors)])
    columns = ["", "runs", "mean p50", "p99", "SMAPE", "median p50", "p99", "SMAPE", "P99 p50", "p99", "SMAPE"]
    columns += ["penalised p50", "p99", "SMAPE", "paper penalised p50", "p99", "SMAPE"]
    print(report.table("TTFT: errors in percent, median and P99 over the runs; right: the paper's own twin", columns, lines))


def _errors(chosen: Sequence[Result]) -> list[float]:
    found = []
    for predicted, measured in (
        ([r.predicted.total_tok_s for r in chosen], [r.measured.total_tok_s for r in chosen]),
        ([r.predicted.itl_mean_ms for r in chosen], [r.measured.itl_mean_ms for r in chosen]),
    ):
        ratio = np.asarray(predicted) / np.asarray(measured)
        found += [_mape(predicted, measured), float((ratio - 1).mean()) * 100, _smape(predicted, measured)]
    return found


def _paper_errors(chosen: Sequence[Result]) -> list[object]:
    known = [(r, r.paper) for r in chosen if r.paper is not None]
    if not known:
        return ["-"] * 4
    found: list[object] = []
    for predicted, measured in (
        ([paper.total_tok_s for _, paper in known], [r.measured.total_tok_s for r, _ in known]),
        ([paper.itl_mean_ms for _, paper in known], [r.measured.itl_mean_ms for r, _ in known]),
    ):
        found += [_mape(predicted, measured), _smape(predicted, measured)]
    return found


def _ttft_pairs(chosen: Sequence[Result]) -> list[list[tuple[float, float]]]:
    """(predicted, measured) of the runs that have both, for each of `TTFTS` and for the paper's own twin."""
    found = []
    for name in TTFTS:
        pairs = [(getattr(r.predicted, name), getattr(r.measured, name)) for r in chosen]
        found.append([(p, m) for p, m in pairs if m is not None])
    papers = [(r.paper.ttft_penalised_ms, r.measured.ttft_penalised_ms) for r in chosen if r.paper is not None]
    return [*found, [(p, m) for p, m in papers if p is not None and m is not None]]


def _spread(pairs: Sequence[tuple[float, float]]) -> tuple[float | None, ...]:
    """Errors of (predicted, measured) in percent: median and 99th percentile of |predicted / measured - 1|, and SMAPE."""
    if not pairs:
        return (None, None, None)
    predicted, measured = zip(*pairs, strict=True)
    errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1) * 100
    return float(np.percentile(errors, 50)), float(np.percentile(errors, 99)), _smape(predicted, measured)


def _mape(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return float(np.abs(np.asarray(predicted) / np.asarray(measured) - 1).mean()) * 100


def _smape(predicted: Sequence[float], measured: Sequence[float]) -> float:
    p, m = np.asarray(predicted), np.asarray(measured)
    return float((np.abs(p - m) / (p + m)).mean()) * 100


def _figures(results: Sequence[Result]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in ("llama", "qwen"):
        chosen = [r for r in _unflagged(results) if r.run.model.startswith(name)]
        errors = _errors(chosen) if chosen else [None] * 6
        figures |= {f"throughput_mape_{name}": _rounded(errors[0]), f"itl_mape_{name}": _rounded(errors[3])}
        figures |= {f"throughput_smape_{name}": _rounded(errors[2]), f"itl_smape_{name}": _rounded(errors[5])}
    mean, median, p99, penalised, paper = (_spread(pairs) for pairs in _ttft_pairs(_unflagged(results)))
    figures |= {"ttft_error_p50": _rounded(mean[0]), "ttft_error_p99": _rounded(mean[1])}
    figures |= {"ttft_median_error_p50": _rounded(median[0]), "ttft_p99_error_p50": _rounded(p99[0])}
    figures |= {"ttft_penalised_error_p50": _rounded(penalised[0]), "ttft_penalised_error_p99": _rounded(penalised[1])}
    figures |= {"ttft_penalised_smape": _rounded(penalised[2]), "paper_ttft_penalised_smape": _rounded(paper[2])}
    return {**figures, "runs": len(results), "runs_unflagged": len(_unflagged(results))}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
