"""Every plan of the Triton kernels against the formula in fp64; interpreted where there is no GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.rivals.triton_lora import mbgmv, padded
from motet.kernels import GROUPS, LoraPool
from motet.kernels.triton import LoraBatch, add_lora, plan_for, prepare, start_lora
from motet.kernels.triton import lora as launches
from motet.kernels.triton.lora import LARGE, PREFILL, SMALL, SMALL_ROWS, LaunchPlan
from tests.kernels.test_lora import (
    MODULES,
    Adapter,
    formula,
    load,
    make_pool,
    poison,
    random_adapter,
    random_io,
    relative_error,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLANS: tuple[LaunchPlan, ...] = ("decode", "prefill")
RANKS = (1, 8, 12, 24, 64, 128)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gpu_pool(ranks: tuple[int, ...] = RANKS, dtype: torch.dtype = torch.float32) -> tuple[LoraPool, dict[int, Adapter]]:
    """Slot i holds an adapter of rank ranks[i]; its pages are scattered and all other memory is NaN."""
    draw = random.Random(sum(ranks))
    pool = make_pool(dtype=dtype)
    for slot in range(len(ranks), 12):  # pages that will be holes between the others
        load(pool, slot, random_adapter(draw, dict.fromkeys(MODULES, draw.choice((8, 16)))))
    held = {}
    for slot, rank in enumerate(ranks):
        if slot + len(ranks) < 12:
            poison(pool, slot + len(ranks))
        adapter = random_adapter(draw, dict.fromkeys(MODULES, rank))
        load(pool, slot, adapter)
        held[slot] = {key: (scale, a.to(dtype), b.to(dtype)) for key, (scale, a, b) in adapter.items()}
    for slot in range(len(ranks), 12):
        if pool.loaded[slot]:
            poison(pool, slot)
    pool.arena = pool.arena.to(DEVICE)
    return pool, held


def assert_follows_the_formula(
    pool: LoraPool, held: dict[int, Adapter], slots: np.ndarray, batch: LoraBatch, group: str
) -> None:
    dtype = pool.arena.dtype
    y, x = random_io(group, len(slots), dtype)
    base = torch.from_numpy(slots < 0)
    y[base, 0] = -0.0
    x[base] = float("nan")  # what goes wrong in a base row stays in it
    want = formula(y, x, held, 1, group, slots)
    results = []
    for _ in range(2):
        got = y.clone().to(DEVICE)
        add_lora(got, x.to(DEVICE), pool, 1, group, batch)
        results.append(got.cpu())
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(results[0].view(bits), results[1].view(bits)), "the same batch gives the same bits"
    assert torch.equal(results[0][base].view(bits), y[base].view(bits)), "rows of the base keep every bit"
    assert relative_error(results[0], want) < TOLERANCE[dtype]
    assert not batch.arrived.any(), "zero between launches"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("multiprocessors", [1, 20])
def test_mixed_ranks_and_scattered_pages_follow_the_formula(
    plan: LaunchPlan, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "multiprocessors_of", lambda device: multiprocessors)
    pool, held = gpu_pool()
    slots = np.array([0, 1, -1, 2, 3, 4, 5, 2, -1, *[3] * 17], dtype=np.int32)
    for name in ("SMALL", "LARGE", "PREFILL"):  # or K has one part
        constants = getattr(launches, name)
        monkeypatch.setattr(launches, name, replace(constants, shrink=replace(constants.shrink, block=16, wide=16)))
    batch = LoraBatch.build(pool, slots, plan)
    parts = [group.splits for group in batch.groups.values()]
    assert (max(parts) > 1) == (multiprocessors > 1 or plan == "decode")
    assert_follows_the_formula(pool, held, slots, batch, "qkv" if multiprocessors == 1 else "down")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_the_formula_within_its_rounding(plan: LaunchPlan, dtype: torch.dtype) -> None:
    pool, held = gpu_pool((24, 12), dtype)
    slots = np.array([1, 0, -1, 0], dtype=np.int32)
    assert_follows_the_formula(pool, held, slots, LoraBatch.build(pool, slots, plan), "gate_up")


@pytest.mark.parametrize("seed", range(2))
def test_random_adapters_and_rows_follow_the_formula(seed: int) -> None:
    draw = random.Random(seed)
    ranks = tuple(draw.randint(1, 128) for _ in range(3))
    pool, held = gpu_pool(ranks)
    slots = np.array([draw.choice([-1, 0, 1, 2]) for _ in range(draw.choice([1, 9, 33]))], dtype=np.int32)
    assert_follows_the_formula(pool, held, slots, LoraBatch.build(pool, slots, PLANS[seed % 2]), draw.choice(list(GROUPS)))


@pytest.mark.parametrize("counts", [(1, 2, 14), (3, 4, 16), (17, 31, 5), (32, 33, 1), (64, 65, 2), (80, 3, 18)])
def test_any_number_of_rows_of_an_adapter_follows_the_formula(counts: tuple[int, int, int]) -> None:
    pool, held = gpu_pool((24, 64, 128))
    slots = np.random.default_rng(sum(counts)).permutation(np.repeat([0, 1, 2, -1], (*counts, 2))).astype(np.int32)
    batch = LoraBatch.build(pool, slots, "decode")
    assert_follows_the_formula(pool, held, slots, batch, "qkv" if sum(counts) % 2 else "down")


@pytest.mark.parametrize("plan", PLANS)
def test_modules_that_an_adapter_lacks_keep_every_bit(plan: LaunchPlan) -> None:
    pool = make_pool()
    load(pool, 2, random_adapter(random.Random(0), {"q_proj": 8, "v_proj": 20}))
    pool.arena = pool.arena.to(DEVICE)
    batch = LoraBatch.build(pool, np.array([2, 2], dtype=np.int32), plan)
    for group in GROUPS:
        y, x = random_io(group, 2)
        y.fill_(-0.0)
        got = y.clone().to(DEVICE)
        add_lora(got, x.to(DEVICE), pool, 0, group, batch)
        kept = slice(48, 64) if group == "qkv" else slice(None)  # the columns of k
        assert torch.equal(got.cpu()[:, kept].view(torch.int32), y[:, kept].view(torch.int32))
        assert torch.equal(got.cpu(), y) == (group != "qkv")


@pytest.mark.parametrize("plan", PLANS)
def test_a_reserved_batch_takes_one_step_after_another(plan: LaunchPlan) -> None:
    pool, held = gpu_pool((16, 40))
    reserved = LoraBatch.reserve(pool, 70, plan)
    for slots in ([-1] * 70, [0, 1, -1, *[0] * 67], [1, -1, *[0] * 65, -1, 1, 1]):
        row_slot = np.array(slots, dtype=np.int32)
        reserved.update(pool, row_slot)
        assert_follows_the_formula(pool, held, row_slot, reserved, "o")


def test_shrinking_early_changes_nothing() -> None:
    pool, _ = gpu_pool((16, 40))
    batch = LoraBatch.build(pool, np.array([0, 1, -1], dtype=np.int32))
    y, x = (tensor.to(DEVICE) for tensor in random_io("o", 3))
    at_once, started = y.clone(), y.clone()
    add_lora(at_once, x, pool, 0, "o", batch)
    assert start_lora(x, pool, 0, "o", batch, "shrink") is None
    add_lora(started, x, pool, 0, "o", batch)
    assert torch.equal(at_once, started)


def test_the_part_computed_apart_is_what_is_added_and_rows_of_the_base_do_not_count() -> None:
    pool, _ = gpu_pool((16, 40))
    pool.arena = pool.arena.cpu()
    load(pool, 2, random_adapter(random.Random(0), {"q_proj": 8}))
    pool.arena = pool.arena.to(DEVICE)
    slots = np.array([0, -1, 1, 2, *[1] * 9], dtype=np.int32)
    batch = LoraBatch.build(pool, slots)
    for group in GROUPS:
        y, x = (tensor.to(DEVICE) for tensor in random_io(group, len(slots)))
        before, want = y.clone(), torch.zeros_like(y)
        add_lora(want, x, pool, 0, group, batch)
        delta = start_lora(x, pool, 0, group, batch)
        add_lora(y, x, pool, 0, group, batch)
        assert delta is not None and torch.equal(y, before)
        assert delta.adapted.tolist() == (slots >= 0).tolist()
        assert torch.equal(delta.values[delta.adapted.bool()], want[delta.adapted.bool()])


def test_a_step_of_the_base_alone_starts_nothing() -> None:
    pool, _ = gpu_pool((16,))
    _, x = random_io("o", 2)
    assert start_lora(x.to(DEVICE), pool, 0, "o", LoraBatch.build(pool, np.full(2, -1, dtype=np.int32))) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("others", [5, 40], ids=["a small step", "a large step"])
def test_a_row_has_the_same_sums_whatever_else_is_in_the_decode_step(others: int, dtype: torch.dtype) -> None:
    pool, _ = gpu_pool((16, 40, 8), dtype)
    slots = np.array([0, 1, 2, 0, -1, 1, 1, *[2] * others], dtype=np.int32)
    y, x = (tensor.to(DEVICE) for tensor in random_io("down", len(slots), dtype))
    together = y.clone()
    add_lora(together, x, pool, 0, "down", LoraBatch.build(pool, slots, "decode"))
    for row in (0, 1, 3, 5, 6):
        alone = y[row : row + 1].clone()
        add_lora(alone, x[row : row + 1], pool, 0, "down", LoraBatch.build(pool, slots[row : row + 1]))
        assert torch.equal(alone, together[row : row + 1])


def test_small_and_large_decode_steps_divide_k_and_add_its_parts_alike() -> None:
    assert SMALL.shrink == LARGE.shrink
    assert (SMALL.tile.few, SMALL.tile.few_ranks) == (LARGE.tile.few, LARGE.tile.few_ranks)
    assert launches.constants_for("decode", SMALL_ROWS) is SMALL and launches.constants_for("decode", SMALL_ROWS + 1) is LARGE


def test_the_plan_for_prefills_is_for_steps_in_which_an_adapter_fills_a_large_group() -> None:
    assert PREFILL.tile.rows == 64
    assert plan_for(np.repeat(np.arange(8, dtype=np.int32), 64)) == "decode"
    assert plan_for(np.array([*range(32), *[5] * 64], dtype=np.int32)) == "prefill"
    assert plan_for(np.full(500, -1, dtype=np.int32)) == "decode"


def test_preparing_runs_every_kernel_of_serving_once_and_reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = gpu_pool((16,))
    before = pool.arena.clone()
    launched = []
    for name in ("_shrink", "_expand"):
        call = getattr(launches, name)
        monkeypatch.setattr(
            launches, name, lambda *args, name=name, call=call, **how: (launched.append(name), call(*args, **how))
        )
    prepare(pool)
    assert launched == ["_shrink", "_expand"] * 3 * len(GROUPS)  # decode steps of few and of many rows, and prefills
    assert torch.equal(pool.arena.view(torch.int32), before.view(torch.int32))


def test_the_kernels_to_compare_with_compute_the_same() -> None:
    pool, held = gpu_pool((8, 24))
    slots = np.array([0, 1, 1, -1, 0], dtype=np.int32)
    batch = mbgmv(pool, slots)
    assert set(batch.packed.parts["o"].tiles[:, 2].tolist()) == {1}, "every group is one row"
    assert_follows_the_formula(pool, held, slots, batch, "o")
    grown = make_pool()
    for slot, adapter in held.items():
        load(grown, slot, padded(adapter, 40))
    grown.arena = grown.arena.to(DEVICE)
    assert (grown.pages[:2] == 5).all()
    assert_follows_the_formula(grown, held, slots, mbgmv(grown, slots), "o")


def test_a_row_that_names_an_empty_slot_is_refused() -> None:
    pool, _ = gpu_pool((8,))
    for slot in (1, 12):
        with pytest.raises(ValueError, match="empty"):
            LoraBatch.build(pool, np.array([-1, slot], dtype=np.int32))
