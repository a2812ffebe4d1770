"""Tiny random PEFT adapters for tests, written with numpy alone, exactly as `peft` names and lays them out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from motet.shared.base_shapes import BaseShapes

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
"""A base model where no two linear layers but k and v, gate and up have the same shape (and head_dim * heads != hidden)."""

TINY = BaseShapes(hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2, head_dim=12, model_type="llama")

_DTYPES = {"F32": np.float32, "F16": np.float16}


def write_base(directory: Path, config: Mapping[str, Any] = TINY_CONFIG) -> Path:
    """A model directory with nothing but `config.json`: all that the registry reads of a base model."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def random_tensors(
    *,
    shapes: BaseShapes = TINY,
    rank: int = 4,
    modules: Iterable[str] = ("q_proj", "v_proj"),
    layers: Iterable[int] | None = None,
    seed: int = 0,
    rank_of: Mapping[str, int] | None = None,
    scale: float = 0.1,
) -> dict[str, np.ndarray]:
    """{PEFT key: float32 matrix}; `rank_of` gives single module paths (`model.layers.0.mlp.up_proj`) another rank."""
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(shapes.layers) if layers is None else layers:
        for module in modules:
            path = shapes.path(layer, module)
            size_in, size_out = shapes.linear(module)
            r = (rank_of or {}).get(path, rank)
            a = random.standard_normal((r, size_in), dtype=np.float32)
            b = random.standard_normal((size_out, r), dtype=np.float32)
            tensors[f"base_model.model.{path}.lora_A.weight"] = a * np.float32(scale)
            tensors[f"base_model.model.{path}.lora_B.weight"] = b * np.float32(scale)
    return tensors


def safetensors_bytes(
    tensors: Mapping[str, np.ndarray], dtype: str = "F32", dtype_of: Mapping[str, str] | None = None
) -> bytes:
    """A safetensors file of `tensors` as F32, F16 or BF16; `dtype_of` sets single ones."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, at = [], 0
    for key, tensor in tensors.items():
        kind = (dtype_of or {}).get(key, dtype)
        if kind == "BF16":
            data = (tensor.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        else:
            data = tensor.astype(_DTYPES[kind]).tobytes()
        header[key] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        chunks.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *chunks])


def peft_config(*, rank: int = 4, alpha: float = 8, modules: Iterable[str] = ("q_proj", "v_proj"), **extra: Any) -> bytes:
    """`adapter_config.json`; `extra` adds or overrides keys."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": list(modules),
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
    }
    return json.dumps(config | extra).encode()


def write_adapter(
    directory: Path,
    *,
    shapes: BaseShapes = TINY,
    rank: int = 4,
    alpha: float = 8,
    modules: Iterable[str] = ("q_proj", "v_proj"),
    seed: int = 0,
    dtype: str = "F32",
    tensors: Mapping[str, np.ndarray] | None = None,
    **extra: Any,
) -> Path:
    """A PEFT directory with random weights (or `tensors`); returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    modules = list(modules)
    if tensors is None:
        tensors = random_tensors(shapes=shapes, rank=rank, modules=modules, seed=seed)
    (directory / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
    (directory / "adapter_config.json").write_bytes(peft_config(rank=rank, alpha=alpha, modules=modules, **extra))
    return directory
