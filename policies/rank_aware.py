"""CaraServe's rank-aware scheduling (section 5, Algorithm 1), for all candidate workers at once.

    d_prefill = Pre(queue + r) - Pre(queue)
    d_decode  = Dec(exists + r) - Dec(exists)               exists = running + queue
    cost      = d_prefill / avg_resp_len + d_decode         milliseconds per output token
    cost     += penalty                                     if Dec(exists + r) > the request's SLO
    total     = cost * (len(running) + len(queue))          what it adds for everybody who is already there

The smallest total wins; among equals the worker with the fewest requests, then the smallest id, so the same state and
request always give the same answer.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from policies.candidates import Ask, Screening, candidates, screen
from policies.cluster_state import ClusterState, PerfColumns
from policies.perf_model import Floats, decode_ms, prefill_ms

PENALTY_MS = 10_000.0
"""Far above any cost per token, so that a worker which keeps the SLO always beats one that breaks it."""
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that takes the request and why; without a candidate, `worker_id` is None and `screening` says why."""

    worker_id: str | None
    candidates: int
    total_cost: float = 0.0  # ms per output token, summed over those it slows down
    breaks_slo: bool = False
    screening: Screening | None = None


def decide(state: ClusterState, ask: Ask, now_s: float, *, stale_s: float, avg_resp_len: float) -> Decision:
    """Choose a worker for `ask`. `avg_resp_len` is the average response length in tokens, at least 1."""
    rows = candidates(state, ask, now_s, stale_s)
    if not len(rows):
        return Decision(worker_id=None, candidates=0, screening=screen(state, ask, now_s, stale_s))
    totals, breaks_slo = total_costs(state, rows, ask, avg_resp_len)
    best = np.flatnonzero(totals == totals.min())
    if len(best) > 1:
        requests = state.table["running"][rows[best]] + state.table["queued"][rows[best]]
        best = best[requests == requests.min()]
    pick = min(best.tolist(), key=lambda i: state.ids[rows[i]])
    return Decision(
        worker_id=state.ids[rows[pick]],
        candidates=len(rows),
        total_cost=float(totals[pick]),
        breaks_slo=bool(breaks_slo[pick]),
    )


def total_costs(state: ClusterState, rows: NDArray[np.intp], ask: Ask, avg_resp_len: float) -> tuple[Floats, NDArray[np.bool_]]:
    """`total` of Algorithm 1 for each of `rows`, and whether the request would break its SLO there."""
    t = state.table[rows]
    perf = PerfColumns(t)
    queued, exists = t["queued"], t["queued"] + t["running"]
    queue_max, exists_max = t["queue_max_rank"], t["max_rank"]
    tokens = t["queue_tokens"].astype(np.float64)

    queue_load = perf.lora_load(queued, t["queue_rank_sum"], queue_max)
    queue_load_with = perf.lora_load(queued + 1, t["queue_rank_sum"] + ask.rank, np.maximum(queue_max, ask.rank))
    d_prefill = prefill_ms(perf, tokens + ask.tokens, queue_load_with) - prefill_ms(perf, tokens, queue_load)

    rows_now = exists.astype(np.float64)
    load = perf.lora_load(exists, t["rank_sum"], exists_max)
    load_with = perf.lora_load(exists + 1, t["rank_sum"] + ask.rank, np.maximum(exists_max, ask.rank))
    decode_with = decode_ms(perf, rows_now + 1, load_with)
    d_decode = decode_with - decode_ms(perf, rows_now, load)

    breaks_slo = decode_with > ask.tpot_slo_ms
    cost = d_prefill / avg_resp_len + d_decode + np.where(breaks_slo, PENALTY_MS, 0.0)
    return cost * rows_now, breaks_slo


def seconds_until_room(state: ClusterState, ask: Ask, now_s: float, *, stale_s: float) -> float:
    """When a full worker of the base model is likely to have room again, the soonest of all.

    A place is free when one running request ends. With R running requests that have L tokens left together, one ends
    about every (L / R) / R decode steps; the queue's prefill shares the engine meanwhile, spread over what is queued.
    """
    serves = state.table["base"] == state.base_index(ask.base_model)
    t = state.table[serves & (state.table["heard_s"] >= now_s - stale_s) & ~state.table["draining"]]
    if not len(t):
        return MIN_RETRY_S
    perf = PerfColumns(t)
    running = np.maximum(t["running"], 1).astype(np.float64)
    queued = np.maximum(t["queued"], 1).astype(np.float64)
    step_ms = decode_ms(perf, running, perf.lora_load(t["running"], t["rank_sum"] - t["queue_rank_sum"], t["max_rank"]))
    queue_load = perf.lora_load(t["queued"], t["queue_rank_sum"], t["queue_max_rank"])
    prefill_each_ms = prefill_ms(perf, t["queue_tokens"].astype(np.float64), queue_load) / queued
    wait_ms = step_ms * np.maximum(t["running_left"], 1) / running**2 + prefill_each_ms
    return float(np.clip(wait_ms.min() / 1000.0, MIN_RETRY_S, MAX_RETRY_S))
