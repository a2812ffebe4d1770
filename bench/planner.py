"""`motet plan` measured: workers against the bound and against other planners, and what the twin finds of every plan.

    python -m bench planner [--runs DIR] [--part scenarios|what-if|models] [--quick]

*law*: workers and bound of every scenario, without the twin: the command's answer with --no-check.

*scenarios*: high, low and mixed rates and ranks of 100, 400 and 2,000 adapters (adapter-caching paper, section 8.4), on the
published calibrations of vLLM for Llama and Qwen and on CaraServe's A10. Each plan is made as `motet plan` makes it, then
judged by an hour with a seed that it has not seen. A rival's plan counts only if it is valid too, for 20 minutes.

*what-if*: 20 drawn workers with lengths of arXiv, Mooncake and Azure (from `--runs`'s parent folder), which no constant of the
law was chosen with: the load at which the law says that they break, beside the twin's.

*picture*: workers by the load for docs/planning.svg, by the law alone.

*models* (needs `--runs`): the law and the learned models beside published runs of vLLM (`bench.planner_models`).
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench import planner_models, report
from bench.planner_scenarios import ADAPTERS, Scenario, scenarios
from motet.cli.plan_cases import Cases
from motet.cli.plan_runs import processes
from motet.policies.plan.bound import bound
from motet.policies.plan.capacity import Limits, judge
from motet.policies.plan.fleet import CannotServe
from motet.policies.plan.rivals import RIVALS
from motet.shared.model import Slo
from motet.twin.planning.check import Result, Run
from motet.twin.planning.kinds import NativeKind, Part, VllmKind
from motet.twin.planning.loads import Loads, Objective, capped
from motet.twin.planning.planner import Goal, Made, Offer, Trial, bounding, make, pack_by, tried
from motet.twin.plots import Curve, Plot, svg
from motet.twin.profile import a10_llama2_7b
from motet.twin.traces import Trace, read_lengths, read_trace
from motet.twin.vllm.published import published
from motet.twin.workload import Lengths, Workload

T = TypeVar("T")
MODELS = ("llama-3.1-8b@h100", "qwen2.5-7b@h100")
NATIVE_RATE = 0.25  # of the scenarios' rates: an A10 serves a tenth of an H100
TRIAL = Trial(seeds=(1, 2), warm_s=300.0, duration_s=1500.0)
HOUR = Trial(seeds=(1001,), warm_s=300.0, duration_s=3900.0)
RIVALS_TRIAL = Trial(seeds=(1001,), warm_s=300.0, duration_s=1500.0)
QUICK = Trial(seeds=(1,), warm_s=60.0, duration_s=240.0)
NATIVE = Trial(seeds=(1, 2, 3), warm_s=60.0, duration_s=660.0)
NATIVE_HOUR = Trial(seeds=tuple(range(1001, 1007)), warm_s=60.0, duration_s=660.0)
WHAT_IFS = 20
BREAK_STEP = 1.02
OURS = "motet"
PICTURE = Path(__file__).parents[1] / "docs" / "planning.svg"
AT_ONCE = 4
MIX_RATES = (3.2, 1.6, 0.8, 0.4, 0.1, 0.05, 0.025, 0.0125)  # of the paper, section 8.3
MOST_TOKENS = 16_384


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--runs", type=Path, help="folder with the published runs of vLLM; its parent has traces of lengths")
    parser.add_argument("--part", choices=["law", "scenarios", "what-if", "models", "picture"], help="only this part")
    parser.add_argument("--kind", help="only the workers whose name begins like this: llama, qwen, A10")
    parser.add_argument("--most", type=int, default=max(ADAPTERS), help="only scenarios of up to so many adapters")
    planner_models.options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All parts, or one."""
    figures: dict[str, Any] = {}
    with processes() as simulate:
        if args.part in (None, "law"):
            figures |= _law(args)
        if args.part in (None, "scenarios"):
            figures |= _scenarios(args, simulate)
        if args.part in (None, "what-if") and args.runs is not None:
            figures |= _what_ifs(args)
    if args.part == "picture":
        figures |= _picture()
    if args.part == "models" or (args.part is None and args.runs is not None and not args.quick):
        figures |= planner_models.figures(args)
    return figures


# ---- scenarios


