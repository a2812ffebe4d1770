"""The report of one or several runs as one HTML file with figures and plots, without scripts or external files.

`motet.twin.figures` has the same figures as text, and needs no matplotlib.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape

import numpy as np

from motet.policies.times.perf_model import Floats
from motet.twin.events import PS_PER_S
from motet.twin.figures import Result, cell, table_rows
from motet.twin.metrics import NEVER, Latencies, within
from motet.twin.plots import COLORS, Counts, Curve, Plot, Shares, svg

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
@media print { body { margin: 0 } figure { break-inside: avoid } }
"""


def html(title: str, subtitle: str, results: Sequence[Result]) -> str:
    """The report as an HTML page. All results must be of the same workload."""
    keys = legend([result.name for result in results])
    head = "".join(f"<th>{escape(result.name)}</th>" for result in results)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table_rows([result.figures for result in results])
    )
    plots = "".join(map(figure, _plots(results)))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<style>{STYLE}</style></head><body><h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p><p>{keys}</p>'
        f'<div class="plots">{plots}</div><h2>Figures</h2><table><tr><th></th>{head}</tr>{body}</table>'
        f"{_classes(results)}</body></html>\n"
    )


def figure(plot: Plot | Shares | Counts, names: Sequence[str] = ()) -> str:
    """The plot as an image inside a page, with the names of its curves or parts."""
    caption, image = escape(plot.caption), b64encode(svg(plot)).decode()
    shown = f'<img alt="{caption}" src="data:image/svg+xml;base64,{image}">'
    return f"<figure><figcaption>{caption}{legend(names)}</figcaption>{shown}</figure>"


def legend(names: Sequence[str]) -> str:
    """The colors of curves or parts."""
    return "".join(
        f'<span class="key" style="background:{color}"></span>{escape(name)}'
        for name, color in zip(names, COLORS, strict=False)
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
                waits = [cell(queue.get(quantile), ",.1f") for quantile in ("p50", "p99")]
                cells = (f"{of['requests']:,}", f"{of['slo_attainment']:.2%}", *waits)
                parts.append(f"</tr><tr><td>{escape(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells))
            parts.append("</tr></table>")
    return "".join(parts)


# ---- what is drawn


def _plots(results: Sequence[Result]) -> list[Plot]:
    slos = results[0].workload.slos
    times = [Latencies.of(result.workload, result.metrics) for result in results]
    span_s = max((float(result.figures["duration_s"]) for result in results), default=0.0) or 1.0
    edges = np.linspace(0.0, span_s, BUCKETS + 1)
    tpot = [one.tpot_ms[~np.isnan(one.tpot_ms)] for one in times]
    return [
        Plot(
            caption="Time to first token, share of requests below",
            curves=[_cdf(one.ttft_ms) for one in times],
            unit="ms",
            log_x=True,
            share=True,
            marks=sorted({slo.ttft_slo_ms for slo in slos}),
        ),
        Plot(
            caption="Time per output token, share of requests below",
            curves=[_cdf(one) for one in tpot],
            unit="ms",
            share=True,
            marks=sorted({slo.tpot_slo_ms for slo in slos}),
        ),
        Plot(caption="Requests in the system", curves=[_in_system(result, edges) for result in results], unit="s"),
        Plot(caption="Output tokens per second", curves=[_throughput(result, edges) for result in results], unit="s"),
        Plot(
            caption="SLO attainment by time of arrival",
            curves=[_attainment(result, one, edges) for result, one in zip(results, times, strict=True)],
            unit="s",
            share=True,
        ),
        Plot(caption="Requests per worker, fewest to most", curves=[_balance(result) for result in results], unit="worker"),
    ]


def _cdf(values: Floats) -> Curve:
    if not len(values):
        return Curve(np.zeros(0), np.zeros(0))
    at = np.linspace(0.0, 1.0, 300)
    return Curve(np.quantile(values, at), at)


def _in_system(result: Result, edges: Floats) -> Curve:
    ends = np.sort(result.metrics.end_ps[result.metrics.end_ps != NEVER]) / PS_PER_S
    taken = np.sort(result.workload.arrival_s[~result.metrics.refused])
    return Curve(edges, (np.searchsorted(taken, edges) - np.searchsorted(ends, edges)).astype(np.float64))


def _throughput(result: Result, edges: Floats) -> Curve:
    """Each request's tokens spread evenly between its first and its last."""
    done = result.metrics.end_ps != NEVER
    first, end = result.metrics.first_ps[done] / PS_PER_S, result.metrics.end_ps[done] / PS_PER_S
    rate = result.metrics.output_tokens[done] / np.maximum(end - first, 1e-3)
    width = edges[1] - edges[0]
    begins = np.minimum((first / width).astype(np.int64), BUCKETS - 1)
    ends = np.minimum((end / width).astype(np.int64), BUCKETS - 1)
    change = np.bincount(begins, rate, BUCKETS + 1) - np.bincount(ends, rate, BUCKETS + 1)
    return Curve((edges[1:] + edges[:-1]) / 2, np.cumsum(change)[:BUCKETS])


def _attainment(result: Result, times: Latencies, edges: Floats) -> Curve:
    workload = result.workload
    in_ttft, in_tpot = within(workload, times.rows, times.ttft_ms, times.tpot_ms)
    good = in_ttft & in_tpot
    asked, _ = np.histogram(workload.arrival_s, edges)
    kept, _ = np.histogram(workload.arrival_s[times.rows][good], edges)
    some = asked > 0
    return Curve(((edges[1:] + edges[:-1]) / 2)[some], kept[some] / asked[some])


def _balance(result: Result) -> Curve:
    taken = result.metrics.worker[result.metrics.worker >= 0]
    counts = np.sort(np.bincount(taken, minlength=int(result.figures["workers"]))).astype(np.float64)
    return Curve(np.arange(1.0, len(counts) + 1), counts)
