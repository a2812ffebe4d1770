"""A plan on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from motet.cli.plan_cases import Case
from motet.cli.terminal import table
from motet.shared.plan import Checked, Plan, PlannedWorker
from motet.twin.planning.check import Result
from motet.twin.planning.kinds import Part
from motet.twin.planning.loads import Loads
from motet.twin.planning.study import cells

MOST_RANKS = 6
LATENCIES = ("TTFT p99", "TPOT p99")


def show(console: Console, plan: Plan, loads: Loads) -> None:
    """The whole plan: what was asked, the workers, what the twin found, how to start them."""
    asked, needed, found, *start = summary(plan, loads)
    console.print(asked)
    console.print(needed)
    console.print(worker_table(plan.workers))
    console.print(found)
    for line in start:
        console.print(line)


def summary(plan: Plan, loads: Loads) -> list[str]:
    """The plan in sentences: what was asked, how many workers, what the twin found, how to start them."""
    return [demand_line(loads), workers_line(plan, loads), checked_text(plan.checked), *start_lines(plan.workers)]


def demand_line(loads: Loads) -> str:
    """One line: what is asked."""
    demand = loads.demand
    ranks = sorted({int(rank) for rank in loads.rank.tolist()})
    some = ", ".join(map(str, ranks[:MOST_RANKS])) + (", ..." if len(ranks) > MOST_RANKS else "")
    goals = "; ".join(
        f"{one.slo.slo_class}: TTFT {one.slo.ttft_slo_ms:g} ms, TPOT {one.slo.tpot_slo_ms:g} ms, {one.share * 100:.4g}%"
        for one in loads.objectives
    )
    tokens = f"{demand.mean(demand.prompt_tokens):.0f} + {demand.mean(demand.output_tokens):.0f} tokens"
    return f"{len(loads):,} adapters (ranks {some}), {demand.total_rate:.4g} requests/s, {tokens}; {goals}"


def workers_line(plan: Plan, loads: Loads) -> str:
    """One line: how many workers, what they cost, and the bound."""
    counts: dict[str, int] = {}
    for worker in plan.workers:
        counts[worker.kind] = counts.get(worker.kind, 0) + 1
    kinds = ", ".join(f"{count} x {name}" if len(counts) > 1 else name for name, count in counts.items())
    million = plan.cost / 3600.0 / loads.demand.tokens_s * 1e6
    text = f"{_workers(len(plan.workers))} ({kinds}), cost {plan.cost:.4g} per hour, {million:.3g} per million tokens."
    if plan.bound is None:
        return text
    if plan.objective == "cost":
        return f"{text} No plan can cost less than {plan.bound:.4g} under the same law."
    return f"{text} No plan can need fewer than {plan.bound:.2f} workers under the same law."


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"


def worker_table(workers: Sequence[PlannedWorker]) -> Table:
    """One row per worker."""
    rows = [cells(worker) for worker in workers]
    columns = list(rows[0])
    found = table("", *columns, right=columns[:-1])
    for place, row in enumerate(rows, start=1):
        texts = (f"{text} ms" if column in LATENCIES and text != "-" else text for column, text in row.items())
        found.add_row(f"worker {place}", *texts)
    return found


def _ms(value: float) -> str:
    return f"{value:,.0f} ms"


def checked_text(found: Checked | None) -> str:
    """What the twin found."""
    if found is None:
        return "Not simulated (--no-check): this is what the law says, and it errs where slots are scarce."
    text = (
        f"Checked in the twin: {found.seeds} seed{'s' if found.seeds > 1 else ''} x {found.seconds / 60:.0f} min,"
        f" attained {found.attained:.2%} (worst adapter {found.worst_adapter}: {found.worst_attained:.2%})"
    )
    if found.after_loss is not None:
        text += f", without the most loaded workers {found.after_loss:.2%}"
    if not found.valid:
        return f"{text}. NOT within the objectives."
    if found.holds_to is None:
        return f"{text}."
    if found.breaks_first is None:
        return f"{text}; holds up to {found.holds_to:.2f} x this load and beyond."
    return (
        f"{text}; holds up to {found.holds_to:.2f} x this load. First to break: worker {found.breaks_first}, {found.breaks_by}."
    )


def start_lines(workers: Sequence[PlannedWorker]) -> list[str]:
    """How to start the workers: one line for each set of options."""
    places: dict[tuple[str, str], list[int]] = {}
    for place, worker in enumerate(workers, start=1):
        places.setdefault((worker.kind, worker.flags), []).append(place)
    return [
        f"start {'worker' if len(of) == 1 else 'workers'} {', '.join(map(str, of))} ({kind}) with: {flags}"
        for (kind, flags), of in places.items()
    ]


def missing(plan: Plan) -> str:
    """Which workers miss their objectives."""
    shares = {one.slo.slo_class: one.share for one in plan.objectives}
    least = min(shares.values())
    late = [
        f"worker {place} attains {worker.attained:.2%}"
        for place, worker in enumerate(plan.workers, start=1)
        if worker.attained is not None and worker.attained < least
    ]
    loss = plan.checked.after_loss if plan.checked is not None else None
    if not late and loss is not None and loss < least:
        return f"without the most loaded workers {loss:.2%} are attained"
    return ", ".join(late) or "single adapters miss their objective"


def case_table(cases: Sequence[Case]) -> Table:
    """One row per case of `--what-if`."""
    found = table("what if", "workers", "cost", "attained", "limit", right=("workers", "cost", "attained"))
    for case in cases:
        found.add_row(case.label, *_cells(case))
    return found


def rival_table(plan: Plan, cases: Sequence[Case]) -> Table:
    """The plan beside those of other planners."""
    found = table("planner", "workers", "cost", "attained", "limit", right=("workers", "cost", "attained"))
    checked = plan.checked
    ours = Case(
        label="this plan",
        workers=len(plan.workers),
        cost=plan.cost,
        attained=None if checked is None else checked.attained,
        valid=None if checked is None else checked.valid,
        limit=max(plan.workers, key=lambda worker: worker.busy).limit,
    )
    for case in (ours, *cases):
        found.add_row(case.label, *_cells(case))
    return found


def _cells(case: Case) -> tuple[str, ...]:
    if case.workers is None or case.cost is None:
        return ("-", "-", "-", case.reason)
    attained = "-" if case.attained is None else f"{case.attained:.2%}"
    return (str(case.workers), f"{case.cost:.4g}", attained + ("" if case.valid is not False else ", misses"), case.limit)


def result_table(parts: Sequence[tuple[int, Part]], results: Sequence[Result]) -> Table:
    """What the twin found for each worker."""
    columns = ("adapters", "req/s", "TTFT p99", "TPOT p99", "served", "attained")
    found = table("", *columns, right=columns)
    for place, ((_, part), result) in enumerate(zip(parts, results, strict=True), start=1):
        found.add_row(
            f"worker {place}",
            f"{len(part.loads):,}",
            f"{float(part.loads.rate.sum()):.1f}",
            _ms(result.ttft_p99_ms),
            _ms(result.tpot_p99_ms),
            f"{result.served_share:.2%}",
            f"{result.share:.2%}",
        )
    return found
