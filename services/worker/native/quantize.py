"""Writes a checkpoint of floats as one of 8 or 4 bits, in the layout of compressed-tensors.

    report = quantize(Path("model"), Path("model-int4"), 4)

The seven projections of each layer are rounded to nearest, as `--quantization` rounds them when a worker starts. Embeddings,
norms, biases and the matrix to the vocabulary stay as they are. A source file becomes one file, so memory holds one of each.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from motet.kernels.quantized import GROUP, QuantizedMatrix, round_to
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.safetensors_files import INDEX, opened
from motet.services.worker.native.checkpoint import check_files, projection_names
from motet.shared.hf_config import UnsupportedModel
from motet.shared.text_files import TEMPLATES_DIR

COPIED = ("*.json", "*.jinja", f"{TEMPLATES_DIR}/*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True)
class Report:
    """The result: bytes of tensors before and after, and the RMS error of the rounded weights relative to their RMS."""

    bytes_before: int
    bytes_after: int
    error: float


def quantize(model_dir: Path, out: Path, bits: int, progress: Callable[[str], None] = lambda _: None) -> Report:
    """Write a quantized copy of the checkpoint in `model_dir` to `out`, which appears when it is complete.

    `progress` gets the name of each file. Raises UnsupportedModel, OSError.
    """
    config = read_model_config(model_dir)
    if config.quantization is not None:
        raise UnsupportedModel(f"{model_dir} is {config.quantization.name} already: a checkpoint of floats is expected")
    if out.exists():
        raise UnsupportedModel(f"{out} exists already: give a directory that does not")
    files = sorted({one.path for one in check_files(model_dir, config).values()})
    rounded = projection_names(config)
    before = after = 0
    error = power = 0.0
    where: dict[str, str] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as unfinished:
        making = Path(unfinished) / "model"
        making.mkdir()
        for path in files:
            progress(path.name)
            stored: dict[str, torch.Tensor] = {}
            with opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    tensor: torch.Tensor = file.get_tensor(name)
                    before += tensor.nbytes
                    if name not in rounded:
                        stored[name] = tensor
                        continue
                    whole = round_to(tensor, bits)
                    error += float((whole.floats(torch.float32) - tensor.float()).square().sum())
                    power += float(tensor.float().square().sum())
                    stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in _tensors(whole)}
            after += sum(tensor.nbytes for tensor in stored.values())
            where |= dict.fromkeys(stored, path.name)
            save_file(stored, str(making / path.name), metadata={"format": "pt"})
        _copy_others(model_dir, making)
        if (model_dir / INDEX).exists():
            (making / INDEX).write_text(json.dumps({"metadata": {"total_size": after}, "weight_map": where}, indent=2))
        described = json.loads((model_dir / "config.json").read_text(encoding="utf-8")) | {
            "quantization_config": describe(bits)
        }
        (making / "config.json").write_text(json.dumps(described, indent=2))
        making.rename(out)
    return Report(before, after, (error / power) ** 0.5 if power else 0.0)


def describe(bits: int) -> dict[str, Any]:
    """The `quantization_config` for the written checkpoint."""
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": GROUP}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs if bits == 8 else None}
        },
        "ignore": ["lm_head"],
    }


def _tensors(whole: QuantizedMatrix) -> Iterator[tuple[str, torch.Tensor]]:
    """(last part of the name, tensor) of a module."""
    yield "weight_scale", whole.scales
    if whole.bits == 8:
        yield "weight", (whole.values ^ 128).view(torch.int8)
        return
    k = whole.values.shape[1]
    values = torch.nn.functional.pad(whole.values, (0, -k % 8))
    yield "weight_packed", (values[:, ::2] | values[:, 1::2] << 4).view(torch.int32)
    yield "weight_shape", torch.tensor(whole.values.shape)


def _copy_others(model_dir: Path, to: Path) -> None:
    """Copy the tokenizer's and other small files."""
    for pattern in COPIED:
        for path in model_dir.glob(pattern):
            if path.is_file() and path.name not in ("config.json", INDEX):
                copy = to / path.relative_to(model_dir)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
