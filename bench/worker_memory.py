"""Adapter memory of a live worker: 64 adapters compete for room for 12, and every copy to the device takes its time.

The worker is a process with the compiled CPU engine on one core and a small model, so that copies are what takes time. Adapters
pass an emulated link, so that a copy takes as long on every machine. All adapters are in host memory. In the same run, in
turns, each with the same requests:

    on demand       nothing is kept: an adapter is copied for its first request and leaves with its last one; first come,
                    first served; a request waits for the whole copy
    motet           Motet's defaults: room for 12 adapters, and for more in KV blocks that are idle
    assisted        the same, and a process on another core computes cold adapters until their copies are there (CaraServe);
                    NATS and the client use that core too

The rival has the same engine: copies run beside the steps, requests for one adapter share a copy, and other requests pass those
that wait for one. Requests arrive as a Poisson process and draw their adapter by a power law with
exponent EXPONENT, each draw by itself. That is the popularity of adapters in GenTD26 on the base model that is asked most (1.16
over its first 64). Functions of the Azure 2019 trace, the usual stand-in for adapters, have 1.19. In GenTD26 requests for one
adapter also come in a row, which a cache gains from and these draws leave out. LOADS are shares of the link's time, if every
request needed a copy. A load presses the rival and does not drown it when its link is busy for 70 to 95% of the time and its
queue does not grow. The headline is the smallest ratio among such loads, and that of the cache and the queue alone, without
assistance.

Draws are independent, so no cache copies less often than one that always holds the most popular adapters, in all KV blocks
too. `_limit` computes how long each request of a round would wait with that cache and a link that does nothing else. The P99 of
it is a limit for every cache.

The stall is measured first, with a larger model, whose steps are long beside what the system's own jitter takes: streams decode
with adapters that are there while others are copied, one after another. Each gap between two tokens is counted as one beside a
copy, one that ends with the newcomer's first token (its step prefills the newcomer too), or neither.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.models import SHAPES, model_and_adapters
from bench.rig.answers import metric
from bench.rig.http import BASE
from bench.rig.percentiles import quantile
from bench.rig.workers import LiveWorker, workload
from bench.watch import Watch
from motet.cli.process import free_port
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.native.device_memory import kv_bytes_per_block
from motet.services.worker.profiling import random_adapter
from motet.shared.clock import now_s
from motet.shared.model import AdapterRef
from motet.twin.workload import Floats, Intensity, Ints, Lengths, Workload, arrivals, pick, zipf

ADAPTERS, ROOM, RANK = 64, 12, 64
EXPONENT = 1.16
COPY_S = 0.08
LOADS = (1.0, 1.2)
SEATS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 48, 24
LONGEST_PROMPT, LONGEST_OUTPUT = 128, 96
BLOCK_SIZE = 16
MIB = 1 << 20
WAYS: dict[str, dict[str, str]] = {
    "on demand": {"plugins": "bench.rivals", "adapter_eviction": "none", "cold_start": "blocking", "device_memory": "fixed"},
    "motet": {},
    "assisted": {"assist_processes": "1", "adapter_probe": "off"},  # its tokens would wait for the whole copy
}
"""Options of the worker, beyond those of `_bed`."""
OURS, RIVAL, ASSISTED = "motet", "on demand", "assisted"
WARM_S, WARM_EVERY_S = 4.0, 0.05
LEARN_LOAD, LEARN_S = 3.0, 30.0  # before the first round: a cache that counts uses has to count some
STREAMS, STREAM_TOKENS, COLDS, COLD_EVERY_S, COLD_TOKENS = 4, 200, 10, 0.2, 2
QUICK_STREAM_TOKENS = 400  # of a smaller model
STALL_MODEL = "SM"
PRESSED = (0.7, 0.95)
"""Limits for the link's busy share of the time. Below the first the load is light, above the second the rival is overloaded."""


