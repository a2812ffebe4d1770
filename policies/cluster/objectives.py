"""Admission by objective: the workers that are expected to meet a request's objectives, and the time until others are.

A request that no worker can serve in time is refused at once. It would miss its objectives and delay all later requests,
until all miss. Estimates for the request r on a worker with seats, or KV memory, for S requests, in milliseconds:

    rows    = min(requests there and r, S)                   sequences in a step
    tpot    = Dec(rows) + rows * Pre(usual prompt) / L       each row is followed by another request every L tokens
    turn    = L * tpot / rows                                between two requests that end (`waits`)
    wait    = turn * how many lack a seat up to r / (1 - u) + until r's adapter has a slot + the prefill of all that join with r
    ttft    = wait + Pre(r) + r's adapter + 1.5 * Dec(rows)

An objective for the whole answer is compared with ttft + output * tpot. A picture's last position is its decoding, which takes
a time of its own and during which the others wait: it counts in the whole answer, and as what follows each row in tpot.

L is the average response length; in `turn`, the average rest of a running request if that is more. Waiting requests run in
order of urgency (`step.batch_admission`), so those before r are in its band of objectives or a more urgent one. u is
the share of running rows that are more urgent than r: under steady overload this share of the seats goes to requests that
come later and overtake r.

An objective that a worker would miss even when idle is no reason to refuse. An idle worker takes every request. Part of a
worker's room is reserved for urgent requests (ROOM).

Fair shares: a tenant above its share gets only free seats, and not the last of them (OVER_SHARE). A tenant is above its share
if it has by far the most requests for its weight and recently asked for more than its share (`demand`). So the queue belongs to
the other tenants, up to their shares. The running urgent requests are not theirs, so none is expected to overtake (u = 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster import cached_prompt
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import adapter_ms
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.waits import seat_share, slot_share
from motet.policies.cluster.worker_load import Share, WorkerLoad, band_of
from motet.policies.cluster.worker_table import MIN_STEP_MS
from motet.policies.times.perf_model import Floats

Admission = Literal["objective", "room"]
TTFT_MARGIN, TPOT_MARGIN = (0.9, 0.7, 0.6), 0.95
"""Share of an objective that an estimate may use, per band for the first token. The rest covers the estimate's error, which is
larger where other requests overtake."""
OVER_SHARE = 0.125
"""Share of the seats, and of a time per token, that a tenant above its share leaves to the others."""
ABOVE_MEAN, OF_LARGEST = 1.25, 0.75
"""A tenant is above its share with this many times the mean requests per weight, and this share of the largest tenant's."""
ROOM = (1.0, 0.875, 0.75)
"""Share that each band may use of a worker's waiting places, and of the strictest time per token among its requests. The rest
is for more urgent requests."""
LOOKED = 32
"""Maximum workers examined, beginning with the fewest requests per seat; bounds the time of a refusal."""
FEW = 1.0
"""Rows added to the non-urgent ones: among few rows the urgent share is uncertain."""


def pressed(state: ClusterState, ask: Ask, row: int, now_s: float, avg_resp_len: float) -> bool:
    """Whether `late_ms` might find this row late: no free seat, no slot for one more adapter, or a tight time per token.

    This check is cheaper than `late_ms`.
    """
    t = state.table
    exists = t["exists"].item(row)
    seats = t["max_running"].item(row)
    if not exists or exists >= (seats - seats * OVER_SHARE if ask.demand > ABOVE_MEAN else seats):
        return bool(exists)
    if t["slots_lacking"].item(row) > 0.0:
        return True
    rank = t["max_rank"].item(row) if t["bgmv"].item(row) else t["rank_sum"].item(row) / exists
    rank = max(rank, ask.rank)
    found = cached_prompt.find(state, ask, now_s)
    tokens = ask.tokens if found is None else ask.tokens - found.spared.item(row)
    prompt = (t["queue_tokens"].item(row) + tokens) / (t["queued"].item(row) + 1.0)
    prefill = t["prefill_base_ms"].item(row) + t["prefill_token_ms"].item(row) * prompt + t["prefill_lora_ms"].item(row) * rank
    finish_ms = ask.area * t["finish_ms"].item(row)
    row_ms = t["decode_row_ms"].item(row) + t["decode_lora_ms"].item(row) * rank + (prefill + finish_ms) / avg_resp_len
    tightest = t["tightest_tpot_ms"].item(row) * ROOM[band_of(ask.ttft_slo_ms)]
    limit: float = TPOT_MARGIN * min(tightest, ask.tpot_slo_ms)
    if ask.e2e_slo_ms != inf:
        limit = min(limit, TPOT_MARGIN * (ask.e2e_slo_ms - finish_ms) / (ask.out_tokens or avg_resp_len))
    rows = exists + t["extra_rows"].item(row) + ask.rows if ask.draws else exists + 1.0
    return t["decode_base_ms"].item(row) + rows * row_ms > limit


