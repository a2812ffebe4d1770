"""Promise: a merged copy of packed weights is W + scale B A of the base weights, rounded once, on every instruction set."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from motet.kernels import GROUPS, PackedLora
from motet.kernels.cpu import CpuEngine, Packed, Packer, available_isas
from motet.kernels.cpu.library import Layer
from motet.kernels.cpu.merging import MergedWeights

ISAS = os.environ.get("MOTET_TEST_ISAS", "").split() or available_isas()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYERS = 2
SHAPES = {  # k and v begin in the middle of a panel, k of down is no whole number of lines
    "q_proj": (40, 36),
    "k_proj": (40, 12),
    "v_proj": (40, 12),
    "o_proj": (36, 40),
    "gate_proj": (40, 50),
    "up_proj": (40, 50),
    "down_proj": (50, 40),
}
ADAPTED = ("q_proj", "v_proj", "o_proj", "up_proj")
Matrices = dict[tuple[int, str], torch.Tensor]


@pytest.fixture(scope="module", params=ISAS)
def engine(request: pytest.FixtureRequest) -> Iterator[CpuEngine]:
    yield CpuEngine(threads=2, isa=request.param)


@dataclass
class Host:
    """An adapter in host memory."""

    packed: PackedLora

    def rest(self) -> None:
        """Does nothing: the weights stay in memory."""


class Decoder:
    """Random matrices, the packed ones of every layer, and one adapter."""

    def __init__(self, engine: CpuEngine, dtype: torch.dtype, adapter_dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(4)
        self.engine, self.dtype = engine, dtype
        self.weights: Matrices = {
            (layer, module): torch.randn(out, in_, generator=draw).to(dtype)
            for layer in range(LAYERS)
            for module, (in_, out) in SHAPES.items()
        }
        pack = Packer(engine)
        self.packed: list[list[Packed]] = [
            [pack(torch.cat([self.weights[layer, module] for module in group])) for group in GROUPS.values()]
            for layer in range(LAYERS)
        ]
        self.layers = (Layer * LAYERS)(
            *(Layer(qkv=a.matrix, o=b.matrix, gate_up=c.matrix, down=d.matrix) for a, b, c, d in self.packed)
        )
        self.pairs = {
            (layer, module): (
                0.5 + layer,
                torch.randn(rank, SHAPES[module][0], generator=draw).to(adapter_dtype),
                torch.randn(SHAPES[module][1], rank, generator=draw).to(adapter_dtype),
            )
            for layer in range(LAYERS)
            for module, rank in zip(ADAPTED, (4, 20, 8, 9), strict=True)
            if (layer, module) != (1, "o_proj")
        }
        self.adapter = PackedLora.pack(self.pairs, SHAPES, layers=LAYERS)

    def wanted(self, layer: int, group: str) -> torch.Tensor:
        """The merged matrix by its formula in fp64, not rounded."""
        parts = []
        for module in GROUPS[group]:
            weight = self.weights[layer, module].double()
            if (layer, module) in self.pairs:
                scale, a, b = self.pairs[layer, module]
                weight = weight + scale * (b.double() @ a.double())
            parts.append(weight)
        return torch.cat(parts)

    def read(self, matrix: object, group: str) -> torch.Tensor:
        """A packed matrix as numbers: its products with the unit vectors, in a type that takes them as they are."""
        packed = Packed(matrix, ())  # type: ignore[arg-type]
        k = SHAPES[GROUPS[group][0]][0]
        n = sum(SHAPES[module][1] for module in GROUPS[group])
        y = torch.empty(k, n)
        self.engine.gemm([packed], torch.eye(k), y, self.dtype)
        return y.T


def merge(decoder: Decoder) -> MergedWeights:
    merged = MergedWeights(decoder.engine, decoder.layers)
    merged.begin(Host(decoder.adapter))
    assert merged.advance(lambda: False)
    return merged


@pytest.mark.parametrize("adapter_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_merged_matrix_is_its_formula_rounded_once(
    engine: CpuEngine, dtype: torch.dtype, adapter_dtype: torch.dtype
) -> None:
    decoder = Decoder(engine, dtype, adapter_dtype)
    merged = merge(decoder)
    half_a_step = torch.finfo(dtype).eps / 2
    for layer in range(LAYERS):
        for group, name in zip(GROUPS, ("qkv", "o", "gate_up", "down"), strict=True):
            got, want = decoder.read(getattr(merged.layers[layer], name), group).double(), decoder.wanted(layer, group)
            assert ((got - want).abs() <= half_a_step * want.abs() + 1e-5).all(), (layer, group)


def test_what_the_adapter_does_not_change_is_not_copied(engine: CpuEngine) -> None:
    decoder = Decoder(engine, torch.bfloat16, torch.bfloat16)
    merged = merge(decoder)
    library = engine.library
    assert all(merged.layers[i].down.data == decoder.layers[i].down.data for i in range(LAYERS))
    copied = [library.motet_packed_bytes(one.matrix.n, one.matrix.k, one.matrix.type) for one in decoder.packed[0][:3]]
    assert merged.nbytes == merged.size(Host(decoder.adapter)) == LAYERS * sum(copied)


def test_a_copy_is_made_piece_by_piece_and_the_pristine_weights_stay(engine: CpuEngine) -> None:
    decoder = Decoder(engine, torch.float32, torch.float32)
    before = bytes(ctypes.string_at(decoder.packed[0][0].matrix.data, 4096))
    merged = MergedWeights(engine, decoder.layers)
    merged.begin(Host(decoder.adapter))
    pieces = 1
    while not merged.advance(lambda: True):
        pieces += 1
    assert pieces == LAYERS * 3 + 1
    assert bytes(ctypes.string_at(decoder.packed[0][0].matrix.data, 4096)) == before
    merged.drop()
    assert not merged.whole
