"""CaraServe's rank-aware scheduling (section 5, Algorithm 1), for all candidate workers at once.

    d_prefill = Pre(queue + r) - Pre(queue)
    d_decode  = Dec(exists + r) - Dec(exists)               exists = running + queue
    cost      = d_prefill / avg_resp_len + d_decode         milliseconds per output token
    cost     += penalty                                     if Dec(exists + r) > the request's SLO
    total     = cost * (len(running) + len(queue))          what it adds for all requests already there

The smallest total wins; ties go to the worker with the fewest requests, then the smallest id, so the same state and request
always give the same answer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choice, lightest
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.times.perf_model import Floats, decode_ms, prefill_ms

PENALTY_MS = 10_000.0
"""Far above any cost per token, so that a worker that meets the SLO always beats one that misses it."""


def total_costs(state: ClusterState, ask: Ask, avg_resp_len: float) -> tuple[Floats, NDArray[np.bool_]]:
    """`total` of Algorithm 1 for each row, and whether the request would break its SLO there.

    `avg_resp_len` is the average response length in tokens, at least 1.
    """
    t = state.table
    perf = state.perf
    queued, exists = t["queued"], t["exists"]
    queue_max, exists_max = t["queue_max_rank"], t["max_rank"]
    tokens = t["queue_tokens"]

    queue_load = perf.lora_load(queued, t["queue_rank_sum"], queue_max)
    queue_load_with = perf.lora_load(queued + 1, t["queue_rank_sum"] + ask.rank, np.maximum(queue_max, ask.rank))
    d_prefill = prefill_ms(perf, tokens + ask.tokens, queue_load_with) - prefill_ms(perf, tokens, queue_load)

    load = perf.lora_load(exists, t["rank_sum"], exists_max)
    load_with = perf.lora_load(exists + 1, t["rank_sum"] + ask.rank, np.maximum(exists_max, ask.rank))
    decode_with = decode_ms(perf, exists + 1, load_with)
    d_decode = decode_with - decode_ms(perf, exists, load)

    breaks_slo = decode_with > ask.tpot_slo_ms
    cost = d_prefill / avg_resp_len + d_decode + np.where(breaks_slo, PENALTY_MS, 0.0)
    return cost * exists, breaks_slo


def choose(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
    """Algorithm 1 over the rows in `fit`."""
    totals, breaks_slo = total_costs(state, ask, avg_resp_len)
    best = lightest(totals, fit)
    if len(best) > 1:
        best = best[lightest(state.table["exists"][best])]
    row = min(best.tolist(), key=state.ids.__getitem__)
    return Choice(row, float(totals[row]), bool(breaks_slo[row]))
