"""Attention over long contexts for `python -m bench kernels`: keys and values in bfloat16 beside those in int8, in turns.

The attention of one decode step of model M (12 heads, 4 KV heads of 128) for 1 and 8 sequences. As in a step, keys and values
come from memory: there are more layers than fit in the caches, and they are read in turn, all in one call. The limit is reading
every key, value and scale once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench import report
from bench.watch import Watch
from motet.kernels import KvCache
from motet.kernels.cpu import CpuEngine

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 12, 4, 128, 16
CONTEXTS, ROWS = (512, 2048, 8192), (1, 8)
KINDS = {"bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Timed:
    """Attention of one layer: milliseconds, and the share of the bandwidth that was measured beside it."""

    ms: float
    share: float


def measure(
    engine: CpuEngine, probe: Callable[[], float], cold_bytes: int, repeats: int, watch: Watch, *, quick: bool
) -> dict[tuple[int, int, str], Timed]:
    """{(rows, context, kind): its time}. `probe` measures the present bandwidth, in bytes per second."""
    found: dict[tuple[int, int, str], Timed] = {}
    for rows in ROWS[:1] if quick else ROWS:
        for context in CONTEXTS[:1] if quick else CONTEXTS:
            for kind, timed in _pair(engine, probe, cold_bytes, rows, context, repeats, watch):
                found[rows, context, kind] = timed
    return found


def table(found: dict[tuple[int, int, str], Timed]) -> str:
    """The results as text."""
    lines: list[list[object]] = []
    for rows, context in dict.fromkeys((rows, context) for rows, context, _ in found):
        wide, narrow = (found[rows, context, kind] for kind in KINDS)
        lines.append([f"{rows} x {context:,}", wide.ms, wide.share, narrow.ms, narrow.share, wide.ms / narrow.ms])
    columns = ["sequences x context", "bf16 ms", "of bandwidth", "int8 ms", "of bandwidth", "bf16 / int8"]
    return report.table("Attention of one layer of M, one step", columns, lines)


def figures(found: dict[tuple[int, int, str], Timed]) -> dict[str, float]:
    """The bench's figures: means over all contexts and numbers of sequences."""
    pairs = [(found[rows, context, "bf16"], found[rows, context, "int8"]) for rows, context, kind in found if kind == "int8"]
    return {
        "attention_bandwidth_fraction": round(statistics.fmean(wide.share for wide, _ in pairs), 3),
        "attention_int8_bandwidth_fraction": round(statistics.fmean(narrow.share for _, narrow in pairs), 3),
        "attention_int8_vs_bf16": round(statistics.fmean(wide.ms / narrow.ms for wide, narrow in pairs), 3),
    }


def _pair(
    engine: CpuEngine, probe: Callable[[], float], cold_bytes: int, rows: int, context: int, repeats: int, watch: Watch
) -> list[tuple[str, Timed]]:
    """Both kinds in turns. Returns the medians."""
    blocks = rows * context // BLOCK_SIZE
    shape: dict[str, Any] = {"blocks": blocks, "block_size": BLOCK_SIZE, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    layers = max(2, cold_bytes // (rows * context * 2 * KV_HEADS * HEAD_DIM * 2))
    caches = {kind: KvCache(layers=layers, **shape, dtype=dtype) for kind, dtype in KINDS.items()}
    caches["bf16"].data.fill_(1)
    caches["int8"].data.fill_(60)  # also the four bytes of a scale, which is 0.0115 then
    tables = np.random.default_rng(0).permutation(blocks).astype(np.int32).reshape(rows, -1)
    step = SimpleNamespace(
        seq_starts=np.arange(rows + 1, dtype=np.int32),
        context_lens=np.full(rows, context, dtype=np.int32),
        block_tables=tables,
        kv_slots=tables[:, -1].astype(np.int64) * BLOCK_SIZE + BLOCK_SIZE - 1,
    )
    qkv, out = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM), torch.empty(rows, HEADS * HEAD_DIM)

    def attend(cache: KvCache) -> float:
        began = time.perf_counter()
        engine.attention(out, qkv, cache.data[0], step, heads=HEADS, layers=layers)
        return (time.perf_counter() - began) / layers

    for cache in caches.values():
        attend(cache)
    pairs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in watch.rounds(repeats, within=0.9):
        for kind, cache in caches.items():
            pairs[kind].append((attend(cache), probe()))
    found = []
    for kind, cache in caches.items():
        nbytes = cache.data[0, :blocks].nbytes
        share = statistics.median(nbytes / seconds / bandwidth for seconds, bandwidth in pairs[kind])
        found.append((kind, Timed(statistics.median(seconds for seconds, _ in pairs[kind]) * 1000, share)))
    return found
