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
predicts every run, and once more with the step times as they are paced. Then the twin alone: the paper's worker
(`bench.cluster`) with an engine that mixes prefills with decodes, and with one that does not, at the rate of figure 20.

`--data DIR` (or MOTET_DATA) holds the recorded popularity and lengths; without it a power law and log-normal lengths are drawn.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench import report
from bench.cluster_live_parts import Live, Outcome, Setting, paced_perf, popularity_and_lengths, predicted
from bench.paced import Pace
from bench.rivals import POLICIES
from bench.rivals.parts import ABLATIONS
from motet.shared.model import PerfModel
from motet.twin.steps import A10_BGMV, A10_MBGMV
from motet.twin.workload import Workload

PACE = Pace(step_ms=16.0, row_ms=0.56, rank_ms=0.02, token_ms=1.2)
WORKERS, SEATS, ADAPTERS = 4, 32, 64
RATE = 12.0
REQUESTS, ROUNDS = 400, 3
SLO_FACTOR = 1.5
LEARNING = 150  # requests before the rounds, from which workers learn their step times
LEARNING_ROUND = 1_000_000  # a draw of its own
SEED = 1
LIMIT_S = 1320.0
PAPER_WORKERS, PAPER_RATE, PAPER_REQUESTS = 8, 60.0, 1200
PAPER_POLICIES = ("motet", "motet without shared prefills", "rank-aware", "most-idle", "round-robin")
QUICK = ("motet", "most-idle")
TWIN_COLUMNS = ("attainment %", "TPOT ms", "error %")
COLUMNS = (
    *("policy", "attainment %", "TPOT ms", "p99", "TTFT ms"),
    *(f"{twin}: {name}" for twin in ("learned", "paced") for name in TWIN_COLUMNS),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--seed", type=int, default=SEED, help="another draw of arrivals, lengths, and adapters' ranks")
    parser.add_argument("--rate", type=float, default=RATE, help=f"requests per second (default {RATE:g})")
    parser.add_argument(
        "--rounds", type=int, choices=range(1, 10), default=ROUNDS, help=f"of {REQUESTS} requests per policy (default {ROUNDS})"
    )
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
    policies = listed_policies(args.policies) if args.policies else QUICK if quick else tuple(POLICIES)
    with Live.started(setting) as cluster:
        alone_ms = cluster.alone_ms()
        slo_ms = SLO_FACTOR * alone_ms
        cluster.run("round-robin", setting.draw(LEARNING_ROUND, slo_ms, requests=10 if quick else LEARNING))
        learned = cluster.learned()
        found: dict[str, list[Outcome]] = {policy: [] for policy in policies}
        rounds: list[Workload] = []
        for number in args.watch.rounds(1 if quick else args.rounds):
            rounds.append(setting.draw(number, slo_ms))
            turn = number * len(policies) // args.rounds
            for policy in (*policies[turn:], *policies[:turn]):
                found[policy].append(cluster.run(policy, rounds[-1]))
                print(f"  round {number + 1}, {policy}: {found[policy][-1].figures()}", flush=True)

    def simulated(perfs: Sequence[PerfModel]) -> dict[str, Outcome]:
        return {policy: Outcome.together([predicted(setting, perfs, policy, one) for one in rounds]) for policy in policies}

    live = {policy: Outcome.together(outcomes) for policy, outcomes in found.items()}
    twin, twin_of_pace = simulated(learned), simulated([paced_perf(setting.pace)] * setting.workers)
    print(_table(setting, live, twin, twin_of_pace))
    return _figures(live, twin) | {
        "twin_error_p50_of_pace": _error_p50(live, twin_of_pace),
        "attainment_error_p50_of_pace": _attainment_error_p50(live, twin_of_pace),
        "twin_of_pace": {policy: one.figures() for policy, one in twin_of_pace.items()},
        "rounds": {policy: [one.figures() for one in of] for policy, of in found.items()},
        "papers_worker": _papers_worker(setting, quick=quick),
        "alone_ms": round(alone_ms, 2),
        "slo_ms": round(slo_ms, 2),
        "workers": setting.workers,
        "requests": setting.requests * len(rounds),
        "requests_per_s": setting.rate,
        "seed": setting.seed,
        "recorded_workload": bool(args.data),
        "pace": asdict(setting.pace),
        "learned": _mean(learned),
    }


def listed_policies(listed: str) -> tuple[str, ...]:
    """The names in a comma-separated list. Raises SystemExit for an unknown one, or if those of the figures are missing."""
    names = tuple(listed.split(","))
    if unknown := [name for name in names if name not in (*POLICIES, *ABLATIONS)]:
        raise SystemExit(f"--policies: {', '.join(unknown)} is none of {', '.join((*POLICIES, *ABLATIONS))}")
    if missing := [name for name in QUICK if name not in names]:
        raise SystemExit(f"--policies: {', '.join(missing)} must be among them, as the figures compare with it")
    return names


def _table(setting: Setting, live: Mapping[str, Outcome], *twins: Mapping[str, Outcome]) -> str:
    rows: list[list[object]] = []
    for policy, outcome in live.items():
        one = outcome.figures()
        row: list[object] = [policy, 100 * outcome.attainment, one["tpot_ms"], one["tpot_p99_ms"], one["ttft_ms"]]
        for twin in twins:
            row += [100 * twin[policy].attainment, float(twin[policy].tpot_ms.mean()), 100 * _error(outcome, twin[policy])]
        rows.append(row)
    requests = len(next(iter(live.values())).kept)
    return report.table(f"{setting.workers} live workers, {requests} requests, {setting.rate:g} per second", COLUMNS, rows)


def _figures(live: Mapping[str, Outcome], twin: Mapping[str, Outcome]) -> dict[str, Any]:
    rivals = [policy for policy in live if not policy.startswith("motet")]
    best = max(rivals, key=lambda policy: live[policy].attainment)
    motet = live["motet"]
    pairs, apart = list(itertools.combinations(live, 2)), told_apart(live)
    return {
        "attainment": round(motet.attainment, 4),
        "attainment_best_rival": round(live[best].attainment, 4),
        "best_rival": best,
        "tpot_vs_mostidle": round(float(motet.tpot_ms.mean() / live["most-idle"].tpot_ms.mean()), 4),
        "twin_rank_order": round(rank_order(live, twin, apart), 4),
        "twin_rank_order_all_pairs": round(rank_order(live, twin, pairs), 4),
        "not_told_apart": [" = ".join(pair) for pair in pairs if pair not in apart],
        "twin_error_p50": _error_p50(live, twin),
        "attainment_error_p50": _attainment_error_p50(live, twin),
        "busy": round(float(np.mean([one.busy for one in live.values()])), 3),
        "behind": round(float(np.mean([one.behind for one in live.values()])), 4),
        "lost": round(float(np.mean([one.lost for one in live.values()])), 4),
        "policies": {policy: one.figures() for policy, one in live.items()},
        "twin": {policy: one.figures() for policy, one in twin.items()},
    }


def _papers_worker(setting: Setting, *, quick: bool) -> dict[str, dict[str, Any]]:
    """The paper's eight workers in the twin: a prefill takes a pass over the weights of its own, or shares that of a step."""
    setting = replace(setting, workers=PAPER_WORKERS, rate=PAPER_RATE, requests=60 if quick else PAPER_REQUESTS)
    figures: dict[str, dict[str, Any]] = {}
    rows: list[list[object]] = []
    for (kernel, perf), mixes in itertools.product((("MBGMV", A10_MBGMV), ("BGMV", A10_BGMV)), (False, True)):
        name = f"{kernel}, {'one pass for all' if mixes else 'a pass for prefills'}"
        perf = msgspec.structs.replace(perf, load_base_ms=0.0, load_ms_per_mib=0.0)
        if mixes:
            perf = msgspec.structs.replace(perf, prefill_base_ms=0.0)
        workload = setting.draw(0, SLO_FACTOR * perf.decode_base_ms)
        for policy in PAPER_POLICIES:
            outcome = predicted(setting, [perf] * setting.workers, policy, workload, mixes=mixes)
            one = outcome.figures()
            figures.setdefault(name, {})[policy] = {
                key: one[key] for key in ("attainment", "tpot_ms", "tpot_p99_ms", "ttft_ms")
            }
            rows.append([name, policy, 100 * outcome.attainment, one["tpot_ms"], one["tpot_p99_ms"], one["ttft_ms"]])
    columns = ("kernel, steps", "policy", "attainment %", "TPOT ms", "p99", "TTFT ms")
    print(report.table(f"the paper's worker in the twin: {setting.workers}, {setting.rate:g} requests/s", columns, rows))
    return figures


def told_apart(live: Mapping[str, Outcome]) -> list[tuple[str, str]]:
    """The pairs of policies whose attainment differs by more than noise: on the same requests, by two standard errors."""
    found = []
    for a, b in itertools.combinations(live, 2):
        more, less = (live[a].kept & ~live[b].kept).sum(), (live[b].kept & ~live[a].kept).sum()
        if abs(int(more) - int(less)) > 2.0 * np.sqrt(float(more + less)):
            found.append((a, b))
    return found


def rank_order(live: Mapping[str, Outcome], twin: Mapping[str, Outcome], pairs: Sequence[tuple[str, str]]) -> float:
    """Kendall's tau by attainment: 1 if the twin orders these pairs of policies as the live run, -1 if it reverses them all."""
    signs = [np.sign(of[a].attainment - of[b].attainment) for a, b in pairs for of in (live, twin)]
    return float(np.mean(np.array(signs[::2]) * np.array(signs[1::2]))) if pairs else 1.0


def _error(live: Outcome, twin: Outcome) -> float:
    """How far the twin's mean time per token is from the live one, as a share."""
    return abs(float(twin.tpot_ms.mean()) / float(live.tpot_ms.mean()) - 1.0)


def _error_p50(live: Mapping[str, Outcome], twin: Mapping[str, Outcome]) -> float:
    """The median over the policies of `_error`."""
    return round(float(np.median([_error(one, twin[policy]) for policy, one in live.items()])), 4)


def _attainment_error_p50(live: Mapping[str, Outcome], twin: Mapping[str, Outcome]) -> float:
    """The median over the policies of how far the twin's attainment is from the live one."""
    return round(float(np.median([abs(one.attainment - twin[policy].attainment) for policy, one in live.items()])), 4)


def _mean(learned: Sequence[PerfModel]) -> dict[str, float]:
    """The mean of the step times that the workers learned, for the record."""
    names = ("prefill_base_ms", "prefill_token_ms", "prefill_lora_ms", "decode_base_ms", "decode_row_ms", "decode_lora_ms")
    return {name: round(float(np.mean([getattr(perf, name) for perf in learned])), 4) for name in names}
