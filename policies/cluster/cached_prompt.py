"""How many tokens of a prompt each worker need not compute, because it has their KV blocks cached or fetches them.

    cached     the tokens whose KV blocks the worker has in its prefix cache
    spared     these, and those that it fetches from a worker that has more of the prompt (the *lender*)
    fetch_ms   how long the fetch takes; the worker's steps go on meanwhile

A worker fetches what a lender has and it lacks if that is clearly faster than computing it (`kv_travel.SURE`). Both times are
the worker's own measurements. Lenders are live workers with the same KV format; what they are only expected to have, because a
request is on its way to them, cannot be fetched. An adapter that is merged into a worker's weights has other blocks there, so
such a worker neither lends nor fetches blocks of this adapter.

Of several lenders with equally many tokens the one with the fewest requests is asked.

Requests that come together go to the same worker, because the first one's blocks count as cached there from its assignment on.
Each of them is told the lender: they wait for one fetch instead of computing the prompt beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.cluster_state import Beginning, ClusterState
from motet.policies.times.perf_model import Floats
from motet.shared.model import KvOffer

SILENT_S = 3.0
"""A worker that was not heard for so long is not asked for blocks."""


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """Tokens and milliseconds for each row of the workers' table. `lenders`: the longest beginning of each KV format."""

    beginnings: Sequence[Beginning]
    cached: Floats
    spared: Floats
    fetch_ms: Floats | None = None  # None: nowhere is anything fetched
    lenders: Mapping[int, Beginning] = field(default_factory=dict)


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
    lenders = _longest(state, beginnings, now_s) if ask.travels and (gain > 0.0).any() else {}
    if not lenders:
        return CachedPrompt(beginnings, cached, cached)
    t = state.table
    formats, there = t["kv_format"], np.zeros(len(cached))
    for number, one in lenders.items():
        there[formats == number] = one.tokens
    there[state.merged_rows(ask.adapter)] = 0.0
    fetched = np.clip(there - cached, 0.0, t["kv_tokens_most"])
    fetched[fetched * gain <= t["kv_base_ms"]] = 0.0
    if not fetched.any():
        return CachedPrompt(beginnings, cached, cached, None, lenders)
    fetch_ms = np.where(fetched > 0.0, t["kv_base_ms"] + t["kv_token_ms"] * fetched, 0.0)
    return CachedPrompt(beginnings, cached, cached + fetched, fetch_ms, lenders)


def offer(state: ClusterState, ask: Ask, found: CachedPrompt | None, row: int, now_s: float) -> KvOffer | None:
    """The blocks that the worker in this row should fetch; None for none."""
    t = state.table
    number = t["kv_format"].item(row)
    longest = found.lenders.get(number) if found is not None else None
    if found is None or longest is None:
        return None
    have, end = found.cached.item(row), found.spared.item(row)
    if end == have:
        if not _promised(state, found, row):
            return None
        have, end = 0.0, min(have, longest.tokens, t["kv_tokens_most"].item(row))
        if end * state.travel_gain.item(row) <= t["kv_base_ms"].item(row):
            return None
    rows = _able(state, longest, number, now_s)
    order = np.lexsort((t["key"][rows] ^ np.uint64(ask.key & 0xFFFFFFFFFFFFFFFF), t["exists"][rows]))
    lender = next(one for one in rows[order].tolist() if not state.prefixes.expects(one, longest.last_key))
    return KvOffer(worker_id=state.ids[lender], from_tokens=int(have), to_tokens=int(end))


def _promised(state: ClusterState, found: CachedPrompt, row: int) -> bool:
    """Whether the worker is only about to have what counts as cached, because a request is on its way to it."""
    return any(
        not one.merged and state.prefixes.expects(row, one.last_key) and row in one.rows.tolist() for one in found.beginnings
    )


def _longest(state: ClusterState, beginnings: Sequence[Beginning], now_s: float) -> dict[int, Beginning]:
    """The longest beginning of the prompt that a worker of each KV format can lend."""
    found: dict[int, Beginning] = {}
    formats, prefixes = state.table["kv_format"], state.prefixes
    for one in sorted(beginnings, key=lambda one: -one.tokens):
        if one.merged:
            continue
        for number in set(formats[one.rows].tolist()) - found.keys() - {0}:
            rows = _able(state, one, number, now_s).tolist()
            if any(not prefixes.expects(row, one.last_key) for row in rows):
                found[number] = one
    return found


def _able(state: ClusterState, one: Beginning, number: int, now_s: float) -> NDArray[np.intp]:
    """The rows with this beginning and KV format that are heard and stay."""
    t, rows = state.table, one.rows
    return rows[(t["kv_format"][rows] == number) & ~t["draining"][rows] & (t["heard_s"][rows] >= now_s - SILENT_S)]
