"""add_lora and its pool against the formula in fp64, over random ranks, rows and page layouts, with poisoned memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from motet.kernels import GROUPS, LoraBatch, LoraPool, PackedLora, PoolFull, add_lora

SHAPES = {
    "q_proj": (40, 48),
    "k_proj": (40, 16),
    "v_proj": (40, 16),
    "o_proj": (48, 40),
    "gate_proj": (40, 72),
    "up_proj": (40, 72),
    "down_proj": (72, 40),
}
LAYERS = 3
SLOTS = 12
MODULES = tuple(SHAPES)

Adapter = dict[tuple[int, str], tuple[float, torch.Tensor, torch.Tensor]]


def random_adapter(draw: random.Random, ranks: dict[str, int] | None = None, *, missing: float = 0.2) -> Adapter:
    """Random pairs; without `ranks` every present (layer, module) has a rank of its own from 1 to 128."""
    pairs: Adapter = {}
    for layer in range(LAYERS):
        for module, (fan_in, fan_out) in SHAPES.items():
            if ranks is None and draw.random() < missing:
                continue
            rank = draw.randint(1, 128) if ranks is None else ranks.get(module, 0)
            if rank:
                seeded = torch.Generator().manual_seed(draw.randrange(1 << 30))
                a = torch.randn(rank, fan_in, generator=seeded)
                b = torch.randn(fan_out, rank, generator=seeded)
                pairs[layer, module] = (draw.choice([0.25, 0.7, 2.0]), a, b)
    return pairs


def load_or_free(draw: random.Random, pool: LoraPool, held: dict[int, PackedLora]) -> None:
    """Free one of eight slots, or load a random adapter into it if there is room. `held` has the adapters by slot."""
    slot = draw.randrange(8)
    if slot in held:
        pool.free(slot)
        del held[slot]
        return
    packed = PackedLora.pack(random_adapter(draw), pool.shapes, layers=LAYERS)
    try:
        pool.load(slot, packed)
        held[slot] = packed
    except PoolFull:
        pass


def make_pool(*, bytes_total: int = 32 << 20, dtype: torch.dtype = torch.float32, max_rank: int = 128) -> LoraPool:
    """A pool whose free memory is NaN, so that reading beyond an adapter's own pages shows in the result."""
    pool = LoraPool(SHAPES, layers=LAYERS, slots=SLOTS, max_rank=max_rank, bytes_total=bytes_total, dtype=dtype)
    pool.arena.fill_(float("nan"))
    return pool


def load(pool: LoraPool, slot: int, adapter: Adapter) -> None:
    pool.load(slot, PackedLora.pack(adapter, pool.shapes, layers=pool.layers))


def poison(pool: LoraPool, slot: int) -> None:
    """Free a slot and overwrite its memory with NaN."""
    before = pool.arena.clone()
    taken = np.zeros(len(pool.arena), dtype=bool)
    pool.free(slot)
    for other in np.flatnonzero(pool.loaded):
        for m, module in enumerate(MODULES):
            for page in range(pool.pages[other, m]):
                start = int(pool.table[other, m, page]) * 8
                taken[start : start + pool.page_lines[module] * 8] = True
    pool.arena.copy_(torch.where(torch.from_numpy(taken), before, torch.nan))


def scattered_pool(draw: random.Random, dtype: torch.dtype = torch.float32) -> tuple[LoraPool, dict[int, Adapter]]:
    """A pool after many loads and frees: pages of one adapter lie apart, holes are NaN."""
    pool, held = make_pool(dtype=dtype), dict[int, Adapter]()
    for _ in range(30):
        slot = draw.randrange(SLOTS)
        if slot in held:
            poison(pool, slot)
            del held[slot]
            continue
        adapter = random_adapter(draw)
        try:
            load(pool, slot, adapter)
            held[slot] = adapter
        except PoolFull:
            continue
    assert len(held) >= 2
    return pool, held


def formula(
    y: torch.Tensor, x: torch.Tensor, held: dict[int, Adapter], layer: int, group: str, slots: np.ndarray
) -> torch.Tensor:
    """The definition in kernels/__init__.py, row by row in fp64."""
    result = y.double()
    for row, slot in enumerate(slots.tolist()):
        column = 0
        for module in GROUPS[group]:
            fan_out = SHAPES[module][1]
            if slot >= 0 and (layer, module) in held[slot]:
                scale, a, b = held[slot][layer, module]
                result[row, column : column + fan_out] += scale * (x[row].double() @ a.double().T) @ b.double().T
            column += fan_out
    return result


