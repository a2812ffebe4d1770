"""The scheduling decision: finds candidates, then applies the policy that the scheduler's configuration names.

motet          the least cost for all requests, the new one included, under all objectives     (policies/cluster/shared_cost)

Others to compare with, such as CaraServe's Algorithm 1, are in bench/rivals. Plug-ins add their own to `POLICIES`
(docs/extending.md).

Admission applies on top of any policy (policies/cluster/objectives). With "objective", only workers that are expected to meet
the request's objectives may take it; without one it is refused with the time until one may. With "room", every candidate may
take it. Admission is computed only when the chosen worker has no free seat or the policy expects a missed objective, so
ordinary decisions cost no more.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from motet.policies.cluster import cached_prompt, objectives, shared_cost
from motet.policies.cluster.candidates import Ask, Screening, candidates, lacking, screen
from motet.policies.cluster.choice import Choose
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.objectives import Admission
from motet.policies.cluster.waits import seat_share
from motet.policies.times.perf_model import decode_ms, prefill_ms
from motet.shared.model import KvOffer
from motet.shared.tables import Table

POLICIES: Table[Callable[[], Choose]] = Table({"motet": lambda: shared_cost.choose})
"""Constructors of the policies; every scheduler makes its own."""

MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that gets the request, and why.

    It need not compute `cached_tokens` of the prompt; `kv` names the worker from which it should fetch some of them. Without a
    worker, `screening` says why there is no candidate, or `late_s` when the first candidate is expected to meet the
    objectives.
    """

    worker_id: str | None
    candidates: int
    total_cost: float = 0.0  # in the policy's own unit
    breaks_slo: bool = False
    cached_tokens: int = 0
    kv: KvOffer | None = None
    screening: Screening | None = None
    late_s: float = 0.0


def decide(
    choose: Choose,
    state: ClusterState,
    ask: Ask,
    now_s: float,
    *,
    stale_s: float,
    avg_resp_len: float,
    admission: Admission = "room",
) -> Decision:
    """Choose a worker for `ask`. `avg_resp_len` is the average response length in tokens, at least 1."""
    fit = candidates(state, ask, now_s, stale_s)
    count = int(np.count_nonzero(fit))
    if not count:
        return Decision(worker_id=None, candidates=0, screening=screen(state, ask, now_s, stale_s))
    row, cost, breaks_slo = choose(state, ask, fit, now_s, avg_resp_len)
    if admission == "objective" and not ask.begun and (breaks_slo or objectives.pressed(state, ask, row, now_s, avg_resp_len)):
        rows, late_ms = objectives.late_ms(state, ask, fit, now_s, avg_resp_len)
        in_time = rows[late_ms == 0.0]
        if not len(in_time):
            late_s = min(max(float(late_ms.min()) / 1000.0, MIN_RETRY_S), MAX_RETRY_S)
            return Decision(worker_id=None, candidates=count, late_s=late_s)
        if row not in in_time:
            fit[:] = False
            fit[in_time] = True
            row, cost, breaks_slo = choose(state, ask, fit, now_s, avg_resp_len)
    return _decision(state, ask, row, now_s, count, cost, breaks_slo=breaks_slo)


def named(state: ClusterState, ask: Ask, worker_id: str, now_s: float, *, stale_s: float) -> Decision | None:
    """The decision for the worker that a move names; None if it is no candidate."""
    row = state.row(worker_id)
    if row < 0 or not candidates(state, ask, now_s, stale_s)[row]:
        return None
    return _decision(state, ask, row, now_s, 1, 0.0, breaks_slo=False)


def _decision(state: ClusterState, ask: Ask, row: int, now_s: float, count: int, cost: float, *, breaks_slo: bool) -> Decision:
    found = cached_prompt.find(state, ask, now_s)
    return Decision(
        worker_id=state.ids[row],
        candidates=count,
        total_cost=cost,
        breaks_slo=breaks_slo,
        cached_tokens=int(found.spared.item(row)) if found is not None else 0,
        kv=cached_prompt.offer(state, ask, found, row, now_s),
    )


def seconds_until_room(state: ClusterState, ask: Ask, now_s: float, *, stale_s: float) -> float:
    """The expected time until the first full worker of the base model has room.

    That is when the first running request has ended, in the time that they still need on average (`waits`). The queue's prefill
    shares the engine meanwhile, spread over the queued requests.
    """
    t = state.table
    live = state.serving(ask.base_model) & (t["heard_s"] >= now_s - stale_s) & ~t["draining"]
    if ask.needs or state.exclusive:
        live &= ~lacking(state, ask)
    if not live.any():
        return MIN_RETRY_S
    perf = state.perf
    running, queued = np.maximum(t["running"], 1.0), np.maximum(t["queued"], 1.0)
    step_ms = decode_ms(perf, running, perf.lora_load(t["running"], t["rank_sum"] - t["queue_rank_sum"], t["max_rank"]))
    queue_load = perf.lora_load(t["queued"], t["queue_rank_sum"], t["queue_max_rank"])
    prefill_each_ms = prefill_ms(perf, t["queue_tokens"], queue_load) / queued
    rest_ms = step_ms * np.maximum(t["running_left"], 1.0) / running
    wait_ms = rest_ms * seat_share(1.0, running) + prefill_each_ms
    return float(np.clip(wait_ms[live].min() / 1000.0, MIN_RETRY_S, MAX_RETRY_S))
