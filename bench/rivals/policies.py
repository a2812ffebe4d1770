"""Scheduling policies to compare with. Each function states the policy's rule and its source.

All of them choose among the same candidates and see the same state as Motet's own; ties go by `choice.spread`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choice, adapter_ms, lightest, spread
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.holders import IN_USE, ON_DEVICE
from motet.policies.times.perf_model import Floats, decode_ms, prefill_ms


def random(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
    """A random candidate (CaraServe section 7.5: Random)."""
    return Choice(spread(state, np.flatnonzero(fit), ask.key))


def most_idle(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
    """The worker with the fewest requests, running or queued (CaraServe section 7.5: MostIdle)."""
    return Choice(spread(state, lightest(state.table["exists"], fit), ask.key))


def first_fit(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
    """The first worker with a free seat and memory for the prompt (CaraServe section 7.5: FirstFit; Punica section 5).

    A seat is a place in the running batch. When no worker has both, the shortest queue.
    """
    t = state.table
    seat = fit & (t["exists"] < t["max_running"]) & (t["kv_tokens_free"] - t["queue_tokens"] > ask.tokens)
    if seat.any():
        return Choice(min(np.flatnonzero(seat).tolist(), key=state.ids.__getitem__))
    return Choice(spread(state, lightest(t["queued"], fit), ask.key))


def least_pending(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
    """The shortest estimated pending time (dLoRA section 5.1)."""
    wait_ms = pending_ms(state, ask, avg_resp_len)
    best = lightest(wait_ms, fit)
    return Choice(spread(state, best, ask.key), float(wait_ms[best[0]]))


def pending_ms(state: ClusterState, ask: Ask, avg_resp_len: float) -> Floats:
    """Each worker's estimated pending time (dLoRA section 5.1): loading the adapter, if it is not there, and queuing.

    Queuing is the prefill of the queued requests. A request without a free seat also waits until as many requests have ended as
    are before it; one ends every `steps left / running` decode steps.
    """
    t = state.table
    perf = state.perf
    queued, running = t["queued"], t["running"]
    wait_ms = np.where(
        queued > 0,
        prefill_ms(perf, t["queue_tokens"], perf.lora_load(queued, t["queue_rank_sum"], t["queue_max_rank"])),
        0.0,
    )
    step_ms = decode_ms(perf, running, perf.lora_load(running, t["rank_sum"] - t["queue_rank_sum"], t["max_rank"]))
    behind = np.maximum(0.0, t["exists"] + 1.0 - t["max_running"])
    wait_ms += behind * step_ms * avg_resp_len / np.maximum(1.0, running)
    copy, fetch = adapter_ms(state, ask)
    return wait_ms + copy + fetch


ACTIVE, ROOM, WAITING, FULL = 1.0, 0.8, 0.6, 0.0


def lora_affinity(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
    """The LoRA affinity score of the Kubernetes gateway API's inference extension; the shortest queue among equals.

    1.0 where the adapter is active (on the device), 0.8 where there is room (a free seat), 0.6 where it waits already,
    0.0 where all is full. The base model is active everywhere.
    """
    t = state.table
    score = np.where(t["exists"] < t["max_running"], ROOM, FULL) if ask.adapter else np.full(len(state.ids), ACTIVE)
    held = state.holders(ask.adapter)
    if held is not None:
        rows = held.rows
        score[rows] = np.where(held.bits & ON_DEVICE, ACTIVE, np.maximum(score[rows], WAITING))
    best = lightest(-score, fit)
    best = best[lightest(t["queued"][best])]
    return Choice(spread(state, best, ask.key), float(score[best[0]]))


class WeightedAffinity:
    """The same score beside the other scorers of that gateway, each from 0 to 1: short queues and free KV memory.

    There is room where fewer adapters are in use than there are slots, as in the gateway's own scorer. The sum of the weighted
    scores counts, and the shortest queue among equals.
    """

    def __init__(self, queue: float, kv: float) -> None:
        self._queue, self._kv = queue, kv

    def __call__(self, state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
        t = state.table
        score = np.where(t["adapters_used"] < t["adapter_slots"], ROOM, FULL)
        if (held := state.holders(ask.adapter)) is not None:
            used = held.rows[held.bits & IN_USE != 0]
            score[used] = np.maximum(score[used], WAITING)
            score[held.rows[held.bits & ON_DEVICE != 0]] = ACTIVE
        queued, rows = t["queued"], np.flatnonzero(fit)
        least, most = float(queued[rows].min()), float(queued[rows].max())
        score += self._queue * (1.0 if most == least else (most - queued) / (most - least))
        score += self._kv * np.where(fit, t["kv_tokens_free"], 0.0) / np.maximum(t["kv_tokens_total"], 1.0)
        best = lightest(-score, fit)
        best = best[lightest(queued[best])]
        return Choice(spread(state, best, ask.key), float(score[best[0]]))


class RoundRobin:
    """The workers in turn, in the order of their ids."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
        ids = {state.ids[row]: row for row in np.flatnonzero(fit).tolist()}
        self._last = min((worker_id for worker_id in ids if worker_id > self._last), default=min(ids))
        return Choice(ids[self._last])
