"""`motet plan`: how many workers a set of adapters needs, which adapters go where, and whether it will hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from motet.cli import plan_rules, plan_show
from motet.cli.client import ApiError
from motet.cli.plan_cases import Cases
from motet.cli.plan_demand import live, loads_of
from motet.cli.plan_inputs import changes, objectives, offer
from motet.cli.plan_runs import Telling, processes
from motet.cli.terminal import terminal
from motet.cli.workload_options import EXISTING, NEW, POSITIVE, Number, workload_options
from motet.policies.plan.fleet import CannotServe
from motet.shared.json_files import FileError
from motet.shared.plan import Plan, read_plan, write_plan
from motet.twin.planning.check import Run
from motet.twin.planning.loads import Loads
from motet.twin.planning.planner import Goal, Offer, Trial, tried
from motet.twin.planning.study import checked, parts_of

WARM_S = 300.0
MOST_MINUTES = 24 * 60


@click.command()
@click.option(
    "--adapters", help="File of adapters and the load on each (CSV or JSON lines), or how many to generate.", metavar="FILE|N"
)
@workload_options
@click.option("--from", "source", metavar="URL", help="Watch a running mesh: its rates, lengths and adapters.")
@click.option("--watch-s", type=POSITIVE, default=60.0, show_default=True, help="With --from: for how long to watch it.")
@click.option(
    "--percentile",
    type=Number(0, 100),
    default=95.0,
    show_default=True,
    help="With a trace: plan for this percentile of the rates of its windows of 5 minutes.",
)
@click.option(
    "--worker",
    "workers",
    multiple=True,
    metavar="PROFILE[,cost=,most=,seats=]",
    help="A kind of worker: a profile of `motet profile`, or a published calibration, vllm:llama-3.1-8b@h100 or"
    " vllm:qwen2.5-7b@h100 (repeatable). cost: per hour; most: how many there are; seats: max_num_seqs of vLLM (256).",
)
@click.option(
    "--slo",
    "slos",
    multiple=True,
    metavar="CLASS:ttft=,tpot=,share=",
    help="Objectives of a class in ms, and the share of its requests that must meet both (repeatable).",
)
@click.option(
    "--objective",
    type=click.Choice(["workers", "cost", "latency"]),
    default="workers",
    show_default=True,
    help="Fewest workers, least cost, or lowest latencies with all workers of `most`.",
)
@click.option(
    "--survive", type=click.IntRange(0), default=0, show_default=True, help="Still hold when so many workers are gone."
)
@click.option("--headroom", type=Number(0, 10), default=0.0, show_default=True, help="Plan for so much more load, e.g. 0.15.")
@click.option(
    "--what-if",
    "what_ifs",
    multiple=True,
    metavar="CHANGE",
    help="Plan again with a change: rate=1.5, rate=0.5..3, lose=1, worker=PROFILE, slo=CLASS:ttft=... (repeatable).",
)
@click.option("--explain", metavar="ADAPTER", help="Say why an adapter is where it is.")
@click.option("--rivals", is_flag=True, help="Compare with how other planners would place the adapters.")
@click.option("--rules", is_flag=True, help="Print rules of thumb for vLLM workers and plan nothing.")
@click.option("--check", "old", type=EXISTING, metavar="PLAN", help="Judge an old plan on this load instead of making one.")
@click.option("--no-check", "unchecked", is_flag=True, help="Do not simulate the plan: what the law says, at once.")
@click.option("--seeds", type=click.IntRange(1, 100), default=3, show_default=True, help="Simulations of each worker.")
@click.option(
    "--minutes",
    type=Number(1, MOST_MINUTES),
    default=30.0,
    show_default=True,
    help="Minutes of load in each simulation, after five of warm-up.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of generated workloads.")
@click.option("--html", "page", type=NEW, help="Write a page with the plan and its pictures; needs the extra `plots`.")
@click.option("--json", "file", type=NEW, metavar="FILE", help="Write the plan; with --rules, the rules.")
def plan(**options: Any) -> None:
    """Plan how many workers a set of adapters needs within its objectives, and try the plan in the digital twin.

    Prints the workers with their adapters and memory, what binds on each, the attainment that the twin found, the load at which
    the plan breaks, a lower bound, and the options to start the workers with. Ends with status 1 if there is no such plan.

    \b
      motet plan --adapters adapters.csv --worker vllm:llama-3.1-8b@h100,cost=2.9 --slo interactive:ttft=500,tpot=50
      motet plan --trace week.jsonl --worker a10.json,cost=0.6,most=8 --worker h100.json,cost=2.9 --objective cost
      motet plan --from http://localhost:8000 --worker a10.json --what-if rate=2 --what-if lose=1 --json plan.json
      motet plan --check plan.json --trace other.jsonl --worker a10.json
      motet plan --rules --worker vllm:llama-3.1-8b@h100
    """
    if options["rules"]:
        _rules(options["workers"], options["file"])
        return
    try:
        with Telling() as say, processes() as run:
            _plan(options, run, say)
    except (ApiError, CannotServe, FileError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def _plan(options: dict[str, Any], run: Run, say: Callable[[str], None]) -> None:
    goals = objectives(options["slos"])
    if not options["workers"]:
        raise click.UsageError("give a --worker: a profile, or vllm:llama-3.1-8b@h100")
    offers = [offer(text) for text in options["workers"]]
    names = [one.kind.name for one in offers]
    if len({*names}) < len(names):
        raise click.UsageError(f"--worker: {', '.join(names)}: two kinds have one name")
    goal = Goal(objective=options["objective"], headroom=options["headroom"], survive=options["survive"])
    tests = changes(options["what_ifs"])
    watched = options["source"]
    loads = live(watched, options["watch_s"], goals, say) if watched else loads_of(options, goals)
    if options["explain"] and options["explain"] not in loads.names:
        raise click.UsageError(f"--explain {options['explain']}: there is no such adapter")
    html = _page_maker() if options["page"] else None
    trial = Trial(seeds=tuple(range(1, options["seeds"] + 1)), warm_s=WARM_S, duration_s=WARM_S + options["minutes"] * 60.0)
    if options["old"]:
        _judge(read_plan(options["old"]), loads, offers, trial, run)
        return
    cases = Cases(loads, offers, goal, None if options["unchecked"] else trial, run, say)
    made, written = cases.plan()
    if options["file"]:
        write_plan(options["file"], written)
    console = terminal()
    plan_show.show(console, written, loads)
    if options["explain"]:
        for line in cases.explained(made, options["explain"]):
            console.print(line)
    if options["rivals"]:
        console.print(plan_show.rival_table(written, cases.rivals()))
    if tests:
        console.print(plan_show.case_table([cases.changed(made, change) for change in tests]))
    if html is not None:
        stairs = cases.staircase(rivals=options["rivals"])
        lines = plan_show.summary(written, cases.loads)
        text = html("Motet plan", lines, written, stairs, cases.attainment(), cases.day())
        options["page"].write_text(text, encoding="utf-8")
    if written.checked is not None and not written.checked.valid:
        raise click.ClickException(f"the twin finds no plan valid after {made.rounds} rounds: {plan_show.missing(written)}")


def _rules(workers: Sequence[str], file: Path | None) -> None:
    """Prints, and writes, the rules of kinds of workers."""
    found = plan_rules.rules_of(workers)
    if file:
        plan_rules.write(file, found)
    console = terminal()
    for profile, of in found.items():
        plan_rules.show(console, profile, of)


def _judge(old: Plan, loads: Loads, offers: Sequence[Offer], trial: Trial, run: Run) -> None:
    """Prints how an old plan does on a load. Status 1 if it does not hold."""
    parts, unknown = parts_of(old, loads, offers)
    results = tried(parts, offers, trial, run)
    found = checked(parts, results, trial)
    console = terminal()
    console.print(plan_show.demand_line(loads))
    console.print(plan_show.result_table(parts, results))
    console.print(f"{unknown:.1%} of the requests are on adapters that the plan does not have.")
    console.print(plan_show.checked_text(found))
    if not found.valid:
        raise click.ClickException("the plan does not hold on this load")


def _page_maker() -> Callable[..., str]:
    """What makes the page, before anything is simulated for it."""
    try:
        from motet.twin.planning.page import html
    except ModuleNotFoundError as error:
        raise click.ClickException(f"--html needs {error.name}: pip install 'motet[plots]'") from None
    return html
