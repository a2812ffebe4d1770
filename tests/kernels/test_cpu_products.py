"""The compiled products against their formulas in fp64, on every instruction set that this machine has."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.cpu import CpuEngine, Packer
from motet.kernels.quantized import QuantizedMatrix, round_to
from tests.kernels.support_cpu import DTYPES, as_activation, close
from tests.support_integers import to_4_bits, to_8_bits


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


def test_an_instruction_set_that_is_not_here_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="vax"):
        CpuEngine(isa="vax")
