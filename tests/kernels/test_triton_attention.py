"""Paged attention in one launch, against the formula in fp64 and against plain torch; interpreted where there is no GPU."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from motet.kernels import AttentionBatch, KvCache, attend
from motet.kernels import library_attention as library
from motet.kernels.triton import attention as triton_attention
from motet.kernels.triton.attention import PagedAttention, Splitting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, BLOCKS = 8, 48
DIVIDED = Splitting(programs=64, least=16, most=32)  # short contexts, too, and where there are programs enough


def formula(qkv: torch.Tensor, heads: int, kv_heads: int, window: int) -> torch.Tensor:
    """One whole sequence, [tokens, all heads, head_dim] -> [tokens, heads * head_dim], in fp64."""
    q, k, v = qkv.double().split([heads, kv_heads, kv_heads], dim=1)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / qkv.shape[-1] ** 0.5
    at = torch.arange(len(qkv))
    seen = at[None, :] <= at[:, None]
    if window:
        seen &= at[None, :] > at[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


def poisoned_cache(kv_heads: int, head_dim: int, dtype: torch.dtype, heads: int) -> KvCache:
    cache = KvCache(layers=1, blocks=BLOCKS, block_size=BLOCK, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=DEVICE)
    cache.data[:, : cache.null_block] = float("nan")
    cache.library = PagedAttention(cache, heads=heads)
    return cache


TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "dtype"),
    [
        (4, 2, 16, 0, torch.float32),
        (7, 1, 24, 5, torch.float32),
        (4, 4, 32, 1, torch.float32),
        (6, 2, 32, 20, torch.float32),
        (6, 2, 32, 70, torch.float32),
        (4, 1, 64, 0, torch.bfloat16),
        (4, 2, 64, 0, torch.float16),
    ],
)


@SHAPES
def test_chunks_and_decodes_of_mixed_lengths_follow_the_formula(
    heads: int, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype
) -> None:
    draw = random.Random(heads * head_dim + window)
    cache = poisoned_cache(kv_heads, head_dim, dtype, heads)
    free = draw.sample(range(BLOCKS), BLOCKS)
    lengths = [1, 3, 75, 11, 40, 8]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(n, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype) for n in lengths]
    outputs = [torch.empty(0, heads * head_dim) for _ in lengths]
    done, tables = [0] * len(lengths), [[free.pop() for _ in range(-(-n // BLOCK))] for n in lengths]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        live = [i for i, n in enumerate(lengths) if done[i] < n]
        draw.shuffle(live)
        most = draw.choice([1, 30, 70])
        takes = [min(draw.choice([1, most]), lengths[i] - done[i]) for i in live]
        table = np.full((len(live), 10), -1, dtype=np.int32)
        slots = []
        for row, (i, take) in enumerate(zip(live, takes, strict=True)):
            table[row, : len(tables[i])] = tables[i]
            slots += [tables[i][p // BLOCK] * BLOCK + p % BLOCK for p in range(done[i], done[i] + take)]
        batch = AttentionBatch.build(
            cache,
            seq_starts=np.cumsum([0, *takes]).astype(np.int32),
            context_lens=np.array([done[i] + take for i, take in zip(live, takes, strict=True)], dtype=np.int32),
            block_tables=table,
            kv_slots=np.array(slots, dtype=np.int64),
            windows=[window],
        )
        rows = torch.cat([inputs[i][done[i] : done[i] + take] for i, take in zip(live, takes, strict=True)])
        out = attend(rows.to(DEVICE), cache, 0, batch, heads=heads, window=window).float().cpu()
        for i, take, part in zip(live, takes, out.split(takes), strict=True):
            outputs[i] = torch.cat([outputs[i], part])
            done[i] += take
    for qkv, output in zip(inputs, outputs, strict=True):
        want = formula(qkv, heads, kv_heads, window)
        torch.testing.assert_close(output.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@SHAPES
def test_divided_contexts_follow_the_formula_and_give_the_same_bits_again(
    heads: int, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_attention, "SPLITTING", DIVIDED)
    cache = poisoned_cache(kv_heads, head_dim, dtype, heads)
    assert isinstance(cache.library, PagedAttention)
    cache.library.workspace.parts.fill_(float("nan"))
    cache.library.workspace.sums.fill_(float("nan"))
    lengths = [200, 1, 33, 64, 7]
    free = iter(np.random.default_rng(0).permutation(BLOCKS).tolist())
    table = np.full((len(lengths), 25), -1, dtype=np.int32)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(n, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype) for n in lengths]
    slots = []
    for row, (qkv, n) in enumerate(zip(inputs, lengths, strict=True)):
        table[row, : -(-n // BLOCK)] = [next(free) for _ in range(-(-n // BLOCK))]
        at = torch.arange(n)
        slots.append(torch.from_numpy(table[row])[at // BLOCK] * BLOCK + at % BLOCK)
        cache.write(0, slots[-1][:-1].to(DEVICE, torch.int64), qkv[:-1, heads:].unflatten(1, (2, -1)).to(DEVICE))
    batch = AttentionBatch.build(
        cache,
        seq_starts=np.arange(len(lengths) + 1, dtype=np.int32),
        context_lens=np.array(lengths, dtype=np.int32),
        block_tables=table,
        kv_slots=np.array([int(slot[-1]) for slot in slots], dtype=np.int64),
        windows=[window],
    )
    rows = torch.stack([qkv[-1] for qkv in inputs]).to(DEVICE)
    first, second = (attend(rows, cache, 0, batch, heads=heads, window=window).cpu() for _ in range(2))
    assert torch.equal(first, second)
    assert cache.library.workspace.parts.isnan().all() == (0 < window < 2 * DIVIDED.least), "divided where it sees enough"
    assert not cache.library.workspace.arrived.any()
    want = torch.stack([formula(qkv, heads, kv_heads, window)[-1] for qkv in inputs])
    torch.testing.assert_close(first.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_long_contexts_of_few_sequences_are_divided_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "multiprocessors_of", lambda device: 132)
    cache = KvCache(layers=1, blocks=1, block_size=16, kv_heads=8, head_dim=16, dtype=torch.bfloat16)
    plan = PagedAttention(cache, heads=32)

    def shares(rows: int, context: int, window: int = 0) -> int:
        return plan.for_graph(rows, context // 16).shares(window)

    assert [shares(8, 2048), shares(8, 256), shares(1, 8192), shares(3, 1024)] == [6, 2, 32, 8]
    assert [shares(32, 128), shares(64, 1024), shares(256, 8192)] == [1, 1, 1]
    assert [shares(8, 2048, window=300), shares(8, 2048, window=200)] == [2, 1]


@pytest.mark.parametrize("splitting", [triton_attention.SPLITTING, DIVIDED], ids=["whole", "divided"])
def test_a_reserved_plan_takes_one_step_after_another(splitting: Splitting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "SPLITTING", splitting)
    heads, kv_heads, head_dim = 4, 2, 16
    cache = poisoned_cache(kv_heads, head_dim, torch.float32, heads)
    twin = KvCache(layers=1, blocks=BLOCKS, block_size=BLOCK, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float32)
    twin.data[:, :-1].normal_(generator=torch.Generator().manual_seed(3))
    cache.data.copy_(twin.data)
    reserved = AttentionBatch.reserve(cache, rows=3, columns=8, windows=[0, 6])
    for lengths in ([5, 40, 17], [6, 41, 64], [1, 2, 9], [64, 1, 33]):
        contexts = np.array(lengths, dtype=np.int32)
        tables = np.random.default_rng(0).permutation(BLOCKS)[:24].reshape(3, 8).astype(np.int32)
        tables = tables[:, : -(-max(lengths) // BLOCK)]
        last = contexts.astype(np.int64) - 1
        slots = tables[np.arange(3), last // BLOCK].astype(np.int64) * BLOCK + last % BLOCK
        step = {"context_lens": contexts, "block_tables": tables, "kv_slots": slots}
        qkv = torch.randn(3, heads + 2 * kv_heads, head_dim)
        reserved.update(cache, **step)
        plain = AttentionBatch.build(twin, seq_starts=np.arange(4, dtype=np.int32), windows=[0, 6], **step)
        for window in (0, 6):
            got = attend(qkv.to(DEVICE), cache, 0, reserved, heads=heads, window=window).cpu()
            torch.testing.assert_close(got, attend(qkv, twin, 0, plain, heads=heads, window=window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "window", "dtype"), [(4, 0, torch.float32), (6, 9, torch.float32), (4, 0, torch.bfloat16)])
def test_a_reserved_plan_for_prompts_takes_any_sequences_and_other_rows_see_nothing(
    heads: int, window: int, dtype: torch.dtype
) -> None:
    cache = poisoned_cache(2, 16, dtype, heads)
    reserved = AttentionBatch.reserve(cache, rows=24, columns=6, windows=[window], prompts=True)
    for counts, contexts in (([1, 13, 1, 4], [11, 20, 1, 4]), ([24], [40]), ([1, 1], [30, 7])):
        rows, tables = sum(counts), np.arange(9 * len(counts), dtype=np.int32).reshape(-1, 9)
        positions = [np.arange(n - count, n) for n, count in zip(contexts, counts, strict=True)]
        slots = [table[at // BLOCK] * BLOCK + at % BLOCK for table, at in zip(tables, positions, strict=True)]
        step = {
            "seq_starts": np.cumsum([0, *counts]).astype(np.int32),
            "context_lens": np.array(contexts, dtype=np.int32),
            "block_tables": tables,
        }
        for table, n, count in zip(tables, contexts, counts, strict=True):
            before = torch.from_numpy(table[np.arange(n - count) // BLOCK] * BLOCK + np.arange(n - count) % BLOCK)
            cache.tokens(0)[before.to(DEVICE, torch.int64)] = torch.randn(n - count, 2, 2, 16).to(DEVICE, dtype)
        qkv = torch.full((24, heads + 4, 16), float("nan"), dtype=dtype)
        qkv[:rows] = torch.randn(rows, heads + 4, 16)
        written = np.concatenate([*slots, np.full(24 - rows, cache.null_block * BLOCK)]).astype(np.int64)
        plain = AttentionBatch.build(cache, windows=[window], kv_slots=written[:rows], **step)
        want = attend(qkv[:rows].to(DEVICE), cache, 0, plain, heads=heads, window=window)
        reserved.update(cache, kv_slots=written, **step)
        got = attend(qkv.to(DEVICE), cache, 0, reserved, heads=heads, window=window)
        torch.testing.assert_close(got[:rows], want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert want.isfinite().all() and not got[rows:].any()


def test_paged_attention_is_used_without_a_better_library_and_agrees_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KvCache(layers=1, blocks=8, block_size=8, kv_heads=2, head_dim=16, dtype=torch.float32, device=DEVICE)
    monkeypatch.setattr(library, "find_flashinfer", lambda cache: None)
    monkeypatch.setattr(library, "on_a_gpu", lambda cache: True)
    assert isinstance(library.agreeing_library(cache, heads=4, windows=(0, 6)), PagedAttention)
    monkeypatch.setattr(PagedAttention, "attend", lambda self, q, layer, window: q)
    assert library.agreeing_library(cache, heads=4, windows=(0, 6)) is None
