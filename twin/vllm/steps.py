"""Duration of one engine step, as a sum of terms that each have a cause.

backbone   weights are read once whatever the batch (constant); from about a hundred tokens on arithmetic counts (linear,
           steeper above 128); sampling and bookkeeping per row that yields a token; attention reads per context token
LoRA       vLLM's kernels start a grid of blocks for *every* slot, used or not: expand has one block of rows per 64 tokens,
           shrink one per 32, times ceil(S_max / 16) column blocks, times a split of the inner sum into 64 parts below 128
           tokens and 8 above. Unused slots return at once but are started (A_max x blocks); adapters of the batch also
           compute (distinct x ...)
worker     before a step, it copies the list of all adapters in CPU memory once for each adapter of the batch
scheduler  examines every waiting request that it passes over
loads      copying an adapter to its slot, slower when its rank is below S_max (padding)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

GRAPH_TOKENS = 512  # largest CUDA graph; sizes in between are multiples of 8
TERMS = (
    "constant",
    "tokens",
    "tokens_above_128",
    "rows",
    "context_ktokens",
    "mixed_context_ktokens",
    "lora",
    "lora_tokens",
    "slot_expand",
    "slot_shrink",
    "adapter",
    "adapter_expand",
    "adapter_shrink",
)


def features(
    tokens: ArrayLike,
    rows: ArrayLike,
    context_tokens: ArrayLike,
    a_max: ArrayLike,
    s_max: ArrayLike,
    distinct: ArrayLike,
    *,
    mixed: bool,
) -> NDArray[np.float64]:
    """The terms of steps, [..., len(TERMS)], in the order of `TERMS`. The duration of a step is linear in them.

    `tokens`: of the step; `rows`: requests that get a token; `context_tokens`: tokens that the decodes have in the cache;
    `distinct`: adapters in the batch; `mixed`: the steps have prompt tokens. `a_max` 0: the engine runs without LoRA. They
    are numbers, or arrays that broadcast.
    """
    slots, rank = np.asarray(a_max, dtype=np.float64), np.asarray(s_max, dtype=np.float64)
    padded = _padded(np.asarray(tokens, dtype=np.float64))
    expand = np.ceil(padded / 64)
    columns = np.ceil(rank / 16) * np.where(padded < 128, 64, 8) / 64
    adapters = np.where(slots > 0, distinct, 0.0)
    lora = (adapters > 0).astype(np.float64)
    context = np.asarray(context_tokens, dtype=np.float64) / 1e3
    terms = (
        1.0,
        padded,
        np.maximum(padded - 128, 0),
        rows,
        context,
        context if mixed else 0.0,
        lora,
        lora * padded,
        slots * expand,
        slots * np.ceil(padded / 32) * columns,
        adapters,
        adapters * expand,
        adapters * columns,
    )
    found = np.empty((*np.broadcast_shapes(*(np.shape(term) for term in terms)), len(terms)))
    for place, term in enumerate(terms):
        found[..., place] = term
    return found


def _padded(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    graph = np.where(tokens <= 4, np.maximum(1.0, tokens), np.ceil(np.round(tokens) / 8) * 8)
    return np.where(tokens > GRAPH_TOKENS, tokens, graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmStepModel:
    """Fitted coefficients of one model: milliseconds per unit of each of `TERMS`, and costs outside of the steps."""

    ms: dict[str, float]
    load_full_ms: float  # adapter whose rank is S_max
    load_padded_ms: float  # adapter of lower rank
    scan_us: float  # per waiting request that the scheduler passes over
    listed_us: float  # per adapter in CPU memory and adapter of the batch

    @property
    def scan_s(self) -> float:
        """Seconds per waiting request that the scheduler passes over."""
        return self.scan_us * 1e-6

    def load_s(self, rank: int, s_max: int) -> float:
        """Seconds to load an adapter from CPU memory into a slot."""
        return (self.load_full_ms if rank >= s_max else self.load_padded_ms) * 1e-3

    def table(self, a_max: int, s_max: int, max_tokens: int, in_memory: int) -> StepTable:
        """The model at one setting of the slots with `in_memory` adapters in CPU memory, as a table by the tokens of a step."""
        weights = np.array([self.ms[term] for term in TERMS]) * 1e-3
        tokens = np.arange(max_tokens + 1)
        idle, one, two = (
            (features(tokens, 0, 0, a_max, s_max, distinct, mixed=False) @ weights).tolist() for distinct in (0, 1, 2)
        )
        used = [2 * a - b for a, b in zip(one, two, strict=True)]
        per_adapter = [b - a + self.listed_us * 1e-6 * in_memory for a, b in zip(one, two, strict=True)]
        context_s = self.ms["context_ktokens"] * 1e-6
        mixed_s = context_s + self.ms["mixed_context_ktokens"] * 1e-6
        return StepTable(idle, used, per_adapter, self.ms["rows"] * 1e-3, context_s, mixed_s)


@dataclass(frozen=True, slots=True)
class StepTable:
    """Seconds of a step by its tokens: without adapters, with adapters, and per adapter in the batch."""

    idle_s: list[float]
    used_s: list[float]
    adapter_s: list[float]
    row_s: float
    context_s: float  # per context token in a step of decodes
    mixed_context_s: float  # and in one with prompt tokens

    def seconds(self, tokens: int, rows: int, context_tokens: int, distinct: int, *, mixed: bool) -> float:
        """Duration of a step."""
        base_s = self.used_s[tokens] + distinct * self.adapter_s[tokens] if distinct else self.idle_s[tokens]
        return base_s + rows * self.row_s + context_tokens * (self.mixed_context_s if mixed else self.context_s)
