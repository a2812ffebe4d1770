"""Motet's scheduling policy with one of its parts off."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster import shared_cost
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choice, Choose
from motet.policies.cluster.cluster_state import ClusterState


def _without_shared_prefill(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, length: float) -> Choice:
    opened_ms = state.table["opened_ms"]
    kept = opened_ms.copy()
    opened_ms[:] = LONG_AGO_MS  # so that no prefill can be joined
    try:
        return shared_cost.choose(state, ask, fit, now_s, length)
    finally:
        opened_ms[:] = kept


def _without_sparing_the_young(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, length: float) -> Choice:
    kept = shared_cost._YOUNG, shared_cost._EACH
    shared_cost._YOUNG = shared_cost._EACH = np.array(0.0)
    try:
        return shared_cost.choose(state, ask, fit, now_s, length)
    finally:
        shared_cost._YOUNG, shared_cost._EACH = kept


def _without_affinity(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, length: float) -> Choice:
    return shared_cost.choose(state, msgspec.structs.replace(ask, adapter="", adapter_bytes=0), fit, now_s, length)


LONG_AGO_MS = -1e15
ABLATIONS: dict[str, Choose] = {
    "motet without shared prefills": _without_shared_prefill,
    "motet without sparing the young": _without_sparing_the_young,
    "motet without affinity": _without_affinity,
}
