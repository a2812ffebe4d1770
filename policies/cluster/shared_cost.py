"""Motet's default policy: the worker where a request costs all requests, itself included, the least time.

For each worker, with N requests there and the new one r, in milliseconds per output token:

    step     = Dec(N + r)                                    one decode step with r in the batch
    stall    = r's share of a prefill, and its adapter's copy if steps wait for it: a one-time wait for all
    wait     = queue's prefill + copy, unless CPU processes bridge it (+ fetch, if the worker has it in no tier) + room
    room     = the time until a seat is free + the time until enough KV blocks are free, + until r's adapter has a slot
    others   = N * ((stall + room) / L + LASTING * [Dec(N + r) - Dec(N)]) + (N + 1) * copy * evictions / L
    own      = step + N * Pre(nothing) / L + wait / out(r)   each of the N is followed by another request in L tokens
    cost     = others + own + penalties

L is the average response length, out(r) the predicted one. Tokens of the prompt that a worker has cached count nowhere: it
does not compute them (`cached_prompt`). The paper's Algorithm 1 is `others` without copy and room. The other
parts:

r's own time. Without it, slow workers would be filled like fast ones, and a queue would never outweigh a loaded adapter.

Shared prefills. A prefill that is a step of its own reads the whole model however few tokens it has. So a request that joins a
prefill which is about to start costs the others only its own tokens. A queued prefill starts with the worker's next step. It
came at `opened_ms`; a request that comes `t` later still joins it with probability 1 - t / step. Otherwise it causes a stall of
its own. An engine that computes prompts and decodes in one pass reads the model once for both. Its workers learn that a prefill
has hardly a `prefill_base_ms`, and nothing is shared.

Recently started requests. A stall is spread over all tokens of a request, so it hurts the time per token most when the answer
is short and has just begun. Which answers will be short is not known, so a stall costs up to 1 + YOUNG times as much just after
requests start, and 1 + YOUNG_EACH times as much for each request of a queue whose prefill r just misses; this fades within
YOUNG_STEPS steps. As a result workers take turns.

Room. One of R running requests ends every L / R steps and gives back a seat and its share of the memory (`waits`). Who waits
for that passes the wait on: the N requests are followed by N others within L tokens, and these wait behind r. So it counts N
times as well, and beyond capacity it outweighs all else: the shortest queue wins.

Slots. An adapter of a request that runs keeps its slot. Once the adapters in use take all of them, a request for another one
waits until one of them has no request left. In `others` this counts as soon as the slots that are left could be taken by
chance: fewer than the root of all, by which the number in use varies.

Evictions. On a device that is full, r's copy makes another adapter leave, which somebody will ask for: EVICTED copies. Where
r's adapter is not at home (`homes`), it will leave again: STRANGER copies. Both count by the share of slots in use: where few
are, room is not what binds. They are costs and no filters: a home that is late still loses. Their numbers were found with the
twin (`bench homes`, `bench cluster`).

Fetched blocks. Where a worker fetches a part of the prompt from another one, r waits for the later of these blocks and its turn
instead of computing that part. In `others` the part counts as if it were computed: it takes cache memory from blocks that
others will then compute again. Without that, copies of the same prompts fill all caches, and less is reused in the end.

Separate ranks. With BGMV a request of a high rank slows all others, and the next request of that rank comes to the same
worker. So its cost outlasts the request and counts LASTING times.

Rows. A picture counts in a step as its pixels do and twice with guidance (`RequestBrief.rows`); where requests are counted that
wait for a step, it counts once.

Penalties grow with the share by which an objective is missed: r's time to first token, r's time per token, r's time of the
whole answer, and the time per token of the strictest request already there. A fixed penalty would, once no worker meets the
objective, send requests to the worker that misses it by least, and mix ranks.

Several schedulers that see the same states must not all choose the same worker. A scheduler's own assignments count at once
(`flights`). For those of others, which no state shows yet, the choice is any worker whose cost is within NEAR of the best,
selected by a hash: of the adapter while no worker has it, so that it is loaded in one place, else of the request.

`costs` computes all of this for every worker at once, on columns that are kept up to date. `tests/policies/support_cost.py` has
the plain formula for one worker, from its requests, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster import cached_prompt
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choice, adapter_ms, spread
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.waits import room_share, slot_share
from motet.policies.cluster.worker_table import hash_of
from motet.policies.times.perf_model import Floats

PENALTY_MS = 100.0
"""Penalty per token for an objective that is missed by 100%."""
LASTING = 2.0
EVICTED, STRANGER = 1.0, 16.0
"""Copies that count for an adapter which leaves for r's, and for r's adapter where it is not at home."""
NEAR = 0.005
"""Workers whose cost is within this share of the best count as equally good."""
YOUNG, YOUNG_EACH, YOUNG_STEPS = 0.5, 0.3, 10.0
_HALF, _ONE, _LASTING, _YOUNG, _EACH, _INF = map(np.array, (0.5, 1.0, LASTING, YOUNG, YOUNG_EACH, inf))
_EVICTED, _STRANGER = np.array(EVICTED), np.array(STRANGER)
_FADING = np.array(-1.0 / YOUNG_STEPS)
"""Constants as arrays: with them numpy computes in half the time that it takes with Python's numbers."""


