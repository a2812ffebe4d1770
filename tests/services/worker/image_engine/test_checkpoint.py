"""Promise: a checkpoint opens by its model_index.json and safetensors files alone; anything else is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.services.worker.image_engine.checkpoint import open_checkpoint
from motet.shared.hf_config import UnsupportedModel
from tests.services.worker.image_engine.conftest import Oracles

pytestmark = pytest.mark.filterwarnings("ignore")
Change = Callable[[Path], None]


@pytest.fixture
def copied(oracles: Oracles, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    return Path(shutil.copytree(oracles("sd15").model_dir, tmp_path / "copy"))


def edited(name: str, **fields: object) -> Change:
    """Change fields of a JSON file."""

    def change(directory: Path) -> None:
        told = json.loads((directory / name).read_text()) | fields
        (directory / name).write_text(json.dumps(told))

    return change


def renamed(name: str, to: str) -> Change:
    def change(directory: Path) -> None:
        (directory / name).rename(directory / to)

    return change


def indexed(directory: Path) -> None:
    """The UNet's weights in a shard outside its folder."""
    path = directory / "unet" / "diffusion_pytorch_model.safetensors"
    path.unlink()
    index = path.with_name(path.name + ".index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"conv_in.weight": "../../secret.safetensors"}}))


def test_parts_and_facts_are_those_of_the_files(oracles: Oracles) -> None:
    shares: list[float] = []
    checkpoint = open_checkpoint(oracles("sd15").model_dir, shares.append)
    assert list(checkpoint.encoders) == ["text_encoder"] and not checkpoint.xl and not checkpoint.inpaints
    assert (checkpoint.latent_px, checkpoint.multiple_px, checkpoint.time_ids) == (2, 8, 0)
    assert shares == sorted(shares) and shares[-1] == 1.0
    xl = open_checkpoint(oracles("sdxl").model_dir)
    assert list(xl.encoders) == ["text_encoder", "text_encoder_2"] and xl.xl and xl.time_ids == 6 and xl.zero_negative
    assert xl.tokenizers["text_encoder"].parts([], 1)[2:] != xl.tokenizers["text_encoder_2"].parts([], 1)[2:]
    assert open_checkpoint(oracles("sd2").model_dir).inpaints


def test_sixteen_bit_variants_are_preferred_and_computed_in_float32(copied: Path) -> None:
    path = copied / "unet" / "diffusion_pytorch_model.safetensors"
    halves = {name: tensor.half() for name, tensor in load_file(path).items()}
    save_file(halves, path.with_name("diffusion_pytorch_model.fp16.safetensors"))
    path.write_bytes(b"not opened")
    weight = open_checkpoint(copied).unet.conv_in.weight
    assert weight.dtype is torch.float32 and torch.equal(weight, halves["conv_in.weight"].float())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (renamed("unet/diffusion_pytorch_model.safetensors", "unet/diffusion_pytorch_model.bin"), "pickled weights only"),
        (renamed("vae/diffusion_pytorch_model.safetensors", "vae/weights.safetensors"), "has no diffusion_pytorch_model"),
        (renamed("tokenizer", "words"), "text_encoder: tokenizer"),
        (renamed("scheduler", "plan"), "no scheduler/scheduler_config.json"),
        (renamed("model_index.json", "index.json"), "no model_index.json"),
        (edited("model_index.json", _class_name="FluxPipeline"), "_class_name is 'FluxPipeline'"),
        (edited("model_index.json", vae=["diffusers", "AutoencoderTiny"]), "vae is"),
        (edited("model_index.json", unet=["my_code", "UNet2DConditionModel"]), "unet is"),
        (edited("vae/config.json", latent_channels=16), "latent_channels is 16"),
        (edited("unet/config.json", in_channels=8), "in_channels is 8"),
        (edited("unet/config.json", cross_attention_dim=32), "unet cannot be loaded"),
        (edited("unet/config.json", block_out_channels=[32, 64, 128]), "unet cannot be loaded"),
        (edited("scheduler/scheduler_config.json", use_karras_sigmas=True), "use_karras_sigmas is True"),
        (indexed, "names '../../secret.safetensors'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change: Change, why: str, copied: Path) -> None:
    change(copied)
    with pytest.raises(UnsupportedModel, match=why):
        open_checkpoint(copied)


def test_a_safety_checker_that_is_not_run_is_told(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_checkpoint(copied)
    assert not caplog.records
    edited("model_index.json", safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"])(copied)
    open_checkpoint(copied)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "not run" in caplog.text


def test_parts_that_do_not_belong_together_are_refused(copied: Path, oracles: Oracles) -> None:
    shutil.rmtree(copied / "text_encoder")
    shutil.copytree(oracles("sdxl").model_dir / "text_encoder_2", copied / "text_encoder")
    edited("model_index.json", text_encoder=["transformers", "CLIPTextModelWithProjection"])(copied)
    with pytest.raises(UnsupportedModel, match="cross_attention_dim is 24, the text encoders give 32"):
        open_checkpoint(copied)


def test_a_checkpoint_in_a_single_file_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="from_single_file"):
        open_checkpoint(tmp_path)
