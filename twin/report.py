"""The report of one or several runs as one HTML file: figures and inline SVG plots, without scripts or external files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.twin.events import PS_PER_S
from motet.twin.metrics import NEVER, Latencies, Metrics
from motet.twin.workload import Workload

Floats = NDArray[np.float64]

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 42
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
BUCKETS = 120  # in time

STYLE = """
:root { color-scheme: light; --ink: #1f2937; --faint: #6b7280; --line: #e5e7eb; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 980px; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem }
p.sub { color: var(--faint); margin: .2rem 0 1.5rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; color: var(--faint); font-weight: normal }
.plots { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem } figure { margin: 0 }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .2rem }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .35em 0 1em }
svg text { font: 11px system-ui, sans-serif; fill: var(--faint) }
@media print { body { margin: 0 } figure { break-inside: avoid } }
"""


@dataclass(frozen=True)
class Result:
    """A run with its name in the report."""

    name: str
    workload: Workload
    metrics: Metrics
    figures: dict[str, Any]


ROWS: tuple[tuple[str, Callable[[dict[str, Any]], float | None], str], ...] = (
    ("requests", lambda f: f["requests"], ",.0f"),
    ("finished", lambda f: f["finished"], ",.0f"),
    ("refused", lambda f: f["refused"], ",.0f"),
    ("SLO attainment", lambda f: f["slo_attainment"], ".2%"),
    ("of TTFT", lambda f: f["ttft_attainment"], ".2%"),
    ("of TPOT", lambda f: f["tpot_attainment"], ".2%"),
    ("TTFT p50, ms", lambda f: f["ttft_ms"].get("p50"), ",.1f"),
    ("TTFT p99, ms", lambda f: f["ttft_ms"].get("p99"), ",.1f"),
    ("TPOT mean, ms", lambda f: f["tpot_ms"].get("mean"), ",.2f"),
    ("TPOT p99, ms", lambda f: f["tpot_ms"].get("p99"), ",.2f"),
    ("ITL p50, ms", lambda f: f["itl_ms"].get("p50"), ",.2f"),
    ("ITL p99, ms", lambda f: f["itl_ms"].get("p99"), ",.2f"),
    ("E2E p50, s", lambda f: _seconds(f["e2e_ms"].get("p50")), ",.2f"),
    ("E2E p99, s", lambda f: _seconds(f["e2e_ms"].get("p99")), ",.2f"),
    ("queueing p99, ms", lambda f: f["queue_ms"].get("p99"), ",.1f"),
    ("output tokens/s", lambda f: f["throughput"]["output_tokens_per_s"], ",.0f"),
    ("requests/s", lambda f: f["throughput"]["requests_per_s"], ",.2f"),
    ("engines busy", lambda f: f["throughput"]["busy_share"], ".1%"),
    ("adapter hits on the device", lambda f: f["adapters"]["device_hit_rate"], ".1%"),
    ("adapter loads to the device", lambda f: f["adapters"]["device_loads"], ",.0f"),
    ("waits for an adapter's host copy", lambda f: f["adapters"]["host_misses"], ",.0f"),
    ("starved adapters", lambda f: f["starvation"]["starved_adapters"], ",.0f"),
    ("preemptions", lambda f: f["preemptions"], ",.0f"),
)
"""What a table of results shows: name, where it is in a summary, how it is written."""


def table_rows(figures: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of `ROWS`, one column of text per run."""
    return [(name, *(_cell(value(one), form) for one in figures)) for name, value, form in ROWS]


def html(title: str, subtitle: str, results: Sequence[Result]) -> str:
    """The page. All results belong to the same workload."""
    keys = "".join(
        f'<span class="key" style="background:{color}"></span>{escape(result.name)}'
        for result, color in zip(results, COLORS, strict=False)
    )
    head = "".join(f"<th>{escape(result.name)}</th>" for result in results)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table_rows([result.figures for result in results])
    )
    plots = "".join(f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" for caption, svg in _plots(results))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<style>{STYLE}</style></head><body><h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p><p>{keys}</p>'
        f'<div class="plots">{plots}</div><h2>Figures</h2><table><tr><th></th>{head}</tr>{body}</table>'
        f"{_classes(results)}</body></html>\n"
    )


