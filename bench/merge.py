"""Merged adapters in a live worker: the gain of merging for one adapter, the cost of a copy, and changing traffic.

Two worker processes with the same model and adapters, one of them with `--merge on`, have a core each and work at the same
time, so that a machine that gets slower changes no ratio. They change cores with every round.

    gap       short laps of 32 requests at once on both workers: both without LoRA; one adapter, unmerged, beside no LoRA; and
              that adapter merged (whole copy) beside no LoRA. A lap counts with the median time from one decoding step of all
              32 to the next, a round with the ratios of its laps over that of both without LoRA. Rounds in which the worker
              did not merge are counted apart. gap_recovered = (merged - unmerged) / (without LoRA - unmerged), medians
    copy      32 streams of two adapters decode; those of the second one end, and a copy for the first one is made beside the
              steps and takes over. worst_itl_ratio = the longest gap between two tokens of a stream from the first slice to
              the first merged tokens, over the median gap of the unmerged steps of as many streams
    mixed     more clients than seats, each sending its next request after the last; nine of ten requests are for one of four
              adapters, and that one changes with every phase. mixed_vs_unmerged = output tokens/s with `--merge on` over off
              of workers that serve the same requests at the same time

The headline figures are those of the model where LoRA costs most; "by_model" has both. Where it costs less than LEAST_GAP,
which laps differ by, there is no gap to recover. A worker makes no copy that would not pay, so where LoRA costs next to nothing
there may be no merged laps and no copy to measure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.models import SHAPES, model_and_adapters
from bench.rig.percentiles import quantile, quantile_ms
from bench.rig.worker_process import StepSeen
from bench.rig.workers import LiveWorker, Served, workload
from bench.watch import Watch
from motet.shared.model import AdapterRef

SEATS, CLIENTS = 32, 48
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 128
LAP_TOKENS = 48
COPY_TOKENS = 300  # of the streams beside which a copy is made
RANK, ADAPTERS = 32, 4
ROUNDS, COPIES, PHASES, PHASE_S = 24, 3, 4, 20.0
LEAST_STEPS = 5  # of a lap that decode for all seats in the lap's mode
DOMINANT = 0.9  # of the requests of a phase
WARM_LAPS = 12
LEAST_GAP = 0.02
COPY_FIGURES = ("copy_work_ms", "copy_wait_ms", "switch_ms", "worst_itl_ratio")
GOALS = {"gap_recovered": 0.8, "mixed_vs_unmerged": 1.0}


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    lap_tokens: int = LAP_TOKENS
    copy_tokens: int = COPY_TOKENS
    rounds: int = ROUNDS
    copies: int = COPIES
    phases: int = PHASES
    phase_s: float = PHASE_S


SIZES = {"M": Size(prompt_tokens=16, output_tokens=32, lap_tokens=24, copy_tokens=160, rounds=8, copies=1, phases=10)}
"""Sizes of the runs for models with long steps, because the whole bench has ten minutes."""
QUICK = Size(output_tokens=16, lap_tokens=128, copy_tokens=200, rounds=1, copies=1, phases=2, phase_s=2.0)


@dataclass(frozen=True, slots=True)
class Rig:
    """The two workers and their adapters."""

    plain: LiveWorker
    merging: LiveWorker
    adapters: dict[str, list[AdapterRef]]
    size: Size
    watch: Watch

    def pin(self, number: int) -> None:
        """Give each worker a core; they change with each number."""
        cores = sorted(os.sched_getaffinity(0))[-2:]
        for (_, worker), core in zip(self.both, cores[:: 1 if number % 2 else -1], strict=True):
            worker.pin(core)

    @property
    def both(self) -> tuple[tuple[str, LiveWorker], ...]:
        return ("unmerged", self.plain), ("merged", self.merging)


@dataclass(frozen=True, slots=True)
class Copy:
    """One merged copy, and the switch to it."""

    work_ms: float  # of the slices
    wait_ms: float  # from the first slice to the first merged step
    switch_ms: float  # what the first merged step begins later than a step after the usual time
    worst_itl_ratio: float


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--merge", choices=("on", "auto"), default="on", help="the option of the worker that merges")
    parser.add_argument("--model", choices=sorted(SHAPES), default="", help="shape of the model (bench/models.py); M and S")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    models = [args.model] if args.model else ["XS"] if args.quick else ["S", "M"]
    found: dict[str, dict[str, Any]] = {}
    for model in models:
        size = QUICK if args.quick else SIZES.get(model, Size())
        found[model] = asyncio.run(_measure(model, replace(size, phase_s=args.seconds or size.phase_s), args.watch, args.merge))
    _show(found)
    model = min(models, key=lambda name: found[name]["unmerged_vs_base"])
    head = {
        name: found[model][name]
        for name in ("gap_recovered", "mixed_vs_unmerged", "worst_itl_ratio", "copy_work_ms", "switch_ms")
    }
    return head | {"merge": args.merge, "model": model, "by_model": found, "goals": GOALS}


async def _measure(model: str, size: Size, watch: Watch, merge_option: str) -> dict[str, Any]:
    directory, _ = model_and_adapters(model)
    options = {
        "kv_memory_gib": "2",
        "max_running": str(SEATS),
        "max_waiting": str(4 * CLIENTS),
        "prefix_cache": "false",
        "threads": "1",
    }
    async with AsyncExitStack() as stack:
        workers = []
        for merge in ("off", merge_option):
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-bench-")))
            workers.append(
                await stack.enter_async_context(LiveWorker(directory, options | {"merge": merge}, home, records=True))
            )
        adapters = {
            name: [await worker.publish(RANK, number) for number in range(ADAPTERS)]
            for name, worker in zip(("unmerged", "merged"), workers, strict=True)
        }
        rig = Rig(workers[0], workers[1], adapters, size, watch)
        rig.pin(0)
        found = await _gap(rig)
        _say(f"{model}: {found}")
        found |= await _copies(rig)
        _say(f"{model}: {found}")
        return found | await _mixed(rig)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- one adapter


async def _gap(rig: Rig) -> dict[str, Any]:
    one = {name: rig.adapters[name][0] for name, _ in rig.both}
    merges = False
    for _ in range(WARM_LAPS):
        await _lap(rig, rig.merging, one["merged"])
        if merges := rig.merging.steps()[-1].merged:
            break
    pairs: dict[str, tuple[AdapterRef | None, AdapterRef | None]] = {
        "base": (None, None),
        "unmerged": (one["unmerged"], None),
        "merged": (None, one["merged"]),
    }
    times_ms: dict[str, list[float]] = {name: [] for name in pairs}
    unmerged, merged, not_merged = [], [], 0
    for number in rig.watch.rounds(rig.size.rounds, "rounds of the gap", at_least=2, within=0.5):
        rig.pin(number)
        ratio: dict[str, float] = {}
        for name, (plain, merging) in pairs.items():
            seen = await asyncio.gather(_lap(rig, rig.plain, plain), _lap(rig, rig.merging, merging))
            own_ms, other_ms = _decode_ms(seen[0], merged=False), _decode_ms(seen[1], merged=merges and name == "merged")
            if not own_ms or (not other_ms and name != "merged"):
                raise RuntimeError(f"too few steps decoded for {SEATS} requests in a lap of {name}")
            if other_ms:
                ratio[name] = own_ms / other_ms
                times_ms[name].append(other_ms if name == "merged" else own_ms)
        unmerged.append(ratio["base"] / ratio["unmerged"])
        if "merged" in ratio:
            merged.append(ratio["merged"] / ratio["base"])
        else:
            not_merged += 1
    if not merged:
        raise RuntimeError("the worker merged in none of the rounds")
    gap = 1.0 - statistics.median(unmerged)
    return {
        "decode_ms": {name: round(statistics.median(found), 3) for name, found in times_ms.items()},
        "rounds": len(unmerged),
        "rounds_not_merged": not_merged,
        "unmerged_vs_base": round(1.0 - gap, 4),
        "unmerged_vs_base_quartiles": _quartiles(unmerged),
        "merged_vs_base": round(statistics.median(merged), 4),
        "merged_vs_base_quartiles": _quartiles(merged),
        "merges": merges,
        "gap_recovered": round((statistics.median(merged) - 1.0 + gap) / gap, 3) if gap > LEAST_GAP else None,
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    return [round(quantile(values, q), 4) for q in (0.25, 0.75)]


def _decode_ms(steps: Sequence[StepSeen], *, merged: bool) -> float:
    """The median time between the beginnings of two steps in this mode that both decode for all seats, without a copy between.

    0 with too few of them.
    """
    steps = [step for step in steps if step.merged == merged]
    found = [1000 * (b.began_s - a.began_s) for a, b in pairwise(steps) if a.decoding == b.decoding == SEATS and not b.merge_s]
    return statistics.median(found) if len(found) >= LEAST_STEPS else 0.0


async def _lap(rig: Rig, worker: LiveWorker, adapter: AdapterRef | None) -> list[StepSeen]:
    """The steps of requests that arrive at once."""
    before = len(worker.steps())
    await _at_once(rig, worker, [0 if adapter else -1] * SEATS, [adapter] if adapter else [], [rig.size.lap_tokens] * SEATS)
    return worker.steps()[before:]


async def _at_once(
    rig: Rig, worker: LiveWorker, chosen: Sequence[int], adapters: Sequence[AdapterRef], tokens: Sequence[int]
) -> list[Served]:
    prompts, none = np.full(len(chosen), rig.size.prompt_tokens), np.zeros(len(chosen))
    load = workload(adapters, none, np.array(chosen), prompts, np.array(tokens))
    return await worker.run(load, adapters)


# ---- a copy


async def _copies(rig: Rig) -> dict[str, Any]:
    found: list[Copy] = []
    adapters, long, half = rig.adapters["merged"], rig.size.copy_tokens, SEATS // 2
    for number in range(rig.size.copies):
        before = len(rig.merging.steps())
        pair = [adapters[number % ADAPTERS], adapters[(number + 1) % ADAPTERS]]  # the first one's copy is there
        served = await _at_once(rig, rig.merging, [0] * half + [1] * half, pair, [long // 6] * half + [long] * half)
        copy = _copy_of(rig.merging.steps()[before:], served[half:], rig.merging.began_s)
        found += [copy] if copy is not None else []
        rig.watch.mark()
    if not found:
        return dict.fromkeys(COPY_FIGURES)
    return {
        "copy_work_ms": round(statistics.median(one.work_ms for one in found), 1),
        "copy_wait_ms": round(statistics.median(one.wait_ms for one in found), 1),
        "switch_ms": round(statistics.median(one.switch_ms for one in found), 2),
        "worst_itl_ratio": round(max(one.worst_itl_ratio for one in found), 3),
    }


def _copy_of(steps: Sequence[StepSeen], served: Sequence[Served], began_s: float) -> Copy | None:
    """The copy in these steps; None if no copy was made, or if it was not used before the streams ended."""
    first = next((i for i, step in enumerate(steps) if step.merge_s), None)
    merged = next((i for i, step in enumerate(steps) if step.merged and first is not None and i >= first), None)
    if first is None or merged is None:
        return None
    each_s = [b.began_s - a.began_s for a, b in pairwise(steps)]
    from_s, to_s = steps[first - 1].began_s - began_s, steps[merged + 2].began_s - began_s
    gaps = [(b - a, b) for one in served for a, b in pairwise(one.frames_s)]
    return Copy(
        work_ms=1000 * sum(step.merge_s for step in steps[: merged + 1]),
        wait_ms=1000 * (steps[merged].began_s - steps[first].began_s),
        switch_ms=1000 * (each_s[merged] - statistics.median(each_s[merged:])),
        worst_itl_ratio=max(gap for gap, at in gaps if from_s <= at <= to_s) / statistics.median(gap for gap, _ in gaps),
    )


# ---- mixed traffic


async def _mixed(rig: Rig) -> dict[str, Any]:
    size = rig.size
    tokens: dict[str, list[float]] = {name: [] for name, _ in rig.both}
    longest: dict[str, list[float]] = {name: [] for name, _ in rig.both}
    merged_steps = steps = 0
    copying_s = 0.0
    for phase in rig.watch.rounds(size.phases, "phases", at_least=2):
        rig.pin(phase)

        async def serve(name: str, worker: LiveWorker, phase: int = phase) -> list[Served]:
            draw, adapters = random.Random(phase), rig.adapters[name]
            others = [one for number, one in enumerate(adapters) if number != phase % ADAPTERS]

            def request() -> tuple[int, int, AdapterRef]:
                chosen = adapters[phase % ADAPTERS] if draw.random() < DOMINANT else draw.choice(others)
                return size.prompt_tokens, draw.randint(size.output_tokens // 2, size.output_tokens * 3 // 2), chosen

            return await worker.keep_busy(CLIENTS, size.phase_s, request)

        before = len(rig.merging.steps())
        for (name, _), served in zip(rig.both, await asyncio.gather(*(serve(*each) for each in rig.both)), strict=True):
            tokens[name].append(_rate(served, size.phase_s))
            longest[name] += [max((b - a for a, b in pairwise(one.frames_s)), default=0.0) for one in served]
        ran = rig.merging.steps()[before:]
        merged_steps, steps = merged_steps + sum(step.merged for step in ran), steps + len(ran)
        copying_s += sum(step.merge_s for step in ran)
        _say(f"phase {phase}: { ({name: round(rates[-1], 1) for name, rates in tokens.items()}) } tokens/s")
    ratios = [a / max(b, 1.0) for a, b in zip(tokens["merged"], tokens["unmerged"], strict=True)]
    return {
        "mixed_vs_unmerged": round(sum(tokens["merged"]) / max(1.0, sum(tokens["unmerged"])), 3),
        "mixed_by_phase": [round(ratio, 3) for ratio in ratios],
        "mixed_merged_share": round(merged_steps / max(1, steps), 3),
        "mixed_copying_share": round(copying_s / (len(ratios) * size.phase_s), 4),
        "longest_gap_ms": {name: round(quantile_ms(gaps, 1.0), 1) for name, gaps in longest.items()},
        "p90_longest_gap_ms": {name: round(quantile_ms(gaps, 0.9), 1) for name, gaps in longest.items()},
    }


def _rate(served: Sequence[Served], phase_s: float) -> float:
    """Output tokens/s of a phase up to the last token in it, so that a step under way at its end does not count."""
    frames_s = [at for one in served for at in one.frames_s if at <= phase_s]
    return len(frames_s) / max(frames_s, default=phase_s)


def _show(found: dict[str, dict[str, Any]]) -> None:
    rows: list[list[object]] = []
    for model, one in found.items():
        rows.append(
            [
                model,
                one["decode_ms"]["base"],
                f"{one['unmerged_vs_base']:.3f}",
                f"{one['merged_vs_base']:.3f}",
                "no gap" if one["gap_recovered"] is None else f"{one['gap_recovered']:.2f}",
                *("none" if one[name] is None else one[name] for name in COPY_FIGURES),
                f"{one['mixed_vs_unmerged']:.3f}",
                f"{one['mixed_merged_share']:.0%}",
            ]
        )
    columns = (
        *(
            "model",
            "decoding step without LoRA, ms",
            "speed: one adapter",
            "merged",
            "gap recovered (0.8)",
            "copy: work ms",
            "until merged ms",
        ),
        *("switch ms", "worst ITL / median", "mixed / unmerged", "merged steps"),
    )
    print(report.table(f"{SEATS} requests, one adapter of rank {RANK}", columns, rows))