@dataclass(slots=True)
class Cell:
    """One way under one load, all rounds. Milliseconds, in the order of arrival."""

    ttft_ms: list[Floats] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)  # per request
    busy: list[float] = field(default_factory=list)  # share of the time in which the link copied
    limit_wait_ms: list[Floats] = field(default_factory=list)  # for a copy, of each request, with the best cache

    @property
    def limit_ms(self) -> float:
        """The P99 that the best possible cache would reach: its waiting times, plus this way's median, the time of a request
        that does not wait.
        """
        return quantile(np.concatenate(self.limit_wait_ms), 0.99) + self.quantile(0.5)

    def quantile(self, q: float) -> float:
        """The quantile over all rounds together."""
        return quantile(np.concatenate(self.ttft_ms), q)

    @property
    def pressed(self) -> bool:
        """Whether the link is busy most of the time, and requests of the last third wait at most twice as long."""
        thirds = [np.array_split(one, 3) for one in self.ttft_ms]
        last = float(np.mean([third[2].mean() for third in thirds]))
        early = float(np.mean([np.concatenate(third[:2]).mean() for third in thirds]))
        return PRESSED[0] <= float(np.mean(self.busy)) <= PRESSED[1] and last < 2 * early


@dataclass(slots=True)
class Gaps:
    """Gaps between the tokens of a stream, divided by the stream's median gap, by what happened meanwhile."""

    copying: list[float] = field(default_factory=list)
    prefilling: list[float] = field(default_factory=list)
    neither: list[float] = field(default_factory=list)
    median_ms: list[float] = field(default_factory=list)  # of the streams
    copies: int = 0

    def add(self, frames_s: Floats, copies: Sequence[tuple[float, float]]) -> None:
        """Add a stream whose tokens came at `frames_s`.

        `copies`: for each copy, when its request was sent and when its first token came.
        """
        gaps = np.diff(frames_s)
        usual = float(np.median(gaps))
        self.median_ms.append(1e3 * usual)
        for begin, end, ratio in zip(frames_s[:-1], frames_s[1:], gaps / usual, strict=True):
            if any(begin < first <= end for _, first in copies):
                self.prefilling.append(float(ratio))
            elif any(begin < first and sent < end for sent, first in copies):
                self.copying.append(float(ratio))
            else:
                self.neither.append(float(ratio))


@dataclass(slots=True)
class Bed:
    """A worker, its adapters, and the source of its copy statistics."""

    worker: LiveWorker
    ops_port: int
    adapters: list[AdapterRef]
    room: int = ROOM
    """Adapters that the device holds while no request runs."""

    def copied_bytes(self) -> float:
        """Bytes that the link has copied so far."""
        return metric(f"http://127.0.0.1:{self.ops_port}", "motet_worker_link_bytes_total")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--model", choices=sorted(SHAPES), default="", help="shape of the model (bench/models.py); XS")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:
        return asyncio.run(_run(args, Path(directory)))


