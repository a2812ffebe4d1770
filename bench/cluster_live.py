"""Scheduling policies on live workers: the same requests with every policy, in turns, and the twin's prediction of them.

Four workers of the demo model behind a gateway, schedulers and NATS, each worker a process. Its engine is real and computes
prompts and decodes in the same steps, but a step takes as long as `PACE` says (`bench.paced`): two cores cannot carry four
workers of a larger model. The pace has the proportions that steps of model S have on a core of its own; a step of one request
takes 16 ms.

1,200 requests as in CaraServe's figure 20, in three rounds of 400: popularity of Azure Functions, Alpaca's lengths up to 128
tokens, ranks 8 to 128, every adapter on the device of every worker. The objective is a time per token of 1.5 times that of a
request alone, which is measured. How long an answer will be is known to the paced engine alone.

Between two policies the scheduler and the predictor are replaced, so that none knows more than another, and the workers stay.
The workers learn their step times themselves, in a run before the rounds; the twin gets what they have learned then, and
predicts every run. `--data DIR` (or MOTET_DATA) holds the recorded popularity and lengths; without it a power law and
log-normal lengths are drawn.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.cluster_live_parts import Live, Outcome, Setting, as_record, popularity_and_lengths, predicted
from bench.paced import Pace
from bench.rivals import POLICIES
from motet.shared.model import PerfModel
from motet.twin.workload import Workload

PACE = Pace(step_ms=16.0, row_ms=0.56, rank_ms=0.02, token_ms=1.2)
WORKERS, SEATS, ADAPTERS = 4, 32, 64
RATE = 11.0
REQUESTS, ROUNDS = 400, 3
SLO_FACTOR = 1.5
LEARNING = 150  # requests before the rounds, from which workers learn their step times
LEARNING_ROUND = 1_000_000  # a draw of its own
SEED = 1
LIMIT_S = 1140.0
QUICK = ("motet", "most-idle", "round-robin")
COLUMNS = ("policy", "attainment %", "TPOT ms", "p50", "p99", "TTFT ms", "twin: attainment %", "TPOT ms", "error %")


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--seed", type=int, default=SEED, help="another draw of arrivals, lengths, and adapters' ranks")
    parser.add_argument("--rate", type=float, default=RATE, help=f"requests per second (default {RATE:g})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of {REQUESTS} requests per policy (default {ROUNDS})")
    parser.add_argument("--policies", default="", help="comma-separated; default: Motet's and all rivals")
    parser.add_argument("--data", type=Path, default=os.environ.get("MOTET_DATA"), help="directory of the recorded workload")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    args.watch.limit_s = LIMIT_S
    quick = args.quick
    shares, lengths = popularity_and_lengths(Path(args.data) if args.data else None, 10 if quick else ADAPTERS)
    setting = Setting(
        workers=2 if quick else WORKERS,
        seats=SEATS,
        pace=PACE,
        rate=args.rate / 2 if quick else args.rate,
        requests=20 if quick else REQUESTS,
        seed=args.seed,
        shares=shares,
        lengths=lengths,
    )
    policies = tuple(args.policies.split(",")) if args.policies else QUICK if quick else tuple(POLICIES)
    with Live.started(setting) as live:
        alone_ms = live.alone_ms()
        slo_ms = SLO_FACTOR * alone_ms
        live.run("round-robin", setting.draw(LEARNING_ROUND, slo_ms, requests=10 if quick else LEARNING))
        learned = live.learned()
        found: dict[str, list[Outcome]] = {policy: [] for policy in policies}
        rounds: list[Workload] = []
        for number in args.watch.rounds(1 if quick else args.rounds):
            rounds.append(setting.draw(number, slo_ms))
            turn = number * len(policies) // max(1, args.rounds)
            for policy in (*policies[turn:], *policies[:turn]):
                found[policy].append(live.run(policy, rounds[-1]))
                print(f"  round {number + 1}, {policy}: {found[policy][-1].figures()}", flush=True)
    twin = {policy: [predicted(setting, learned, policy, one) for one in rounds] for policy in policies}
    print(_table(setting, found, twin))
    return _figures(found, twin) | {
        "alone_ms": round(alone_ms, 2),
        "slo_ms": round(slo_ms, 2),
        "workers": setting.workers,
        "requests": setting.requests * len(rounds),
        "requests_per_s": setting.rate,
        "seed": setting.seed,
        "recorded_workload": bool(args.data),
        "pace": asdict(setting.pace),
        "learned": as_record(_mean(learned)),
    }


def _table(setting: Setting, found: Mapping[str, Sequence[Outcome]], twin: Mapping[str, Sequence[Outcome]]) -> str:
    rows: list[list[object]] = []
    for policy, rounds in found.items():
        live, simulated = Outcome.together(rounds), Outcome.together(twin[policy])
        one = live.figures()
        shown = [100 * live.attainment, one["tpot_ms"], one["tpot_p50_ms"], one["tpot_p99_ms"], one["ttft_ms"]]
        rows.append(
            [policy, *shown, 100 * simulated.attainment, float(simulated.tpot_ms.mean()), 100 * _error(live, simulated)]
        )
    requests = sum(one.requests for one in next(iter(found.values())))
    return report.table(f"{setting.workers} live workers, {requests} requests, {setting.rate:g} per second", COLUMNS, rows)


def _figures(found: Mapping[str, Sequence[Outcome]], twin: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    live = {policy: Outcome.together(rounds) for policy, rounds in found.items()}
    simulated = {policy: Outcome.together(rounds) for policy, rounds in twin.items()}
    rivals = [policy for policy in live if not policy.startswith("motet")]
    best = max(rivals, key=lambda policy: live[policy].attainment)
    motet = live["motet"]
    return {
        "attainment": round(motet.attainment, 4),
        "attainment_best_rival": round(live[best].attainment, 4),
        "best_rival": best,
        "tpot_vs_mostidle": round(float(motet.tpot_ms.mean() / live["most-idle"].tpot_ms.mean()), 4),
        "twin_rank_order": round(rank_order(*({p: one.attainment for p, one in of.items()} for of in (live, simulated))), 4),
        "twin_rank_order_tpot": round(
            rank_order(*({p: -float(one.tpot_ms.mean()) for p, one in of.items()} for of in (live, simulated))), 4
        ),
        "twin_error_p50": round(float(np.median([_error(live[policy], simulated[policy]) for policy in live])), 4),
        "attainment_error_p50": round(
            float(np.median([abs(live[policy].attainment - simulated[policy].attainment) for policy in live])), 4
        ),
        "busy": round(float(np.mean([one.busy for one in live.values()])), 3),
        "late": round(float(np.mean([one.late for one in live.values()])), 4),
        "policies": {policy: one.figures() for policy, one in live.items()},
        "twin": {policy: one.figures() for policy, one in simulated.items()},
        "rounds": {policy: [one.figures() for one in rounds] for policy, rounds in found.items()},
    }


def rank_order(live: Mapping[str, float], twin: Mapping[str, float]) -> float:
    """Kendall's tau of two scores of the same policies: 1 if both order them alike, -1 if they are in reverse order."""
    pairs = [np.sign(live[a] - live[b]) * np.sign(twin[a] - twin[b]) for a, b in itertools.combinations(live, 2)]
    return float(np.mean(pairs)) if pairs else 1.0


def _error(live: Outcome, twin: Outcome) -> float:
    """How far the twin's mean time per token is from the live one, as a share."""
    return abs(float(twin.tpot_ms.mean()) / float(live.tpot_ms.mean()) - 1.0)


def _mean(learned: Sequence[PerfModel]) -> PerfModel:
    names = [name for name in PerfModel.__struct_fields__ if name != "kernel"]
    return PerfModel(**{name: float(np.mean([getattr(perf, name) for perf in learned])) for name in names})
