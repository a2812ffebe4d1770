"""The compiled attention against its formula in fp64, on every instruction set that this machine has."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from motet.kernels import AttentionBatch, KvCache, attend
from motet.kernels.cpu import CpuEngine
from tests.kernels.support_cpu import DTYPES, close
from tests.support_kv import Layer, stored

KV_DTYPES = (*DTYPES, torch.int8)


def paged(draw: np.random.Generator, counts: list[int], contexts: list[int], block_size: int, blocks: int) -> SimpleNamespace:
    """A step of sequences with `counts` rows at the end of `contexts` tokens, blocks scattered."""
    free = draw.permutation(blocks).tolist()
    tables = np.zeros((len(counts), max(-(-c // block_size) for c in contexts)), dtype=np.int32)
    kv_slots, all_slots = [], []
    for i, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        need = -(-context // block_size)
        tables[i, :need] = [free.pop() for _ in range(need)]
        at = [int(tables[i, p // block_size]) * block_size + p % block_size for p in range(context)]
        all_slots.append(at)
        kv_slots += at[context - count :]
    return SimpleNamespace(
        seq_starts=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        block_tables=tables,
        kv_slots=np.array(kv_slots, dtype=np.int64),
        all_slots=all_slots,
    )


CASES = [  # heads, kv heads, head size, block size, window
    (4, 2, 32, 8, 0),
    (4, 4, 24, 16, 0),
    (6, 2, 128, 16, 19),
    (3, 1, 20, 5, 7),
    (8, 2, 64, 32, 0),
    (5, 1, 16, 24, 33),
    (7, 1, 96, 40, 50),
    (10, 2, 90, 3, 0),
]


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_attention_is_softmax_over_what_a_row_may_see(engine: CpuEngine, dtype: torch.dtype, case: tuple[int, ...]) -> None:
    heads, kv_heads, head_dim, block_size, window = case
    draw = np.random.default_rng(sum(case))
    torch.manual_seed(sum(case))
    counts = [1, 9, 1, 70, 1, 3, 1, 1, 1, 1, 1]
    contexts = [1, 9, 50, 101, 16, 90, 33, 17, 7, 130, 64]
    blocks = sum(-(-c // block_size) for c in contexts) + 3
    step = paged(draw, counts, contexts, block_size, blocks)
    cache = Layer(blocks=blocks, block_size=block_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    rows = sum(counts)
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim)
    want = torch.empty(rows, heads, head_dim, dtype=torch.float64)
    for i, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        start = int(step.seq_starts[i])
        slots = torch.tensor(step.all_slots[i])
        kv = torch.randn(context, 2, kv_heads, head_dim)
        kv[context - count :] = qkv[start : start + count, heads:].unflatten(1, (2, kv_heads))
        cache.put(slots[: context - count], kv[: context - count])
        kv = stored(kv, dtype)
        for r in range(count):
            position = context - count + r
            low = max(0, position - window + 1) if window else 0
            for head in range(heads):
                k, v = kv[low : position + 1, :, head // (heads // kv_heads)].unbind(1)
                weights = torch.softmax(k @ qkv[start + r, head].double() / head_dim**0.5, 0)
                want[start + r, head] = weights @ v
    out = attention(engine, step, qkv, cache.data, heads, window)
    rounded = dtype == torch.int8 and engine.isa in ("avx512bf16", "amx")  # with VNNI queries have 15 bits
    close(out, want.flatten(1), 5e-5 if rounded else 1e-5)
    one = attention(engine, one_of(step, 3, counts), qkv[11:81].clone(), cache.data, heads, window)
    assert torch.equal(one, out[11:81]), "others in the batch make no difference"


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_row_attends_to_the_same_bits_alone_in_a_batch_and_in_a_chunk(
    engine: CpuEngine, dtype: torch.dtype, case: tuple[int, ...]
) -> None:
    heads, kv_heads, head_dim, block_size, window = case
    torch.manual_seed(sum(case))
    counts, contexts = [40, *[1] * 11], [int(c) for c in np.random.default_rng(sum(case)).integers(40, 120, 12)]
    blocks = sum(-(-c // block_size) for c in contexts)
    step = paged(np.random.default_rng(1), counts, contexts, block_size, blocks)
    cache = Layer(blocks=blocks, block_size=block_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    for slots in step.all_slots:
        cache.put(torch.tensor(slots), torch.randn(len(slots), 2, kv_heads, head_dim))
    qkv = torch.randn(sum(counts), heads + 2 * kv_heads, head_dim)
    together = attention(engine, step, qkv, cache.data, heads, window)
    for i in range(1, len(counts)):
        row = int(step.seq_starts[i])
        alone = attention(engine, one_of(step, i, counts), qkv[row : row + 1].clone(), cache.data, heads, window)
        assert torch.equal(alone[0], together[row])
    end = one_of(step, 0, counts)
    end.seq_starts, end.kv_slots = np.array([0, 1], dtype=np.int32), end.kv_slots[-1:].copy()
    assert torch.equal(attention(engine, end, qkv[39:40].clone(), cache.data, heads, window)[0], together[39])


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("case", [(4, 2, 32, 16, 0), (6, 2, 24, 16, 700), (3, 1, 20, 5, 0), (4, 4, 16, 300, 0)])
def test_a_long_context_gives_the_same_bits_whether_its_segments_are_spread_over_the_team_or_not(
    engine: CpuEngine, dtype: torch.dtype, case: tuple[int, ...]
) -> None:
    heads, kv_heads, head_dim, block_size, window = case
    torch.manual_seed(sum(case))
    sequences = 4 * engine.threads + 1  # with fewer a row alone is spread
    counts = [30, *[1] * sequences]
    contexts = [1_300, 1_024, 1_025, *np.random.default_rng(sum(case)).integers(600, 2_300, sequences - 2).tolist()]
    blocks = sum(-(-c // block_size) for c in contexts)
    step = paged(np.random.default_rng(1), counts, contexts, block_size, blocks)
    cache = Layer(blocks=blocks, block_size=block_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    qkv = torch.randn(sum(counts), heads + 2 * kv_heads, head_dim)
    kept = []
    for i, slots in enumerate(step.all_slots):
        kv = torch.randn(len(slots), 2, kv_heads, head_dim)
        start = int(step.seq_starts[i])
        kv[len(slots) - counts[i] :] = qkv[start : start + counts[i], heads:].unflatten(1, (2, kv_heads))
        cache.put(torch.tensor(slots), kv)
        kept.append(stored(kv, dtype))
    together = attention(engine, step, qkv, cache.data, heads, window)
    for i in range(len(counts)):
        end, row = one_of(step, i, counts), int(step.seq_starts[i + 1]) - 1
        end.seq_starts, end.kv_slots = np.array([0, 1], dtype=np.int32), end.kv_slots[-1:].copy()
        alone = attention(engine, end, qkv[row : row + 1].clone(), cache.data, heads, window)
        assert torch.equal(alone[0], together[row])
        k, v = kept[i][-window:].unbind(1)
        of_head = torch.arange(heads) // (heads // kv_heads)
        weights = torch.softmax(torch.einsum("thd,hd->ht", k[:, of_head], qkv[row, :heads].double()) / head_dim**0.5, 1)
        close(alone, torch.einsum("ht,thd->hd", weights, v[:, of_head]).reshape(1, -1))


@pytest.mark.parametrize("seed", range(12))
def test_attention_over_int8_is_near_that_over_floats_for_any_shape(engine: CpuEngine, seed: int) -> None:
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kv_heads, per, head_dim, block_size = (
        int(draw.choice(c)) for c in ([1, 2, 4], [1, 2, 3, 5, 8], [8, 20, 64, 128], [4, 16, 48])
    )
    heads, window = kv_heads * per, int(draw.choice([0, 0, 25]))
    contexts = draw.integers(1, 200, 9).tolist()
    counts = [int(draw.integers(1, context + 1)) if draw.random() < 0.3 else 1 for context in contexts]
    blocks = sum(-(-c // block_size) for c in contexts)
    step = paged(draw, counts, contexts, block_size, blocks)
    shape = {"blocks": blocks, "block_size": block_size, "kv_heads": kv_heads, "head_dim": head_dim}
    exact, cache = Layer(**shape, dtype=torch.float32), Layer(**shape, dtype=torch.int8)
    for slots in step.all_slots:
        before = torch.randn(len(slots), 2, kv_heads, head_dim) * torch.rand(len(slots), 2, kv_heads, 1) * 20
        exact.put(torch.tensor(slots), before)
        cache.put(torch.tensor(slots), before)
    qkv = torch.randn(sum(counts), heads + 2 * kv_heads, head_dim)
    qkv[:, :heads] /= 10  # so that a row looks at many tokens
    want = attention(engine, step, qkv, exact.data, heads, window)
    got = attention(engine, step, qkv, cache.data, heads, window)
    assert 0 < (got - want).norm() / want.norm() < 0.02


def test_keys_and_values_of_int8_come_back_within_half_a_step_of_their_largest(engine: CpuEngine) -> None:
    torch.manual_seed(3)
    kv_heads, head_dim, rows = 2, 20, 60
    cache = Layer(blocks=9, block_size=8, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.int8)
    step = paged(np.random.default_rng(3), [rows], [rows], 8, 9)
    sizes = torch.logspace(-20, 20, rows)[:, None, None]
    qkv = torch.randn(rows, 3 * kv_heads, head_dim) * sizes
    qkv[:, :kv_heads] = 0
    qkv[7, 2:] = 0
    attention(engine, step, qkv, cache.data, kv_heads, 0)
    kv = qkv[:, kv_heads:].unflatten(1, (2, kv_heads))
    got, most = cache.get(torch.tensor(step.all_slots[0])), kv.abs().amax(-1, keepdim=True).double()
    assert ((got - kv.double()).abs() <= most / 254 * (1 + 1e-5)).all()
    assert torch.equal(got, stored(kv, torch.int8)), "and are the same numbers on every instruction set"
    assert not got[7].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_key_in_int8_that_is_not_finite_stays_visible_to_its_own_sequence_alone(engine: CpuEngine, bad: float) -> None:
    torch.manual_seed(4)
    cache = Layer(blocks=8, block_size=8, kv_heads=1, head_dim=20, dtype=torch.int8)
    step = paged(np.random.default_rng(4), [3, 30], [3, 30], 8, 8)
    qkv = torch.randn(33, 4, 20)
    right = attention(engine, step, qkv, cache.data, 2, 0)
    qkv[1, 2, 17] = bad
    got = attention(engine, step, qkv, cache.data, 2, 0)
    assert torch.equal(got[0], right[0]) and torch.equal(got[3:], right[3:])
    assert got[1:3].isnan().all()


@pytest.mark.parametrize("context", [257, 1_025])
def test_a_key_that_is_not_finite_stays_visible_when_it_is_alone_in_its_segment(engine: CpuEngine, context: int) -> None:
    torch.manual_seed(5)
    blocks = -(-context // 8)
    cache = Layer(blocks=blocks, block_size=8, kv_heads=2, head_dim=16, dtype=torch.float32)
    step = paged(np.random.default_rng(5), [1], [context], 8, blocks)
    cache.put(torch.tensor(step.all_slots[0]), torch.randn(context, 2, 2, 16))
    qkv = torch.randn(1, 8, 16)
    qkv[0, 4, 7] = float("nan")
    out = attention(engine, step, qkv, cache.data, 4, 0).view(4, 16)
    assert out[:2].isnan().all()
    assert out[2:].isfinite().all(), "and the other head's queries do not see it"


def test_a_context_whose_segments_take_too_much_memory_is_divided_by_heads(engine: CpuEngine) -> None:
    heads, head_dim, block_size, repeats = 64, 16, 16, 39_000
    segments = repeats * 3 * block_size / 256
    assert segments * heads * (head_dim + 2) > 8 << 20, "MAX_PARTIALS of attention.h"
    torch.manual_seed(0)
    cache = Layer(blocks=4, block_size=block_size, kv_heads=1, head_dim=head_dim, dtype=torch.float32)
    kv = torch.randn(4 * block_size, 2, 1, head_dim)
    cache.put(torch.arange(len(kv)), kv)
    qkv = torch.randn(1, heads + 2, head_dim)
    kv[-1, :, 0] = qkv[0, heads:]
    tables = np.array([[*[0, 1, 2] * repeats, 3]], dtype=np.int32)  # the same three blocks again and again
    step = SimpleNamespace(
        seq_starts=np.array([0, 1], dtype=np.int32),
        context_lens=np.array([tables.size * block_size], dtype=np.int32),
        block_tables=tables,
        kv_slots=np.array([4 * block_size - 1], dtype=np.int64),
    )
    out = attention(engine, step, qkv, cache.data, heads, 0)
    k, v = kv[:, :, 0].double().unbind(1)
    scores = qkv[0, :heads].double() @ k.T / head_dim**0.5
    scores[:, : 3 * block_size] += math.log(repeats)
    close(out, (torch.softmax(scores, 1) @ v).flatten()[None], tolerance=1e-4)  # 7,313 segments are added up as floats


def one_of(step: SimpleNamespace, i: int, counts: list[int]) -> SimpleNamespace:
    start = int(step.seq_starts[i])
    return SimpleNamespace(
        seq_starts=np.array([0, counts[i]], dtype=np.int32),
        context_lens=step.context_lens[i : i + 1].copy(),
        block_tables=step.block_tables[i : i + 1].copy(),
        kv_slots=step.kv_slots[start : start + counts[i]].copy(),
    )


def attention(engine: CpuEngine, step: Any, qkv: torch.Tensor, cache: torch.Tensor, heads: int, window: int) -> torch.Tensor:
    out = torch.full((len(qkv), heads * qkv.shape[2]), float("nan"))
    engine.attention(out, qkv.contiguous(), cache, step, heads=heads, window=window)
    return out


def test_the_compiled_attention_reads_what_the_reference_wrote(engine: CpuEngine) -> None:
    torch.manual_seed(0)
    cache = KvCache(layers=1, blocks=20, block_size=8, kv_heads=2, head_dim=16, dtype=torch.float32)
    draw = np.random.default_rng(0)
    contexts, counts = [21, 9, 40], [21, 1, 12]
    step = paged(draw, counts, contexts, 8, 20)
    cache.data.normal_()
    qkv = torch.randn(34, 8, 16)
    arrays = {name: getattr(step, name) for name in ("seq_starts", "context_lens", "block_tables", "kv_slots")}
    got = attention(engine, step, qkv, cache.data[0].clone(), 4, 0)
    want = attend(qkv, cache, 0, AttentionBatch.build(cache, **arrays, windows=[0]), heads=4)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
