"""FlashInfer is used only where it gives what plain torch gives. Here it is stood in for by its documentation, in torch."""

from __future__ import annotations

import itertools
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from motet.kernels import AttentionBatch, KvCache, attend
from motet.kernels.library_attention import agreeing_library

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 16, 8
WINDOWS = (0, 6)


class Wrapper:
    """BatchPrefillWithPagedKVCacheWrapper, layout NHD, as FlashInfer documents it."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_cuda_graph: bool = False, **buffers: torch.Tensor) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")
        self.rows = len(buffers["qo_indptr_buf"]) - 1 if use_cuda_graph else 0
        self.room = len(buffers["paged_kv_indices_buf"]) if use_cuda_graph else math.inf

    def plan(
        self, qo: Any, starts: Any, ids: Any, last: Any, heads: int, kv_heads: int, head_dim: int, page: int, **rest: Any
    ) -> None:
        assert rest["causal"] and rest["q_data_type"] == rest["kv_data_type"] == torch.bfloat16
        assert (heads, kv_heads, head_dim, page) == (HEADS, KV_HEADS, HEAD_DIM, BLOCK)
        assert all(tensor.dtype == torch.int32 for tensor in (qo, starts, ids, last))
        assert not self.rows or (len(qo) == self.rows + 1 and len(ids) <= self.room), "a captured batch has one size"
        self.planned = qo.tolist(), starts.tolist(), ids.long(), last.tolist(), rest["window_left"]

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        qo, starts, ids, last, back = self.planned
        out = torch.empty_like(q, dtype=torch.float32)
        for i, (row, end) in enumerate(itertools.pairwise(qo)):
            pages = ids[starts[i] : starts[i + 1]]
            length = (len(pages) - 1) * BLOCK + last[i]
            k, v = (part[pages].flatten(0, 1)[:length].float().repeat_interleave(HEADS // KV_HEADS, 1) for part in kv)
            at = torch.arange(length - (end - row), length)[:, None]
            seen = torch.arange(length)[None] <= at
            if back >= 0:
                seen &= torch.arange(length)[None] >= at - back
            scores = torch.einsum("qhd,khd->hqk", q[row:end].float(), k) / HEAD_DIM**0.5
            out[row:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        return out.to(q.dtype)


def install(monkeypatch: pytest.MonkeyPatch, wrapper: Any) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)


def make_cache(dtype: torch.dtype = torch.bfloat16) -> KvCache:
    cache = KvCache(layers=2, blocks=40, block_size=BLOCK, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    cache.data[:, :-1].normal_(generator=torch.Generator().manual_seed(3))
    return cache


def decode_step(lengths: list[int]) -> dict[str, np.ndarray]:
    contexts = np.array(lengths, dtype=np.int32)
    tables = np.random.default_rng(0).permutation(40)[: 8 * len(lengths)].reshape(len(lengths), 8).astype(np.int32)
    last = contexts.astype(np.int64) - 1
    slots = tables[np.arange(len(lengths)), last // BLOCK].astype(np.int64) * BLOCK + last % BLOCK
    return {"context_lens": contexts, "block_tables": tables, "kv_slots": slots}


def test_a_reserved_plan_attends_like_plain_torch_step_after_step(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Wrapper)
    cache, twin = make_cache(), make_cache()
    cache.library = agreeing_library(cache, heads=HEADS, windows=WINDOWS)
    assert cache.library is not None
    reserved = AttentionBatch.reserve(cache, rows=3, columns=8, windows=WINDOWS)
    for lengths in ([5, 40, 17], [6, 41, 64], [1, 2, 9]):
        step = decode_step(lengths)
        qkv = torch.randn(3, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16()
        reserved.update(cache, **step)
        plain = AttentionBatch.build(twin, seq_starts=np.arange(4, dtype=np.int32), windows=WINDOWS, **step)
        for window in WINDOWS:
            got = attend(qkv, cache, 1, reserved, heads=HEADS, window=window)
            want = attend(qkv, twin, 1, plain, heads=HEADS, window=window)
            torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
        assert torch.equal(cache.data, twin.data)


def test_a_library_that_differs_or_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Blind(Wrapper):
        def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return super().run(q, (kv[0], kv[1].roll(1, 0)))

    class Broken(Wrapper):
        def plan(self, *args: Any, **rest: Any) -> None:
            raise RuntimeError("no compiler")

    for wrapper, complaint in ((Blind, "differs"), (Broken, "no compiler")):
        install(monkeypatch, wrapper)
        assert agreeing_library(make_cache(), heads=HEADS, windows=WINDOWS) is None
        assert complaint in caplog.text


def test_a_library_is_not_used_where_it_does_not_support_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # not installed
    assert agreeing_library(make_cache(), heads=HEADS, windows=WINDOWS) is None
    install(monkeypatch, Wrapper)
    assert agreeing_library(make_cache(torch.float32), heads=HEADS, windows=WINDOWS) is None