def _classes(results: Sequence[Result]) -> str:
    """A table per run with the results of each class of requests, if there are several."""
    parts = []
    for result in results:
        classes = result.figures["classes"]
        if len(classes) > 1:
            parts.append(f"<h2>Classes: {escape(result.name)}</h2><table><tr><th></th>")
            parts += [f"<th>{name}</th>" for name in ("requests", "SLO attainment", "queueing p50, ms", "queueing p99, ms")]
            for name, of in classes.items():
                queue = of["queue_ms"]
                waits = [_cell(queue.get(quantile), ",.1f") for quantile in ("p50", "p99")]
                cells = (f"{of['requests']:,}", f"{of['slo_attainment']:.2%}", *waits)
                parts.append(f"</tr><tr><td>{escape(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells))
            parts.append("</tr></table>")
    return "".join(parts)


# ---- what is drawn


@dataclass(frozen=True)
class _Curve:
    x: Floats
    y: Floats


def _plots(results: Sequence[Result]) -> list[tuple[str, str]]:
    slos = results[0].workload.slos
    times = [Latencies.of(result.workload, result.metrics) for result in results]
    span_s = max((float(result.figures["duration_s"]) for result in results), default=0.0) or 1.0
    edges = np.linspace(0.0, span_s, BUCKETS + 1)
    ttft_marks = sorted({slo.ttft_slo_ms for slo in slos})
    tpot_marks = sorted({slo.tpot_slo_ms for slo in slos})
    tpot = [one.tpot_ms[~np.isnan(one.tpot_ms)] for one in times]
    return [
        (
            "Time to first token, share of requests below",
            _plot([_cdf(one.ttft_ms) for one in times], "ms", log_x=True, marks=ttft_marks, share=True),
        ),
        (
            "Time per output token, share of requests below",
            _plot([_cdf(one) for one in tpot], "ms", marks=tpot_marks, share=True),
        ),
        ("Requests in the system", _plot([_in_system(result, edges) for result in results], "s")),
        ("Output tokens per second", _plot([_throughput(result, edges) for result in results], "s")),
        (
            "SLO attainment by time of arrival",
            _plot([_attainment(result, one, edges) for result, one in zip(results, times, strict=True)], "s", share=True),
        ),
        ("Requests per worker, fewest to most", _plot([_balance(result) for result in results], "worker")),
    ]


def _cdf(values: Floats) -> _Curve:
    if not len(values):
        return _Curve(np.zeros(0), np.zeros(0))
    at = np.linspace(0.0, 1.0, 300)
    return _Curve(np.quantile(values, at), at)


def _in_system(result: Result, edges: Floats) -> _Curve:
    ends = np.sort(result.metrics.end_ps[result.metrics.end_ps != NEVER]) / PS_PER_S
    taken = np.sort(result.workload.arrival_s[~result.metrics.refused])
    return _Curve(edges, (np.searchsorted(taken, edges) - np.searchsorted(ends, edges)).astype(np.float64))


def _throughput(result: Result, edges: Floats) -> _Curve:
    """Each request's tokens spread evenly between its first and its last."""
    done = result.metrics.end_ps != NEVER
    first, end = result.metrics.first_ps[done] / PS_PER_S, result.metrics.end_ps[done] / PS_PER_S
    rate = result.metrics.output_tokens[done] / np.maximum(end - first, 1e-3)
    width = edges[1] - edges[0]
    begins = np.minimum((first / width).astype(np.int64), BUCKETS - 1)
    ends = np.minimum((end / width).astype(np.int64), BUCKETS - 1)
    change = np.bincount(begins, rate, BUCKETS + 1) - np.bincount(ends, rate, BUCKETS + 1)
    return _Curve((edges[1:] + edges[:-1]) / 2, np.cumsum(change)[:BUCKETS])


def _attainment(result: Result, times: Latencies, edges: Floats) -> _Curve:
    workload = result.workload
    which = workload.slo if workload.slo is not None else np.zeros(len(workload), np.int64)
    slos = np.array([(slo.ttft_slo_ms, slo.tpot_slo_ms) for slo in workload.slos])[which[times.rows]].T
    good = (times.ttft_ms <= slos[0]) & ~(times.tpot_ms > slos[1])
    asked, _ = np.histogram(workload.arrival_s, edges)
    kept, _ = np.histogram(workload.arrival_s[times.rows][good], edges)
    some = asked > 0
    return _Curve(((edges[1:] + edges[:-1]) / 2)[some], kept[some] / asked[some])


def _balance(result: Result) -> _Curve:
    taken = result.metrics.worker[result.metrics.worker >= 0]
    counts = np.sort(np.bincount(taken, minlength=int(result.figures["workers"]))).astype(np.float64)
    return _Curve(np.arange(1.0, len(counts) + 1), counts)


# ---- how


def _plot(curves: Sequence[_Curve], unit: str, *, log_x: bool = False, share: bool = False, marks: Sequence[float] = ()) -> str:
    drawn = [curve for curve in curves if len(curve.x)]
    if not drawn:
        return f'<svg width="{WIDTH}" height="{HEIGHT}"><text x="{WIDTH // 2}" y="{HEIGHT // 2}">nothing to show</text></svg>'
    smallest = min(float(curve.x.min()) for curve in drawn)
    low_x = max(smallest, 1e-3) if log_x else 0.0
    high_x = max(float(curve.x.max()) for curve in drawn) or 1.0
    marks = [mark for mark in marks if low_x < mark < 2 * high_x]  # one that is far away would press the curves together
    high_x = max(high_x, *marks, 0.0)
    high_y = 1.0 if share else max(float(curve.y.max()) for curve in drawn) * 1.05 or 1.0

    def at_x(value: Floats | float) -> Any:
        if log_x:
            part = np.log(np.maximum(value, low_x) / low_x) / max(np.log(high_x / low_x), 1e-9)
        else:
            part = np.asarray(value) / high_x
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def at_y(value: Floats | float) -> Any:
        return HEIGHT - BOTTOM - np.asarray(value) / high_y * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in _log_ticks(low_x, high_x) if log_x else _ticks(high_x):
        x = at_x(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#f3f4f6"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{_short(tick)}</text>')
    for tick in _ticks(high_y):
        y = at_y(tick)
        text = f"{tick:.0%}" if share else _short(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for mark in marks:
        x = at_x(mark)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#6b7280" stroke-dasharray="4 3"/>'
            f'<text x="{x - 4:.1f}" y="{HEIGHT - BOTTOM - 6}" text-anchor="end">SLO</text>'
        )
    for curve, color in zip(curves, COLORS, strict=False):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(at_x(curve.x), at_y(curve.y), strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(unit)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'


def _ticks(high: float) -> list[float]:
    """Four to eight round numbers from 0 to `high`."""
    step = 10.0 ** floor(log10(high / 4))
    while high / step > 8:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    return [step * i for i in range(int(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(floor(log10(low)), floor(log10(high)) + 1)
    ticks = [10.0**power * digit for power in powers for digit in ((1, 2, 5) if len(powers) < 4 else (1,))]
    return [tick for tick in ticks if low <= tick <= high]


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
