"""A policy's answer, and helpers to find the best of many rows.

A policy is `choose(state, ask, fit, now_s, avg_resp_len) -> Choice`: it chooses one of the rows in the mask `fit` (at least
one) for the request. Random choices are a hash of the request and the worker: the same request on the same state gives the
same answer, two requests give different ones, and no generator must be kept or logged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.times.perf_model import Floats


class Choice(NamedTuple):
    """The chosen row of the state's table. `cost` is in the policy's own unit; `breaks_slo` is the policy's own estimate."""

    row: int
    cost: float = 0.0
    breaks_slo: bool = False


Choose = Callable[[ClusterState, Ask, NDArray[np.bool_], float, float], Choice]
_MIX = np.array(0x9E3779B97F4A7C15, np.uint64), np.array(0xD6E8FEB86659FD93, np.uint64)
_HALF_WORD = np.array(32, np.uint64)


def lightest(cost: NDArray, fit: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """The rows of smallest cost, among those in `fit`."""
    if fit is None:
        return np.flatnonzero(cost == cost.min())
    rows = np.flatnonzero(fit)
    if len(rows) == len(cost):
        return np.flatnonzero(cost == cost.min())
    costs = cost[rows]
    return rows[costs == costs.min()]


def spread(state: ClusterState, rows: NDArray[np.intp], key: int) -> int:
    """One of `rows`: always the same one for the same key, and each equally likely over all keys (rendezvous hashing)."""
    if len(rows) == 1:
        return int(rows[0])
    mixed = (state.table["key"][rows] ^ np.array(key & 0xFFFFFFFFFFFFFFFF, np.uint64)) * _MIX[0]
    mixed = (mixed ^ (mixed >> _HALF_WORD)) * _MIX[1]
    return int(rows[np.argmax(mixed)])


def adapter_ms(state: ClusterState, ask: Ask) -> tuple[Floats, Floats]:
    """Time to copy the request's adapters onto each worker's device, and to fetch them into the worker's memory before.

    The copy is 0 where an adapter is on the device, or about to be for another request; the fetch is 0 where it is in any
    tier. Both are 0 for the base model. The caller must not change the arrays, because other requests get the same ones.
    """
    count = len(state.ids)
    if not ask.adapter:
        return np.zeros(count), np.zeros(count)
    copy, fetch = _one_ms(state, ask.adapter, ask.adapter_bytes)
    for digest, size_bytes in ask.more:
        its_copy, its_fetch = _one_ms(state, digest, size_bytes)
        copy, fetch = copy + its_copy, fetch + its_fetch
    return copy, fetch


def _one_ms(state: ClusterState, adapter: str, size_bytes: int) -> tuple[Floats, Floats]:
    copy, fetch = state.perf.transfer_ms(size_bytes)
    held = state.holders(adapter)
    if held is not None:
        rows = held.rows
        copy = copy.copy()
        copy[rows[held.loaded]] = 0.0
        if state.perf.fetches:
            fetch = fetch.copy()
            fetch[rows] = 0.0
    return copy, fetch