def late_ms(
    state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float
) -> tuple[NDArray[np.intp], Floats]:
    """Some of the rows in `fit`, and the time until each is expected to meet the objectives of `ask`; 0.0 means now."""
    rows = _roomiest(state, fit)
    t = {name: state.table[name][rows] for name in (*_PACE, *_WAIT)}
    loads = [state.load(row) for row in rows.tolist()]
    band = band_of(ask.ttft_slo_ms)
    room = ROOM[band]
    tokens: Floats | float = float(ask.tokens)
    found = cached_prompt.find(state, ask, now_s)
    if found is not None:
        tokens = tokens - found.spared[rows]
    pace = _pace(t, ask, tokens, avg_resp_len)
    share = share_of((load.tenants for load in loads), ask)
    own, ttft = _ttft(state, ask, tokens, rows, t, loads, pace, overtaken=share != "below")
    if found is not None and found.fetch_ms is not None:
        own, ttft = own + found.fetch_ms[rows], ttft + found.fetch_ms[rows]
    alone = pace.base + pace.row  # a step with r alone

    over = share == "above"
    tpot_margin = TPOT_MARGIN - OVER_SHARE if over else TPOT_MARGIN
    late = np.where(own + alone <= ask.ttft_slo_ms, ttft - TTFT_MARGIN[band] * ask.ttft_slo_ms, 0.0)
    np.maximum(late, pace.until(tpot_margin * ask.tpot_slo_ms), out=late, where=alone <= tpot_margin * ask.tpot_slo_ms)
    if ask.e2e_slo_ms != inf:
        out = ask.out_tokens or avg_resp_len
        finish = ask.area * t["finish_ms"]
        whole = ttft + (out - ask.draws) * (pace.base + pace.rows * pace.row_tpot) + finish
        possible = own + (1.0 + out - ask.draws) * alone + finish <= ask.e2e_slo_ms
        np.maximum(late, whole - TTFT_MARGIN[band] * ask.e2e_slo_ms, out=late, where=possible)
    tightest = t["tightest_tpot_ms"]  # of the requests there; r slows them down unless it only waits
    slows = (t["exists"] < pace.seats) & (alone <= TPOT_MARGIN * tightest)
    np.maximum(late, pace.until(room * tpot_margin * tightest), out=late, where=slows)
    places = t["max_running"] + np.ceil(room * (t["max_requests"] - t["max_running"]))
    if over:
        places = np.minimum(places, pace.seats - np.floor(OVER_SHARE * pace.seats))
    np.maximum(late, (pace.exists - places) * pace.turn, out=late)
    late[t["exists"] == 0.0] = 0.0
    return rows, np.maximum(late, 0.0)


@dataclass(slots=True)
class _Pace:
    """Step times of each worker with the new request r, in milliseconds."""

    exists: Floats  # requests, with r
    held: Floats  # KV tokens that one of them holds on average
    seats: Floats  # in the engine, or sequences that fit in memory if fewer
    rows: Floats  # requests in a step
    base: Floats  # a step takes base + rows * row, and a token base + rows * row_tpot
    row: Floats
    row_tpot: Floats
    turn: Floats

    def until(self, objective_ms: Floats | float) -> Floats:
        """Time until enough requests have ended to meet this objective of time per token; 0 where it is met now."""
        allowed = np.floor(np.maximum((objective_ms - self.base) / self.row_tpot, 1.0))
        return np.where(self.rows > allowed, (self.exists - allowed) * self.turn, 0.0)


