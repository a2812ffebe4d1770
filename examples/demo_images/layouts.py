"""The layouts in which people have LoRA adapters of Stable Diffusion, written from PEFT's weights.

- `diffusers`: `unet.<site>.lora_A.weight`, with PEFT's configuration as metadata;
- `kohya`: `lora_unet_<site>.lora_down.weight` with `_` for every dot, and a tensor `.alpha` for each site. Convolutions keep
  their four dimensions in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

Layout = Literal["diffusers", "kohya"]

UNET, TEXT_ENCODER = "unet", "text_encoder"
KOHYA_PREFIXES = {UNET: "lora_unet", TEXT_ENCODER: "lora_te"}
TEXT_ROOT = "text_model."  # opens every site of a text encoder in files, whether or not its modules have it

Weights = dict[str, torch.Tensor]  # PEFT's: {"<site>.lora_A.weight": [rank, inputs, ...]}


def write_adapter(folder: Path, layout: Layout, alpha: float, parts: dict[str, tuple[Weights, dict[str, Any]]]) -> Path:
    """Write {part: (weights, PEFT's configuration)} as the one file of an adapter's folder, in 16-bit floats."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {part: _sites_as_in_files(part, weights) for part, (weights, _) in parts.items()}
    if layout == "diffusers":
        path = folder / "pytorch_lora_weights.safetensors"
        tensors = {f"{part}.{key}": value for part, weights in named.items() for key, value in weights.items()}
        configs = {f"{part}.{key}": value for part, (_, config) in parts.items() for key, value in config.items()}
        metadata = {"lora_adapter_metadata": json.dumps(configs, indent=2, sort_keys=True, default=sorted)}
    else:
        path = folder / f"{folder.name}.safetensors"
        tensors = {key: value for part, weights in named.items() for key, value in _kohya(part, weights, alpha).items()}
        ranks = {len(value) for key, value in tensors.items() if key.endswith("lora_down.weight")}
        metadata = {"ss_network_dim": str(max(ranks)), "ss_network_alpha": str(alpha), "ss_output_name": folder.name}
    halves = {key: value.to(torch.float16).contiguous() for key, value in tensors.items()}
    save_file(halves, path, metadata={"format": "pt", **metadata})
    return path


def _sites_as_in_files(part: str, weights: Weights) -> Weights:
    if part != TEXT_ENCODER:
        return weights
    return {key if key.startswith(TEXT_ROOT) else TEXT_ROOT + key: value for key, value in weights.items()}


def _kohya(part: str, weights: Weights, alpha: float) -> Weights:
    renamed: Weights = {}
    for key, value in weights.items():
        site, _, matrix = key.removesuffix(".weight").rpartition(".")
        name = f"{KOHYA_PREFIXES[part]}_{site.replace('.', '_')}"
        renamed[f"{name}.{'lora_down' if matrix == 'lora_A' else 'lora_up'}.weight"] = value
        renamed[f"{name}.alpha"] = torch.tensor(float(alpha))
    return renamed
