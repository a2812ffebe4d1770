"""LoRA of another engine's linear layers follows its formula in fp64, in the engine's types, on every instruction set."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from motet.kernels.cpu.layers import LayerBatch, LayerLora, add_layer_lora, slots_of
from motet.kernels.cpu.sites import torch_threads
from tests.kernels.support_cpu import DTYPES, ISAS

SLOTS, MAX_RANK, FAN_IN = 6, 64, 96
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SLICES = [(48,), (64, 32, 32), (72, 72), (40, 8, 8, 16, 24)]
Adapter = tuple[list[torch.Tensor | None], list[torch.Tensor | None]]


def random_adapter(outs: tuple[int, ...], dtype: torch.dtype, seed: int, fan_in: int = FAN_IN) -> Adapter:
    """A and B of each slice at ranks of their own; about one in five slices is not adapted."""
    draw, a, b = np.random.default_rng(seed), [], []
    generator = torch.Generator().manual_seed(seed)
    for out in outs:
        rank = int(draw.choice([1, 4, 8, 12, 16, 33, 64]))
        missing = draw.random() < 0.2
        a.append(None if missing else (torch.randn(rank, fan_in, generator=generator) / fan_in**0.5).to(dtype))
        b.append(None if missing else (torch.randn(out, rank, generator=generator) / rank**0.5).to(dtype))
    return a, b


def formula(
    y: torch.Tensor, x: torch.Tensor, held: dict[int, Adapter], rows: np.ndarray, outs: tuple[int, ...]
) -> torch.Tensor:
    """y + (x A^T) B^T of each row's adapter, slice by slice, in fp64."""
    result = y.double()
    for row, slot in enumerate(rows.tolist()):
        column = 0
        for number, out in enumerate(outs):
            a, b = (part[number] for part in held[slot]) if slot >= 0 else (None, None)
            if a is not None and b is not None:
                result[row, column : column + out] += b.double() @ (a.double() @ x[row].double())
            column += out
    return result


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert not got.isnan().any()
    assert (got.double() - want).abs().max() <= TOLERANCE[got.dtype] * max(want.abs().max().item(), 1.0)