@dataclass(frozen=True, kw_only=True)
class Case:
    """A scenario on a kind of worker, how a plan is tried, and how it is judged afterwards."""

    name: str
    offer: Offer
    loads: Loads
    trial: Trial
    hour: Trial


@dataclass(frozen=True, kw_only=True)
class Row:
    """One planner's plan of one scenario. `workers` None: it found none.

    `valid`: share of the workers that were tried; of a rival's plan, none is tried after the first that is not valid.
    """

    scenario: str
    planner: str
    least: int  # the bound, rounded up
    workers: int | None = None
    valid: float = 0.0
    starved: int = 0
    attained: float = 0.0


def _law(args: argparse.Namespace) -> dict[str, Any]:
    rows, above, packed_s, bound_s = list[list[object]](), list[tuple[int, int]](), [0.0], [0.0]
    goal = Goal()
    for case in _cases(quick=args.quick):
        if case.offer.kind.together or not case.name.startswith(args.kind or ""):
            continue  # workers that share their load are planned with the twin
        found, took_s = _timed(bound, case.loads.demand, bounding([case.offer], goal))
        made, pack_s = _timed(make, case.loads, [case.offer], goal, None, lambda jobs: ())
        bound_s.append(took_s)
        packed_s.append(pack_s)
        above.append((len(made.workers), found.least))
        rows.append([case.name, *above[-1], found.value, pack_s, took_s])
    columns = ["scenario", "workers", "bound", "of which", "plan s", "bound s"]
    print(report.table("by the law", columns, rows))
    return {
        "law_workers_vs_bound": round(sum(workers for workers, _ in above) / sum(least for _, least in above), 3),
        "law_most_above_bound": max(workers - least for workers, least in above),
        "law_plan_s": round(max(packed_s), 2),
        "law_bound_s": round(max(bound_s), 2),
    }


def _scenarios(args: argparse.Namespace, simulate: Run) -> dict[str, Any]:
    rows: list[Row] = []
    packed_s, planned_s, bound_s = [0.0], [0.0], [0.0]
    cases = [
        case for case in _cases(quick=args.quick) if case.name.startswith(args.kind or "") and len(case.loads) <= args.most
    ]
    for number in args.watch.rounds(len(cases), "scenarios"):
        case = cases[number]
        offers, goal = [case.offer], Goal()
        found, took_s = _timed(bound, case.loads.demand, bounding(offers, goal))
        bound_s.append(took_s)
        _, took_s = _timed(make, case.loads, offers, goal, None, simulate)
        packed_s.append(took_s)
        made, took_s = _timed(make, case.loads, offers, goal, case.trial, simulate)
        planned_s.append(took_s)
        rows.append(_judged(case, OURS, made, found.least, simulate))
        for rival, packer in RIVALS.items():
            try:
                other = pack_by(packer, case.loads, offers, goal)
            except CannotServe:
                rows.append(Row(scenario=case.name, planner=rival, least=found.least))
                continue
            rows.append(_judged(case, rival, other, found.least, simulate))
        print(f"{case.name}: {len(made.workers)} workers after {made.rounds} rounds, bound {found.value:.2f}", flush=True)
    _print_rows(rows)
    return {
        **_figures(rows),
        "plan_s_law": round(max(packed_s), 2),
        "plan_s_twin": round(max(planned_s), 1),
        "bound_s": round(max(bound_s), 2),
    }


def _timed(work: Callable[..., T], *given: Any) -> tuple[T, float]:
    began_s = time.monotonic()
    return work(*given), time.monotonic() - began_s


def _judged(case: Case, planner: str, made: Made, least: int, simulate: Run) -> Row:
    """Motet's plan is judged whole, a rival's up to its first worker that is not valid, the most strained ones first."""
    parts = [part for _, part in sorted(zip(made.workers, made.parts, strict=True), key=lambda pair: -pair[0].strain)]
    at_once = len(parts) if planner == OURS or case.offer.kind.together else AT_ONCE
    results: list[Result] = []
    trial = case.hour if planner == OURS or case.offer.kind.together or case.hour is QUICK else RIVALS_TRIAL
    while parts and all(result.valid for result in results):
        results += tried(parts[:at_once], [case.offer], trial, simulate)
        parts = parts[at_once:]
    arrived = sum(int(result.arrived.sum()) for result in results)
    return Row(
        scenario=case.name,
        planner=planner,
        workers=len(made.workers),
        least=least,
        valid=sum(result.valid for result in results) / len(results),
        starved=sum(result.starved for result in results),
        attained=sum(int(result.attained.sum()) for result in results) / max(1, arrived),
    )


