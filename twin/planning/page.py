"""A plan as one HTML file with tables and pictures, without scripts or external files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from motet.shared.plan import Plan, PlannedWorker
from motet.twin.planning.study import cells
from motet.twin.plots import Counts, Curve, Plot, Shares
from motet.twin.report import STYLE, figure

Points = Sequence[tuple[float, float]]
MS = ", ms"
COLUMNS = (
    *("worker", "kind", "adapters", "req/s", "S_max", "A_max"),
    *("busy", "in use", f"TTFT p99{MS}", f"TPOT p99{MS}", "attained", "limit"),
)


def html(title: str, lines: Sequence[str], plan: Plan, stairs: Mapping[str, Points], attained: Points, day: Points) -> str:
    """The page. `lines`: what was asked and found; `stairs`: workers at multiples of the load; `attained`: shares at
    these; `day`: workers at the hours of a trace."""
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    body = "".join(f"<tr>{_row(place, worker)}</tr>" for place, worker in enumerate(plan.workers, start=1))
    text = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{text}"
        f'<div class="plots">{"".join(_pictures(plan, stairs, attained, day))}</div>'
        f"<h2>Workers</h2><table><tr>{head}</tr>{body}</table></body></html>\n"
    )


def _row(place: int, worker: PlannedWorker) -> str:
    shown = cells(worker)
    texts = (str(place), worker.kind, *(shown[column.removesuffix(MS)] for column in COLUMNS[2:]))
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def _pictures(plan: Plan, stairs: Mapping[str, Points], attained: Points, day: Points) -> list[str]:
    found = []
    lines = {name: points for name, points in stairs.items() if points}
    unit = "cost per hour" if plan.objective == "cost" else "workers"
    if lines:
        curves = [Curve(*np.array(points, np.float64).T) for points in lines.values()]
        plot = Plot(caption=f"{unit} by the load", curves=curves, unit="x the load", steps=True, plain=True)
        found.append(figure(plot, tuple(lines)))
    if attained:
        curve = Curve(*np.array(attained, np.float64).T)
        plot = Plot(
            caption="Requests within their objectives by the load", curves=[curve], unit="x the load", share=True, plain=True
        )
        found.append(figure(plot))
    if day:
        curve = Curve(*np.array(day, np.float64).T)
        found.append(figure(Plot(caption=f"{unit} over the trace", curves=[curve], unit="hours", steps=True, plain=True)))
    shares = [worker.adapter_share for worker in plan.workers]
    if None not in shares:
        part = np.array(shares, np.float64)
        memory = Shares(caption="Memory for adapters and for KV blocks", parts=[part], unit="worker")
        found.append(figure(memory, ("adapters", "KV blocks")))
    found.append(figure(_ranks(plan)))
    return found


def _ranks(plan: Plan) -> Counts:
    """How many adapters of each rank each worker has."""
    ranks = sorted({adapter.rank for worker in plan.workers for adapter in worker.adapters})
    counts = np.zeros((len(ranks), len(plan.workers)))
    for place, worker in enumerate(plan.workers):
        for adapter in worker.adapters:
            counts[ranks.index(adapter.rank), place] += 1
    return Counts(caption="Adapters by rank and worker", values=counts, rows=[str(rank) for rank in ranks], unit="worker")
