"""Autoscalers over days of load in simulated time: what they pay, and how many requests they lose.

    python -m bench autoscale [--maf FILE] [--images FILE] [--azure FILE] [--twin | --picture] [--quick]

*maf*: invocations by minute (Azure Functions 2019). *images*: the rate of an image service (GenTD26), sums of 10 minutes with
straight lines between them. *azure*: half an hour of Azure's conversations, by the minute. Their rates are multiplied so that
the load needs some ten workers at its peak; arrivals are Poisson. *made*: without files, a day with the statistics of the first
two. Workers are CaraServe's A10, a start takes 120 s. Motet decides by the class that its scheduler runs.

The constants of all autoscalers were chosen on the first two thirds of each day: a rival's are those with the least worker
hours of the settings in `autoscale_rivals` that reach an attainment of .99 there, or else of the best attainment. All are
judged on the last third, with another seed, and over the whole day. *hindsight*: a rival's setting that is best on the last
third itself.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.autoscale_parts import Day, Law, Scaler, Score, simulate
from bench.autoscale_rivals import MOST, MotetSizer, rivals
from bench.autoscale_twin import in_twin
from motet.policies.plan.demand import Floats
from motet.policies.scale.base_sizer import LOOK_S
from motet.policies.scale.fleet_demand import AdapterShare
from motet.policies.scale.need import Objective
from motet.policies.scale.sizing import SizingConfig
from motet.twin.plots import Curve, Plot, svg
from motet.twin.profile import a10_llama2_7b
from motet.twin.traces import opened, read_invocations, read_trace
from motet.twin.workload import zipf

GOAL = 0.99
OBJECTIVE = Objective(ttft_slo_ms=2000.0, tpot_slo_ms=100.0)
TOKENS = 200  # of a prompt, and of an answer
RANKS, MIB_PER_RANK = (8, 16, 32, 64), 0.625
ADAPTERS, QUICK_ADAPTERS = 12, 8
MEAN, QUICK_MEAN = 12.0, 4.0  # requests/s of maf
PEAK, QUICK_PEAK = 24.0, 12.0  # of images
TUNE_SEED, SEED = 1, 2
TWIN_MINUTES = 60
OURS = "motet"
PICTURE = Path(__file__).parents[1] / "docs" / "orchestration.svg"
COLUMNS = ("day", "autoscaler", "part", "hours / oracle", "attained %", "flaps / day", "late min", "setting")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--maf", type=Path, help="CSV: function, minute_1, ...")
    parser.add_argument("--images", type=Path, help="CSV: timestamp_anon, value, container, request_type")
    parser.add_argument("--azure", type=Path, help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens")
    parser.add_argument("--seed", type=int, default=SEED, help="of the arrivals on which all are judged")
    parser.add_argument("--twin", action="store_true", help="only: the end of the last day in the twin, beside the law")
    parser.add_argument("--picture", action="store_true", help="only: draw the made day for docs/orchestration.md")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All days with all autoscalers; or some hours in the twin; or the picture."""
    law = law_of(QUICK_ADAPTERS if args.quick else ADAPTERS)
    days = list(_days(args))
    if args.picture:
        return _picture(law)
    if args.twin:
        return _in_twin(law, days[-1], args)
    rows: list[list[object]] = []
    found = {}
    for number in args.watch.rounds(len(days), "days"):
        found[days[number].name] = _compare(law, days[number], args, rows)
    print(report.table("autoscalers", COLUMNS, rows))
    return _figures(found)


def law_of(adapters: int) -> Law:
    """A10s with adapters of a power law."""
    shares = zip(zipf(adapters).tolist(), (RANKS[place % len(RANKS)] for place in range(adapters)), strict=True)
    rows = [AdapterShare(share, rank, round(rank * MIB_PER_RANK * 2**20)) for share, rank in shares]
    return Law(a10_llama2_7b(), rows, TOKENS, OBJECTIVE)


# ---- days


