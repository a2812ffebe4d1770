"""Models of real shapes without a download: a `config.json`, weights made on the device, adapters made in host memory."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from motet.kernels import PAGE_RANKS, PackedLora
from motet.kernels.pool import MODULES
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import ModelConfig

RANKS = (8, 16, 32, 64)  # of mixed adapters, in turn

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "Qwen2.5-7B": _LLAMA
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "Llama-3.2-1B": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "tiny": _LLAMA
    | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
    },
}


def write_config(name: str, directory: Path) -> Path:
    """Write the configuration of a model of `MODELS` to a directory, for `--load-format dummy`."""
    home = directory / name
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps(MODELS[name]))
    return home


def projections(name: str) -> dict[str, tuple[int, int]]:
    """{module: (in, out)} of one layer."""
    model = MODELS[name]
    hidden, mlp, heads = model["hidden_size"], model["intermediate_size"], model["num_attention_heads"]
    head = model.get("head_dim", hidden // heads)
    q, kv = heads * head, model["num_key_value_heads"] * head
    sizes = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, mlp), (hidden, mlp), (mlp, hidden)]
    return dict(zip(MODULES, sizes, strict=True))


def host_adapter(config: ModelConfig, rank: int, dtype: torch.dtype, *, modules: tuple[str, ...] = MODULES) -> HostAdapter:
    """An adapter of random weights in memory that other processes can map, as in a worker."""
    shapes, layers = config.projection_shapes(), config.num_layers
    pages = dict.fromkeys(modules, -(-rank // PAGE_RANKS))
    elements = sum(count * PAGE_RANKS * layers * sum(shapes[module]) for module, count in pages.items())
    fd = os.memfd_create("bench-adapter", os.MFD_CLOEXEC)
    os.ftruncate(fd, elements * dtype.itemsize)
    with mmap.mmap(fd, 0) as shared:
        some = (torch.randn(min(elements, 1 << 20), generator=torch.Generator().manual_seed(rank)) * 0.02).to(dtype)
        piece = some.view(torch.uint8).numpy().tobytes()
        for at in range(0, len(shared), len(piece)):
            shared[at : at + len(piece)] = piece[: len(shared) - at]
    memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    packed = PackedLora.over(
        torch.frombuffer(memory, dtype=dtype),
        shapes,
        layers=layers,
        pages=pages,
        scales=dict.fromkeys(modules, [1.0] * layers),
    )
    return HostAdapter(
        digest=f"{rank}",
        rank=rank,
        ranks=dict.fromkeys(modules, rank),
        nbytes=len(memory),
        blob_bytes=len(memory),
        packed=packed,
        memory=memory,
        fd=fd,
        data_start=0,
        anonymous=True,
    )


def another(adapter: HostAdapter, name: str) -> HostAdapter:
    """The same weights under another digest, which the engine treats as another adapter."""
    return replace(adapter, digest=name)


def adapter_bytes(shapes: Mapping[str, tuple[int, int]], ranks: list[int], itemsize: int) -> int:
    """Bytes of one layer of adapters of these ranks on all modules."""
    return sum(-(-rank // PAGE_RANKS) * PAGE_RANKS for rank in ranks) * itemsize * sum(map(sum, shapes.values()))
