"""`motet simulate`: runs the digital twin on a workload and prints a table, JSON or an HTML report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import click
import msgspec
import numpy as np
import orjson
from numpy.random import Generator

from motet.cli.options import takes
from motet.cli.progress import bar
from motet.cli.terminal import table, terminal
from motet.policies.cluster.dispatch import POLICIES
from motet.policies.memory.eviction import EVICTIONS
from motet.policies.step.request_queues import QUEUES
from motet.shared import tables
from motet.shared.config import ConfigError, ProcessConfig, ServiceConfig, load
from motet.shared.json_files import FileError
from motet.shared.model import Slo
from motet.shared.scheduler_options import SchedulerOptions
from motet.shared.worker_options import WorkerOptions
from motet.twin.cluster import BusDelays, Cluster
from motet.twin.figures import Result, table_rows
from motet.twin.memory import ATTENTION_QKV, LLAMA2_7B
from motet.twin.profile import TwinProfile, a10_llama2_7b, read_profile
from motet.twin.scheduler import SchedulerSpec
from motet.twin.traces import Popularity, Trace, read_lengths, read_popularity, read_trace, write_trace
from motet.twin.workload import MAX_CV, Intensity, Lengths, Workload, arrivals, rank_mix, zipf

MIB = 1 << 20
RANK_MIB = LLAMA2_7B.adapter_rank_bytes(ATTENTION_QKV) / MIB
EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW = click.Path(dir_okay=False, writable=True, path_type=Path)


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


SETS: dict[str, type[WorkerOptions | SchedulerOptions]] = {
    field.name: kind
    for kind in (WorkerOptions, SchedulerOptions)
    for field in msgspec.structs.fields(kind)
    if field.name not in ("policy", "admission")  # options of their own
}
TABLES: dict[str, tables.Table[Any]] = {"queues": QUEUES, "eviction": EVICTIONS}
POSITIVE = Number(min=0.0, min_open=True, max=1e9)


@click.command()
@click.option("--trace", type=EXISTING, help="Recorded requests in Motet's, Azure's, Mooncake's, MAF 2021 or GenTD26 format.")
@click.option(
    "--popularity",
    type=EXISTING,
    help="MAF 2019 counts per minute: shares of adapters and, without --trace, the rate over time.",
)
@click.option("--lengths", type=EXISTING, help="Token lengths: CSV num_prefill_tokens,num_decode_tokens, or Alpaca JSON lines.")
@click.option("--rate", type=POSITIVE, help="Requests per second; a trace is scaled to it.  [default: 4, or the trace's]")
@click.option("--duration-s", type=POSITIVE, help="Duration of the workload in seconds.  [default: 300, or the trace's]")
@click.option(
    "--shape", type=click.Choice(["constant", "diurnal", "flash"]), default="constant", help="Shape of the rate over time."
)
@click.option(
    "--cv",
    type=Number(0.05, MAX_CV),
    default=1.0,
    show_default=True,
    help="Coefficient of variation of the gaps between requests; 1: Poisson.",
)
@click.option("--prompt-tokens", type=POSITIVE, default=250.0, show_default=True, help="Mean prompt length (log-normal).")
@click.option("--output-tokens", type=POSITIVE, default=230.0, show_default=True, help="Mean output length (log-normal).")
@click.option(
    "--adapters",
    type=click.IntRange(0, 1_000_000),
    default=64,
    show_default=True,
    help="Number of adapters; 0: base model only.",
)
@click.option(
    "--zipf", "exponent", type=Number(0, 10), default=1.0, show_default=True, help="Zipf exponent of popularity; 0: uniform."
)
@click.option("--ranks", type=Mix(), default="8,16,32,64", show_default=True, help="Ranks and their weights, e.g. 8:3,64:1.")
@click.option("--rank-mib", type=POSITIVE, default=RANK_MIB, show_default=True, help="Adapter size in MiB per unit of rank.")
@click.option("--slo-ttft-ms", type=POSITIVE, default=Slo().ttft_slo_ms, show_default=True, help="TTFT objective of requests.")
@click.option("--slo-tpot-ms", type=POSITIVE, default=Slo().tpot_slo_ms, show_default=True, help="TPOT objective of requests.")
@click.option("--profile", type=EXISTING, help="Worker profile from `motet profile`.  [default: Llama-2-7B on an A10]")
@click.option(
    "--set",
    "changes",
    metavar="NAME=VALUE",
    multiple=True,
    help=f"Change an option of the workers or the schedulers: {', '.join(SETS)} (repeatable), e.g. queues=chameleon.",
)
@takes(ServiceConfig, "plugins")
@click.option("--workers", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Number of workers.")
@click.option(
    "--policy", "policies", multiple=True, help="Scheduling policy (repeat to compare); --plugins adds more.  [default: motet]"
)
@click.option(
    "--admission",
    type=click.Choice(["objective", "room"]),
    default="objective",
    show_default=True,
    help="When to refuse requests.",
)
@click.option("--schedulers", type=click.IntRange(1, 64), default=1, show_default=True, help="Number of schedulers.")
@click.option("--oracle-lengths", is_flag=True, help="Predict every output length exactly.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed repeats the run to the bit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--html", "page", type=NEW, help="Write a report with plots; needs the extra `plots`.")
@click.option("--save-trace", type=NEW, help="Write the workload to a file for --trace.")
def simulate(
    as_json: bool, page: Path | None, save_trace: Path | None, policies: tuple[str, ...], plugins: str | None, **options: Any
) -> None:
    """Simulate a cluster under a workload with the live scheduling and batching code.

    Prints attainment of objectives, latencies and throughput for each --policy. Without files the workload is generated.

    \b
      motet simulate --workers 4 --rate 12 --adapters 500 --html report.html
      motet simulate --workers 60 --rate 340 --policy motet --policy mine --plugins ./my_policy.py
      motet simulate --trace recorded.jsonl --profile worker.json --json
    """
    html = _report() if page is not None else None
    try:
        load(ProcessConfig, {"plugins": plugins})
        for name in policies:
            named("--policy", POLICIES, name)
        profile = read_profile(options["profile"]) if options["profile"] else a10_llama2_7b()
        for name, table_of_names in TABLES.items():
            named(f"--profile: engine.{name}", table_of_names, getattr(profile.engine, name))
        profile = msgspec.structs.replace(profile, engine=changed(profile.engine, options["changes"]))
        options["scheduler"] = changed(SchedulerOptions(admission=options["admission"]), options["changes"])
        workload = build(np.random.default_rng(options["seed"]), options)
        results = [run(name, workload, profile, options) for name in policies or ("motet",)]
        if save_trace is not None:
            write_trace(save_trace, workload)
    except (ConfigError, FileError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if page is not None and html is not None:
        page.write_text(html("Motet simulation", describe(workload, profile, options), results), encoding="utf-8")
    if as_json:
        runs = {result.name: result.figures for result in results}
        click.echo(orjson.dumps({"seed": options["seed"], "runs": runs}, option=orjson.OPT_INDENT_2).decode())
        return
    show(results, describe(workload, profile, options))


def _report() -> Callable[[str, str, Sequence[Result]], str]:
    """What makes a page of results. It needs matplotlib, which an installation may lack, so it is not imported before."""
    try:
        from motet.twin.report import html
    except ModuleNotFoundError as error:
        raise click.ClickException(f"--html needs {error.name}: pip install 'motet[plots]'") from None
    return html


Options = TypeVar("Options", WorkerOptions, SchedulerOptions)


def named(option: str, table: tables.Table[Any], name: str) -> None:
    """Check that a table has what an option names. Raises UsageError."""
    try:
        table.named(name)
    except tables.UnknownName as error:
        raise click.UsageError(f"{option}: {error}") from None


def changed(options: Options, changes: Sequence[str]) -> Options:
    """The options with those of `--set` that are theirs. Raises UsageError naming the option and the reason."""
    given: dict[str, Any] = {}
    for name, _, value in (change.partition("=") for change in changes):
        if name not in SETS:
            raise click.UsageError(f"--set {name}: there is no such option; one of {', '.join(SETS)}")
        if SETS[name] is not type(options):
            continue
        if name in TABLES:
            named(f"--set {name}", TABLES[name], value)
        kind = get_type_hints(type(options))[name]
        given[name] = {"on": "true", "off": "false"}.get(value, value) if kind is bool else value
        try:
            msgspec.convert({name: given[name]}, type(options), strict=False)
        except msgspec.ValidationError as error:
            choices = "on, off" if kind is bool else ", ".join(get_args(kind))
            reason = f"one of {choices}" if choices else str(error).partition(" - at")[0]
            raise click.UsageError(f"--set {name}={value}: {reason}") from None
    return msgspec.convert(msgspec.to_builtins(options) | given, type(options), strict=False)


def build(rng: Generator, options: dict[str, Any]) -> Workload:
    """The workload that the options describe. Raises FileError for files, ValueError for inconsistent options."""
    slo = Slo(ttft_slo_ms=options["slo_ttft_ms"], tpot_slo_ms=options["slo_tpot_ms"])
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
            adapter_bytes=np.rint(ranks * options["rank_mib"] * MIB).astype(np.int64),
            shares=shares,
            lengths=_lengths(rng, options),
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


def _lengths(rng: Generator, options: dict[str, Any]) -> Lengths:
    if options["lengths"]:
        return read_lengths(options["lengths"])
    return Lengths.lognormal(rng, prompt_mean=options["prompt_tokens"], output_mean=options["output_tokens"])


def run(policy: str, workload: Workload, profile: TwinProfile, options: dict[str, Any]) -> Result:
    """One policy on the workload, with a progress bar on a terminal."""
    spec = SchedulerSpec(
        **msgspec.to_builtins(options["scheduler"]) | {"policy": policy},
        oracle_lengths=options["oracle_lengths"],
        copies=options["schedulers"],
    )
    workers = [profile.spec()] * options["workers"]
    bus = BusDelays(assign_ms=profile.hops.assign_ms, stream_ms=profile.hops.frame_ms)
    cluster = Cluster(workload, workers, spec, bus=bus, seed=options["seed"])
    with bar(policy, workload.duration_s) as seen:
        cluster.run(progress=seen)
    return Result(policy, workload, cluster.metrics, cluster.summary())


def describe(workload: Workload, profile: TwinProfile, options: dict[str, Any]) -> str:
    """One line: what was simulated."""
    rate = len(workload) / workload.duration_s if workload.duration_s else 0.0
    return (
        f"{len(workload):,} requests in {workload.duration_s:,.0f} s ({rate:.2f}/s) on {len(workload.ranks):,} adapters; "
        f"{options['workers']} × {profile.name or profile.limits.base_model}; "
        f"{options['schedulers']} scheduler{'s' if options['schedulers'] > 1 else ''}; seed {options['seed']}"
    )


def show(results: list[Result], subtitle: str) -> None:
    """The table on the terminal."""
    console = terminal()
    console.print(subtitle)
    names = [result.name for result in results]
    compared = table("", *names, right=names)
    for row in table_rows([result.figures for result in results]):
        compared.add_row(*row)
    console.print(compared)
