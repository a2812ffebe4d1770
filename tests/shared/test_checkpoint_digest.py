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
