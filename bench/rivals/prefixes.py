"""How other gateways and routers choose a worker by prompts' prefixes. Each states its rule and source.

Importing this module adds their names, apart from those of `bench.rivals`: without prompts in common they say nothing new.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.rivals.policies import most_idle
from motet.policies.cluster.cached_prompt import find
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choice, lightest, spread
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.dispatch import POLICIES
from motet.policies.cluster.prefix_index import PrefixIndex
from motet.policies.times.perf_model import Floats
from motet.shared.wire.prefixes import unpack_keys


class Sticky:
    """Sticky sessions: every turn of a chat goes to the worker of the turn before, a new chat to the one with fewest requests.

    Without an id of the session, a chat is known by its last prompt, with which the next one begins.
    """

    def __init__(self) -> None:
        self._homes: dict[int, str] = {}

    def __call__(self, state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
        keys = unpack_keys(ask.prefix_keys[0].keys) if ask.prefix_keys else []
        home = next((self._homes[key] for key in reversed(keys) if key in self._homes), "")
        row = state.row(home)
        if row < 0 or not fit[row]:
            row = most_idle(state, ask, fit, now_s, avg_resp_len).row
        if len(keys):
            self._homes[keys[-1]] = state.ids[row]
        return Choice(row)


class CacheAwareTree:
    """SGLang's gateway, policy `cache_aware`: a tree of the prompts that it has sent to each worker, instead of what is cached.

    If the busiest worker has more than IMBALANCE requests more than the idlest, and more than IMBALANCE_TIMES as many, the
    shortest queue. Otherwise the worker with the longest match if that is more than MATCH of the prompt, else the one with the
    smallest tree. Trees lose their oldest prompts above TREE_BLOCKS.
    """

    IMBALANCE, IMBALANCE_TIMES, MATCH = 64, 1.5, 0.3
    TREE_BLOCKS = 1 << 20

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._sent: dict[int, dict[int, None]] = {}  # row -> keys, the oldest first

    def __call__(self, state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
        exists: Floats = state.table["exists"]
        keys = unpack_keys(ask.prefix_keys[0].keys) if ask.prefix_keys else []
        most, least = exists[fit].max(), exists[fit].min()
        if most - least > self.IMBALANCE and most > self.IMBALANCE_TIMES * least:
            row = spread(state, lightest(exists, fit), ask.key)
        else:
            row = self._matching(state, ask, fit, keys)
        sent = self._sent.setdefault(row, {})
        for key in keys:
            sent.pop(key, None)
            sent[key] = None
        self._index.add(row, keys)
        old = [key for key, _ in zip(sent, range(len(sent) - self.TREE_BLOCKS), strict=False)]
        for key in old:
            del sent[key]
        self._index.remove(row, old)
        return Choice(row)

    def _matching(self, state: ClusterState, ask: Ask, fit: NDArray[np.bool_], keys: Sequence[int]) -> int:
        matched = np.zeros(len(fit))
        for depth in self._index.depths(keys):
            matched[depth.rows] = depth.keys * ask.prefix_keys[0].tokens
        best = lightest(-matched, fit)
        if matched[best[0]] > self.MATCH * ask.tokens:
            return spread(state, best, ask.key)
        sizes = np.array([len(self._sent.get(row, ())) for row in range(len(fit))], dtype=float)
        return spread(state, lightest(sizes, fit), ask.key)


def dynamo(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
    """Dynamo's KV router with an overlap weight of 1: the least `prefill blocks + active blocks`.

    Prefill blocks are those that the worker's queue and this request have to compute, active ones those in use. It knows from
    events what each worker has cached, as Motet does.
    """
    t = state.table
    size = np.maximum(t["block_size"], 1)
    found = find(state, ask, now_s)
    tokens = float(ask.tokens) if found is None else ask.tokens - found.spared
    prefill = (t["queue_tokens"] + tokens) / size
    active = (t["kv_tokens_total"] - t["kv_tokens_free"] + t["queue_tokens"] + ask.tokens) / size
    cost = prefill + active
    return Choice(spread(state, lightest(cost, fit), ask.key))


POLICIES.add("sticky", Sticky)
POLICIES.add("cache-aware-tree", CacheAwareTree)
POLICIES.add("dynamo", lambda: dynamo)