def _days(args: argparse.Namespace) -> list[Day]:
    mean, peak = (QUICK_MEAN, QUICK_PEAK) if args.quick else (MEAN, PEAK)
    days: list[Day] = []
    if args.maf is not None:
        days.append(_day("maf", read_invocations(args.maf).sum(axis=0), mean=mean))
    if args.images is not None:
        days.append(_day("images", _image_rates(args.images), peak=peak))
    if args.azure is not None:
        minutes = np.bincount((read_trace(args.azure).arrival_s // 60.0).astype(np.int64)).astype(np.float64)
        days.append(_day("azure", minutes[:-1], mean=mean))  # its last minute is not whole
    return days or [made(mean, minutes=240 if args.quick else 1440)]


def _day(name: str, rate: Floats, *, mean: float = 0.0, peak: float = 0.0) -> Day:
    return Day(name=name, rate=rate * (mean / rate.mean() if mean else peak / rate.max()), tuned=len(rate) * 2 // 3)


def _image_rates(path: Path) -> Floats:
    """[minutes] sums of all containers of 10 minutes, with straight lines between their middles."""
    with opened(path) as lines:
        rows = [row for row in csv.DictReader(lines) if row["request_type"].startswith("Generative")]
    at_s, values = (np.array([float(row[name]) for row in rows]) for name in ("timestamp_anon", "value"))
    sums = np.bincount(((at_s - at_s.min()) // 600.0).astype(np.int64), values)
    return np.interp(np.arange(len(sums) * 10), np.arange(len(sums)) * 10 + 5, sums)


def made(mean: float, *, minutes: int = 1440, seed: int = 0) -> Day:
    """A day as the first two are: a wave, peaks at full hours and at every tenth minute, and minutes that differ by chance."""
    minute, chance = np.arange(minutes), np.random.default_rng(seed)
    wave = 1.0 + 0.35 * np.sin(2.0 * np.pi * (minute / 1440.0 - 0.3))
    peaks = 1.0 + 0.4 * (minute % 60 == 0) + 0.2 * (minute % 60 == 1) + 0.12 * ((minute % 10 == 0) & (minute % 60 != 0))
    rate = wave * peaks * chance.lognormal(0.0, 0.04, minutes)
    return _day("made", rate, mean=mean)


# ---- autoscalers


@dataclass(frozen=True, kw_only=True)
class Row:
    """One autoscaler on one day."""

    held: Score  # on the last third
    whole: Score
    hindsight: float | None = None  # the least worker hours on the last third of any of its settings that reach the goal there


def _compare(law: Law, day: Day, args: argparse.Namespace, rows: list[list[object]]) -> dict[str, Row]:
    found = {OURS: _judged(law, day, lambda: motet(law), args.seed)}
    peak = law.needed(float(day.rate.max()))
    chosen = {OURS: ""}
    for name, settings in rivals(law, peak, quick=args.quick).items():
        tuned = {label: simulate(law, day, make(), seed=TUNE_SEED, until=day.tuned) for label, make in settings.items()}
        chosen[name] = _best(tuned)
        later = [_held(law, day, make, args.seed) for make in settings.values()]
        hours = min((score.worker_hours for score in later if score.attainment >= GOAL), default=None)
        found[name] = _judged(law, day, settings[chosen[name]], args.seed, hours)
    for name, row in found.items():
        for part, score in (("last third", row.held), ("whole", row.whole)):
            figures = (score.vs_oracle, 100.0 * score.attainment, score.flaps_a_day, score.late_minutes)
            rows.append([day.name, name, part, *figures, chosen[name]])
        print(f"{day.name}: {name} done", flush=True)
    return found


def motet(law: Law) -> Scaler:
    """Motet's sizer with the options that a mesh starts with."""
    return MotetSizer(law, SizingConfig(most_workers=MOST, ttft_slo_ms=OBJECTIVE.ttft_slo_ms))


def _held(law: Law, day: Day, make: Callable[[], Scaler], seed: int) -> Score:
    return simulate(law, day, make(), seed=seed, since=day.tuned)


def _judged(law: Law, day: Day, make: Callable[[], Scaler], seed: int, hindsight: float | None = None) -> Row:
    whole = simulate(law, day, make(), seed=seed)
    return Row(held=_held(law, day, make, seed), whole=whole, hindsight=hindsight)


def _best(tuned: Mapping[str, Score]) -> str:
    """The least worker hours of the settings that reach the goal; or else the best attainment."""
    reach = {label: score for label, score in tuned.items() if score.attainment >= GOAL}
    if not reach:
        return max(tuned, key=lambda label: tuned[label].attainment)
    return min(reach, key=lambda label: reach[label].worker_hours)


def _figures(found: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    """Of the last thirds; of a rival that reaches the goal there, Motet's worker hours over its own."""
    figures: dict[str, Any] = {}
    for day, rows in found.items():
        held = rows[OURS].held
        beaten = {name: row for name, row in rows.items() if name != OURS}
        figures[day] = {
            "worker_hours_vs_oracle": round(held.vs_oracle, 3),
            "attainment": round(held.attainment, 4),
            "flaps_per_day": round(held.flaps_a_day, 1),
            "late_minutes": held.late_minutes,
            "whole_day": [round(rows[OURS].whole.vs_oracle, 3), round(rows[OURS].whole.attainment, 4)],
            "flaps_of": {name: round(row.held.flaps_a_day, 1) for name, row in beaten.items()},
            "hours_vs": {
                name: round(held.worker_hours / row.held.worker_hours, 3)
                for name, row in beaten.items()
                if row.held.attainment >= GOAL
            },
            "hours_vs_hindsight": {
                name: round(held.worker_hours / row.hindsight, 3) for name, row in beaten.items() if row.hindsight
            },
        }
    ours = [figures[day] for day in found]
    return {
        "worker_hours_vs_oracle": max(one["worker_hours_vs_oracle"] for one in ours),
        "attainment": min(one["attainment"] for one in ours),
        "flaps_per_day": max(one["flaps_per_day"] for one in ours),
        "late_minutes": sum(one["late_minutes"] for one in ours),
        "days": figures,
    }


# ---- the twin, and the picture


def _in_twin(law: Law, day: Day, args: argparse.Namespace) -> dict[str, Any]:
    """Motet and two rivals in the last minutes of a day, served by simulated workers that come and go."""
    peak = law.needed(float(day.rate.max()))
    others = rivals(law, peak)
    makes: dict[str, Callable[[], Scaler]] = {OURS: lambda: motet(law)}
    for name in ("forecast x ceil", "keda concurrency"):
        settings = others[name]
        makes[name] = settings[
            _best({one: simulate(law, day, make(), seed=TUNE_SEED, until=day.tuned) for one, make in settings.items()})
        ]
    until = len(day.rate)
    since = until - (20 if args.quick else TWIN_MINUTES)
    rows, figures = list[list[object]](), dict[str, Any]()
    for name, make in makes.items():
        seen = in_twin(law, a10_llama2_7b(), day, make, since=since, until=until, seed=args.seed)
        figures[name.replace(" ", "_")] = {key: round(value, 4) for key, value in asdict(seen).items()}
        rows.append([name, seen.worker_hours, seen.law_worker_hours, 100 * seen.attainment, 100 * seen.law_attainment])
        print(f"{name} done", flush=True)
    columns = ["autoscaler", "worker hours, twin", "law", "attained %, twin", "law"]
    print(report.table(f"{day.name}, minutes {since} to {until}", columns, rows))
    return {"twin": figures}


def _picture(law: Law) -> dict[str, Any]:
    """Of the synthetic day: how many workers the load needs, and how many Motet ran."""
    day = made(MEAN)
    score = simulate(law, day, motet(law), seed=SEED)
    hours = np.arange(len(score.ready), dtype=np.float64) * (LOOK_S / 3600.0)
    needs = np.repeat([float(law.needed(rate)) for rate in day.rate.tolist()], len(hours) // len(day.rate))
    curves = [Curve(hours, needs), Curve(hours, score.ready)]
    PICTURE.write_bytes(svg(Plot(caption="", curves=curves, unit="h", plain=True, steps=True, names=("needed", "serving"))))
    return {"worker_hours_vs_oracle": round(score.vs_oracle, 3), "attainment": round(score.attainment, 4)}