async def _run(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    watch: Watch = args.watch
    shape = args.model or "XS"
    model, _ = model_and_adapters(shape)
    ways = (RIVAL, OURS) if args.quick else tuple(WAYS)  # the quick form's machine may have one core
    loads = LOADS[:1] if args.quick else LOADS
    seconds = args.seconds or (1.0 if args.quick else 26.0)
    rounds, laps = (1, 1) if args.quick else (2, 8)
    cells = {(way, load): Cell() for way in ways for load in loads}
    gaps = Gaps()
    async with contextlib.AsyncExitStack() as stack:
        beds = {way: await _bed(stack, model, home / str(number), WAYS[way]) for number, way in enumerate(ways)}
        if args.quick:
            await _stall(beds[OURS], gaps, 0, QUICK_STREAM_TOKENS)
        else:
            larger, _ = model_and_adapters(STALL_MODEL)
            async with contextlib.AsyncExitStack() as alone:
                bed = await _bed(alone, larger, home / "stall", WAYS[OURS], STREAMS + 2 * ROOM)
                for lap in watch.rounds(laps, "rounds of the stall", within=0.2):
                    await _stall(bed, gaps, lap, STREAM_TOKENS)
        if not args.quick:
            for way in ways[1:]:  # the rival keeps nothing
                await _serve(beds[way], Cell(), LEARN_LOAD, LEARN_S, seed=rounds, warm_s=0.0)
        turn = list(ways)
        for number in watch.rounds(rounds, "rounds of the loads"):
            for load in loads:
                for way in turn:
                    await _serve(beds[way], cells[way, load], load, seconds, seed=number, warm_s=min(WARM_S, seconds / 2))
                    print(f"round {number + 1}, load {load:g}, {way}: P99 {cells[way, load].quantile(0.99):.0f} ms", flush=True)
                watch.mark()
                turn = turn[1:] + turn[:1]
        adapter_bytes = beds[OURS].adapters[0].size_bytes
    return _figures(cells, gaps, ways, loads) | {
        "model": shape,
        "adapter_mib": round(adapter_bytes / MIB, 2),
        "copy_ms": 1e3 * COPY_S,
        "exponent": EXPONENT,
        "seconds": seconds,
    }


async def _bed(
    stack: contextlib.AsyncExitStack, model: Path, home: Path, changed: Mapping[str, str], adapters: int = ADAPTERS
) -> Bed:
    """A worker that has had a request for every adapter, so that all are in its host memory."""
    home.mkdir()
    port = free_port()
    blob, _ = random_adapter(model, BASE, RANK, 0)
    kv_blocks = SEATS * (LONGEST_PROMPT + LONGEST_OUTPUT) // BLOCK_SIZE
    kv_bytes = kv_blocks * kv_bytes_per_block(read_model_config(model), dtype="auto", block_size=BLOCK_SIZE)
    options = {
        "threads": "1",  # the other core is for NATS and the client
        "max_running": str(SEATS),
        "max_waiting": "10000",
        "block_size": str(BLOCK_SIZE),
        "kv_blocks": str(kv_blocks),
        "lora_memory_mib": str(ceil(ROOM * len(blob) / MIB)),
        "ops_port": str(port),
    }
    worker = await stack.enter_async_context(
        LiveWorker(model, {**options, **changed}, home, link_bytes_per_s=len(blob) / COPY_S)
    )
    room = ROOM if changed.get("device_memory") == "fixed" else ROOM + kv_bytes // len(blob)
    bed = Bed(worker, port, [await worker.publish(RANK, number) for number in range(adapters)], room)
    await worker.run(_once_each(bed, WARM_EVERY_S), bed.adapters)
    return bed


def _once_each(bed: Bed, every_s: float) -> Workload:
    """Send a short request for every adapter."""
    each = np.arange(len(bed.adapters))
    few = np.full(len(each), COLD_TOKENS)
    return workload(bed.adapters, every_s * each, each, few, few)


async def _serve(bed: Bed, cell: Cell, load: float, seconds: float, *, seed: int, warm_s: float) -> None:
    """One round: `warm_s` seconds that do not count, then `seconds` that do."""
    draw = np.random.default_rng((seed, round(100 * load)))
    times = arrivals(draw, Intensity.constant(load / COPY_S, warm_s + seconds))
    which = pick(draw, zipf(ADAPTERS, EXPONENT), len(times))
    lengths = Lengths.lognormal(draw, prompt_mean=PROMPT_TOKENS, output_mean=OUTPUT_TOKENS, prompt_cv=0.8, output_cv=0.7)
    prompt, output = lengths.capped(LONGEST_PROMPT, LONGEST_OUTPUT).draw(draw, len(times))
    before, began_s = bed.copied_bytes(), now_s()
    served = await bed.worker.run(workload(bed.adapters, times, which, prompt, output), bed.adapters)
    took_s, copied = now_s() - began_s, (bed.copied_bytes() - before) / bed.adapters[0].size_bytes
    counted = [one for one in served if one.sent_s >= warm_s]
    cell.ttft_ms.append(1e3 * np.array([one.first_s - one.sent_s for one in counted]))
    cell.limit_wait_ms.append(1e3 * _limit(times, which, bed.room)[times >= warm_s])
    cell.copies.append(copied / len(served))
    cell.busy.append(copied * COPY_S / took_s)


def _limit(times_s: Floats, which: Ints, room: int) -> Floats:
    """The wait of each request for its adapter, in seconds, if the `room - 1` most popular adapters always stay on the device.

    The last place is for all others. They are copied one after another, and requests for an adapter that is being copied share
    the copy.
    """
    there_s = {adapter: 0.0 for adapter in range(room - 1)}  # adapters are numbered by popularity
    other, link_s = -1, 0.0
    waits = np.zeros(len(times_s))
    for number, (now, adapter) in enumerate(zip(times_s.tolist(), which.tolist(), strict=True)):
        if adapter not in there_s:
            there_s.pop(other, None)
            other, link_s = adapter, max(link_s, now) + COPY_S
            there_s[adapter] = link_s
        waits[number] = max(0.0, there_s[adapter] - now)
    return waits


async def _stall(bed: Bed, gaps: Gaps, lap: int, tokens: int) -> None:
    """Streams that decode while adapters are copied, each copy for a request of its own."""
    first = lap * COLDS
    which = np.concatenate([np.arange(STREAMS), STREAMS + (first + np.arange(COLDS)) % (len(bed.adapters) - STREAMS)])
    times = np.concatenate([np.zeros(STREAMS), COLD_EVERY_S * (1 + np.arange(COLDS))])
    few = np.full(COLDS, COLD_TOKENS)
    output = np.concatenate([np.full(STREAMS, tokens), few])
    served = await bed.worker.run(
        workload(bed.adapters, times, which, np.concatenate([np.full(STREAMS, 8), few]), output), bed.adapters
    )
    waited = [(one.sent_s, one.first_s) for one in served[STREAMS:] if one.first_s - one.sent_s > COPY_S / 2]
    gaps.copies += len(waited)
    for stream in served[:STREAMS]:
        gaps.add(np.array(stream.frames_s), waited)


def _print_gaps(gaps: Gaps, itl_ms: float) -> None:
    kinds = (("beside a copy", gaps.copying), ("the newcomer's prefill", gaps.prefilling), ("neither", gaps.neither))
    shown = [[name, len(some), quantile(some, 0.99), quantile(some, 0.999), max(some)] for name, some in kinds if some]
    title = f"Gaps between tokens over the stream's median ({itl_ms:.2f} ms), {gaps.copies} copies"
    print(report.table(title, ["", "gaps", "p99", "p99.9", "worst"], shown))


def _figures(
    cells: Mapping[tuple[str, float], Cell], gaps: Gaps, ways: Sequence[str], loads: Sequence[float]
) -> dict[str, Any]:
    rows: list[list[object]] = []
    found: dict[str, dict[str, Any]] = {}
    for load in loads:
        rival = cells[RIVAL, load]
        for way in ways:
            cell = cells[way, load]
            ratio = rival.quantile(0.99) / cell.quantile(0.99)
            figures = {
                "ttft_p50_ms": round(cell.quantile(0.5), 1),
                "ttft_p99_ms": round(cell.quantile(0.99), 1),
                "copies_per_request": round(float(np.mean(cell.copies)), 3),
                "link_busy": round(float(np.mean(cell.busy)), 3),
                "pressed": cell.pressed,
                "ondemand_p99_vs_this": round(ratio, 2),
                "limit_p99_ms": round(cell.limit_ms, 1),
                "share_of_limit": round(cell.limit_ms / cell.quantile(0.99), 2),
                "rounds": [
                    round(quantile(theirs, 0.99) / quantile(one, 0.99), 2)
                    for one, theirs in zip(cell.ttft_ms, rival.ttft_ms, strict=True)
                ],
            }
            found[f"{way}@{load:g}"] = figures
            requests = sum(len(one) for one in cell.ttft_ms)
            rows.append([f"{load:g}: {way}", requests, *list(figures.values())[:7]])
    columns = [
        "load",
        "requests",
        "TTFT p50 ms",
        "p99 ms",
        "copies each",
        "link busy",
        "pressed",
        "on demand p99 / this",
        "limit",
    ]
    print(report.table(f"{ADAPTERS} adapters, room for {ROOM}; a copy takes {1e3 * COPY_S:.0f} ms", columns, rows))
    stalls = {
        "worst_stall_vs_median_itl": max(gaps.copying, default=0.0),
        "worst_stall_with_prefill": max(gaps.prefilling, default=0.0),
        "worst_stall_otherwise": max(gaps.neither, default=0.0),
    }
    itl_ms = float(np.median(gaps.median_ms))
    _print_gaps(gaps, itl_ms)
    fair = [load for load in loads if cells[RIVAL, load].pressed] or [max(loads)]
    headline = min(fair, key=lambda load: found[f"{OURS}@{load:g}"]["ondemand_p99_vs_this"])
    ours = found[f"{OURS}@{headline:g}"]
    if ASSISTED in ways:
        found_assisted = [found[f"{ASSISTED}@{load:g}"]["ondemand_p99_vs_this"] for load in fair]
        stalls["ttft_p99_ondemand_vs_assisted"] = min(found_assisted)
    return {
        "ttft_p99_ondemand_vs_ours": ours["ondemand_p99_vs_this"],
        "share_of_limit": ours["share_of_limit"],
        **{name: round(value, 3) for name, value in stalls.items()},
        "median_itl_ms": round(itl_ms, 3),
        "headline_load": headline,
        "pressing_loads": fair,
        "loads": found,
    }
