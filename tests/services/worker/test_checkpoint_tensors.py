"""Promise: every tensor of a checkpoint is used as transformers uses it, left out for a reason, or refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.safetensors_files import Stored
from motet.services.worker.native import loader
from motet.services.worker.native.checkpoint import check_files
from motet.shared.hf_config import UnsupportedModel
from tests.support_models import Oracle, Sequence, drive, make_checkpoint, make_runner, random_prompts
from tests.support_quantized import LAYOUTS, quantize_checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KERNELS = ("reference", "cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["llama3", "qwen2"])
def tied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose config.json ties the output layer to the embedding, and that stores the embedding alone."""
    path = make_checkpoint(request.param, tmp_path_factory.mktemp("tied"))
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"]
    return path


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def changed(model_dir: Path, to: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    copy = Path(shutil.copytree(model_dir, to))
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    return copy


def own_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].flip(0).contiguous()


def equal_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].float()  # also in another type


def head_alone(tensors: Tensors) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def logits(model_dir: Path, **options: str) -> torch.Tensor:
    asked = [Sequence(prompt, -1, 1) for prompt in random_prompts(4, seed=3)]
    drive(make_runner(model_dir, [], **options), asked, chunk=7)
    return torch.stack([one.logits[-1] for one in asked])


def oracle_logits(model_dir: Path) -> torch.Tensor:
    oracle = Oracle(model_dir, [])
    return torch.stack([oracle.logits(prompt, None)[-1] for prompt in random_prompts(4, seed=3)])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("change", [own_head, equal_head, head_alone])
def test_an_output_layer_is_what_transformers_takes_it_for(
    tied: Path, tmp_path: Path, change: Callable[[Tensors], None], kernels: str, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = changed(tied, tmp_path / "model", change)
    got = logits(model_dir, kernels=kernels)
    torch.testing.assert_close(got, oracle_logits(model_dir), rtol=2e-4, atol=2e-4)
    same_as_tied = torch.allclose(got, logits(tied, kernels=kernels), rtol=2e-4, atol=2e-4)
    assert same_as_tied == (change is not own_head)
    assert ("lm_head.weight is used: it differs" in caplog.text) == (change is own_head)


def test_a_quantized_checkpoint_keeps_its_own_output_layer_too(tied: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tied, tmp_path / "tied", LAYOUTS["gptq-4-groups"])
    own = changed(tmp_path / "tied", tmp_path / "own", own_head)
    assert not torch.allclose(logits(own, kernels="reference"), logits(tmp_path / "tied", kernels="reference"), atol=1e-2)


def test_packed_weights_hold_the_output_layer_that_is_used(tied: Path, tmp_path: Path) -> None:
    own = changed(tied, tmp_path / "own", own_head)
    packed = str(tmp_path / "packed")
    first, second = (logits(own, kernels="cpu", packed_weights_dir=packed) for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(second, oracle_logits(own), rtol=2e-4, atol=2e-4)


def with_nan(tensors: Tensors, name: str) -> None:
    tensors[name][1, 2] = torch.nan


def with_infinity(tensors: Tensors, name: str) -> None:
    tensors[name].view(-1)[-1] = -torch.inf


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        (EMBEDDING, with_nan),
        (HEAD, with_nan),
        ("model.norm.weight", with_infinity),
        ("model.layers.1.self_attn.k_proj.weight", with_nan),
        ("model.layers.2.mlp.down_proj.weight", with_infinity),
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_name(
    tied: Path, tmp_path: Path, name: str, spoil: Callable[[Tensors, str], None], kernels: str
) -> None:
    def change(tensors: Tensors) -> None:
        own_head(tensors)
        spoil(tensors, name)

    model_dir = changed(tied, tmp_path / "model", change)
    with pytest.raises(UnsupportedModel, match=rf"tensor {name} has a NaN or an infinite number, as float32"):
        make_runner(model_dir, [], kernels=kernels)


def test_weights_that_a_smaller_type_cannot_hold_are_refused(tied: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.norm.weight"][0] = 1e6

    model_dir = changed(tied, tmp_path / "model", change)
    make_runner(model_dir, [], kernels="reference")
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has a NaN or an infinite number, as float16"):
        make_runner(model_dir, [], kernels="reference", dtype="float16")


def test_a_tensor_that_passed_the_check_and_that_nothing_reads_is_refused(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    model_dir = changed(tied, tmp_path / "model", change)

    def unchecked(path: Path, config: object) -> dict[str, Stored]:
        monkeypatch.setattr("motet.services.worker.native.checkpoint.check", lambda stored, config: None)
        return check_files(path, read_model_config(path))

    monkeypatch.setattr(loader, "check_files", unchecked)
    with pytest.raises(UnsupportedModel, match=r"tensor model\.layers\.0\.self_attn\.sinks is stored, and nothing reads it"):
        make_runner(model_dir, [], kernels="reference")


def test_a_file_that_names_no_type_is_served_in_the_type_of_its_weights(tied: Path, tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(tied, tmp_path / "model"))
    config = json.loads((model_dir / "config.json").read_text())
    del config["dtype"]
    (model_dir / "config.json").write_text(json.dumps(config))
    assert read_model_config(model_dir).dtype == "bfloat16"
    for path in model_dir.glob("*.safetensors"):
        path.unlink()
    assert read_model_config(model_dir).dtype == "float32"


def test_a_single_file_counts_and_an_index_beside_it_does_not(tied: Path, tmp_path: Path) -> None:
    """As in transformers: a merged model saved into the folder of a sharded one."""
    model_dir = Path(shutil.copytree(tied, tmp_path / "model"))
    (model_dir / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert torch.equal(logits(model_dir, kernels="reference"), logits(tied, kernels="reference"))
    torch.testing.assert_close(logits(model_dir, kernels="reference"), oracle_logits(model_dir), rtol=2e-4, atol=2e-4)