def choose(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
    """The row with the least cost, or one of nearly the same cost."""
    cost, breaks_slo = costs(state, ask, now_s, avg_resp_len)
    np.copyto(cost, _INF, where=~fit)
    near = (cost <= np.array(float(cost[cost.argmin()]) * (1.0 + NEAR))).nonzero()[0]
    if len(near) == 1:
        row = int(near[0])
    else:
        known = not ask.adapter or state.holders(ask.adapter) is not None
        row = spread(state, near, ask.key if known else hash_of(ask.adapter))
    return Choice(row, float(cost[row]), bool(breaks_slo[row]))


def costs(state: ClusterState, ask: Ask, now_s: float, avg_resp_len: float) -> tuple[Floats, NDArray[np.bool_]]:
    """The cost of each row, and whether an objective breaks there: that of the request, or of a request already there."""
    t, perf = state.table, state.perf
    rank, out = ask.rank, float(ask.out_tokens) or avg_resp_len
    n = t["exists"]

    d_step, d_prefill = _added_ms(state, ask)
    step = t["step_ms"] + d_step
    now_ms = np.array(1000.0 * now_s)

    tokens: Floats | float = float(ask.tokens)
    if (found := cached_prompt.find(state, ask, now_s)) is not None:
        tokens = tokens - found.cached
    own = perf.prefill_token_ms * np.array(tokens) + d_prefill
    age = (now_ms - t["opened_ms"]) / step
    alone = np.minimum(age, _ONE)  # chance that r joins no other prefill: then it costs its base
    copy, fetch = adapter_ms(state, ask)
    stall = own + alone * perf.prefill_base_ms
    stalls, waits = state.alike("copies_stall"), state.alike("copies_wait")
    if stalls != 0.0:
        stall += copy if stalls == 1.0 else t["copies_stall"] * copy
    wait = t["queue_ms"] + own
    if found is not None:
        wait += _fetching_ms(state, found)
    if waits != 0.0:
        wait += copy if waits == 1.0 else t["copies_wait"] * copy
    if perf.fetches:
        wait += fetch
    if perf.pads:
        padding = perf.prefill_lora_ms * (perf.lora_growth(t["queued"], t["queue_max_rank"], rank) - rank)
        stall += (1.0 - alone) * padding
        wait += padding

    length = np.array(avg_resp_len)
    per_token = n / length  # what stops all of them for a millisecond costs so much
    others = _young(t, now_ms, step, age, alone)  # from here on in place, which takes a tenth less time
    others += per_token
    others *= stall
    others += n * (_LASTING * d_step)
    tpot = step + per_token * perf.prefill_base_ms
    spare = t["kv_tokens_free"] - t["kv_tokens_promised"]
    if state.crowded or spare[spare.argmin()] < ask.tokens + out:
        room = length * step * room_share(t, n - t["max_running"] + 1.0, tokens + out - spare)
        wait += room
        others += per_token * room
    if ask.adapter and state.slotted:
        wait += length * _slot_wait(state, ask, others, n * step, step)
        others += _evictions(state, ask) * copy * (per_token + _ONE / length)
    cost = others
    cost += tpot
    cost += wait / np.array(out)

    ttft = wait + _HALF * step
    tightest = t["tightest_tpot_ms"]  # of the requests there
    whole = None  # the time of the whole answer
    if ask.e2e_slo_ms != inf:
        whole = ttft + (out - ask.draws) * tpot + ask.area * perf.finish_ms
    in_time = whole is None or _within(whole, ask.e2e_slo_ms)
    if in_time and _within(ttft, ask.ttft_slo_ms) and _within(tpot, min(ask.tpot_slo_ms, tightest[tightest.argmin()])):
        return cost, np.zeros(len(cost), dtype=bool)
    excess = _over(tpot / tightest) + _over(ttft / ask.ttft_slo_ms) + _over(tpot / ask.tpot_slo_ms)
    if whole is not None:
        excess += _over(whole / ask.e2e_slo_ms)
    return cost + PENALTY_MS * excess, excess > 0


def _added_ms(state: ClusterState, ask: Ask) -> tuple[Floats | float, Floats | float]:
    """What r adds to each step and to its own prefill."""
    t, perf, rank = state.table, state.perf, ask.rank
    d_step, d_prefill = perf.added_ms(rank)
    if perf.pads:
        d_step = perf.decode_row_ms + perf.decode_lora_ms * perf.lora_growth(t["exists"], t["max_rank"], rank)
    return d_step if ask.rows == 1.0 else ask.rows * d_step, d_prefill


def _fetching_ms(state: ClusterState, found: cached_prompt.CachedPrompt) -> Floats | float:
    """What the wait changes where cached blocks of other workers are fetched instead of computed."""
    if found.fetch_ms is None:
        return 0.0
    perf = state.perf
    turn_ms = state.table["queue_ms"] - perf.prefill_base_ms
    return np.maximum(found.fetch_ms - turn_ms, 0.0) - perf.prefill_token_ms * (found.spared - found.cached)


def _slot_wait(state: ClusterState, ask: Ask, others: Floats, all_steps: Floats, step: Floats) -> Floats | float:
    """The time until r's adapter has a slot, over L. Adds to `others` what its slot costs the requests there."""
    short = slot_share(state, ask, "slots_short")
    if short is None:
        return 0.0
    others += short * all_steps
    lacking = slot_share(state, ask)
    return lacking * step if lacking is not None else 0.0


def _evictions(state: ClusterState, ask: Ask) -> Floats:
    """How many copies r's own copy causes later: of the adapter that leaves for it, and of r's adapter back at home."""
    t = state.table
    copies = np.where(t["adapters_loaded"] >= t["adapter_slots"], _EVICTED, 0.0)
    free = t["adapter_bytes_free"]
    if free[free.argmin()] < ask.adapter_bytes:
        copies[free < ask.adapter_bytes] = _EVICTED
    if (homes := state.homes.of(ask.adapter)) is not None:
        copies += _STRANGER
        copies[homes] -= STRANGER
    copies *= t["slots_used"]
    return copies


def _over(share: Floats) -> Floats:
    """By how much a time exceeds its objective, as a share of that; 0 within it. `share`: the time over the objective."""
    return np.maximum(share - 1.0, 0.0)


def _within(values: Floats, limit: float) -> bool:
    """Whether all values are within `limit`. `argmax` and one element take a fifth of the time of `max` on few workers."""
    return bool(values[values.argmax()] <= limit)


def _young(t: Mapping[str, NDArray], now_ms: NDArray, step_ms: Floats, age: Floats, alone: Floats) -> Floats:
    """The surcharge on a stall for the requests that have just begun, or whose prefill r misses with probability `alone`.

    `age`: of the queue, in steps.
    """
    running = now_ms - t["began_ms"]
    running /= step_ms
    running *= _FADING
    np.exp(running, out=running)
    running *= _YOUNG
    fading = age * _FADING
    np.exp(fading, out=fading)
    queued: Floats = _EACH * t["queued"]
    queued *= alone
    queued *= fading
    return np.maximum(running, queued, out=running)
