"""Attention on a GPU with paged-attention kernels: the same results as kernels/attention.py, without gathering context.

    library = agreeing_library(cache, heads=, windows=)   None: no installed kernel agrees with torch
    cache.library = library                               from then on AttentionBatch.build plans for it

Takes FlashInfer if it is installed and the type has 16 bits, else Triton (kernels/triton/attention.py). One call per layer
computes the decoding rows and prefill chunks of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from motet.kernels.attention import AttentionBatch, attend
from motet.kernels.types import KvCache, Library

WORKSPACE_BYTES = 128 << 20
_log = logging.getLogger(__name__)


class LibraryAttention:
    """FlashInfer's plan for one step at a time, per distinct sliding window.

    With `rows` the plan is for exactly that many decoding sequences of up to `columns` blocks, and a graph captured with it
    stays valid when it is planned again.
    """

    graphs_prompts = False

    def __init__(
        self,
        flashinfer: ModuleType,
        cache: KvCache,
        *,
        heads: int,
        windows: Sequence[int],
        rows: int = 0,
        columns: int = 0,
        workspace: torch.Tensor | None = None,
    ) -> None:
        self._flashinfer, self._cache, self._heads = flashinfer, cache, heads
        self._windows = tuple(dict.fromkeys(windows))
        device = cache.data.device
        if workspace is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._workspace = workspace
        self._wrappers: dict[int, Any] = {}
        for window in self._windows:
            fixed: dict[str, Any] = {}
            if rows:
                sizes = {"qo_indptr_buf": rows + 1, "paged_kv_indptr_buf": rows + 1, "paged_kv_last_page_len_buf": rows}
                sizes["paged_kv_indices_buf"] = rows * columns
                fixed = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
                fixed["use_cuda_graph"] = True
            self._wrappers[window] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **fixed)

    def for_graph(self, rows: int, columns: int, *, prompts: bool = False) -> LibraryAttention:
        """A separate plan for a captured graph. Graphs run one at a time and share the workspace."""
        assert not prompts, "a graph of FlashInfer's has a fixed number of sequences"
        return LibraryAttention(
            self._flashinfer,
            self._cache,
            heads=self._heads,
            windows=self._windows,
            rows=rows,
            columns=columns,
            workspace=self._workspace,
        )

    def plan(self, seq_starts: np.ndarray, context_lens: np.ndarray, block_tables: np.ndarray) -> None:
        """Plan a step with these arrays, which are those of `AttentionBatch.build`."""
        size, kv = self._cache.block_size, self._cache.data
        blocks = -(-context_lens.astype(np.int64) // size)
        ids = block_tables[np.arange(block_tables.shape[1]) < blocks[:, None]].astype(np.int32)
        starts = np.concatenate(([0], np.cumsum(blocks))).astype(np.int32)
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                torch.from_numpy(seq_starts.astype(np.int32)),
                torch.from_numpy(starts),
                torch.from_numpy(ids).to(kv.device),
                torch.from_numpy((context_lens - (blocks - 1) * size).astype(np.int32)),
                self._heads,
                kv.shape[4],
                kv.shape[5],
                size,
                causal=True,  # a chunk's last row sees the whole context, as FlashInfer aligns it
                window_left=window - 1,  # how far back a row sees besides itself; -1: all
                q_data_type=kv.dtype,
                kv_data_type=kv.dtype,
            )

    def attend(self, q: torch.Tensor, layer: int, window: int) -> torch.Tensor:
        """Attention of q [rows, heads, head_dim], in the same shape. The cache must have this step's K and V already."""
        kv = self._cache.data[layer]
        out: torch.Tensor = self._wrappers[window].run(q, (kv[:, :, 0], kv[:, :, 1]))
        return out


def agreeing_library(cache: KvCache, *, heads: int, windows: Sequence[int]) -> Library | None:
    """The first library that is available and agrees with plain torch on a small batch; None without one.

    Tried once, at start.
    """
    candidates: dict[str, Callable[[KvCache], Library]] = {}
    flashinfer = find_flashinfer(cache)
    if flashinfer is not None:
        candidates["FlashInfer"] = lambda cache: LibraryAttention(flashinfer, cache, heads=heads, windows=windows)
    if on_a_gpu(cache):
        from motet.kernels.triton.attention import PagedAttention

        candidates["Triton"] = lambda cache: PagedAttention(cache, heads=heads)
    for name, make in candidates.items():
        try:
            if _agrees(make, cache, heads, windows):
                return make(cache)
            _log.warning("%s's attention differs from PyTorch's on this device; it is not used", name)
        except Exception as error:  # it compiles for this device now, and whatever goes wrong must not stop the worker
            _log.warning("%s's attention does not run here: %s", name, error)
    return None


def find_flashinfer(cache: KvCache) -> ModuleType | None:
    """FlashInfer, where it is installed and has kernels for the cache's type."""
    if cache.data.dtype not in (torch.float16, torch.bfloat16):
        return None
    try:
        import flashinfer
    except ImportError:
        return None
    found: ModuleType = flashinfer
    return found


def on_a_gpu(cache: KvCache) -> bool:
    """Whether Triton's kernels can read the cache."""
    return cache.data.is_cuda


def _agrees(make: Callable[[KvCache], Library], like: KvCache, heads: int, windows: Sequence[int]) -> bool:
    """Whether the library agrees on steps of every kind, in scattered blocks. This compiles what serving launches.

    A chunk of 5 rows after 20 tokens beside two decoding sequences; these two alone; one with a context that may be divided.
    """
    steps = (([25, 3, 17], [5, 1, 1]), ([3, 17], [1, 1]), ([300], [1]))
    return all(_agrees_on(make, like, heads, windows, np.array(contexts, dtype=np.int32), counts) for contexts, counts in steps)


def _agrees_on(
    make: Callable[[KvCache], Library],
    like: KvCache,
    heads: int,
    windows: Sequence[int],
    contexts: np.ndarray,
    counts: Sequence[int],
) -> bool:
    """Whether the library agrees on one step: the last `counts` tokens of sequences of `contexts` tokens."""
    size, (kv_heads, head_dim), device = like.block_size, like.data.shape[4:], like.data.device
    columns = -(-int(contexts.max()) // size)
    blocks = len(contexts) * columns
    cache = KvCache(
        layers=1,
        blocks=blocks,
        block_size=size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=like.data.dtype,
        device=device,
    )
    cache.data[:, :-1].normal_()
    tables = np.arange(blocks, dtype=np.int32).reshape(columns, -1).T[::-1].copy()
    positions = [np.arange(context - count, context) for context, count in zip(contexts, counts, strict=True)]
    step = {
        "seq_starts": np.cumsum([0, *counts]).astype(np.int32),
        "context_lens": contexts,
        "block_tables": tables,
        "kv_slots": np.concatenate([table[at // size] * size + at % size for table, at in zip(tables, positions, strict=True)]),
    }
    step["kv_slots"] = step["kv_slots"].astype(np.int64)
    qkv = torch.randn(sum(counts), heads + 2 * kv_heads, head_dim, device=device).to(like.data.dtype)
    plain = AttentionBatch.build(cache, windows=windows, **step)
    want = [attend(qkv, cache, 0, plain, heads=heads, window=window) for window in windows]
    cache.library = make(cache)
    planned = AttentionBatch.build(cache, windows=windows, **step)
    got = [attend(qkv, cache, 0, planned, heads=heads, window=window) for window in windows]
    return all(torch.allclose(a.float(), b.float(), rtol=3e-2, atol=3e-2) for a, b in zip(got, want, strict=True))
