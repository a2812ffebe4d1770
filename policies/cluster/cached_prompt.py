"""What a prompt finds on each worker: the tokens that it need not compute there, because it has them or fetches them.

    cached     the tokens whose KV blocks the worker has in its prefix cache
    spared     these, and those that it fetches from a worker that has more of the prompt (the *lender*)
    fetch_ms   how long the fetch takes; the worker's steps go on meanwhile

A worker fetches what a lender has and it lacks if that is clearly faster than computing it (`kv_travel.SURE`). Both times are
the worker's own measurements. Lenders are live workers with the same KV format; what they are only expected to have, because a
request is on its way to them, cannot be fetched. An adapter that is merged into a worker's weights has other blocks there, so
such a worker neither lends nor fetches blocks of this adapter.

Of several lenders with equally many tokens the one with the fewest requests is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.cluster_state import Beginning, ClusterState
from motet.policies.times.perf_model import Floats
from motet.shared.wire.request import KvOffer

SILENT_S = 3.0
"""A worker that was not heard for so long is not asked for blocks."""


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """Tokens and milliseconds for each row of the workers' table. `lenders`: the deepest beginning of each KV format."""

    cached: Floats
    spared: Floats
    fetch_ms: Floats | None = None  # None: nowhere is anything fetched
    lenders: tuple[tuple[int, Beginning], ...] = ()


def find(state: ClusterState, ask: Ask, now_s: float) -> CachedPrompt | None:
    """What the prompt of `ask` finds; None when no worker has anything of it.

    A decision needs this several times: the state keeps the last answer until it changes.
    """
    if not ask.prefix_keys:
        return None
    key = ask.prefix_keys, ask.adapter, ask.travels, now_s, state.prefixes.version
    known = state.found
    if known is None or known[0][0] is not key[0] or known[0][1:] != key[1:]:
        known = state.found = key, _find(state, ask, now_s)
    found: CachedPrompt | None = known[1]
    return found


def _find(state: ClusterState, ask: Ask, now_s: float) -> CachedPrompt | None:
    beginnings = state.beginnings(ask.prefix_keys, ask.adapter)
    if not beginnings:
        return None
    cached = np.zeros(len(state.ids))
    for one in beginnings:
        cached[one.rows] = one.tokens
    gain = state.travel_gain
    lenders = _deepest(state, beginnings, now_s) if ask.travels and (gain > 0.0).any() else []
    if not lenders:
        return CachedPrompt(cached, cached)
    t = state.table
    formats, there = t["kv_format"], np.zeros(len(cached))
    for number, one in lenders:
        there[formats == number] = one.tokens
    there[state.merged_rows(ask.adapter)] = 0.0
    fetched = np.clip(there - cached, 0.0, t["kv_tokens_most"])
    fetched[fetched * gain <= t["kv_base_ms"]] = 0.0
    if not fetched.any():
        return CachedPrompt(cached, cached)
    fetch_ms = np.where(fetched > 0.0, t["kv_base_ms"] + t["kv_token_ms"] * fetched, 0.0)
    return CachedPrompt(cached, cached + fetched, fetch_ms, tuple(lenders))


def offer(state: ClusterState, ask: Ask, found: CachedPrompt | None, row: int, now_s: float) -> KvOffer | None:
    """The blocks that the worker in this row should fetch; None for none."""
    if found is None or found.fetch_ms is None or not found.fetch_ms[row]:
        return None
    number = state.table["kv_format"].item(row)
    deepest = next(one for number_, one in found.lenders if number_ == number)
    rows = _able(state, deepest, number, now_s)
    t = state.table
    order = np.lexsort((t["key"][rows] ^ np.uint64(ask.key & 0xFFFFFFFFFFFFFFFF), t["exists"][rows]))
    lender = next(row for row in rows[order].tolist() if not state.prefixes.expects(row, deepest.last_key))
    return KvOffer(worker_id=state.ids[lender], from_tokens=int(found.cached.item(row)), to_tokens=int(found.spared.item(row)))


def _deepest(state: ClusterState, beginnings: list[Beginning], now_s: float) -> list[tuple[int, Beginning]]:
    """The longest beginning of the prompt that a worker of each KV format can lend."""
    found: list[tuple[int, Beginning]] = []
    seen = {0}
    formats, prefixes = state.table["kv_format"], state.prefixes
    for one in sorted(beginnings, key=lambda one: -one.tokens):
        if one.merged:
            continue
        for number in set(formats[one.rows].tolist()) - seen:
            rows = _able(state, one, number, now_s).tolist()
            if any(not prefixes.expects(row, one.last_key) for row in rows):
                seen.add(number)
                found.append((number, one))
    return found


def _able(state: ClusterState, one: Beginning, number: int, now_s: float) -> NDArray[np.intp]:
    """The rows with this beginning and KV format that are heard and stay."""
    t, rows = state.table, one.rows
    return rows[(t["kv_format"][rows] == number) & ~t["draining"][rows] & (t["heard_s"][rows] >= now_s - SILENT_S)]
