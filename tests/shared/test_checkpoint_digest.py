"""Promise: two checkpoints have the same digest only if they are the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from motet.shared.checkpoint_digest import checkpoint_digest

FILE_BYTES = 1 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 64}')
    for number in (1, 2):
        (directory / f"model-{number}.safetensors").write_bytes(bytes([number]) * FILE_BYTES)
    return directory


def test_a_copy_has_the_same_digest_wherever_it_lies(checkpoint: Path, tmp_path: Path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    (copy / "README.md").write_text("not a part of it")
    assert checkpoint_digest(copy) == checkpoint_digest(checkpoint)


def test_other_weights_of_the_same_size_another_name_and_another_config_have_another_digest(checkpoint: Path):
    seen = {checkpoint_digest(checkpoint)}
    weights = checkpoint / "model-2.safetensors"
    for change in (
        lambda: weights.write_bytes(bytes([2]) * (FILE_BYTES // 2) + bytes([3]) * (FILE_BYTES // 2)),  # fine-tuned
        lambda: weights.rename(checkpoint / "model-3.safetensors"),
        lambda: (checkpoint / "config.json").write_text('{"hidden_size": 64, "rope_theta": 1}'),
        lambda: (checkpoint / "model-3.safetensors").write_bytes(b""),
    ):
        change()
        seen.add(checkpoint_digest(checkpoint))
    assert len(seen) == 5


def test_the_digest_of_an_image_checkpoint_covers_every_part(tmp_path: Path):
    for part in ("unet", "vae"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text('{"act_fn": "silu"}')
        (tmp_path / part / "diffusion_pytorch_model.safetensors").write_bytes(bytes(FILE_BYTES))
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    seen = {checkpoint_digest(tmp_path)}
    for change in (
        lambda: (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(bytes([1]) * FILE_BYTES),
        lambda: (tmp_path / "unet" / "config.json").write_text('{"act_fn": "gelu"}'),
        lambda: (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionInpaintPipeline"}'),
    ):
        change()
        seen.add(checkpoint_digest(tmp_path))
    assert len(seen) == 4