def _cases(*, quick: bool) -> Iterator[Case]:
    chosen = [scenario for scenario in scenarios() if not quick or scenario.adapters == min(ADAPTERS)]
    for scenario in chosen[: 1 if quick else None]:
        for model in MODELS[: 1 if quick else None]:
            yield Case(
                name=f"{model.partition('-')[0]} {scenario.name}",
                offer=Offer(kind=VllmKind(name=model, calibration=published(model))),
                loads=scenario.loads(),
                trial=QUICK if quick else TRIAL,
                hour=QUICK if quick else HOUR,
            )
    native = replace(chosen[0], adapters=40 if quick else 100)
    yield Case(
        name=f"A10 {native.name}",
        offer=Offer(kind=NativeKind(name="a10", profile=a10_llama2_7b())),
        loads=native.loads(rate=NATIVE_RATE, ttft_slo_ms=2000.0),
        trial=QUICK if quick else NATIVE,
        hour=QUICK if quick else NATIVE_HOUR,
    )


def _print_rows(rows: Sequence[Row]) -> None:
    shown = [
        [
            row.scenario,
            row.planner,
            "-" if row.workers is None else row.workers,
            row.least,
            "-" if row.workers is None else f"{row.valid:.0%}",
            row.starved,
            f"{row.attained:.2%}",
        ]
        for row in rows
    ]
    columns = ["scenario", "planner", "workers", "bound", "valid workers", "starved", "attained"]
    print(report.table("plans", columns, shown))


def _figures(rows: Sequence[Row]) -> dict[str, Any]:
    ours = {row.scenario: row for row in rows if row.planner == OURS}
    workers = {name: row.workers or 0 for name, row in ours.items()}
    figures: dict[str, Any] = {
        "scenarios": len(ours),
        "workers_vs_bound": round(sum(workers.values()) / sum(row.least for row in ours.values()), 3),
        "most_above_bound": max(workers[name] - row.least for name, row in ours.items()),
        "valid": round(sum(row.valid * workers[name] for name, row in ours.items()) / sum(workers.values()), 4),
        "starved_adapters": sum(row.starved for row in ours.values()),
    }
    for rival in dict.fromkeys(row.planner for row in rows if row.planner != OURS):
        figures |= _against(rival, [row for row in rows if row.planner == rival], workers)
    return figures


def _against(rival: str, rows: Sequence[Row], ours: Mapping[str, int]) -> dict[str, Any]:
    """In how many scenarios a rival's plan is valid, and Motet's workers there against its own."""
    valid = {row.scenario: row.workers for row in rows if row.workers is not None and row.valid == 1.0}
    saved = [workers - ours[name] for name, workers in valid.items()]
    key = rival.replace("*", "_star")
    return {
        f"valid_{key}": len(valid),
        f"workers_vs_{key}": round(sum(ours[name] for name in valid) / sum(valid.values()), 3) if valid else None,
        f"least_saved_of_{key}": min(saved, default=None),
    }


# ---- the picture

EXAMPLE = Scenario("mixed", "mixed", 400)
DRAWN = {"bound": "bound", "plan, by the law": "motet plan"} | {
    name: name for name in ("dlora", "proposedlat", "rank_grouped", "paper")
}
"""The picture's lines by their names in the command's staircase. Its rivals are those that the law does not find strained."""


def _picture() -> dict[str, Any]:
    """Workers at multiples of the load of `EXAMPLE` on Llama, beside the bound and other planners."""
    offers = [Offer(kind=VllmKind(name=MODELS[0], calibration=published(MODELS[0])))]
    stairs = Cases(EXAMPLE.loads(), offers, Goal(), None, lambda jobs: (), lambda text: None).staircase(rivals=True)
    lines = {shown: stairs[name] for name, shown in DRAWN.items() if stairs[name]}
    curves = [Curve(*np.array(points).T) for points in lines.values()]
    plot = Plot(caption="", curves=curves, unit="x the load", plain=True, steps=True, names=tuple(lines))
    PICTURE.write_bytes(svg(plot))
    return {f"workers_at_3_{name.replace(' ', '_')}": dict(points).get(3.0) for name, points in lines.items()}


