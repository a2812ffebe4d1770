"""The compiled kernels against their formulas in fp64, on every instruction set that this machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from motet.kernels import GROUPS, AttentionBatch, KvCache, LoraPool, PackedLora, attend
from motet.kernels.cpu import CpuEngine, Packer, available_isas
from motet.kernels.quantized import QuantizedMatrix, round_to
from tests.support_integers import to_4_bits, to_8_bits
from tests.support_kv import Layer, stored

ISAS = os.environ.get("MOTET_TEST_ISAS", "").split() or available_isas()  # `make sanitize` takes two of them
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_DTYPES = (*DTYPES, torch.int8)
MODULES = tuple(module for group in GROUPS.values() for module in group)
GROUP_NAMES = tuple(GROUPS)


@pytest.fixture(scope="module", params=ISAS)
def engine(request: pytest.FixtureRequest) -> Iterator[CpuEngine]:
    yield CpuEngine(threads=2, isa=request.param)


def multiplies_bf16(engine: CpuEngine, dtype: torch.dtype) -> bool:
    """Whether activations are rounded to bf16 before they meet weights of `dtype`, LoRA's A x as PEFT rounds it."""
    return dtype == torch.bfloat16 and engine.isa in ("avx512bf16", "amx")


def as_activation(engine: CpuEngine, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.bfloat16().double() if multiplies_bf16(engine, dtype) else x.double()


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert not got.isnan().any()
    assert (got.double() - want).abs().max() <= tolerance * max(want.abs().max().item(), 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
def test_a_packed_product_is_the_product(engine: CpuEngine, dtype: torch.dtype, add: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    for n, k, rows in [
        (16, 32, 1),
        (48, 64, 2),
        (211, 90, 7),
        (33, 31, 3),
        (97, 45, 50),
        (130, 96, 17),
        (64, 512, 200),
        (1, 1, 5),
    ]:
        w, x = torch.randn(n, k, generator=draw).to(dtype), torch.randn(rows, k, generator=draw)
        bias = torch.randn(n, generator=draw) if n % 2 else None
        y = torch.full((rows, n), 3.0 if add else float("nan"))
        engine.gemm([Packer(engine)(w, bias)], x, y, dtype, add=add)
        want = as_activation(engine, x, dtype) @ w.double().T + (0 if bias is None else bias.double()) + 3.0 * add
        close(y, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integers", [None, "int8", "int4"])
def test_a_row_of_a_product_is_the_same_bits_for_any_number_of_rows(
    engine: CpuEngine, dtype: torch.dtype, integers: str | None
) -> None:
    draw = torch.Generator().manual_seed(2)
    w, x = torch.randn(70, 200, generator=draw).to(dtype), torch.randn(200, 200, generator=draw)
    packed = Packer(engine, integers)(w)
    everything = torch.empty(200, 70)
    engine.gemm([packed], x, everything, dtype)
    for rows in range(1, 40):
        some = torch.empty(rows, 70)
        engine.gemm([packed], x[50 : 50 + rows].clone(), some, dtype)
        assert torch.equal(some, everything[50 : 50 + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("integers", ["int8", "int4"])
def test_a_product_with_integers_is_that_of_the_rounded_weights_and_rows(
    engine: CpuEngine, dtype: torch.dtype, add: bool, integers: str
) -> None:
    draw = torch.Generator().manual_seed(3)
    rounded = to_8_bits if integers == "int8" else to_4_bits
    shapes = [(16, 64, 1), (48, 64, 2), (211, 90, 7), (33, 31, 3), (97, 45, 50), (130, 96, 17), (64, 512, 300), (1, 1, 5)]
    for n, k, rows in shapes:
        w, x = torch.randn(n, k, generator=draw).to(dtype), torch.randn(rows, k, generator=draw) * 10
        x[0, 0] = 0.0 if rows % 2 else 100.0  # rows of another size, and with 1 x 1 a row and a group of zeros
        w[-1] *= 0.0
        bias = torch.randn(n, generator=draw) if n % 2 else None
        y = torch.full((rows, n), 3.0 if add else float("nan"))
        engine.gemm([Packer(engine, integers)(w, bias)], x, y, dtype, add=add)
        want = to_8_bits(as_activation(engine, x, dtype)) @ rounded(w).T + (0 if bias is None else bias.double()) + 3.0 * add
        close(y, want)


@pytest.mark.parametrize("integers", [None, "int8", "int4"])
@pytest.mark.parametrize("sizes", [(32, 16, 5), (7, 48, 1)])
def test_a_matrix_of_parts_is_the_same_bits_as_one_of_their_rows(
    engine: CpuEngine, integers: str | None, sizes: tuple[int, ...]
) -> None:
    draw = torch.Generator().manual_seed(7)
    parts, x = [torch.randn(n, 70, generator=draw).bfloat16() for n in sizes], torch.randn(4, 70, generator=draw)
    one, many = torch.empty(4, sum(sizes)), torch.empty(4, sum(sizes))
    engine.gemm([Packer(engine, integers)(torch.cat(parts))], x, one, torch.bfloat16)
    engine.gemm([Packer(engine, integers).parts(parts)], x, many, torch.bfloat16)
    assert torch.equal(one, many)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_whole_numbers_of_a_checkpoint_are_multiplied_as_they_are(engine: CpuEngine, dtype: torch.dtype, bits: int) -> None:
    draw = torch.Generator().manual_seed(5)
    for n, k, rows, size in [
        (16, 64, 1, 32),
        (211, 90, 7, 64),
        (33, 31, 3, 31),
        (97, 224, 50, 128),
        (130, 96, 17, 96),
        (7, 320, 300, 32),
    ]:
        groups = -(-k // size)
        values = torch.randint(0, 2**bits, (n, k), generator=draw, dtype=torch.uint8)
        scales = torch.randn(n, groups, generator=draw).half()
        x, bias = torch.randn(rows, k, generator=draw) * 10, torch.randn(n, generator=draw)
        anywhere = torch.randint(0, 2**bits + 1, (n, groups), generator=draw).float()
        for zeros in (None, anywhere):
            whole = QuantizedMatrix(bits, values, scales, zeros, size)
            y = torch.full((rows, n), float("nan"))
            engine.gemm([Packer(engine).whole(whole, bias)], x, y, dtype)
            group = torch.arange(k) // size
            middle = 2.0 ** (bits - 1) if zeros is None else zeros.double()[:, group]
            want = to_8_bits(as_activation(engine, x, dtype)) @ ((values.double() - middle) * scales.double()[:, group]).T
            close(y, want + bias.double())


@pytest.mark.parametrize("bits", [8, 4])
def test_a_matrix_that_was_rounded_before_is_the_same_bits_as_one_rounded_at_the_start(engine: CpuEngine, bits: int) -> None:
    draw = torch.Generator().manual_seed(6)
    w, x = (
        torch.randn(70, 192, generator=draw).bfloat16(),
        torch.randn(9, 192, generator=draw),
    )  # bfloat16: largest values are not alone
    now, before = torch.empty(9, 70), torch.empty(9, 70)
    engine.gemm([Packer(engine, f"int{bits}")(w)], x, now, torch.bfloat16)
    engine.gemm([Packer(engine).whole(round_to(w, bits))], x, before, torch.bfloat16)
    assert torch.equal(now, before)


@pytest.mark.parametrize(("integers", "error"), [("int8", 0.012), ("int4", 0.09)])
def test_integers_are_near_the_weights_that_they_stand_for(engine: CpuEngine, integers: str, error: float) -> None:
    draw = torch.Generator().manual_seed(4)
    w, x = torch.randn(96, 256, generator=draw), torch.randn(20, 256, generator=draw)
    y = torch.empty(20, 96)
    engine.gemm([Packer(engine, integers)(w)], x, y, torch.float32)
    want = x.double() @ w.double().T
    assert 0 < (y - want).norm() / want.norm() < error


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("integers", [None, "int8", "int4"])
def test_a_product_of_any_shape_is_the_product(engine: CpuEngine, integers: str | None, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rounded = {None: torch.Tensor.double, "int8": to_8_bits, "int4": to_4_bits}[integers]
    for dtype in DTYPES:
        for _ in range(8):
            rows, n, k = (int(torch.randint(1, most, (), generator=draw)) for most in (71, 200, 300))
            w, x = torch.randn(n, k, generator=draw).to(dtype), torch.randn(rows, k, generator=draw)
            y = torch.full((rows, n), float("nan"))
            engine.gemm([Packer(engine, integers)(w)], x, y, dtype)
            seen = as_activation(engine, x, dtype)
            close(y, (seen if integers is None else to_8_bits(seen)) @ rounded(w).T)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 32])
def test_the_largest_whole_numbers_are_added_without_loss(engine: CpuEngine, bits: int, rows: int) -> None:
    n, k = 35, 1000
    largest = torch.full((n, k), 2**bits - 1, dtype=torch.uint8)
    x = torch.where(torch.arange(rows)[:, None] % 2 == 0, 127.0, -127.0).expand(rows, k).contiguous()
    for zeros in (None, torch.zeros(n, 1)):
        y = torch.full((rows, n), float("nan"))
        engine.gemm(
            [Packer(engine).whole(QuantizedMatrix(bits, largest, torch.ones(n, 1).half(), zeros, k))], x, y, torch.float32
        )
        shift = 2 ** (bits - 1) if zeros is None else 0
        assert torch.equal(y, (x.double() @ (largest.double() - shift).T).float())


def test_a_matrix_whose_sums_would_not_fit_is_refused(engine: CpuEngine) -> None:
    with pytest.raises(ValueError, match="65537 inputs"):
        Packer(engine, "int8")(torch.zeros(1, 65537))


def random_pool(dtype: torch.dtype, shapes: dict[str, tuple[int, int]], seed: int) -> tuple[LoraPool, list[dict]]:
    """Adapters of random ranks and targets in a pool whose free memory is NaN; slot 3 stays empty."""
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    pool = LoraPool(shapes, layers=2, slots=9, max_rank=128, bytes_total=16 << 20, dtype=dtype)
    pool.arena.fill_(float("nan"))
    adapters: list[dict] = []
    for slot in range(9):
        pairs = {}
        for module in MODULES:
            if slot != 3 and draw.random() < 0.8:
                rank = int(draw.choice([1, 3, 8, 12, 16, 40, 64, 128]))
                fan_in, fan_out = shapes[module]
                for layer in range(2):
                    pairs[layer, module] = (
                        float(draw.random()),
                        torch.randn(rank, fan_in).to(dtype),
                        torch.randn(fan_out, rank).to(dtype),
                    )
        adapters.append(pairs)
        if slot != 3:
            pool.load(slot, PackedLora.pack(pairs, shapes, layers=2))
    for slot in (0, 5):  # holes, and pages elsewhere
        pool.free(slot)
        for start, end in pool.holes:
            pool.arena[start * 8 : end * 8] = float("nan")
    pool.load(5, PackedLora.pack(adapters[5], shapes, layers=2))
    return pool, adapters


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 33, 150])
@pytest.mark.parametrize("sizes", [(64, 64, 32, 96), (72, 40, 24, 50), (33, 21, 7, 35)])
def test_lora_is_scale_times_b_a_x(engine: CpuEngine, dtype: torch.dtype, rows: int, sizes: tuple[int, ...]) -> None:
    hidden, q, kv, mlp = sizes
    fans = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, mlp), (hidden, mlp), (mlp, hidden)]
    shapes = dict(zip(MODULES, fans, strict=True))
    pool, adapters = random_pool(dtype, shapes, seed=rows)
    draw = np.random.default_rng(rows)
    slots = draw.choice([-1, 1, 2, 4, 5, 6, 7, 8], rows).astype(np.int32)
    for number, group in enumerate(GROUP_NAMES):
        modules = GROUPS[group]
        x = torch.randn(rows, shapes[modules[0]][0])
        y = torch.randn(rows, sum(shapes[module][1] for module in modules))
        want, before = y.double(), y.clone()
        xs = as_activation(engine, x, dtype)
        column = 0
        for module in modules:
            width = shapes[module][1]
            for row, slot in enumerate(slots.tolist()):
                if slot >= 0 and (1, module) in adapters[slot]:
                    scale, a, b = adapters[slot][1, module]
                    want[row, column : column + width] += scale * (b.double() @ (a.double() @ xs[row]))
            column += width
        engine.lora(y, x, pool, 1, number, torch.from_numpy(slots))
        close(y, want, tolerance=2**-8 if multiplies_bf16(engine, dtype) else 1e-5)
        assert torch.equal(y[slots < 0], before[slots < 0]), "rows of the base keep every bit"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "hidden"), [(5, 224), (16, 224), (64, 224), (64, 2080), (264, 1000)])
