"""Placement by prefix: what it gains that schedulers know the KV blocks that each worker has cached, and that blocks travel.

On the twin, with workers like an H100 that serves Llama-3-8B (`bench.prefix_parts`): recorded conversations of Mooncake and the
long prompts of Azure's code trace (`--data DIR` or MOTET_DATA), and chats of 8 turns on 64 adapters, each with a system prompt
of 1,000 tokens. Motet's policy with and without knowledge of the caches ("today"), round-robin, sticky sessions, the
approximate tree of SGLang's gateway, Dynamo's cost, and an oracle: Motet's policy that looks into every cache. All take every
request (`--admission room`) and may fetch blocks; another row has Motet's own admission by objectives. Load 1.0 is the rate up
to which the oracle keeps 90% of the objectives on 8 workers, and so much for each of 60.

    goodput   requests per second that keep their objectives: 2 s to the first token, 40 ms per token
    reused    prompt tokens that were not computed, of all

Over NATS, blocks never travel between such GPUs, where computing is faster. Two more cases show fetches: the same GPUs with a
transport of 10 GB/s, and CPU workers, with fetches and without. `bench.prefix_fetch` has a fetch between live workers,
`bench.prefix_live` chats on live workers, `bench.prefix_index` the index itself, `bench.prefix_reports` the cost of reports.
Nothing was tuned on these runs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench import prefix_fetch, prefix_index, prefix_live, prefix_reports, report
from bench.prefix_parts import RDMA_MS_PER_MIB, Outcome, chats, cpu_worker, play, recorded, worker
from motet.twin.worker_spec import WorkerSpec
from motet.twin.workload import Workload

CONVERSATIONS, CODE = "mooncake_conversation.jsonl.gz", "azure_llm_2023_code.csv.gz"
RECORDED = 4_000
"""The first requests of a trace that are played."""
RIVALS = ("round-robin", "sticky", "cache-aware-tree", "dynamo")
OURS, TODAY, ORACLE, ADMITS, ALONE = "motet", "today", "oracle", "motet, own admission", "motet, no fetch"
ALL = (OURS, TODAY, *RIVALS, ORACLE)
FEWER = (OURS, TODAY, "cache-aware-tree", "dynamo", ORACLE)
MIDDLE, HIGH = 0.7, 0.95
KEPT = 0.9  # attainment at load 1.0
SEARCH = 5  # halvings


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload on some workers, and the systems that are played at each load. `capacity_of`: the case that says what load 1.0
    is; its own if None."""

    name: str
    workers: int
    make: Callable[[float], Workload]  # of a rate
    cells: Mapping[float, tuple[str, ...]]
    spec: WorkerSpec = field(default_factory=worker)
    capacity_of: str = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument("--data", type=Path, default=os.environ.get("MOTET_DATA"), help=f"directory of {CONVERSATIONS}, {CODE}")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    figures: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        cases = _cases(args)
        searches = {case.name: pool.submit(_capacity, case, quick=args.quick) for case in cases if not case.capacity_of}
        rates = {
            case.name: searches[case.capacity_of or case.name].result() * case.workers / _by_name(cases, case).workers
            for case in cases
        }
        jobs = {case.name: _submit(pool, case, rates[case.name]) for case in cases}
        for case in cases:
            found = {key: job.result() for key, job in jobs[case.name].items()}
            about = {"case": case.name, "rate": round(rates[case.name], 1)}
            runs += [about | {"load": load, "system": system} | _shown(outcome) for (load, system), outcome in found.items()]
            _print(case.name, rates[case.name], found)
            figures |= {f"{case.name}.{key}": value for key, value in _gains(found).items()}
            args.watch.mark()
    figures |= prefix_index.measure(quick=args.quick)
    figures |= prefix_reports.measure(quick=args.quick)
    figures |= prefix_fetch.measure(quick=args.quick)
    figures |= prefix_live.measure(args.watch, quick=args.quick)
    return figures | _summary(figures) | {"runs": runs}


def _cases(args: argparse.Namespace) -> list[Case]:
    seconds = 10.0 if args.quick else 60.0
    wide = {MIDDLE: (*ALL, ADMITS)} if args.quick else {0.3: FEWER, 0.5: FEWER, MIDDLE: ALL, 0.85: FEWER, HIGH: (*ALL, ADMITS)}
    talk = partial(chats, seconds=seconds, seed=1)
    alone = partial(chats, seconds=seconds, seed=3, shared=False)
    cases = [
        Case(name="chats, 8 workers", workers=8, make=talk, cells=wide),
        Case(name="nothing shared, 8 workers", workers=8, make=alone, cells={HIGH: (OURS, TODAY)}),
        Case(
            name="chats, 8 CPU workers",
            workers=8,
            make=partial(chats, seconds=10 * seconds, seed=1, adapters=16),
            cells={MIDDLE: (OURS, ALONE, TODAY, "cache-aware-tree", "dynamo", ORACLE)},
            spec=cpu_worker(),
        ),
    ]
    if args.data is not None:
        most = 400 if args.quick else RECORDED
        talked, coded = (partial(recorded, Path(args.data) / name, most=most) for name in (CONVERSATIONS, CODE))
        cases.append(Case(name="mooncake, 8 workers", workers=8, make=talked, cells=wide))
        few = {MIDDLE: (OURS, TODAY)} if args.quick else {MIDDLE: FEWER, HIGH: FEWER}
        cases.append(Case(name="azure code, 8 workers", workers=8, make=coded, cells=few))
        if not args.quick:
            cases.append(
                Case(name="mooncake, 60 workers", workers=60, make=talked, cells=few, capacity_of="mooncake, 8 workers")
            )
    if not args.quick:
        short = partial(chats, seconds=20.0, seed=1)
        pair, fast = {0.3: (OURS, ALONE), MIDDLE: (OURS, ALONE), HIGH: (OURS, ALONE)}, worker(RDMA_MS_PER_MIB)
        cases.append(Case(name="chats, 60 workers", workers=60, make=short, cells=few_of(HIGH), capacity_of="chats, 8 workers"))
        cases.append(Case(name="chats, 10 GB/s", workers=8, make=talk, cells=pair, spec=fast, capacity_of="chats, 8 workers"))
    return cases


