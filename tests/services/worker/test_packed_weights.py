"""Promise: with a directory for packed weights they are packed once; later starts map them and compute the same bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.kernels.cpu import Arena, CpuEngine, MappedArena, Packer, available_isas
from motet.services.worker.native.quantize import quantize
from tests.support_models import Sequence, drive, make_checkpoint, make_runner, random_prompts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-linear-biased", tmp_path_factory.mktemp("model"))


def logits(model: Path, packed: Path | str, **options: Any) -> torch.Tensor:
    """The logits of some prompts after a start."""
    asked = [Sequence(prompt, -1, 1) for prompt in random_prompts(6, seed=3)]
    drive(make_runner(model, [], kernels="cpu", packed_weights_dir=str(packed), **options), asked, chunk=7)
    return torch.stack([one.logits[0] for one in asked])


def files(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("isa", available_isas())
def test_a_second_start_packs_nothing_and_computes_the_same_bits(
    checkpoint: Path, isa: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_CPU_ISA", isa)
    without = logits(checkpoint, "", quantization=quantization)
    first = logits(checkpoint, tmp_path / "packed", quantization=quantization)
    written = files(tmp_path / "packed")
    monkeypatch.setattr(Arena, "save", None)
    monkeypatch.setattr(Arena, "chunk", None)  # memory to pack into
    second = logits(checkpoint, tmp_path / "packed", quantization=quantization)
    assert torch.equal(first, without) and torch.equal(second, without)
    assert files(tmp_path / "packed") == written and len(written) == 1


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_checkpoints_are_packed_once_as_well(checkpoint: Path, bits: int, tmp_path: Path) -> None:
    quantize(checkpoint, tmp_path / "model", bits)
    first, second = (logits(tmp_path / "model", tmp_path / "packed") for _ in range(2))
    assert torch.equal(first, second)
    assert len(files(tmp_path / "packed")) == 1


def test_another_checkpoint_or_width_has_another_file(checkpoint: Path, tmp_path: Path) -> None:
    model, packed = make_checkpoint("llama-linear-biased", tmp_path), tmp_path / "packed"
    before = logits(model, packed)
    logits(model, packed, quantization="int8")
    assert len(files(packed)) == 2
    for path in model.glob("*.safetensors"):  # written again, with other values of the same size
        content = bytearray(path.read_bytes())
        content[-64:] = bytes(64)
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
    assert not torch.equal(logits(model, packed), before)
    assert len(files(packed)) == 3


def test_a_directory_that_cannot_be_written_costs_only_the_packing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert torch.equal(logits(checkpoint, tmp_path / "file"), logits(checkpoint, ""))


def test_a_file_of_other_weights_is_named(tmp_path: Path) -> None:
    engine = CpuEngine(threads=1)
    arena = Arena(engine.library)
    Packer(engine, arena=arena)(torch.ones(64, 64))
    arena.save(tmp_path / "small")
    assert (tmp_path / "small").stat().st_blocks * 512 < Arena.CHUNK_BYTES, "what was not given out takes no room on disk"
    mapped = Packer(engine, arena=MappedArena(engine.library, tmp_path / "small"))
    with pytest.raises(ValueError, match="small has not all"):
        for _ in range(2):
            mapped(torch.ones(4096, 4096))