def test_a_row_of_an_adapter_is_the_same_bits_for_any_number_of_its_rows(
    engine: CpuEngine, dtype: torch.dtype, rank: int, hidden: int
) -> None:
    torch.manual_seed(rank)
    width = 90
    shapes = dict.fromkeys(MODULES, (hidden, hidden)) | dict.fromkeys(("gate_proj", "up_proj"), (hidden, width))
    pool = LoraPool(shapes, layers=1, slots=2, max_rank=rank, bytes_total=16 << 20, dtype=dtype)
    for slot in range(2):
        a, b = torch.randn(rank, hidden).to(dtype), torch.randn(width, rank).to(dtype)
        pairs = {(0, module): (0.5, a, b) for module in ("gate_proj", "up_proj")}
        pool.load(slot, PackedLora.pack(pairs, shapes, layers=1))
    x, before = torch.randn(90, hidden), torch.randn(90, 2 * width)
    everything = before.clone()
    engine.lora(everything, x, pool, 0, GROUP_NAMES.index("gate_up"), torch.ones(90, dtype=torch.int32))
    for rows in (1, 2, 3, 4, 7, 16, 17, 31, 33):
        some, slots = before[20 : 20 + 2 * rows].clone(), torch.tensor([1, 0] * rows, dtype=torch.int32)
        engine.lora(some, x[20 : 20 + 2 * rows].clone(), pool, 0, GROUP_NAMES.index("gate_up"), slots)
        assert torch.equal(some[::2], everything[20 : 20 + 2 * rows : 2])


