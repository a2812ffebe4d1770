"""CPU-assisted prefill: the cost of a cold adapter, by the way its first request starts (CaraServe sections 4 and 7).

    cached       the adapter is on the device before the request comes: the baseline
    all cores    the same with an engine on every core and no CPU LoRA process: the last core used for the engine instead
    on demand    the request waits until the copy is complete
    layer-wise   it joins when the copy stays ahead of the layers
    assist       it joins at once; CPU processes compute missing layers
    auto         the worker chooses among the three by its cost model

The engine is that of a worker. It has all cores but one, which a CPU LoRA process has. The link is emulated, at the same speeds
on every machine; the time of a copy relative to a prefill is printed and recorded.

    one cold request    by rank, prompt and link, nothing else in the engine: medians, the ways in turns
    burst               Poisson arrivals, each request with an adapter of its own, Alpaca-like lengths: means
    twin                the same policy at the paper's scale (bench/cpu_assist_twin.py)
    parts               shared memory against a socket, processes against threads (bench/cpu_assist_parts.py)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from bench import report
from bench.cpu_assist_parts import prefills, round_trips
from bench.cpu_assist_rig import WAYS, Answered, Asked, Files, Rig
from bench.cpu_assist_twin import paper_scale
from bench.models import SHAPES, prompts
from bench.watch import Watch

COLD = tuple(way for way in WAYS if way != "cached")
ALL_CORES = "all cores"
SINGLE = tuple(way for way in COLD if way != "auto")
SHOWN = (*WAYS, ALL_CORES)
BURST_TOKENS, BURST_LOAD = 16, 0.5
BURST_WEIGHT, MEASURED = 24, 0.85  # time of a burst in single settings; share of the time for both


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The settings to measure."""

    links_gbps: tuple[float, ...]
    ranks: tuple[int, ...]
    prompts: dict[int, int]  # {tokens: rounds}: short ones are over in a moment, and chance is a larger part of them
    burst_links_gbps: tuple[float, ...]
    burst_requests: int
    burst_rounds: int


