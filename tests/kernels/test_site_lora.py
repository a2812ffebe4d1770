"""LoRA at classes of sites follows its formula in fp64, by torch and by every compiled instruction set."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from motet.kernels import LoraBatch, LoraPool, PackedLora, PoolFull, add_lora, reference
from motet.kernels.cpu import BuildError, sites
from motet.kernels.lora import ADAPTERS_MAX, site_kernels
from tests.kernels.support_cpu import DTYPES, ISAS
from tests.kernels.support_sites import (
    CLASSES,
    SLOTS,
    Adapter,
    close,
    filled_pool,
    formula,
    load,
    make_pool,
    random_adapter,
    random_rows,
)

KERNELS = ("torch", *ISAS)


def build(
    kernels: str, pool: LoraPool, slots: np.ndarray, weights: np.ndarray | None = None, *, threads: int = 2
) -> tuple[ModuleType, object]:
    """The module of an implementation, and a batch for it."""
    if kernels == "torch":
        return reference, reference.LoraBatch.build(pool, slots, weights)
    return sites, sites.LoraBatch.build(pool, slots, weights, isa=kernels, threads=threads)


def check_all_sites(
    kernels: str, pool: LoraPool, held: dict[int, Adapter], slots: np.ndarray, weights: np.ndarray | None = None
) -> None:
    """Every site of every class against the formula."""
    uses, batch = build(kernels, pool, slots, weights)
    table = slots.reshape(len(slots), -1)
    factors = np.ones(table.shape, np.float32) if weights is None else weights.reshape(table.shape)
    for name, (fan_in, fan_out, count) in CLASSES.items():
        for site in range(count):
            generator = torch.Generator().manual_seed(site)
            x, y = (torch.randn(len(slots), size, generator=generator) for size in (fan_in, fan_out))
            want = formula(y, x, held, (site, name), table, factors)
            uses.add_lora(y, x, pool, site, name, batch)
            close(y, want)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "adapters"), [(1, 1), (7, 3), (150, 2), (300, 1)])
def test_rows_with_several_weighted_adapters_follow_the_formula(
    kernels: str, dtype: torch.dtype, rows: int, adapters: int
) -> None:
    draw = np.random.default_rng(rows + adapters)
    pool, held = filled_pool(draw, dtype)
    check_all_sites(kernels, pool, held, *random_rows(draw, rows, adapters))


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_adapter_per_row_needs_neither_columns_nor_weights(kernels: str) -> None:
    draw = np.random.default_rng(4)
    pool, held = filled_pool(draw)
    slots = np.repeat(np.array([3, -1, 0, 1, 4, 2, 3], dtype=np.int32), [100, 20, 64, 65, 1, 9, 128])
    check_all_sites(kernels, pool, held, slots)


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_adapter_named_twice_in_a_row_counts_twice(kernels: str) -> None:
    draw = np.random.default_rng(5)
    pool, held = filled_pool(draw)
    slots = np.tile(np.array([1, 1, -1, 1], dtype=np.int32), (9, 1))
    check_all_sites(kernels, pool, held, slots, np.tile(np.array([0.5, 1, 1, -2], dtype=np.float32), (9, 1)))


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_without_an_adapter_keep_every_bit(kernels: str) -> None:
    draw = np.random.default_rng(6)
    pool, _ = filled_pool(draw)
    slots = np.array([-1 if row % 3 else 1 for row in range(50)], dtype=np.int32)
    uses, batch = build(kernels, pool, slots)
    for name, (fan_in, fan_out, _) in CLASSES.items():
        x, y = torch.randn(50, fan_in), torch.randn(50, fan_out)
        y[1, 0] = -0.0
        x[1] = float("nan")  # what goes wrong in a row of the base stays in it
        before = y.clone()
        uses.add_lora(y, x, pool, 0, name, batch)
        base = torch.from_numpy(slots < 0)
        assert torch.equal(y[base].view(torch.int32), before[base].view(torch.int32))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_batch_of_the_base_alone_changes_nothing(kernels: str) -> None:
    pool, _ = filled_pool(np.random.default_rng(7))
    uses, batch = build(kernels, pool, np.full((4, 2), -1, dtype=np.int32))
    for name, (fan_in, fan_out, _) in CLASSES.items():
        y = torch.randn(4, fan_out)
        before = y.clone()
        uses.add_lora(y, torch.randn(4, fan_in), pool, 0, name, batch)
        assert torch.equal(y, before)


@pytest.mark.parametrize("isa", ISAS)
def test_the_number_of_threads_changes_no_bit(isa: str) -> None:
    pool, _ = filled_pool(np.random.default_rng(8))
    name, (fan_in, fan_out, _) = "unet.conv2 576x64", CLASSES["unet.conv2 576x64"]
    slots = np.repeat(np.arange(5, dtype=np.int32), 200)
    x, before = torch.randn(1000, fan_in), torch.randn(1000, fan_out)
    results = []
    for threads in (1, 2, 3):
        y = before.clone()
        sites.add_lora(y, x, pool, 0, name, sites.LoraBatch.build(pool, slots, isa=isa, threads=threads))
        results.append(y)
    assert not torch.equal(results[0], before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_torchs_own_threads_are_found() -> None:
    torch.zeros(1 << 20).add_(1)  # its OpenMP library is loaded now, wherever torch has one
    assert sites.torch_threads() is not None


@pytest.mark.parametrize("seed", range(4))
def test_pages_of_classes_move_when_only_all_holes_together_suffice(seed: int) -> None:
    draw = np.random.default_rng(seed)
    held = {slot: random_adapter(draw) for slot in range(SLOTS)}
    packed = {slot: PackedLora.pack(adapter, CLASSES) for slot, adapter in held.items()}
    bytes_of = {slot: one.arena.nbytes for slot, one in packed.items()}
    pool = make_pool(bytes_total=sum(bytes_of.values()))
    for slot in held:
        pool.load(slot, packed[slot])
    assert pool.bytes_free == 0
    for slot in (0, 2, 4):
        pool.free(slot)
    moved = pool.version
    for slot in (4, 2, 0):  # in another order than before: pages of other sizes do not fit into the same holes
        pool.load(slot, packed[slot])
    assert pool.bytes_free == 0 and pool.version > moved
    pool.compact()
    for kernels in ("torch", ISAS[-1]):
        check_all_sites(kernels, pool, held, *random_rows(draw, 60, 2))


def test_bytes_go_by_pages_over_a_classs_own_sites() -> None:
    pool = make_pool()
    needed = pool.bytes_needed({"unet.attn1.to_q 40x48": 9, "unet.conv1 27x13": 1})
    assert needed == 4 * (2 * 8 * 5 * (40 + 48) + 8 * 1 * (27 + 13))
    with pytest.raises(PoolFull, match="bytes"):
        load(make_pool(bytes_total=1 << 10), 0, random_adapter(np.random.default_rng(1)))


def test_an_adapter_is_copied_in_pieces_and_used_when_all_are_there() -> None:
    draw = np.random.default_rng(9)
    held = {slot: random_adapter(draw) for slot in range(3)}
    pool, packed = make_pool(), PackedLora.pack(held[1], CLASSES)
    load(pool, 0, held[0])
    pool.reserve(1, packed)
    pieces = pool.filling(1, packed, piece_bytes=4096)
    sizes = [next(pieces), next(pieces)]
    with pytest.raises(ValueError, match="empty"):
        LoraBatch.build(pool, np.array([1], dtype=np.int32))
    pool.free(0)
    pool.compact()  # between two pieces, pages move
    load(pool, 2, held[2])
    sizes += list(pieces)
    assert sum(sizes) == packed.arena.nbytes and max(sizes) <= 4096
    slots = np.array([1, 2, 1], dtype=np.int32)
    for kernels in ("torch", ISAS[-1]):
        check_all_sites(kernels, pool, held, slots)


def test_rows_that_name_empty_slots_or_have_wrong_shapes_are_refused() -> None:
    pool, _ = filled_pool(np.random.default_rng(10))
    slots = np.zeros((3, 2), dtype=np.int32)
    for wrong in (SLOTS - 1, SLOTS):
        with pytest.raises(ValueError, match="empty adapter slots"):
            LoraBatch.build(pool, np.array([[0, -1], [1, wrong]], dtype=np.int32))
    for rows in (slots.astype(np.int64), slots[:, :0], np.zeros((3, ADAPTERS_MAX + 1), np.int32), slots[None]):
        with pytest.raises(ValueError, match="row_slot is"):
            LoraBatch.build(pool, rows)
    for weights in (np.ones(3, np.float32), np.ones((3, 2)), np.full((3, 2), np.nan, np.float32)):
        with pytest.raises(ValueError, match="weights are"):
            LoraBatch.build(pool, slots, weights)


def test_tensors_that_do_not_fit_a_site_are_refused_before_memory_is_touched() -> None:
    pool, held = filled_pool(np.random.default_rng(11))
    site, name = next(key for key in held[1])
    fan_in, fan_out, count = CLASSES[name]
    batch = LoraBatch.build(pool, np.ones(4, dtype=np.int32))
    x, y = torch.zeros(4, fan_in), torch.zeros(4, fan_out)
    for wrong_y, wrong_x, wrong_site in (
        (y, x[:3], site),
        (y[:, 1:], x, site),
        (y, x.half(), site),
        (y.double(), x, site),
        (y, torch.zeros(fan_in, 4).T, site),
        (y, x, count),
        (y, x, -1),
    ):
        with pytest.raises(ValueError, match=r"float32 \[4, "):
            add_lora(wrong_y, wrong_x, pool, wrong_site, name, batch)
    with pytest.raises(IndexError, match=f"layer {count} of {name}"):
        pool.rows(count, name, b=False)


def test_classes_need_their_number_of_sites() -> None:
    with pytest.raises(ValueError, match="number of sites"):
        LoraPool({"unet.conv1 27x13": (27, 13)}, slots=1, max_rank=8, bytes_total=1 << 16, dtype=torch.float32)


def test_a_machine_without_a_compiler_computes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(isa: str | None = None) -> None:
        raise BuildError("no C++ compiler is installed")

    monkeypatch.setattr(sites, "sites_library", refuse)
    site_kernels.cache_clear()
    try:
        pool, _ = filled_pool(np.random.default_rng(12))
        assert LoraBatch.build(pool, np.zeros(2, dtype=np.int32)).uses is reference
    finally:
        site_kernels.cache_clear()


def test_a_text_model_takes_weights_too() -> None:
    shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), (24, 24))
    pool = LoraPool(shapes, layers=2, slots=2, max_rank=8, bytes_total=1 << 18, dtype=torch.float32)
    held = {slot: {(1, "o_proj"): (0.5, torch.randn(3, 24), torch.randn(24, 3))} for slot in range(2)}
    for slot, adapter in held.items():
        pool.load(slot, PackedLora.pack(adapter, shapes, layers=2))
    slots, weights = np.array([[0, 1], [1, -1]], np.int32), np.array([[0.5, 2], [-1, 1]], np.float32)
    x, y = torch.randn(2, 24), torch.randn(2, 24)
    want = formula(y, x, held, (1, "o_proj"), slots, weights)
    add_lora(y, x, pool, 1, "o", LoraBatch.build(pool, slots, weights))
    close(y, want)
