"""Promise: int8 weights compute what the rounded weights compute, on every instruction set, and are refused elsewhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.kernels.cpu import available_isas
from motet.shared.config import ConfigError
from tests.support_models import AdapterFixture, Sequence, drive, make_adapters, make_checkpoint, make_runner, random_prompts

FAMILIES = ("llama3", "llama-linear-biased", "qwen3")  # tied; biases, shards; norms of q and k


def rounded_checkpoint(model_dir: Path, directory: Path) -> Path:
    """The same model in fp32 with every matrix rounded as int8 weights are; the embedding of tokens stays exact."""
    tensors = {name: value.float() for path in model_dir.glob("*.safetensors") for name, value in load_file(path).items()}
    config = json.loads((model_dir / "config.json").read_text())
    if config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for name, weight in tensors.items():
        if weight.dim() == 2 and name != "model.embed_tokens.weight":
            largest = weight.abs().amax(1, keepdim=True).clamp(min=1e-30)  # the padding token has a row of zeros
            inverse = torch.full_like(largest, 127) / largest  # `127 / largest` rounds twice, which moves ties
            tensors[name] = (weight * inverse).round() * (largest / 127)
    path = directory / "rounded"
    path.mkdir()
    save_file(tensors, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False, "dtype": "float32"}))
    return path


@dataclass
class Family:
    model_dir: Path
    adapters: list[AdapterFixture]
    want: list[Sequence]  # what the reference says of the rounded weights


def sequences() -> list[Sequence]:
    return [Sequence(prompt, i % 9 - 1, 6) for i, prompt in enumerate(random_prompts(18, seed=3))]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    directory = tmp_path_factory.mktemp(request.param)
    model_dir = make_checkpoint(request.param, directory)
    adapters, want = make_adapters(model_dir, directory), sequences()
    drive(make_runner(rounded_checkpoint(model_dir, directory), adapters, kernels="reference"), want, chunk=7)
    return Family(model_dir, adapters, want)


@pytest.mark.parametrize("isa", available_isas())
def test_int8_weights_say_what_the_reference_says_of_the_rounded_ones(
    family: Family, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_CPU_ISA", isa)
    got = sequences()
    drive(make_runner(family.model_dir, family.adapters, kernels="cpu", quantization="int8"), got, chunk=7)
    for ours, theirs in zip(got, family.want, strict=True):
        assert ours.output == theirs.output
        assert (torch.stack(ours.logits) - torch.stack(theirs.logits)).abs().max() < 1e-4


def test_int8_weights_are_not_the_checkpoints_own(family: Family) -> None:
    exact, coarse = (Sequence(random_prompts(1, seed=1, shortest=30)[0], -1, 1) for _ in range(2))
    drive(make_runner(family.model_dir, []), [exact], chunk=100)
    drive(make_runner(family.model_dir, [], quantization="int8"), [coarse], chunk=100)
    difference = (torch.stack(exact.logits) - torch.stack(coarse.logits)).abs().max()
    assert 1e-3 < difference < 0.3 * torch.stack(exact.logits).abs().max()


def test_int8_without_compiled_kernels_is_refused(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--quantization int8: only the compiled CPU kernels"):
        make_runner(family.model_dir, [], kernels="reference", quantization="int8")
    monkeypatch.setenv("MOTET_KERNELS", "reference")
    with pytest.raises(ConfigError, match="--quantization int8"):
        make_runner(family.model_dir, [], quantization="int8")