RANDOM_RANKS = np.random.default_rng(8).choice([0, 1, 8, 12, 16, 40, 64], (40, len(MODULES)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "ranks",
    [
        [dict(zip(MODULES, ranks, strict=True)) for ranks in RANDOM_RANKS],
        # read at once, these pages are of slot 1 (q), 0 (q, v) and again 1 (k, v)
        [{"q_proj": 8, "v_proj": 8}, {"q_proj": 32, "k_proj": 8, "v_proj": 8}, *[{"q_proj": 8}] * 30],
    ],
    ids=["random ranks", "a rank of each module"],
)
def test_a_batch_of_many_adapters_adds_to_each_row_what_its_own_adapter_adds_alone(
    engine: CpuEngine, dtype: torch.dtype, ranks: list[dict[str, int]]
) -> None:
    draw, adapters = np.random.default_rng(8), len(ranks)
    torch.manual_seed(8)
    fans = [(96, 200), (96, 72), (96, 72), (200, 96), (96, 130), (96, 130), (130, 96)]
    shapes = dict(zip(MODULES, fans, strict=True))
    pool = LoraPool(shapes, layers=1, slots=adapters, max_rank=64, bytes_total=16 << 20, dtype=dtype)
    loaded = []
    for slot, of_slot in enumerate(ranks):
        pairs = {}
        for module, rank in of_slot.items():
            fan_in, fan_out = shapes[module]
            if rank:
                a, b = torch.randn(rank, fan_in).to(dtype), torch.randn(fan_out, rank).to(dtype)
                pairs[0, module] = float(draw.random()), a, b
        pool.load(slot, PackedLora.pack(pairs, shapes, layers=1))
        loaded.append(pairs)
    once = np.arange(-1, adapters)
    slots = torch.from_numpy(draw.permutation(np.concatenate([once, once[-10:]])).astype(np.int32))
    for number, group in enumerate(GROUP_NAMES):
        modules = GROUPS[group]
        x = torch.randn(len(slots), shapes[modules[0]][0])
        before = torch.randn(len(slots), sum(shapes[module][1] for module in modules))
        together, want = before.clone(), before.double()
        engine.lora(together, x, pool, 0, number, slots)
        xs = as_activation(engine, x, dtype)
        for row, slot in enumerate(slots.tolist()):
            column = 0
            for module in modules:
                if slot >= 0 and (0, module) in loaded[slot]:
                    scale, a, b = loaded[slot][0, module]
                    want[row, column : column + len(b)] += scale * (b.double() @ (a.double() @ xs[row]))
                column += shapes[module][1]
            alone = before[row : row + 1].clone()
            engine.lora(alone, x[row : row + 1].clone(), pool, 0, number, slots[row : row + 1].clone())
            assert torch.equal(alone[0], together[row])
        close(together, want, tolerance=2**-8 if multiplies_bf16(engine, dtype) else 1e-5)


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


def test_an_instruction_set_that_is_not_here_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="vax"):
        CpuEngine(isa="vax")
