"""Results of a run: a few numbers per request in arrays, token gaps as runs of equal steps, and their summary.

Definitions, as in the papers. Times of a request are counted from its arrival:

    TTFT  to its first token                      E2E  to its last token
    TPOT  (E2E - TTFT) / (output tokens - 1)      time per token  E2E / output tokens (CaraServe section 7)
    ITL   every gap between two tokens of a request, pooled over all requests

A request attains its SLO when it finished with TTFT, TPOT and E2E within its objectives. Refused and unfinished requests attain
nothing. Starved: less than 90% of the incoming tokens were served (adapter-caching paper, section 8).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.twin.events import PS_PER_MS, PS_PER_S
from motet.twin.workload import Workload

QUANTILES = (0.5, 0.9, 0.95, 0.99)
STARVED_BELOW = 0.9
NEVER = -1
_FLUSH = 1 << 18  # steps, that is 2 MiB per column of them
_BIN = 0.002  # relative width of an ITL bin
_SMALLEST_MS = 1e-4


@dataclass
class Metrics:
    """What a run of the twin records. Times are picoseconds on the virtual clock, `NEVER` for what did not happen."""

    requests: int
    stream_ps: int = 0  # from the worker to the client
    first_ps: NDArray[np.int64] = field(init=False)
    end_ps: NDArray[np.int64] = field(init=False)
    admitted_ps: NDArray[np.int64] = field(init=False)  # into its first batch
    worker: NDArray[np.int32] = field(init=False)
    output_tokens: NDArray[np.int32] = field(init=False)
    refused: NDArray[np.bool_] = field(init=False)
    preemptions: int = 0
    adapter_admissions: int = 0  # of requests with an adapter into a batch, again after a preemption
    device_loads: int = 0
    brought: int = 0  # copies of adapters at home or pinned, which no request has asked for
    prefetches: int = 0  # copies that began before a request's turn
    foreseen: int = 0  # copies to the device ahead of any request
    evictions: int = 0
    cold_starts: dict[str, int] = field(default_factory=dict)  # requests that found their adapter under way, by mode
    host_misses: int = 0  # requests that waited for their adapter to reach host memory
    prefix_tokens: int = 0  # prompt tokens found in the prefix cache
    retries: int = 0  # assignments that a worker refused
    merged_steps: int = 0  # in which an adapter was merged, of an engine that can merge; the next are its other steps
    unmerged_steps: int = 0
    switches: int = 0  # times that the merged adapter changed
    switch_ps: int = 0  # time that the changes took
    moves: int = 0  # requests handed from one worker to another
    kv_travels: int = 0  # requests with KV blocks from another worker: of those that moved, and with a prompt cached there
    kv_blocks_moved: int = 0

    def __post_init__(self) -> None:
        n = self.requests
        self.first_ps, self.end_ps, self.admitted_ps = (np.full(n, NEVER, np.int64) for _ in range(3))
        self.worker, self.output_tokens = np.full(n, -1, np.int32), np.zeros(n, np.int32)
        self.refused = np.zeros(n, bool)
        self._runs, self._steps = array("q"), 0
        self._gaps = np.zeros(round(np.log(1e12) / np.log1p(_BIN)), np.float64)  # log bins from 0.1 microseconds up
        self._gap_sum_ps = 0

    # ---- as it happens

    def admitted(self, index: int, now_ps: int) -> None:
        self.admitted_ps[index] = now_ps

    def first_token(self, index: int, now_ps: int) -> None:
        self.first_ps[index] = now_ps + self.stream_ps

    def ended(self, index: int, now_ps: int, output_tokens: int) -> None:
        self.end_ps[index] = now_ps + self.stream_ps
        self.output_tokens[index] = output_tokens

    def gaps(self, first_ps: int, growth_ps: int, steps: int, rows: int) -> None:
        """Record that `rows` sequences got a token in each of `steps` steps of `first_ps + i * growth_ps`."""
        self._runs.extend((first_ps, growth_ps, steps, rows))
        self._steps += steps
        if self._steps >= _FLUSH:
            self._flush()

    def _flush(self) -> None:
        first, growth, steps, rows = np.array(self._runs, np.int64).reshape(-1, 4).T
        self._runs, self._steps = array("q"), 0
        ends = np.cumsum(steps)
        inside = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - steps, steps)
        gap_ps = np.repeat(first, steps) + inside * np.repeat(growth, steps)
        weight = np.repeat(rows, steps)
        gap_ms = gap_ps / PS_PER_MS
        bins = (np.log(np.maximum(gap_ms, _SMALLEST_MS) / _SMALLEST_MS) / np.log1p(_BIN)).astype(np.int64)
        self._gaps += np.bincount(np.minimum(bins, len(self._gaps) - 1), weight, len(self._gaps))
        self._gap_sum_ps += int(gap_ps @ weight)

    # ---- afterwards

    def itl_ms(self) -> dict[str, float]:
        """Mean and quantiles of the gaps between tokens; quantiles are exact to 0.2%."""
        self._flush()
        count = float(self._gaps.sum())
        if not count:
            return {}
        middles_ms = _SMALLEST_MS * (1 + _BIN) ** (np.arange(len(self._gaps)) + 0.5)
        values = np.quantile(middles_ms, QUANTILES, weights=self._gaps, method="inverted_cdf")
        mean = self._gap_sum_ps / PS_PER_MS / count
        return {"mean": mean, **{_name(q): float(v) for q, v in zip(QUANTILES, values, strict=True)}}


@dataclass(frozen=True)
class Latencies:
    """Latencies of the finished requests in milliseconds, in the order of arrival. `rows`: their indices in the workload."""

    rows: NDArray[np.intp]
    ttft_ms: NDArray[np.float64]
    tpot_ms: NDArray[np.float64]  # nan for a single token
    e2e_ms: NDArray[np.float64]
    queue_ms: NDArray[np.float64]
    per_token_ms: NDArray[np.float64]

    @classmethod
    def of(cls, workload: Workload, metrics: Metrics) -> Latencies:
        rows = np.flatnonzero(metrics.end_ps != NEVER)
        arrival = np.rint(workload.arrival_s[rows] * PS_PER_S)
        first, end, tokens = metrics.first_ps[rows], metrics.end_ps[rows], metrics.output_tokens[rows]
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot_ms = np.where(tokens > 1, (end - first) / (tokens - 1) / PS_PER_MS, np.nan)
        e2e_ms = (end - arrival) / PS_PER_MS
        return cls(
            rows,
            (first - arrival) / PS_PER_MS,
            tpot_ms,
            e2e_ms,
            (metrics.admitted_ps[rows] - arrival) / PS_PER_MS,
            e2e_ms / tokens,
        )


def summary(workload: Workload, metrics: Metrics, *, end_s: float, busy_s: float, workers: int) -> dict[str, Any]:
    """The figures of a run as a JSON-ready tree. Rates are per second of [0, `end_s`)."""
    times = Latencies.of(workload, metrics)
    slos = workload.slos
    class_of = np.array([slo.slo_class for slo in slos])[workload.objective]
    rows = times.rows
    in_ttft, in_tpot = within(workload, rows, times.ttft_ms, times.tpot_ms)
    attained = np.zeros(len(workload), bool)
    e2e_goals_ms = np.array([slo.e2e_slo_ms or np.inf for slo in slos])[workload.objective[rows]]
    attained[rows] = in_ttft & in_tpot & (times.e2e_ms <= e2e_goals_ms)
    n = max(1, len(workload))
    incoming = workload.prompt_tokens + workload.output_tokens
    served = np.zeros(len(workload), np.int64)
    served[rows] = workload.prompt_tokens[rows] + metrics.output_tokens[rows]
    return {
        "requests": len(workload),
        "finished": len(rows),
        "refused": int(metrics.refused.sum()),
        "duration_s": end_s,
        "workers": workers,
        "ttft_ms": spread(times.ttft_ms),
        "tpot_ms": spread(times.tpot_ms),
        "itl_ms": metrics.itl_ms(),
        "e2e_ms": spread(times.e2e_ms),
        "time_per_token_ms": spread(times.per_token_ms),
        "queue_ms": spread(times.queue_ms),
        "slo_attainment": float(attained.sum()) / n,
        "ttft_attainment": float(in_ttft.sum()) / n,
        "tpot_attainment": float(in_tpot.sum()) / n,
        "throughput": {
            "requests_per_s": len(rows) / end_s if end_s else 0.0,
            "output_tokens_per_s": float(metrics.output_tokens[rows].sum()) / end_s if end_s else 0.0,
            "total_tokens_per_s": float(served.sum()) / end_s if end_s else 0.0,
            "busy_share": busy_s / (end_s * workers) if end_s else 0.0,
        },
        "starvation": _starvation(workload, incoming, served),
        "adapters": {
            "admissions": metrics.adapter_admissions,
            "device_hit_rate": 1 - metrics.device_loads / max(1, metrics.adapter_admissions),
            "device_loads": metrics.device_loads,
            "evictions": metrics.evictions,
            "host_misses": metrics.host_misses,
            "cold_starts": dict(sorted(metrics.cold_starts.items())),
        },
        "preemptions": metrics.preemptions,
        "prefix_hit_tokens": metrics.prefix_tokens,
        "assign_retries": metrics.retries,
        "classes": {name: _class(times, attained, class_of == name) for name in sorted({slo.slo_class for slo in slos})},
    }


def within(
    workload: Workload, rows: NDArray[np.intp], ttft_ms: NDArray[np.float64], tpot_ms: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which of some requests are within their objectives: (TTFT, TPOT), [rows]. Both times are [rows], nan for none.

    A single token has no time per token to miss.
    """
    goals = np.array([(slo.ttft_slo_ms, slo.tpot_slo_ms) for slo in workload.slos])[workload.objective[rows]].T
    return ttft_ms <= goals[0], ~(tpot_ms > goals[1])


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Mean, quantiles and maximum; empty without values. Values that are not a number are left out."""
    values = values[~np.isnan(values)]
    if not len(values):
        return {}
    quantiles = np.quantile(values, QUANTILES)
    named = {_name(q): float(v) for q, v in zip(QUANTILES, quantiles, strict=True)}
    return {"mean": float(values.mean()), **named, "max": float(values.max())}


def _name(quantile: float) -> str:
    return f"p{quantile * 100:g}"


def _starvation(workload: Workload, incoming: NDArray[Any], served: NDArray[Any]) -> dict[str, Any]:
    total = int(incoming.sum())
    share = float(served.sum()) / total if total else 1.0
    # per adapter, the base included as the last one
    which = np.where(workload.adapter < 0, len(workload.ranks), workload.adapter)
    asked = np.bincount(which, incoming, len(workload.ranks) + 1)
    given = np.bincount(which, served, len(workload.ranks) + 1)
    return {
        "served_share": share,
        "starved": share < STARVED_BELOW,
        "starved_adapters": int((given < STARVED_BELOW * asked).sum()),
        "adapters": int((asked > 0).sum()),
    }


def _class(times: Latencies, attained: NDArray[np.bool_], members: NDArray[np.bool_]) -> dict[str, Any]:
    finished = members[times.rows]
    return {
        "requests": int(members.sum()),
        "slo_attainment": float(attained[members].mean()) if members.any() else 1.0,
        "queue_ms": spread(times.queue_ms[finished]),
        "ttft_ms": spread(times.ttft_ms[finished]),
        "tpot_ms": spread(times.tpot_ms[finished]),
    }