def filled(outs: tuple[int, ...], dtype: torch.dtype) -> tuple[LayerLora, dict[int, Adapter]]:
    """A layer with an adapter in each slot but the last."""
    layer = LayerLora(FAN_IN, outs, slots=SLOTS, max_rank=MAX_RANK, dtype=dtype)
    held = {slot: random_adapter(outs, dtype, seed=slot + 10 * len(outs)) for slot in range(SLOTS - 1)}
    for slot, adapter in held.items():
        layer.set(slot, *adapter)
    return layer, held


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outs", SLICES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 33, 150])
def test_rows_of_mixed_ranks_follow_the_formula(isa: str, dtype: torch.dtype, outs: tuple[int, ...], rows: int) -> None:
    layer, held = filled(outs, dtype)
    slots = np.random.default_rng(rows).integers(-1, SLOTS - 1, rows).astype(np.int32)
    slots = np.sort(slots) if rows == 150 else slots  # as in prompts
    x, y = torch.randn(rows, FAN_IN).to(dtype), torch.randn(rows, sum(outs)).to(dtype)
    want = formula(y, x, held, slots, outs)
    add_layer_lora(y, x, layer, LayerBatch.build(slots, isa=isa, threads=2))
    close(y, want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_lie_apart_and_rows_beyond_the_batch_keep_their_neighbours(isa: str, dtype: torch.dtype) -> None:
    outs = (64, 32, 32)
    layer, held = filled(outs, dtype)
    slots = np.array([2, -1, 0, 3, 2], dtype=np.int32)
    wide_x, wide_y = torch.randn(7, FAN_IN + 24).to(dtype), torch.randn(7, sum(outs) + 40).to(dtype)
    before, x, y = wide_y.clone(), wide_x[:, 8 : 8 + FAN_IN], wide_y[:, 16 : 16 + sum(outs)]
    want = formula(y[:5], x[:5], held, slots, outs)
    add_layer_lora(y, x, layer, LayerBatch.build(slots, isa=isa))
    close(y[:5], want)
    assert torch.equal(wide_y[5:], before[5:]), "rows that the batch does not have"
    assert torch.equal(wide_y[:, :16], before[:, :16]) and torch.equal(wide_y[:, 16 + sum(outs) :], before[:, 16 + sum(outs) :])
    assert torch.equal(y[1], before[1, 16 : 16 + sum(outs)]), "a row without an adapter"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_does_not_depend_on_threads_and_comes_again(isa: str, dtype: torch.dtype) -> None:
    outs = (192, 64, 64)
    layer, _ = filled(outs, dtype)
    slots = np.random.default_rng(3).integers(-1, SLOTS - 1, 200).astype(np.int32)
    x, y = torch.randn(200, FAN_IN).to(dtype), torch.randn(200, sum(outs)).to(dtype)
    results = []
    for threads in (2, 2, 2, 1):
        results.append(y.clone())
        add_layer_lora(results[-1], x, layer, LayerBatch.build(slots, isa=isa, threads=threads))
    assert all(torch.equal(one, results[0]) for one in results[1:3])
    close(results[3], results[0].double())


def test_a_slot_takes_the_memory_of_its_own_ranks_and_gives_it_back() -> None:
    outs = (48, 16)
    layer = LayerLora(FAN_IN, outs, slots=64, max_rank=256, dtype=torch.bfloat16)
    assert layer.nbytes == 0
    a, b = [torch.ones(12, FAN_IN), None], [torch.ones(48, 12), None]
    layer.set(63, a, b)
    assert layer.nbytes == 2 * 8 * (FAN_IN + 48) * 2, "two pages of eight ranks"
    layer.set(63, [None, torch.ones(8, FAN_IN)], [None, torch.ones(16, 8)])
    assert layer.nbytes == 8 * (FAN_IN + 16) * 2, "instead of what was there"
    layer.reset(63)
    assert layer.nbytes == 0


def test_a_replaced_and_an_emptied_slot_change_the_next_call() -> None:
    outs = (64,)
    layer, held = filled(outs, torch.float32)
    batch = LayerBatch.build(np.array([1, 2], dtype=np.int32))
    held[1] = random_adapter(outs, torch.float32, seed=99)
    layer.set(1, *held[1])
    layer.reset(2)
    x, y = torch.randn(2, FAN_IN), torch.randn(2, 64)
    want = formula(y, x, held | {2: ([None], [None])}, np.array([1, 2]), outs)
    add_layer_lora(y, x, layer, batch)
    close(y, want)


def test_what_does_not_fit_is_refused_and_leaves_the_slot_empty() -> None:
    layer = LayerLora(FAN_IN, (48,), slots=2, max_rank=16, dtype=torch.float32)
    layer.set(0, [torch.ones(8, FAN_IN)], [torch.ones(48, 8)])
    for a, b in [((17, FAN_IN), (48, 17)), ((8, FAN_IN + 1), (48, 8)), ((8, FAN_IN), (47, 8)), ((8, FAN_IN), (48, 9))]:
        with pytest.raises(ValueError, match="do not fit"):
            layer.set(0, [torch.ones(a)], [torch.ones(b)])
    assert layer.nbytes == 0
    with pytest.raises(ValueError, match="slices"):
        layer.set(0, [None, None], [None, None])
    with pytest.raises(ValueError, match="compiled kernels take"):
        LayerLora(FAN_IN, (48,), slots=2, max_rank=2048, dtype=torch.float32)
    with pytest.raises(ValueError, match="compiled kernels take"):
        LayerLora(FAN_IN, (48,), slots=2, max_rank=16, dtype=torch.float64)
    batch = LayerBatch.build(np.zeros(3, np.int32))
    good = torch.zeros(3, FAN_IN), torch.zeros(3, 48)
    for x, y in [(good[0].double(), good[1]), (good[0][:2], good[1]), (good[0], good[1][:, :40]), (good[0].T, good[1])]:
        with pytest.raises(ValueError, match="are expected"):
            add_layer_lora(y, x, layer, batch)


def test_rows_get_the_slots_of_their_adapters() -> None:
    assert slots_of((7, 0, 9, 9, 7), [9, None, 7]).tolist() == [2, -1, 0, 0, 2]
    assert slots_of((), [9]).tolist() == []
    with pytest.raises(KeyError):
        slots_of((8,), [9, None])


def test_a_preloaded_openmp_is_the_one_that_runs_the_threads() -> None:
    """torch's own is loaded too: a second team of threads would compete for the same cores."""
    found = torch_threads()
    assert found is not None and found == ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
