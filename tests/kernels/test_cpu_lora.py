"""The compiled LoRA kernels against their formulas in fp64, on every instruction set that this machine has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from motet.kernels import GROUPS, LoraPool, PackedLora
from motet.kernels.cpu import CpuEngine
from tests.kernels.support_cpu import DTYPES, as_activation, close, multiplies_bf16

MODULES = tuple(module for group in GROUPS.values() for module in group)
GROUP_NAMES = tuple(GROUPS)


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
