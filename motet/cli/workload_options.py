"""The options that describe a workload, for `motet simulate` and `motet plan`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from numpy.random import Generator

from motet.shared.model import Slo
from motet.twin.memory import ATTENTION_QKV, LLAMA2_7B
from motet.twin.traces import Popularity, Trace, read_lengths, read_popularity, read_trace
from motet.twin.workload import MAX_CV, Intensity, Lengths, Workload, arrivals, rank_mix, zipf

MIB = 1 << 20
RANK_MIB = LLAMA2_7B.adapter_rank_bytes(ATTENTION_QKV) / MIB
EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW = click.Path(dir_okay=False, writable=True, path_type=Path)
MOST_ADAPTERS = 1_000_000
F = TypeVar("F", bound=Callable[..., Any])


class Mix(click.ParamType):
    """`8:1,64:3` as {8: 1.0, 64: 3.0}."""

    name = "rank:weight,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[int, float]:
        if isinstance(value, dict):
            return value
        mix: dict[int, float] = {}
        for part in str(value).split(","):
            rank, _, weight = part.partition(":")
            try:
                mix[int(rank)] = float(weight or 1)
            except ValueError:
                self.fail(f"{part!r} is not rank:weight", param, ctx)
        if min(mix) < 1 or not all(math.isfinite(weight) and weight > 0 for weight in mix.values()):
            self.fail(f"{value!r}: ranks and weights must be above 0", param, ctx)
        return mix


class Number(click.FloatRange):
    """A finite number; a range alone lets "nan" through."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


POSITIVE = Number(min=0.0, min_open=True, max=1e9)
_OPTIONS = (
    click.option(
        "--trace", type=EXISTING, help="Recorded requests in Motet's, Azure's, Mooncake's, MAF 2021 or GenTD26 format."
    ),
    click.option(
        "--popularity",
        type=EXISTING,
        help="MAF 2019 counts per minute: shares of adapters and, without --trace, the rate over time.",
    ),
    click.option(
        "--lengths",
        type=EXISTING,
        help="Token lengths: CSV num_prefill_tokens,num_decode_tokens, or Alpaca JSON lines.",
    ),
    click.option("--rate", type=POSITIVE, help="Requests per second; a trace is scaled to it.  [default: 4, or the trace's]"),
    click.option(
        "--cv",
        type=Number(0.05, MAX_CV),
        default=1.0,
        show_default=True,
        help="Coefficient of variation of the gaps between requests; 1: Poisson.",
    ),
    click.option("--prompt-tokens", type=POSITIVE, default=250.0, show_default=True, help="Mean prompt length (log-normal)."),
    click.option("--output-tokens", type=POSITIVE, default=230.0, show_default=True, help="Mean output length (log-normal)."),
    click.option(
        "--zipf",
        "exponent",
        type=Number(0, 10),
        default=1.0,
        show_default=True,
        help="Zipf exponent of popularity; 0: uniform.",
    ),
    click.option(
        "--ranks", type=Mix(), default="8,16,32,64", show_default=True, help="Ranks and their weights, e.g. 8:3,64:1."
    ),
    click.option(
        "--rank-mib", type=POSITIVE, default=RANK_MIB, show_default=True, help="Adapter size in MiB per unit of rank."
    ),
)


def workload_options(command: F) -> F:
    """The options that both commands have. `build` reads them, and three more that only a simulation has."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def build(rng: Generator, options: dict[str, Any], slo: Slo) -> Workload:
    """The workload that the options describe. Raises FileError for files, ValueError for inconsistent options."""
    popularity = read_popularity(options["popularity"]) if options["popularity"] else None
    trace: Trace | Workload = read_trace(options["trace"]) if options["trace"] else _arrivals(rng, options, popularity)
    if isinstance(trace, Trace):
        adapters = (
            trace.adapters if trace.adapter is not None else len(popularity.shares) if popularity else options["adapters"]
        )
        shares = popularity.shares if popularity else zipf(adapters, options["exponent"]) if adapters else None
        ranks = rank_mix(rng, adapters, options["ranks"])
        workload = trace.workload(
            rng,
            ranks=ranks,
            adapter_bytes=adapter_bytes(ranks, options),
            shares=shares,
            lengths=pool(rng, options),
            slo=slo,
        )
    else:
        workload = trace
    if options["trace"] and options["rate"] and workload.duration_s:
        workload = workload.faster(options["rate"] * workload.duration_s / len(workload))
    if options["trace"] and options["duration_s"]:
        workload = workload.until(options["duration_s"])
    if not len(workload):
        raise ValueError("the workload has no requests")
    return workload


def adapter_bytes(ranks: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Sizes of adapters of these ranks."""
    return np.rint(ranks * options["rank_mib"] * MIB).astype(np.int64)


def generated(rng: Generator, options: dict[str, Any]) -> np.ndarray:
    """Arrival times in seconds, without a trace. Raises ValueError for too many."""
    return _arrivals(rng, options, None).arrival_s


def _arrivals(rng: Generator, options: dict[str, Any], popularity: Popularity | None) -> Trace:
    rate, duration_s = options["rate"] or 4.0, options["duration_s"] or 300.0
    if rate * duration_s > 50_000_000:
        raise ValueError(f"--rate {rate:g} for --duration-s {duration_s:g} is more than 50 million requests")
    shapes: dict[str, Callable[[], Intensity]] = {
        "constant": lambda: Intensity.constant(rate, duration_s),
        "diurnal": lambda: Intensity.diurnal(rate, duration_s, period_s=duration_s),
        "flash": lambda: Intensity.flash_crowd(rate, duration_s, at_s=duration_s * 0.4, length_s=duration_s * 0.1, factor=5.0),
    }
    intensity = shapes[options["shape"]]()
    if popularity is not None and options["shape"] == "constant":
        intensity = popularity.scaled(rate).until(duration_s)
    return Trace(arrival_s=arrivals(rng, intensity, cv=options["cv"]))


def pool(rng: Generator, options: dict[str, Any]) -> Lengths:
    """The pairs of lengths that requests draw from."""
    if options["lengths"]:
        return read_lengths(options["lengths"])
    return Lengths.lognormal(rng, prompt_mean=options["prompt_tokens"], output_mean=options["output_tokens"])
