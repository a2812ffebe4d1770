"""Finds the workers that can take a request: CaraServe's "matching the base LLM, adapter, and GPU memory" and our own limits.

A worker is a candidate when it serves the base model, has the capabilities that the request needs, can change the layers of its
adapter where that is kept as PEFT's files, has reported recently, is not draining, has room in its queue, and can hold the
request: context length, LoRA rank, KV memory. Workers that the owner wants to avoid (they were lost or refused before) are
candidates only when there is no other, so that a worker which came back under its old id can continue its requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.worker_table import EXCLUSIVE_BITS, capability_bits
from motet.shared.model import EXCLUSIVE_CAPABILITIES, Capability
from motet.shared.wire.prefixes import PrefixKeys

Reason = Literal["capability", "lora_layers", "stale", "max_model_len", "kv_memory", "lora_rank", "draining", "tried", "full"]
PERMANENT: frozenset[Reason] = frozenset({"capability", "lora_layers", "max_model_len", "kv_memory", "lora_rank"})
"""Reasons that waiting does not change."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request as policies see it. `tokens` counts the prompt and, after a resumption, the output so far."""

    base_model: str
    rank: int  # 0 for the base; of several adapters the sum
    tokens: int
    tpot_slo_ms: float
    ttft_slo_ms: float = inf
    out_tokens: int = 0  # predicted, still to be produced; 0 for unknown
    adapter: str = ""  # digest, "" for the base
    adapter_bytes: int = 0
    key: int = 0  # hash of the request's id: the only random input, so that a logged decision can be repeated
    avoid: tuple[str, ...] = ()  # worker ids: only if there is no other candidate
    tried: tuple[str, ...] = ()  # worker ids: not again
    needs: Mapping[str, str] = {}  # capabilities that its worker must have, and the client's field for each
    targets: tuple[str, ...] = ()  # patterns of its adapter's layers, where not every worker can change them
    begun: bool = False  # it was admitted before and lost its worker: its objectives do not refuse it now
    tenant: str = ""
    tenant_weight: float = 1.0  # its share relative to other tenants'
    prefix_keys: tuple[PrefixKeys, ...] = ()  # of its prompt, for each block size that workers have
    travels: bool = False  # its worker may fetch cached blocks of its prompt from another worker
    demand: float = 0.0  # recent demand of the tenant (policies.cluster.demand.Standing); 0 for unknown
    largest_demand: float = 0.0
    rows: float = 1.0  # what it adds to a step
    area: float = 0.0  # of its picture, in those of 512 x 512 pixels
    more: tuple[tuple[str, int], ...] = ()  # further adapters: digest and bytes
    largest_rank: int = 0  # of one adapter, where there are several
    e2e_slo_ms: float = inf  # for the whole answer

    @property
    def embeds(self) -> bool:
        """Whether the request asks for an embedding instead of text."""
        return "embeddings" in self.needs

    @property
    def draws(self) -> bool:
        """Whether the request asks for a picture."""
        return "draws" in self.needs

    @property
    def rank_needed(self) -> int:
        """The LoRA rank that its worker must accept."""
        return self.largest_rank or self.rank


class Screening(msgspec.Struct, frozen=True, kw_only=True):
    """Why no worker of a base model is a candidate: how many workers fail for each reason, and the best permanent limits."""

    rejected: dict[Reason, int]
    longest_context: int = 0  # tokens; the largest that a live worker could take, by context length and KV memory
    largest_rank: int = 0
    lacking: tuple[str, ...] = ()  # capabilities that the request needs and no live worker has
    lacking_layers: tuple[str, ...] = ()  # layers of the adapter that no live worker can change
    exclusive: tuple[Capability, ...] = ()  # of the live workers that do one thing only


def candidates(state: ClusterState, ask: Ask, now_s: float, stale_s: float) -> NDArray[np.bool_]:
    """A mask of the rows of `state.table` that can take the request."""
    fit = state.serving(ask.base_model).copy()
    for failing in _failures(state, ask, now_s, stale_s).values():
        np.greater(fit, failing, out=fit)  # fit and not failing
    if ask.avoid:
        preferred = fit.copy()
        preferred[_rows(state, ask.avoid)] = False
        if preferred.any():
            fit = preferred
    return fit


def screen(state: ClusterState, ask: Ask, now_s: float, stale_s: float) -> Screening:
    """The reasons behind an empty `candidates`, counted over the workers that serve the base model."""
    serves = state.serving(ask.base_model)
    left = serves.copy()
    rejected: dict[Reason, int] = {}
    failures = _failures(state, ask, now_s, stale_s)
    for reason, failing in failures.items():
        count = int(np.count_nonzero(left & failing))
        if count:
            rejected[reason] = count
        left &= ~failing
    t, live = state.table, serves & ~failures["stale"] if "stale" in failures else serves.copy()
    known = int(np.bitwise_or.reduce(t["capabilities"][live], initial=0))
    nobody_has = tuple(word for word in ask.needs if not capability_bits((word,)) & known)
    exclusive = tuple(word for word in EXCLUSIVE_CAPABILITIES if capability_bits((word,)) & known)
    if "capability" in failures:
        live &= ~failures["capability"]
    nobody_changes = state.lacking_layers(ask.targets, live)
    if "lora_layers" in failures:
        live &= ~failures["lora_layers"]
    if not live.any():
        return Screening(rejected=rejected, lacking=nobody_has, lacking_layers=nobody_changes, exclusive=exclusive)
    context = np.minimum(t["max_model_len"], t["kv_tokens_total"])[live]
    largest_rank = int(t["max_lora_rank"][live].max())
    return Screening(
        rejected=rejected,
        longest_context=int(context.max()),
        largest_rank=largest_rank,
        lacking=nobody_has,
        lacking_layers=nobody_changes,
        exclusive=exclusive,
    )


def lacking(state: ClusterState, ask: Ask) -> NDArray[np.bool_]:
    """The rows of workers that lack a capability of the request, or that do only something else than it asks for."""
    needed = capability_bits(ask.needs)
    examined = np.uint64(needed | EXCLUSIVE_BITS)
    return (state.table["capabilities"] & examined) != np.uint64(needed)


def _failures(state: ClusterState, ask: Ask, now_s: float, stale_s: float) -> dict[Reason, NDArray[np.bool_]]:
    """For each possible reason, the rows that fail by it. The first reason that applies is the one to report."""
    t = state.table
    needed = ask.tokens + (not ask.embeds)  # room for one new token, or there is nothing to generate
    context, rank = state.least
    failures: dict[Reason, NDArray[np.bool_]] = {}
    if ask.needs or state.exclusive:
        failures["capability"] = lacking(state, ask)
    if ask.targets:
        failures["lora_layers"] = ~state.changes_layers(ask.targets)
    if not state.all_heard_since(now_s - stale_s):
        failures["stale"] = t["heard_s"] < now_s - stale_s
    if needed > context:
        failures["max_model_len"] = t["max_model_len"] < needed
        failures["kv_memory"] = t["kv_tokens_total"] < needed
    if ask.rank > rank:
        failures["lora_rank"] = t["max_lora_rank"] < ask.rank_needed
    if state.held_back:
        failures["draining"] = t["draining"]
    if ask.tried:
        failures["tried"] = tried = np.zeros(len(state.ids), dtype=bool)
        tried[_rows(state, ask.tried)] = True
    if state.crowded or state.held_back:
        failures["full"] = (t["exists"] >= t["max_requests"]) | t["refusing"]
    return failures


def _rows(state: ClusterState, worker_ids: tuple[str, ...]) -> list[int]:
    return [row for row in map(state.row, worker_ids) if row >= 0]
