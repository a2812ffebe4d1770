"""Motet's policy: a request goes where it costs everybody the least, itself included, with every objective kept.

For each worker, with N requests there and the new one r, in milliseconds per output token:

    step     = Dec(N + r)                                    one decode step with r in the batch
    stall    = [Pre(queue + r) - Pre(queue)] + load          everybody waits once: r's prefill, and its adapter if missing
    others   = N * stall / L + [Dec(N + r) - Dec(N)] * shared       shared: the part of the others' steps that r is in
    own      = step + N * mean stall / L + wait / out(r)     every one of the N is followed by another request per L tokens
    cost     = others + own + penalties

L is the average response length, out(r) the predicted one, `shared` = sum over the others of min(left, out(r)) / L. The
paper's Algorithm 1 is `others` with the load left out and everybody there until the end; what it lacks is r's own time,
so that it fills slow workers as gladly as fast ones and never trades a queue against a loaded adapter.

    wait     = queue's prefill + load (+ fetch, if nobody on the worker has it) + prefill
               + the time until a seat is free + the time until enough KV blocks are free

Penalties, steep but finite, so that among workers that all break something the least harm wins:
    r's time to first token over its objective, r's time per token over its objective, and the time per token over the
    strictest objective among those that are there.

Several schedulers that see the same states must not all choose the same worker. Own assignments count at once
(`flights`); for those of others, which no state shows yet, the choice falls on any worker whose cost is within NEAR of
the best. Which one is a hash: of the adapter while nobody has it, so that it is loaded in one place, else of the request.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from policies.candidates import Ask
from policies.choice import Choice, adapter_ms, spread
from policies.cluster_state import ClusterState, PerfColumns, hash_of
from policies.perf_model import Floats, decode_ms, prefill_ms

PENALTY_MS = 1000.0
"""Per token, for an objective that is broken; it grows with the excess."""
NEAR = 0.02
"""Share of the best cost within which another worker is as good."""


def choose(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], avg_resp_len: float) -> Choice:
    """The row with the least cost, or one as good."""
    cost, breaks_slo = costs(state, ask, avg_resp_len)
    cost[~fit] = np.inf
    near = np.flatnonzero(cost <= cost.min() * (1.0 + NEAR))
    known = not ask.adapter or len(state.holders(ask.adapter)[0])
    row = spread(state, near, ask.key if known else hash_of(ask.adapter))
    return Choice(row, float(cost[row]), bool(breaks_slo[row]))


def costs(state: ClusterState, ask: Ask, avg_resp_len: float) -> tuple[Floats, NDArray[np.bool_]]:
    """The cost on each row, and whether an objective of the request breaks there."""
    t = state.table
    perf = PerfColumns(t)
    out = float(ask.out_tokens) or avg_resp_len
    n, queued, queue_tokens = t["exists"], t["queued"], t["queue_tokens"]

    max_rank_with = np.maximum(t["max_rank"], ask.rank)
    step = decode_ms(perf, n + 1, perf.lora_load(n + 1, t["rank_sum"] + ask.rank, max_rank_with))
    d_step = step - decode_ms(perf, n, perf.lora_load(n, t["rank_sum"], t["max_rank"]))

    queue_max_with = np.maximum(t["queue_max_rank"], ask.rank)
    prefills_with = prefill_ms(
        perf, queue_tokens + ask.tokens, perf.lora_load(queued + 1, t["queue_rank_sum"] + ask.rank, queue_max_with)
    )
    prefills = prefill_ms(perf, queue_tokens, perf.lora_load(queued, t["queue_rank_sum"], t["queue_max_rank"]))
    copy, fetch = adapter_ms(state, perf, ask)
    stall = prefills_with - np.where(queued > 0, prefills, 0.0) + copy

    left_mean = (t["running_left"] + t["queue_out"]) / np.maximum(n, 1.0)
    others = n * (stall + d_step * np.minimum(left_mean, out)) / avg_resp_len

    tpot = step + n * perf.prefill_base_ms / avg_resp_len
    wait = prefills_with + copy + fetch + _seat_wait_ms(t, step) + _memory_wait_ms(t, ask, step, out)
    cost = others + tpot + wait / out

    ttft_excess = (wait + 0.5 * step) / ask.ttft_slo_ms - 1.0
    tpot_excess = tpot / ask.tpot_slo_ms - 1.0
    breaks = (ttft_excess > 0) | (tpot_excess > 0)
    excess = np.maximum(ttft_excess, 0.0) + np.maximum(tpot_excess, 0.0) + np.maximum(tpot / t["tightest_tpot_ms"] - 1.0, 0.0)
    cost += np.where(excess > 0, PENALTY_MS * (1.0 + excess), 0.0)
    return cost, breaks


def _seat_wait_ms(t: Mapping[str, NDArray], step_ms: Floats) -> Floats:
    """Until the running batch has a seat: those before r take one each, and one comes free every (L / R) / R steps."""
    running = np.maximum(t["running"], 1.0)
    behind = np.maximum(t["exists"] + 1.0 - t["max_running"], 0.0)
    return behind * step_ms * t["running_left"] / running**2


def _memory_wait_ms(t: Mapping[str, NDArray], ask: Ask, step_ms: Floats, out: float) -> Floats:
    """Until enough KV blocks are free for r, for those that wait before it, and for what the running ones will add.

    Requests end one by one over the next 2 * (L / R) steps, each giving back what it holds; so on average half of what
    they still produce is held at once, and the memory in use comes back evenly over that time.
    """
    needed = ask.tokens + out + t["queue_tokens"] + t["queue_out"] + 0.5 * t["running_left"]
    lacking = np.maximum(needed - t["kv_tokens_free"], 0.0)
    used = np.maximum(t["kv_tokens_total"] - t["kv_tokens_free"], 1.0)
    return step_ms * lacking / used * 2.0 * t["running_left"] / np.maximum(t["running"], 1.0)
