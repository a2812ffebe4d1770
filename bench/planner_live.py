"""A plan of `motet plan` on live workers: what they attain as planned and at 1.2 times the load, beside what the twin predicts.

The workers are those of `bench cluster_live`: real engines of the demo model whose steps take as long as `PACE` says. The plan
is made for a profile with the limits that such a worker announces and its pace as step times. The load is the largest for which
a plan that the twin has verified has four workers, in steps of 4%. So it needs all of them, and 1.2 times the load is too much.

The workers are then started again with the plan's flags, and get requests that are drawn as the planner draws them. The twin
gets the same ones. A request attains its objectives when its whole answer came and both times are within them; a refused one
does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as dataclass_replace
from typing import Any

import numpy as np

from bench import report
from bench.cluster_live import PACE, SEATS
from bench.cluster_live_parts import Answers, Live, MixedSteps, Setting, paced_perf, popularity_and_lengths
from motet.cli.plan_runs import processes
from motet.policies.plan.fleet import CannotServe
from motet.shared.model import Slo, WorkerLimits
from motet.shared.worker_options import WorkerOptions
from motet.twin.planning.check import Run
from motet.twin.planning.kinds import NativeKind, Part, Seen, joined
from motet.twin.planning.loads import Loads, Objective
from motet.twin.planning.planner import Goal, Made, Offer, Trial, make
from motet.twin.planning.study import written
from motet.twin.profile import VERSION, TwinProfile
from motet.twin.scheduler import SchedulerSpec
from motet.twin.worker_spec import WorkerSpec

WORKERS, ADAPTERS = 4, 64
OBJECTIVE = Objective(slo=Slo(ttft_slo_ms=400.0, tpot_slo_ms=70.0), share=0.97)
FACTORS = (1.0, 1.2)
MOST_RATE, NEAR, QUICK_NEAR = 100.0, 1.04, 1.25
TRIAL = Trial(seeds=(1, 2), warm_s=20.0, duration_s=140.0)
QUICK = Trial(seeds=(1,), warm_s=2.0, duration_s=20.0)
SEED = 1001
"""Of the requests that live workers get; the plan was made with others."""
WARM_S, DURATION_S, LEARN_S = 20.0, 150.0, 30.0
QUICK_S = 4.0
POLICY, LIVE = "motet", {"MOTET_ADMISSION": "objective", "MOTET_REBALANCE": "auto"}
"""The defaults of `motet up`, which the twin simulates."""
LoadsAt = Callable[[float], Loads]
COLUMNS = ("load", "attained %", "within TTFT %", "within TPOT %", "TTFT p99 ms", "TPOT p99 ms", "not answered %", "requests")


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--seed", type=int, default=SEED, help="another draw of the requests")


@dataclass(frozen=True, kw_only=True)
class PacedKind(NativeKind):
    """A worker whose prompts are computed in the same pass as its decodes."""

    def worker(self, setting: int, adapters: int) -> WorkerSpec:
        """See `NativeKind`."""
        return dataclass_replace(super().worker(setting, adapters), steps=MixedSteps(self.profile.perf))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plan, serve, simulate; print the table, return the figures."""
    quick, wanted = args.quick, 2 if args.quick else WORKERS
    shares, lengths = popularity_and_lengths(None, 10 if quick else ADAPTERS)
    setting = Setting(workers=wanted, seats=SEATS, pace=PACE, rate=1.0, requests=1, seed=1, shares=shares, lengths=lengths)
    with Live.started(setting, LIVE) as cluster:
        kind, sizes = paced_kind(cluster.snapshots()[0].limits), cluster.sizes()
        with processes() as simulate:
            plan = largest(lambda rate: loads_of(setting, sizes, rate), Offer(kind=kind), wanted, simulate, quick=quick)
        print(f"{wanted} workers for {plan.rate:.4g} requests/s, started with {plan.flags}", flush=True)
        parts = [part for _, part in plan.made.parts]
        warm_s, duration_s = (0.0, QUICK_S) if quick else (WARM_S, DURATION_S)
        cluster.restart(variables(plan.flags))
        announced = all(as_planned(word.limits, kind, parts[0]) for word in cluster.snapshots())
        ask(cluster, kind, parts, seed=args.seed + 1, duration_s=QUICK_S if quick else LEARN_S)
        found = [
            compared(cluster, kind, parts, FACTORS[number], args.seed, warm_s, duration_s)
            for number in args.watch.rounds(len(FACTORS), "loads", at_least=len(FACTORS))
        ]
    print(
        report.table(f"{wanted} live workers and their twin, {plan.rate:.4g} requests/s as planned", COLUMNS, list(rows(found)))
    )
    return figures(found) | {
        "workers": wanted,
        "requests_per_s": round(plan.rate, 3),
        "objective": {"share": OBJECTIVE.share, "ttft_ms": OBJECTIVE.slo.ttft_slo_ms, "tpot_ms": OBJECTIVE.slo.tpot_slo_ms},
        "planned_rounds": plan.made.rounds,
        "flags": plan.flags,
        "announced_as_planned": announced,
        "seconds": duration_s - warm_s,
        "seed": args.seed,
        "pace": asdict(PACE),
    }