# ---- what-if


def _what_ifs(args: argparse.Namespace) -> dict[str, Any]:
    """How far the load at which the law says that a worker breaks is from the twin's, on drawn workers."""
    data = args.runs.parent
    pools = {
        "arxiv": read_lengths(data / "arxiv_summarization_lengths.csv.gz"),
        "azure": _pairs(read_trace(data / "azure_llm_2023_conv.csv.gz")),
        "mooncake": _pairs(read_trace(data / "mooncake_conversation.jsonl.gz")),
    }
    jobs = [
        (number, list(pools)[number % 3], pools[list(pools)[number % 3]]) for number in range(4 if args.quick else WHAT_IFS)
    ]
    rows, errors = [], []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (_, name, _), (predicted, found, limit, adapters) in zip(jobs, pool.map(_broken, jobs), strict=True):
            errors.append(abs(predicted / found - 1.0))
            rows.append([name, adapters, predicted, found, predicted / found, limit])
    print(
        report.table(
            "load at which a worker breaks, requests/s", ["lengths", "adapters", "law", "twin", "law / twin", "limit"], rows
        )
    )
    return {
        "what_if_error": round(float(np.mean(errors)), 3),
        "what_if_error_p50": round(float(np.median(errors)), 3),
        "what_if_error_most": round(max(errors), 3),
    }


def _pairs(trace: Trace | Workload) -> Lengths:
    if trace.prompt_tokens is None or trace.output_tokens is None:
        raise ValueError("the trace has no lengths")
    return Lengths(trace.prompt_tokens, trace.output_tokens)


def _broken(job: tuple[int, str, Lengths]) -> tuple[float, float, str, int]:
    """(requests/s at which the law says that a drawn worker breaks, at which the twin finds it, the law's limit, adapters)."""
    number, _, lengths = job
    rng = np.random.default_rng([7, number])
    model = MODELS[number % 2]
    kind = VllmKind(name=model, calibration=published(model))
    count = int(rng.choice([16, 32, 64, 96, 128, 192, 256, 384]))
    ranks = rng.choice([8, 16, 32], count) if rng.random() < 0.5 else np.full(count, rng.choice([8, 16, 32]))
    loads = Loads(
        names=tuple(f"a{place}" for place in range(count)),
        rate=rng.choice(rng.choice(MIX_RATES, 3), count),
        rank=ranks,
        size_bytes=np.ones(count, np.int64),
        pool=np.zeros(count, np.int64),
        objective=np.zeros(count, np.int64),
        lengths=(capped(lengths, MOST_TOKENS),),
        objectives=(
            Objective(
                slo=Slo(ttft_slo_ms=float(rng.choice([1000, 2000, 4000])), tpot_slo_ms=float(rng.choice([120, 200, 300])))
            ),
        ),
    )
    law = kind.settings
    able = np.flatnonzero(law.max_rank == law.max_rank[law.max_rank >= ranks.max()].min())
    setting = int(rng.choice(able))

    def enough(rate: float) -> bool:
        return bool(judge(loads.faster(rate / float(loads.rate.sum())).demand, law, Limits()).strain[setting] <= 1.0)

    def holds(rate: float) -> bool:
        part = Part(setting=setting, loads=loads.faster(rate / float(loads.rate.sum())))
        (outcome,) = kind.simulate([part], seed=number, warm_s=300.0, duration_s=1500.0)
        return bool(outcome.attained.sum() >= loads.objectives[0].share * outcome.arrived.sum())

    predicted = _edge(enough, 1e-3, 1e4, 1.001)
    found = _edge(holds, predicted / 8.0, predicted * 8.0, BREAK_STEP)
    limit = judge(loads.faster(predicted / float(loads.rate.sum())).demand, law).limit(setting)
    return predicted, found, limit, count


def _edge(good: Callable[[float], bool], low: float, high: float, step: float) -> float:
    """The largest value that is good, to a factor of `step`, where all below it are."""
    while high / low > step:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if good(middle) else (low, middle)
    return low
