"""Promise: the folder that vLLM reads has the matrices of the registry's blob."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from motet.services.worker.vllm_engine.peft_files import peft_adapter
from motet.shared.adapter_blob import write_blob
from motet.shared.errors import InvalidAdapter
from motet.shared.peft_blob import half_name, write_peft_blob


def matrices(rank: int, scale: float, seed: int) -> tuple[float, np.ndarray, np.ndarray]:
    made = np.random.default_rng(seed)
    return scale, made.random((rank, 6), np.float32), made.random((5, rank), np.float32)


def effect(folder: Path, name: str) -> np.ndarray:
    """What the adapter adds to a weight, as PEFT computes it."""
    config, weights = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")
    a, b = (weights[f"base_model.model.model.layers.{name}.lora_{letter}.weight"] for letter in "AB")
    return config["lora_alpha"] / config["r"] * b @ a


def test_each_matrix_comes_back_with_its_scale(tmp_path: Path) -> None:
    for scales in ((2.0, 2.0), (0.5, 3.0)):
        pairs = {(0, "q_proj"): matrices(3, scales[0], 1), (1, "down_proj"): matrices(10, scales[1], 2)}
        (tmp_path / "blob").write_bytes(write_blob(pairs, dtype="F32", layers=2))
        adapter = peft_adapter(tmp_path / "blob", tmp_path)
        assert adapter.rank == 10
        for (layer, module), (scale, a, b) in pairs.items():
            block = "self_attn" if module == "q_proj" else "mlp"
            np.testing.assert_allclose(effect(adapter.folder, f"{layer}.{block}.{module}"), scale * b @ a, rtol=1e-5)


def test_the_folder_goes_with_the_adapter(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(write_blob({(0, "q_proj"): matrices(4, 1.0, 3)}, dtype="F32", layers=1))
    adapter = peft_adapter(tmp_path / "blob", tmp_path)
    folder = adapter.folder
    assert folder.is_dir()
    del adapter
    assert not folder.exists()


def test_names_begin_with_what_the_language_model_is_called(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(write_blob({(0, "q_proj"): matrices(4, 1.0, 3)}, dtype="F32", layers=1))
    adapter = peft_adapter(tmp_path / "blob", tmp_path, prefix="language_model.model.")
    names = load_file(adapter.folder / "adapter_model.safetensors")
    assert set(names) == {
        f"base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB"
    }


def test_an_adapter_of_other_layers_is_read_as_it_is_stored_also_when_its_blob_is_evicted(tmp_path: Path) -> None:
    scale, a, b = matrices(4, 2.0, 3)
    tensors = {half_name("model.layers.0.mlp.fc1", name, embeds=False): one for name, one in (("A", a), ("B", b))}
    facts = {"modules": ["fc1"], "targets": ["model.layers.*.mlp.fc1"]}
    (tmp_path / "blob").write_bytes(write_peft_blob(tensors, dtype="F32", rank=4, scale=scale, **facts))
    adapter = peft_adapter(tmp_path / "blob", tmp_path)
    (tmp_path / "blob").unlink()
    assert adapter.rank == 4 and adapter.as_stored
    np.testing.assert_allclose(effect(adapter.folder, "0.mlp.fc1"), scale * b @ a, rtol=1e-5)


def test_a_blob_of_another_format_is_refused(tmp_path: Path) -> None:
    whole = write_peft_blob({"x": np.zeros(4, np.float32)}, dtype="F32", rank=4, scale=1.0, modules=["x"], targets=["x"])
    for wrong in (whole.replace(b"motet-peft/1", b"motet-peft/9"), whole.replace(b'"rank":"4"', b'"rank":"?"'), whole[:40]):
        (tmp_path / "blob").write_bytes(wrong)
        with pytest.raises(InvalidAdapter):
            peft_adapter(tmp_path / "blob", tmp_path)