def random_io(group: str, rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    y = torch.randn(rows, sum(SHAPES[m][1] for m in GROUPS[group]), generator=generator).to(dtype)
    x = torch.randn(rows, SHAPES[GROUPS[group][0]][0], generator=generator).to(dtype)
    return y, x


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("seed", range(6))
def test_mixed_ranks_rows_and_scattered_pages_follow_the_formula(seed: int) -> None:
    draw = random.Random(seed)
    pool, held = scattered_pool(draw)
    slots = np.array([draw.choice([-1, *held]) for _ in range(draw.choice([1, 7, 64, 150]))], dtype=np.int32)
    if seed % 2:
        slots.sort()  # every adapter's rows together, as in prefill
    batch = LoraBatch.build(pool, slots)
    for group in GROUPS:
        for layer in range(LAYERS):
            y, x = random_io(group, len(slots))
            want = formula(y, x, held, layer, group, slots)
            add_lora(y, x, pool, layer, group, batch)
            assert relative_error(y, want) < 2e-6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision_follows_the_formula_within_its_rounding(dtype: torch.dtype, tolerance: float) -> None:
    draw = random.Random(11)
    pool, held = scattered_pool(draw, dtype)
    rounded = {
        slot: {key: (scale, a.to(dtype), b.to(dtype)) for key, (scale, a, b) in adapter.items()}
        for slot, adapter in held.items()
    }
    slots = np.array([draw.choice([-1, *held]) for _ in range(40)], dtype=np.int32)
    batch = LoraBatch.build(pool, slots)
    for group in GROUPS:
        y, x = random_io(group, len(slots), dtype)
        want = formula(y, x, rounded, 1, group, slots)
        add_lora(y, x, pool, 1, group, batch)
        assert relative_error(y, want) < tolerance


def test_rows_of_the_base_keep_every_bit() -> None:
    draw = random.Random(3)
    pool, held = scattered_pool(draw)
    slots = np.array([-1 if i % 3 else next(iter(held)) for i in range(20)], dtype=np.int32)
    batch = LoraBatch.build(pool, slots)
    for group in GROUPS:
        y, x = random_io(group, len(slots))
        y[1, 0] = -0.0
        x[1] = float("nan")  # what goes wrong in a base row stays in it
        before = y.clone()
        add_lora(y, x, pool, 0, group, batch)
        base = torch.from_numpy(slots < 0)
        assert torch.equal(y[base].view(torch.int32), before[base].view(torch.int32))


def test_a_batch_of_the_base_alone_changes_nothing() -> None:
    pool = make_pool()
    y, x = random_io("qkv", 4)
    before = y.clone()
    add_lora(y, x, pool, 0, "qkv", LoraBatch.build(pool, np.full(4, -1, dtype=np.int32)))
    assert torch.equal(y, before)


def test_modules_that_an_adapter_lacks_keep_every_bit() -> None:
    pool, adapter = make_pool(), random_adapter(random.Random(0), {"q_proj": 8, "v_proj": 20})
    load(pool, 2, adapter)
    batch = LoraBatch.build(pool, np.array([2, 2], dtype=np.int32))
    y, x = random_io("qkv", 2)
    before = y.clone()
    add_lora(y, x, pool, 0, "qkv", batch)
    q, k, _ = (SHAPES[m][1] for m in GROUPS["qkv"])
    assert torch.equal(y[:, q : q + k], before[:, q : q + k])
    assert not torch.equal(y[:, :q], before[:, :q])
    for group in ("o", "gate_up", "down"):
        y, x = random_io(group, 2)
        before = y.clone()
        add_lora(y, x, pool, 0, group, batch)
        assert torch.equal(y, before)


def test_a_rows_result_does_not_depend_on_the_other_rows() -> None:
    draw = random.Random(5)
    pool, held = scattered_pool(draw)
    slots = np.array([draw.choice([-1, *held]) for _ in range(33)], dtype=np.int32)
    y, x = random_io("gate_up", len(slots))
    alone = y.clone()
    add_lora(y, x, pool, 2, "gate_up", LoraBatch.build(pool, slots))
    for row in range(len(slots)):
        one = alone[row : row + 1].clone()
        add_lora(one, x[row : row + 1], pool, 2, "gate_up", LoraBatch.build(pool, slots[row : row + 1]))
        torch.testing.assert_close(one[0], y[row], rtol=1e-5, atol=1e-4)


def test_bytes_go_by_pages_of_eight_ranks() -> None:
    pool = make_pool()
    all_modules = {rank: pool.bytes_needed(dict.fromkeys(MODULES, rank)) for rank in (1, 8, 9, 64)}
    assert all_modules[1] == all_modules[8]
    assert all_modules[9] == 2 * all_modules[8]
    assert all_modules[64] == 8 * all_modules[8]
    assert all_modules[8] == 8 * LAYERS * sum(i + o for i, o in SHAPES.values()) * 4
    assert pool.bytes_needed({"q_proj": 8}) == 8 * LAYERS * (40 + 48) * 4


def test_loading_takes_what_was_announced_and_freeing_gives_it_back() -> None:
    pool = make_pool()
    total = pool.bytes_free
    ranks = {"q_proj": 12, "down_proj": 3}
    load(pool, 0, random_adapter(random.Random(1), ranks))
    assert total - pool.bytes_free == pool.bytes_needed(ranks)
    load(pool, 1, random_adapter(random.Random(2)))
    pool.free(0)
    pool.free(1)
    assert pool.bytes_free == total == pool.bytes_total


def test_an_adapter_too_large_for_what_is_free_is_refused_and_nothing_changes() -> None:
    ranks = dict.fromkeys(MODULES, 16)
    needed = make_pool().bytes_needed(ranks)
    pool = make_pool(bytes_total=2 * needed)
    load(pool, 0, random_adapter(random.Random(1), ranks))
    free, version = pool.bytes_free, pool.version
    with pytest.raises(PoolFull, match="bytes"):
        load(pool, 1, random_adapter(random.Random(2), dict.fromkeys(MODULES, 24)))
    assert (pool.bytes_free, pool.version) == (free, version)
    load(pool, 1, random_adapter(random.Random(3), ranks))
    assert pool.bytes_free == 0


@pytest.mark.parametrize("seed", range(4))
def test_free_bytes_are_usable_bytes_however_fragmented(seed: int) -> None:
    draw = random.Random(seed)
    small = {"k_proj": 8}
    pool = make_pool(bytes_total=SLOTS * make_pool().bytes_needed(small))
    held = {slot: random_adapter(draw, small) for slot in range(SLOTS)}
    for slot, adapter in held.items():
        load(pool, slot, adapter)
    for slot in range(0, SLOTS, 2):  # every second page becomes a hole
        poison(pool, slot)
        del held[slot]
    held[0] = random_adapter(draw, {"q_proj": 16})  # its pages fit into no single hole
    load(pool, 0, held[0])
    slots = np.array([draw.choice(list(held)) for _ in range(40)], dtype=np.int32)
    batch = LoraBatch.build(pool, slots)
    for layer in range(LAYERS):
        y, x = random_io("qkv", len(slots))
        want = formula(y, x, held, layer, "qkv", slots)
        add_lora(y, x, pool, layer, "qkv", batch)
        assert relative_error(y, want) < 2e-6


def test_of_several_ways_to_make_room_the_one_that_moves_least_is_taken() -> None:
    pool = make_pool(bytes_total=SLOTS * make_pool().bytes_needed({"k_proj": 8}))
    for slot in range(SLOTS):
        load(pool, slot, random_adapter(random.Random(slot), {"k_proj": 8}))
    before = pool.table[:, MODULES.index("k_proj"), 0].copy()
    for slot in (1, 6, 8, 11):
        pool.free(slot)
    load(pool, 1, random_adapter(random.Random(0), {"q_proj": 8}))  # fits into two of the holes
    moved = np.flatnonzero(pool.table[:, MODULES.index("k_proj"), 0] != before)
    assert moved.tolist() == [7]


def test_a_row_that_names_an_empty_slot_is_refused() -> None:
    pool = make_pool()
    load(pool, 1, random_adapter(random.Random(1), {"o_proj": 4}))
    pool.free(1)
    with pytest.raises(ValueError, match="empty"):
        LoraBatch.build(pool, np.array([-1, 1], dtype=np.int32))
    with pytest.raises(ValueError, match="empty"):
        LoraBatch.build(pool, np.array([SLOTS], dtype=np.int32))


def test_shapes_ranks_and_slots_that_do_not_fit_are_refused() -> None:
    pool = make_pool(max_rank=16)
    a, b = torch.zeros(4, 40), torch.zeros(48, 4)
    for pairs in (
        {(0, "q_proj"): (1.0, a, b[:, :3])},
        {(0, "q_proj"): (1.0, a[:, :39], b)},
        {(0, "k_proj"): (1.0, a, b)},
        {(LAYERS, "q_proj"): (1.0, a, b)},
    ):
        with pytest.raises(ValueError, match="do not fit"):
            load(pool, 0, pairs)
    with pytest.raises(ValueError, match="ranks up to 16"):
        load(pool, 0, {(0, "q_proj"): (1.0, torch.zeros(17, 40), torch.zeros(48, 17))})
    assert not pool.loaded.any() and pool.bytes_free == pool.bytes_total
    load(pool, 0, {(0, "q_proj"): (1.0, a, b)})
    with pytest.raises(ValueError, match="taken"):
        load(pool, 0, {(0, "q_proj"): (1.0, a, b)})
