"""The figures of runs as rows of text, one column per run: for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from motet.twin.metrics import Metrics
from motet.twin.workload import Workload


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
"""The rows of a table of results: name, place in the summary, format."""


def table_rows(figures: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of `ROWS`, one column of text per run."""
    return [(name, *(cell(value(one), form) for one in figures)) for name, value, form in ROWS]


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000


def cell(value: float | None, form: str) -> str:
    """A number as text, or a dash for None."""
    return "-" if value is None else format(value, form)