# ---- the plan


def paced_kind(limits: WorkerLimits) -> PacedKind:
    """The kind of a worker that announces these limits and keeps the pace."""
    options = WorkerOptions(prefix_cache=bool(limits.prefix_cache))
    profile = TwinProfile(motet_profile=VERSION, limits=limits, perf=paced_perf(PACE), engine=options)
    return PacedKind(name="paced", profile=profile)


def loads_of(setting: Setting, sizes: dict[str, int], rate: float) -> Loads:
    """The setting's adapters with so many requests per second in total."""
    nothing = np.zeros(len(setting.names), np.int64)
    return Loads(
        names=tuple(setting.names),
        rate=setting.shares * rate,
        rank=setting.ranks,
        size_bytes=np.array([sizes[name] for name in setting.names]),
        pool=nothing,
        objective=nothing,
        lengths=(setting.lengths,),
        objectives=(OBJECTIVE,),
    )


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan for so many requests/s, and the flags of its workers."""

    rate: float
    made: Made
    flags: str


def largest(loads: LoadsAt, offer: Offer, workers: int, simulate: Run, *, quick: bool) -> Planned:
    """About the largest load for which a plan that the twin has verified needs exactly so many workers."""

    def made_for(rate: float, trial: Trial | None) -> Made | None:
        try:
            made = make(loads(rate), [offer], Goal(), trial, simulate)
        except CannotServe:
            return None
        return made if len(made.workers) <= workers and (trial is None or made.valid) else None

    low, high, near = 1.0, MOST_RATE, QUICK_NEAR if quick else NEAR
    while high / low > near:
        rate = (low * high) ** 0.5
        low, high = (rate, high) if made_for(rate, None) is not None else (low, rate)
    trial = QUICK if quick else TRIAL
    while (made := made_for(low, trial)) is None:
        low /= near
    while (more := made_for(low * near, trial)) is not None:
        low, made = low * near, more
    if len(made.workers) < workers:
        raise SystemExit(f"no load near {low:.3g} requests/s needs {workers} workers")
    flags = written(made, [offer], Goal(), None, bound=None, breaks=None).workers[0].flags
    return Planned(rate=low, made=made, flags=flags)


def variables(flags: str) -> dict[str, str]:
    """The flags of a plan as variables of `motet up`: --max-loras 64 as MOTET_MAX_LORAS."""
    words = flags.split()
    return {f"MOTET_{flag[2:].replace('-', '_').upper()}": value for flag, value in zip(words[::2], words[1::2], strict=True)}


def as_planned(limits: WorkerLimits, kind: NativeKind, part: Part) -> bool:
    """Whether a live worker announces the memory and the seats of the planned one, within 0.1%, as flags are rounded."""
    planned = kind.worker(part.setting, len(part.loads)).limits
    names = ("kv_blocks_total", "adapter_bytes_total", "max_running", "max_lora_rank")
    return all(abs(getattr(limits, name) / getattr(planned, name) - 1.0) < 1e-3 for name in names)


# ---- the comparison


def ask(cluster: Live, kind: NativeKind, parts: Sequence[Part], *, seed: int, duration_s: float) -> Answers:
    """The live workers' answers to the requests of the parts, from a scheduler that knows nothing yet."""
    cluster.begin(POLICY)
    work = kind.requests(parts, seed=seed, duration_s=duration_s)
    names = joined([part.loads for part in parts]).names
    return cluster.answers(work, names, most_tokens=SchedulerSpec().max_tokens)


