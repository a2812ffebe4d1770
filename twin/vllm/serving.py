"""What a server with given adapters delivers: attainment per adapter and totals, without what belongs to a measuring client.

    0 ──── warm_s ───────────────────── duration_s ──────── at most drain_s
      not counted │ arrivals are counted │ no arrivals; counted requests end

`SimulatedVllm.run` reports what the paper's client saw, with its scrapes, its ports and a window that starts with an empty
server. Planning needs the server alone. Requests that arrive in [warm_s, duration_s) are counted. They are not cut off by the
window's end: the simulation goes on without arrivals until they have ended, for `drain_s` at most. A counted request that is
unfinished even then counts as missed. With drain_s >= TTFT + TPOT x longest output this is exact; leaving such requests out
would flatter a server whose queue grows.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.twin.vllm.client import ApiServer, Requests
from motet.twin.vllm.engine import EngineConfig, SimulatedVllm
from motet.twin.vllm.steps import VllmStepModel

DRAIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Objectives:
    """The latency objectives of each adapter's requests, [adapters] in ms; infinite where there is none."""

    ttft_ms: NDArray[np.float64]
    tpot_ms: NDArray[np.float64]

    @classmethod
    def same(cls, adapters: int, ttft_ms: float, tpot_ms: float) -> Objectives:
        """The same objectives for all adapters."""
        return cls(np.full(adapters, ttft_ms), np.full(adapters, tpot_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Outcomes of the counted requests: by adapter [adapters], and of all.

    Percentiles include unfinished requests with the time that they have waited or decoded so far, which is a lower bound; they
    are nan where there is no request. TPOT is the mean time between the tokens of a request with two or more.
    """

    arrived: NDArray[np.int64]
    served: NDArray[np.int64]  # completed
    attained: NDArray[np.int64]  # completed within both objectives
    in_ttft: int  # completed within each of them
    in_tpot: int
    adapter_ttft_p99_ms: NDArray[np.float64]
    adapter_tpot_p99_ms: NDArray[np.float64]
    tok_s: float  # input and output tokens of requests that completed between warm_s and duration_s
    served_share: float  # 1 less the share of arrived tokens by which the queue grew between warm_s and duration_s
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    running_mean: float  # between warm_s and duration_s, as are these:
    preemptions: int
    loads: int

    @property
    def attained_share(self) -> float:
        """The share of the counted requests within their objectives; 1 if none arrived."""
        return float(self.attained.sum() / self.arrived.sum()) if self.arrived.any() else 1.0


def serve(
    config: EngineConfig,
    steps: VllmStepModel,
    requests: Requests,
    objectives: Objectives,
    warm_s: float,
    *,
    request_s: float = 0.0,
    drain_s: float = DRAIN_S,
    ports: int = sys.maxsize,
) -> Served:
    """Simulate a server. `request_s`: what its front end adds to a TTFT; `ports`: of its clients, without one a request fails.

    Raises ValueError if a request exceeds the KV tokens, or the warm-up the window.
    """
    if not 0 <= warm_s < requests.duration_s:
        raise ValueError(f"a warm-up of {warm_s:g} s leaves nothing of a window of {requests.duration_s:g} s")
    engine = SimulatedVllm(config, steps, requests, ApiServer(request_s=request_s).serving(ports))
    engine.advance(warm_s)
    running_s, preemptions, loads = engine.client.running_s, engine.preemptions, engine.loads
    engine.advance(requests.duration_s)
    running_s = engine.client.running_s - running_s
    preemptions, loads = engine.preemptions - preemptions, engine.loads - loads
    engine.advance(requests.duration_s + drain_s)
    return _Counts(engine, objectives, warm_s).served(running_s, preemptions, loads)


class _Counts:
    """The records of a simulation as columns, one row per request."""

    def __init__(self, engine: SimulatedVllm, objectives: Objectives, warm_s: float) -> None:
        work, client = engine.work, engine.client
        self.objectives = objectives
        self.adapters = len(work.ranks)
        self.warm_s, self.end_s = warm_s, work.duration_s
        self.now_s = max(engine.now_s, work.duration_s)
        self.arrival_s = np.asarray(work.arrival_s)
        self.adapter = np.asarray(work.adapter, np.int64)
        self.output = np.asarray(work.output_tokens)
        self.tokens = np.asarray(work.prompt_tokens) + self.output
        self.first_s = np.asarray(client.first_s)
        self.last_s = np.asarray(client.last_s)
        self.ttft_ms = np.asarray(client.ttft_s) * 1e3

    def served(self, running_s: float, preemptions: int, loads: int) -> Served:
        window_s = self.end_s - self.warm_s
        counted = (self.arrival_s >= self.warm_s) & (self.arrival_s < self.end_s)
        done = np.isfinite(self.last_s)
        ttft_ms = np.where(np.isfinite(self.first_s), self.ttft_ms, (self.now_s - self.arrival_s) * 1e3)
        decode_s = np.where(done, self.last_s, self.now_s) - self.first_s
        many = self.output > 1
        tpot_ms = np.where(many, decode_s / np.maximum(1, self.output - 1) * 1e3, 0.0)
        goal = self.objectives
        in_ttft = counted & done & (ttft_ms <= goal.ttft_ms[self.adapter])
        in_tpot = counted & done & (tpot_ms <= goal.tpot_ms[self.adapter])
        decoded = counted & many & np.isfinite(self.first_s)
        in_window = (self.last_s >= self.warm_s) & (self.last_s < self.end_s)
        arrived_tokens = self.tokens[counted].sum()
        grown = self._queued_tokens(self.end_s) - self._queued_tokens(self.warm_s)
        return Served(
            arrived=self._by_adapter(counted),
            served=self._by_adapter(counted & done),
            attained=self._by_adapter(in_ttft & in_tpot),
            in_ttft=int(in_ttft.sum()),
            in_tpot=int(in_tpot.sum()),
            adapter_ttft_p99_ms=percentile_by_group(ttft_ms[counted], self.adapter[counted], self.adapters, 99),
            adapter_tpot_p99_ms=percentile_by_group(tpot_ms[decoded], self.adapter[decoded], self.adapters, 99),
            tok_s=float(self.tokens[in_window].sum()) / window_s,
            served_share=float(min(1.0, 1 - grown / arrived_tokens)) if arrived_tokens else 1.0,
            ttft_p50_ms=_percentile(ttft_ms[counted], 50),
            ttft_p99_ms=_percentile(ttft_ms[counted], 99),
            tpot_p50_ms=_percentile(tpot_ms[decoded], 50),
            tpot_p99_ms=_percentile(tpot_ms[decoded], 99),
            running_mean=running_s / window_s,
            preemptions=preemptions,
            loads=loads,
        )

    def _by_adapter(self, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.bincount(self.adapter[chosen], minlength=self.adapters)

    def _queued_tokens(self, now_s: float) -> int:
        """Tokens of the requests that have arrived and have no token yet."""
        waiting = (self.arrival_s < now_s) & ~(self.first_s <= now_s)
        return int(self.tokens[waiting].sum())


def _percentile(values: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def percentile_by_group(
    values: NDArray[np.float64], group: NDArray[np.int64], groups: int, percent: float
) -> NDArray[np.float64]:
    """`np.percentile` of each group's values, [groups]; nan for an empty one."""
    order = np.lexsort((values, group))
    ordered = values[order]
    sizes = np.bincount(group, minlength=groups)
    starts = np.cumsum(sizes) - sizes
    found = np.full(groups, np.nan)
    some = np.flatnonzero(sizes)
    place = (sizes[some] - 1) * (percent / 100)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, sizes[some] - 1)
    low, high = ordered[starts[some] + below], ordered[starts[some] + above]
    found[some] = low + (high - low) * (place - below)
    return found