def few_of(*loads: float) -> dict[float, tuple[str, ...]]:
    """The fewer systems at the middle load and these."""
    return dict.fromkeys((MIDDLE, *loads), FEWER)


def _by_name(cases: list[Case], case: Case) -> Case:
    name = case.capacity_of or case.name
    return next(one for one in cases if one.name == name)


def _submit(pool: ProcessPoolExecutor, case: Case, rate: float) -> dict[tuple[float, str], Future[Outcome]]:
    asked = [(load, system) for load, systems in case.cells.items() for system in systems]
    return {(load, system): pool.submit(_play, case, load * rate, system) for load, system in asked}


def _play(case: Case, rate: float, system: str) -> Outcome:
    played = partial(play, case.make(rate), case.workers, spec=case.spec)
    match system:
        case "motet, own admission":
            return played(OURS, admission="objective")
        case "motet, no fetch":
            return played(OURS, fetch=False)
        case "today":
            return played(OURS, aware=False)
    return played(system)


def _capacity(case: Case, *, quick: bool) -> float:
    """The highest rate at which the oracle keeps `KEPT` of the objectives."""
    if quick:
        return 5.0 * case.workers if case.spec.limits.device == "cuda" else 0.5 * case.workers
    low, high = (2.0, 80.0) if case.spec.limits.device == "cpu" else (0.5 * case.workers, 40.0 * case.workers)
    for _ in range(SEARCH):
        middle = (low * high) ** 0.5
        if play(case.make(middle), case.workers, ORACLE, spec=case.spec).attainment >= KEPT:
            low = middle
        else:
            high = middle
    return low


def _gains(found: Mapping[tuple[float, str], Outcome]) -> dict[str, float]:
    """Ratios to the others: of the times at load 0.7 (or the only one), of tokens over all loads (the least), of goodput at its
    best load."""
    loads = sorted({load for load, _ in found})
    at = MIDDLE if MIDDLE in loads else loads[0]
    gains: dict[str, float] = {}
    systems = {system for _, system in found}
    best = {system: max(outcome.goodput for (_, name), outcome in found.items() if name == system) for system in systems}
    ours = found[at, OURS]
    for name, word in ((TODAY, "today"), (ORACLE, "oracle"), (ALONE, "no_fetch")):
        if name in systems:
            gains[f"ttft_mean_vs_{word}"] = round(ours.ttft_mean_ms / found[at, name].ttft_mean_ms, 3)
            gains[f"goodput_vs_{word}"] = round(best[OURS] / best[name], 3)
    if ORACLE in systems:
        pairs = [(found[load, OURS].reused, found[load, ORACLE].reused) for load in loads]
        gains["tokens_reused_vs_oracle"] = round(min([ours / theirs for ours, theirs in pairs if theirs], default=1.0), 3)
    if rivals := systems.intersection(RIVALS):
        times = [found[at, rival].ttft_mean_ms for rival in rivals if (at, rival) in found]
        gains["ttft_mean_vs_best_rival"] = round(ours.ttft_mean_ms / min(times), 3)
        gains["goodput_vs_best_rival"] = round(best[OURS] / max(best[rival] for rival in rivals), 3)
    return gains


def _summary(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that pages name, over all cases."""
    found: dict[str, Any] = {"no_prefix_cost": figures["nothing shared, 8 workers.goodput_vs_today"]}
    shared = [name for name in figures if name.startswith(("chats", "mooncake"))]
    for word in ("goodput_vs_best_rival", "tokens_reused_vs_oracle"):
        found[word] = min(figures[name] for name in shared if name.endswith(f".{word}"))
    found["fetch_ttft_mean_vs_none"] = figures["chats, 8 CPU workers.ttft_mean_vs_no_fetch"]
    if "mooncake, 8 workers.ttft_mean_vs_today" in figures:
        found["ttft_mean_vs_today"] = figures["mooncake, 8 workers.ttft_mean_vs_today"]
    return found


def _shown(outcome: Outcome) -> dict[str, float]:
    return {
        "ttft_mean_ms": round(outcome.ttft_mean_ms, 1),
        "ttft_p50_ms": round(outcome.ttft_p50_ms, 1),
        "ttft_p99_ms": round(outcome.ttft_p99_ms, 1),
        "tpot_mean_ms": round(outcome.tpot_mean_ms, 2),
        "attainment": round(outcome.attainment, 4),
        "goodput": round(outcome.goodput, 2),
        "reused": round(outcome.reused_share, 4),
        "fetched": outcome.fetched,
        "refused": outcome.refused,
    }


def _print(name: str, rate: float, found: Mapping[tuple[float, str], Outcome]) -> None:
    columns = ["load, system", "TTFT mean ms", "p50", "p99", "TPOT ms", "objectives kept", "goodput/s", "reused", "fetched"]
    rows = [[f"{load:.2f}  {system}", *_shown(outcome).values()] for (load, system), outcome in found.items()]
    print(report.table(f"{name}; load 1.0 is {rate:.1f} requests/s", [*columns, "refused"], rows), flush=True)