def compared(
    cluster: Live, kind: NativeKind, parts: Sequence[Part], factor: float, seed: int, warm_s: float, duration_s: float
) -> Pair:
    """Live workers and simulated ones with the same requests, at a multiple of the planned load."""
    parts = [dataclass_replace(part, loads=part.loads.faster(factor)) for part in parts]
    answers = ask(cluster, kind, parts, seed=seed, duration_s=duration_s)
    work = kind.requests(parts, seed=seed, duration_s=duration_s)
    everything = joined([part.loads for part in parts])
    live = Seen.of(work, everything, warm_s, done=answers.whole, ttft_ms=answers.ttft_ms, tpot_ms=answers.tpot_ms)
    twin = kind.seen(parts, seed=seed, warm_s=warm_s, duration_s=duration_s)
    pair = Pair(factor=factor, live=Side.of(live), twin=Side.of(twin), answers=answers)
    print(f"  {factor:g} x: live {pair.live.attained}, twin {pair.twin.attained}", flush=True)
    return pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What live workers or simulated ones did, over all requests that count."""

    attained: float
    in_ttft: float
    in_tpot: float
    ttft_p99_ms: float
    tpot_p99_ms: float
    unanswered: float
    requests: int

    @classmethod
    def of(cls, seen: Seen) -> Side:
        """All adapters together."""
        found = seen.outcome(seen.names)
        total = int(found.arrived.sum())
        return cls(
            attained=round(float(found.attained.sum()) / total, 4),
            in_ttft=round(found.in_ttft / total, 4),
            in_tpot=round(found.in_tpot / total, 4),
            ttft_p99_ms=round(found.ttft_p99_ms, 1),
            tpot_p99_ms=round(found.tpot_p99_ms, 2),
            unanswered=round(1.0 - float(found.served.sum()) / total, 4),
            requests=total,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Live workers and their twin at a multiple of the planned load."""

    factor: float
    live: Side
    twin: Side
    answers: Answers

    @property
    def name(self) -> str:
        """The factor in the name of a figure."""
        return f"{self.factor:g}".replace(".", "_")


def rows(pairs: Sequence[Pair]) -> Iterator[list[object]]:
    """The lines of the table."""
    for pair in pairs:
        for where, side in (("live", pair.live), ("twin", pair.twin)):
            shares = (side.attained, side.in_ttft, side.in_tpot)
            yield [
                f"{pair.factor:g} x, {where}",
                *(100 * share for share in shares),
                side.ttft_p99_ms,
                side.tpot_p99_ms,
                100 * side.unanswered,
                side.requests,
            ]


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The figures of all loads."""
    found: dict[str, Any] = {}
    for pair in pairs:
        found[f"attained_live_{pair.name}"] = pair.live.attained
        found[f"attained_twin_{pair.name}"] = pair.twin.attained
    found["worst_difference_points"] = round(max(100 * abs(pair.live.attained - pair.twin.attained) for pair in pairs), 2)
    found["loads"] = {
        f"{pair.factor:g}": {
            "live": asdict(pair.live),
            "twin": asdict(pair.twin),
            "statuses": {str(status): int((pair.answers.status == status).sum()) for status in np.unique(pair.answers.status)},
            "busy": round(pair.answers.busy, 3),
            "behind": round(pair.answers.behind, 4),
            "lost": round(pair.answers.lost, 4),
        }
        for pair in pairs
    }
    return found
