"""Promise: weights of 8 and 4 bits give the results of rounded weights, on every instruction set, and are refused elsewhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.kernels.cpu import INTEGERS, available_isas
from motet.services.worker.native.linear import Linear
from motet.shared.config import ConfigError
from tests.support_integers import to_4_bits, to_8_bits
from tests.support_models import AdapterFixture, Sequence, drive, make_adapters, make_checkpoint, make_runner, random_prompts

FAMILIES = ("llama3", "llama-linear-biased", "qwen3")  # tied; biases, shards; norms of q and k


def rounded_checkpoint(model_dir: Path, directory: Path, quantization: str) -> Path:
    """The same model in fp32, with every matrix rounded to those weights. The token embedding stays exact."""
    tensors = {name: value.float() for path in model_dir.glob("*.safetensors") for name, value in load_file(path).items()}
    config = json.loads((model_dir / "config.json").read_text())
    if config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for name, weight in tensors.items():
        if weight.dim() == 2 and name != "model.embed_tokens.weight":
            rounded = to_4_bits if quantization == "int4" and name != "lm_head.weight" else to_8_bits
            tensors[name] = rounded(weight).float()
    path = directory / f"rounded-{quantization}"
    path.mkdir()
    save_file(tensors, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False, "dtype": "float32"}))
    return path


class LinearOfRoundedRows(Linear):
    """Rounds what it multiplies, as the compiled kernels do before a product with integers."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(to_8_bits(x).float())


@dataclass
class Family:
    model_dir: Path
    adapters: list[AdapterFixture]
    exact: list[Sequence]  # what the reference says of the checkpoint
    want: dict[str, list[Sequence]]  # what it says of the rounded weights and rows


def sequences() -> list[Sequence]:
    return [Sequence(prompt, i % 9 - 1, 1) for i, prompt in enumerate(random_prompts(18, seed=3))]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    directory = tmp_path_factory.mktemp(request.param)
    model_dir = make_checkpoint(request.param, directory)
    found = Family(model_dir, make_adapters(model_dir, directory), sequences(), {})
    drive(make_runner(model_dir, found.adapters, kernels="reference"), found.exact, chunk=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("motet.services.worker.native.backends.reference"), "Linear", LinearOfRoundedRows)
        for quantization in INTEGERS:
            found.want[quantization] = sequences()
            rounded = rounded_checkpoint(model_dir, directory, quantization)
            drive(make_runner(rounded, found.adapters, kernels="reference"), found.want[quantization], chunk=7)
    return found


def distances(ours: list[Sequence], theirs: list[Sequence]) -> list[float]:
    """The distance of the logits of each prompt's first new token: RMS relative to that of theirs."""
    return [((a.logits[0] - b.logits[0]).norm() / b.logits[0].norm()).item() for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("quantization", INTEGERS)
@pytest.mark.parametrize("isa", available_isas())
def test_integer_weights_say_what_the_reference_says_of_the_rounded_ones(
    family: Family, isa: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_CPU_ISA", isa)
    got, want = sequences(), family.want[quantization]
    drive(make_runner(family.model_dir, family.adapters, kernels="cpu", quantization=quantization), got, chunk=7)
    apart, rounding = distances(got, want), median(distances(got, family.exact))
    assert median(apart) < 1e-5, "most are the same"
    assert max(apart) < rounding, "another order of sums rounds some activations to a neighbour"
    assert rounding > 1e-2


def test_integers_without_compiled_kernels_are_refused(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--quantization int8: only the compiled CPU kernels"):
        make_runner(family.model_dir, [], kernels="reference", quantization="int8")
    monkeypatch.setenv("MOTET_KERNELS", "reference")
    with pytest.raises(ConfigError, match="--quantization int4"):
        make_runner(family.model_dir, [], quantization="int4")