FULL = Grid(
    links_gbps=(1.0, 5.0),
    ranks=(8, 128),
    prompts={16: 9, 128: 9, 512: 3},
    burst_links_gbps=(0.5, 1.0),
    burst_requests=24,
    burst_rounds=7,
)
QUICK = Grid(
    links_gbps=(1.0,),
    ranks=(8,),
    prompts={16: 1},
    burst_links_gbps=(1.0,),
    burst_requests=4,
    burst_rounds=1,
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--model", choices=sorted(SHAPES), default="S", help="shape of the model (bench/models.py)")
    parser.add_argument("--processes", type=int, default=1, help="CPU LoRA processes, each on a core of its own")


@dataclass(slots=True)
class Cell:
    """The rounds of one setting, for each way to start."""

    answers: dict[str, list[list[Answered]]] = field(default_factory=dict)
    link_mib: dict[str, float] = field(default_factory=dict)
    modes: dict[str, dict[str, int]] = field(default_factory=dict)
    prefill_ms: float = 0.0  # of a request alone whose adapter is there, the mean

    def of(self, way: str, figure: str) -> float:
        """The median over rounds of the mean over requests."""
        return statistics.median(statistics.fmean(getattr(one, figure) for one in lap) for lap in self.answers[way])

    def beside(self, way: str, figure: str, other: str = "cached") -> float:
        """The median over rounds of the ratio to another way in the same round."""
        return self._ratio(way, other, figure)

    def auto_vs_best(self) -> float:
        """Time to first token of the automatic choice, relative to that of the best single way."""
        best = min(SINGLE, key=lambda way: self.of(way, "ttft_ms"))
        return self._ratio("auto", best, "ttft_ms")

    def _ratio(self, way: str, other: str, figure: str) -> float:
        pairs = zip(self.answers[way], self.answers[other], strict=True)
        return statistics.median(_mean(ours, figure) / _mean(theirs, figure) for ours, theirs in pairs)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    grid = QUICK if args.quick else FULL
    ranks, links, burst_links = grid.ranks, grid.links_gbps, grid.burst_links_gbps
    cells: dict[tuple[float, int, int], Cell] = {}
    bursts: dict[float, Cell] = {}
    with Files(args.model, ranks) as files:
        weights = len(burst_links) * BURST_WEIGHT + len(links) * len(ranks) * len(grid.prompts)
        due = 0.0  # the share of the time by which a part has to end
        for link in dict.fromkeys((*burst_links, *links)):
            print(f"link of {link:g} GB/s", file=sys.stderr)
            with (
                Rig(files, link_gbps=link, processes=args.processes, adapters=grid.burst_requests) as rig,
                Rig(files, link_gbps=link, processes=0, adapters=grid.burst_requests) as whole,
            ):
                if link in burst_links:
                    due += MEASURED * BURST_WEIGHT / weights
                    bursts[link] = _burst(rig, whole, max(ranks), grid.burst_requests, grid.burst_rounds, args.watch, due)
                if link in links:
                    for rank, (tokens, rounds) in product(ranks, grid.prompts.items()):
                        due += MEASURED / weights
                        asked = [Asked(0.0, prompts(1, tokens, seed=tokens)[0], 2)]
                        cells[link, rank, tokens] = measure(rig, whole, asked, rank, rounds, args.watch, due)
        sizes = {rank: blobs[0].stat().st_size for rank, blobs in files.blobs.items()}
    _show(args.model, cells, bursts, sizes)
    figures: dict[str, Any] = {
        "ttft_vs_cached": _mean_of([cell.beside("auto", "ttft_ms") for cell in bursts.values()]),
        "ttft_vs_cached_all_cores": _mean_of([cell.beside("auto", "ttft_ms", ALL_CORES) for cell in bursts.values()]),
        "latency_vs_cached": _mean_of([cell.beside("auto", "latency_ms") for cell in bursts.values()]),
        "latency_vs_cached_all_cores": _mean_of([cell.beside("auto", "latency_ms", ALL_CORES) for cell in bursts.values()]),
        "ttft_ondemand_vs_cached": _mean_of([cell.beside("on demand", "ttft_ms") for cell in bursts.values()]),
        "auto_vs_best": round(max(cell.auto_vs_best() for cell in (*cells.values(), *bursts.values())), 3),
    }
    by_link = {
        f"{link:g}": {
            "copy_vs_prefill": round(sizes[max(ranks)] / link / 1e6 / cell.prefill_ms, 3),
            "ttft_vs_cached": {way: round(cell.beside(way, "ttft_ms"), 3) for way in cell.answers},
            "ttft_ms": {way: round(cell.of(way, "ttft_ms"), 2) for way in cell.answers},
        }
        for link, cell in bursts.items()
    }
    setup = {"model": args.model, "processes": args.processes, "burst_links_gbps": list(burst_links), "burst_rank": max(ranks)}
    figures["bursts"] = by_link
    return setup | figures | _parts(args.quick) | {"twin": paper_scale(quick=args.quick)}


def _parts(quick: bool) -> dict[str, Any]:
    trips, halves = round_trips(quick=quick), prefills(quick=quick)
    for title, found in (("16 tokens x 4096 there and back", trips), ("LoRA of a 128-token prefill", halves)):
        print(report.table(title, list(found[0]), [list(row.values()) for row in found]))
    return {"shm_round_trip_ms_p50_8proc": trips[-1]["shm_ms_p50"], "round_trips": trips, "prefills": halves}


def measure(rig: Rig, whole: Rig, asked: list[Asked], rank: int, rounds: int, watch: Watch, within: float = 1.0) -> Cell:
    """Serve the same requests in every way, in turns and in another order each time. `whole` has all cores."""
    cell = Cell({way: [] for way in SHOWN})
    order = list(SHOWN)
    for _ in watch.rounds(rounds, "rounds of a setting", within=within):
        for way in order:
            asking = whole if way == ALL_CORES else rig
            cell.answers[way].append(asking.serve(asked, rank, "cached" if way == ALL_CORES else way))
            cell.link_mib[way] = asking.link_bytes / (1 << 20)
            cell.modes[way] = asking.modes
        order = order[1:] + order[:1]
    return cell


def _burst(rig: Rig, whole: Rig, rank: int, requests: int, rounds: int, watch: Watch, within: float) -> Cell:
    """Arrivals at `BURST_LOAD` of the engine's capacity with cached adapters, which is measured first."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.4, 0.7, requests), 8, 256).astype(int)
    prompts_ = [prompts(1, int(tokens), seed=i)[0] for i, tokens in enumerate(lengths)]
    one_by_one = [rig.serve([Asked(0.0, prompt, BURST_TOKENS)], rank, "cached")[0] for prompt in prompts_[:8]]
    service_s = statistics.fmean(one.latency_ms for one in one_by_one) / 1e3
    at = np.cumsum(rng.exponential(service_s / BURST_LOAD, requests))
    asked = [Asked(float(s - at[0]), prompt, BURST_TOKENS) for s, prompt in zip(at, prompts_, strict=True)]
    cell = measure(rig, whole, asked, rank, rounds, watch, within)
    cell.prefill_ms = statistics.fmean(one.ttft_ms for one in one_by_one)
    return cell


def _show(model: str, cells: dict[tuple[float, int, int], Cell], bursts: dict[float, Cell], sizes: dict[int, int]) -> None:
    rows: list[list[object]] = []
    for (link, rank, tokens), cell in cells.items():
        times = [cell.of(way, "ttft_ms") for way in SHOWN]
        chosen = "/".join(cell.modes["auto"]) or "-"
        rows.append(
            [f"{link:g} GB/s, rank {rank}, {tokens} tokens", sizes[rank] / link / 1e6, *times, chosen, cell.auto_vs_best()]
        )
    columns = ["", "copy", *SHOWN, "auto chose", "auto / best"]
    print(report.table(f"{model}: one cold request, time to first token in ms (medians)", columns, rows))
    rows = []
    for link, cell in bursts.items():
        for way in SHOWN:
            times = [cell.of(way, figure) for figure in ("ttft_ms", "tpot_ms", "latency_ms")]
            ratios = [cell.beside(way, figure) for figure in ("ttft_ms", "tpot_ms", "latency_ms")]
            chosen = ", ".join(f"{count} {mode}" for mode, count in sorted(cell.modes[way].items())) or "-"
            rows.append([f"{link:g} GB/s, {way}", *times, *ratios, cell.link_mib[way], chosen])
    columns = ["", "TTFT ms", "TPOT ms", "latency ms", "TTFT / cached", "TPOT", "latency", "link MiB", "starts"]
    print(report.table(f"{model}: a burst, every request with an adapter of its own (means)", columns, rows))


def _mean(lap: list[Answered], figure: str) -> float:
    return statistics.fmean(getattr(one, figure) for one in lap)


def _mean_of(values: list[float]) -> float:
    return round(statistics.fmean(values), 3)