def _pace(t: Mapping[str, NDArray], ask: Ask, tokens: Floats | float, avg_resp_len: float) -> _Pace:
    exists = t["exists"] + 1.0
    prompt = (t["queue_tokens"] + tokens) / (t["queued"] + 1.0)
    held = prompt + 0.5 * avg_resp_len
    seats = np.minimum(t["max_running"], np.maximum(t["kv_tokens_total"] / held, 1.0))
    rows = np.minimum(exists, seats)
    base = np.maximum(t["decode_base_ms"], MIN_STEP_MS)
    rank = np.where(t["bgmv"], np.maximum(t["max_rank"], ask.rank), (t["rank_sum"] + ask.rank) / exists)
    row = np.maximum(t["decode_row_ms"] + t["decode_lora_ms"] * rank, 1e-6)
    if ask.draws:
        row = row * (t["exists"] + t["extra_rows"] + ask.rows) / exists  # what a request adds on average
    prefill = t["prefill_base_ms"] + t["prefill_token_ms"] * prompt + t["prefill_lora_ms"] * rank
    row_tpot = row + (prefill + ask.area * t["finish_ms"]) / avg_resp_len
    length = np.maximum(avg_resp_len, t["running_left"] / np.maximum(t["running"], 1.0))
    turn = length * (base + rows * row_tpot) * seat_share(1.0, rows)
    return _Pace(exists, held, seats, rows, base, row, row_tpot, turn)


def _ttft(
    state: ClusterState,
    ask: Ask,
    tokens: Floats | float,
    rows: NDArray[np.intp],
    t: Mapping[str, NDArray],
    loads: list[WorkerLoad],
    pace: _Pace,
    *,
    overtaken: bool,
) -> tuple[Floats, Floats]:
    """(time that r itself needs before its first step, time to the first token of r). `tokens`: that it computes."""
    band = band_of(ask.ttft_slo_ms)
    before = [load.bands[: band + 1] for load in loads]
    ahead = np.array([sum([one.queued for one in bands]) for bands in before], dtype=float)
    ahead_tokens = np.array([sum([one.queue_tokens for one in bands]) for bands in before], dtype=float)
    urgent = np.array([sum([one.running for one in bands[:-1]]) for bands in before], dtype=float)
    copy, fetch = adapter_ms(state, ask)
    own = t["prefill_base_ms"] + t["prefill_token_ms"] * tokens + t["prefill_lora_ms"] * ask.rank
    own += t["copies_wait"] * copy[rows] + fetch[rows]
    free = np.maximum(np.minimum(pace.seats - t["running"], t["kv_tokens_free"] / pace.held), 0.0)
    seat = np.maximum(ahead + 1.0 - np.floor(free), 0.0) * pace.turn
    joining = np.minimum(ahead, free) / np.maximum(ahead, 1.0) * ahead_tokens * t["prefill_token_ms"]
    left = 1.0 - urgent / (t["running"] + FEW) if overtaken else 1.0
    if (lacking := slot_share(state, ask)) is not None:
        joining += lacking[rows] * pace.rows * pace.turn
    return own, seat / left + joining + own + 1.5 * (pace.base + pace.rows * pace.row)


def share_of(tenants: Iterable[Mapping[str, Share]], ask: Ask) -> Literal["above", "fair", "below"]:
    """How the tenant's requests on the workers, this one included, compare with its weighted share of all requests.

    "below": less than its share, while another tenant has more. "above": more than its share, and its recent demand, if known,
    is above its share too. A tenant alone is "fair".
    """
    have: dict[str, float] = {ask.tenant: 1.0}
    weights: dict[str, float] = {}
    for shares in tenants:
        for tenant, share in shares.items():
            have[tenant] = have.get(tenant, 0.0) + share.requests
            weights[tenant] = share.weight
    weights[ask.tenant] = ask.tenant_weight
    own = have[ask.tenant] / ask.tenant_weight
    mean = sum(have.values()) / sum(weights.values())
    largest = max(count / weights[tenant] for tenant, count in have.items())
    if own > ABOVE_MEAN * mean and own >= OF_LARGEST * largest and not 0.0 < ask.demand <= ABOVE_MEAN:
        return "above"
    beside_loud = 0.0 < ask.demand < 1.0 and ask.largest_demand > ABOVE_MEAN
    return "below" if beside_loud or (own < mean and largest > ABOVE_MEAN * mean) else "fair"


def _roomiest(state: ClusterState, fit: NDArray[np.bool_]) -> NDArray[np.intp]:
    rows = fit.nonzero()[0]
    if len(rows) <= LOOKED:
        return rows
    filled = state.table["exists"][rows] / state.table["max_running"][rows]
    return rows[np.argpartition(filled, LOOKED)[:LOOKED]]


_PACE = (
    "max_running", "exists", "extra_rows", "running", "running_left", "queued", "queue_tokens", "rank_sum", "max_rank", "bgmv",
    "tightest_tpot_ms", "kv_tokens_total", "prefill_base_ms", "prefill_token_ms", "prefill_lora_ms", "decode_base_ms",
    "decode_row_ms", "decode_lora_ms", "finish_ms",
)  # fmt: skip
_WAIT = "max_requests", "kv_tokens_free", "copies_wait"
