"""`motet simulate`: runs the digital twin on a workload and prints a table, JSON or an HTML report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import click
import msgspec
import numpy as np
import orjson

from motet.cli.options import takes
from motet.cli.progress import bar
from motet.cli.simulate_images import build_pictures, fits, picture_options
from motet.cli.terminal import table, terminal
from motet.cli.workload_options import EXISTING, MOST_ADAPTERS, NEW, POSITIVE, build, workload_options
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
from motet.twin.profile import TwinProfile, a10_llama2_7b, read_profile
from motet.twin.scheduler import SchedulerSpec
from motet.twin.traces import write_trace
from motet.twin.workload import Workload

SETS: dict[str, type[WorkerOptions | SchedulerOptions]] = {
    field.name: kind
    for kind in (WorkerOptions, SchedulerOptions)
    for field in msgspec.structs.fields(kind)
    if field.name not in ("policy", "admission")  # options of their own
}
TABLES: dict[str, tables.Table[Any]] = {"queues": QUEUES, "eviction": EVICTIONS}


@click.command()
@workload_options
@click.option("--duration-s", type=POSITIVE, help="Duration of the workload in seconds.  [default: 300, or the trace's]")
@click.option(
    "--shape", type=click.Choice(["constant", "diurnal", "flash"]), default="constant", help="Shape of the rate over time."
)
@click.option(
    "--adapters",
    type=click.IntRange(0, MOST_ADAPTERS),
    default=64,
    show_default=True,
    help="Number of adapters; 0: base model only.",
)
@click.option("--slo-ttft-ms", type=POSITIVE, default=Slo().ttft_slo_ms, show_default=True, help="TTFT objective of requests.")
@click.option("--slo-tpot-ms", type=POSITIVE, default=Slo().tpot_slo_ms, show_default=True, help="TPOT objective of requests.")
@picture_options
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
        workload = _workload(profile, options)
        if save_trace is not None and profile.images is not None:
            raise click.UsageError("--save-trace: the format has no pictures")
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


def _workload(profile: TwinProfile, options: dict[str, Any]) -> Workload:
    """Requests for what the worker of the profile makes: text or pictures."""
    rng = np.random.default_rng(options["seed"])
    if profile.images is not None:
        workload = build_pictures(rng, options)
        fits(workload, profile.images.latent_px)
        return workload
    e2e_ms = options["slo_e2e_ms"] or 0.0
    return build(rng, options, Slo(ttft_slo_ms=options["slo_ttft_ms"], tpot_slo_ms=options["slo_tpot_ms"], e2e_slo_ms=e2e_ms))


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
