"""How long a request waits on a worker for room: the one estimate, for all who ask.

    who asks                                          for which request                          in
    dispatch, for the cost to all                     a new one, behind the whole queue          `shared_cost`
    admission, for the time to the first token        a new one, behind the urgent ones          `objectives`
    moves, for who would run sooner elsewhere         the last of a queue, or one that comes     `queue_moves`, `rebalance`
    a refusal, for the time to come again             the first that a full worker could take    `dispatch`

Room is what running requests give back when they end. In the time of an average answer every seat becomes free once, whatever
the lengths (Little's law), and so do all KV tokens in use and all slots of adapters. So a wait is a share of that time:

    seats     requests that lack one / requests that run
    memory    KV tokens that are lacking / KV tokens in use
    slot      slots that one more adapter would lack / slots; none for an adapter in use

Who asks says how many requests are before its own, and multiplies by the time of an answer there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.holders import IN_USE
from motet.policies.times.perf_model import Floats


def seat_share(behind: Floats | float, running: Floats) -> Floats:
    """Until `behind` of the `running` requests have ended, as a share of an answer's time; 0 where none must end."""
    return np.maximum(behind, 0.0) / np.maximum(running, 1.0)


def room_share(t: Mapping[str, NDArray], behind: Floats, lacking: Floats) -> Floats:
    """Until there are seats and KV memory, as a share of an answer's time.

    `behind` requests lack a seat. `lacking` tokens are to become free: for the request, for those that wait before it, and for
    half of the growth of running requests (others end meanwhile). `t`: the columns of some workers.
    """
    memory = np.maximum(lacking, 0.0) / np.maximum(t["kv_tokens_total"] - t["kv_tokens_free"], 1.0)
    return seat_share(behind, t["running"]) + memory


def slot_share(state: ClusterState, ask: Ask, column: str = "slots_lacking") -> Floats | None:
    """Until the request's adapter has a slot on each worker, as a share of an answer's time; None where nothing is lacking.

    `column`: of the table, what one more adapter would lack.
    """
    if not ask.adapter or not state.slotted:
        return None
    lacking: Floats = state.table[column]
    if lacking[lacking.argmax()] <= 0.0:
        return None
    if (held := state.holders(ask.adapter)) is not None:
        lacking = lacking.copy()
        lacking[held.rows[held.bits & IN_USE != 0]] = 0.0
    return lacking
