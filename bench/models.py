"""The checkpoints and adapters that benches run on: random weights in Hugging Face and PEFT format.

    S    28M parameters    small: costs other than matrix products are visible
    SM   103M parameters   the smallest whose weights exceed a processor's share of the cache
    M    428M parameters   large: matrix products dominate

`model_and_adapters` makes a shape's files once and keeps them: <cache>/bench/<name>-<hash>/{model,adapters/lora-00..}.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ADAPTERS = 32
RANKS = (8, 16, 32, 64)  # in turn
DEVIATION = 0.02  # of all random weights, adapters' too: their product changes most tokens and drowns none
RECIPE = 1  # raise it when the same shape gets other files


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int

    def projections(self) -> dict[str, tuple[int, int]]:
        """{module: (out, in)} of one layer's linear layers."""
        head_dim = self.hidden // self.heads
        shapes = {"q_proj": (self.hidden, self.hidden), "o_proj": (self.hidden, self.hidden)}
        shapes |= dict.fromkeys(("k_proj", "v_proj"), (self.kv_heads * head_dim, self.hidden))
        shapes |= dict.fromkeys(("gate_proj", "up_proj"), (self.mlp, self.hidden))
        return shapes | {"down_proj": (self.hidden, self.mlp)}

    def layer_weights(self) -> int:
        """The number of weights in the linear layers of all layers."""
        return sum(out * into for out, into in self.projections().values()) * self.layers


SHAPES = {
    "XS": Shape(hidden=256, layers=4, heads=4, kv_heads=2, mlp=704, vocabulary=4096),  # for quick runs
    "S": Shape(hidden=512, layers=8, heads=8, kv_heads=4, mlp=1408, vocabulary=4096),
    "SM": Shape(hidden=1024, layers=8, heads=16, kv_heads=8, mlp=2816, vocabulary=4096),
    "M": Shape(hidden=1536, layers=16, heads=12, kv_heads=4, mlp=4096, vocabulary=8192),
}


def prompts(streams: int, tokens: int, *, seed: int) -> list[list[int]]:
    """One random prompt per stream, for a model of any of the shapes. Prompts of different seeds share no prefix."""
    draw, vocabulary = random.Random(seed), SHAPES["S"].vocabulary
    return [[draw.randrange(2, vocabulary) for _ in range(tokens)] for _ in range(streams)]


def adapter_modules(number: int) -> tuple[str, ...]:
    """The modules of adapter `number`: attention, and in every fourth group of `RANKS` the MLP too."""
    return (*ATTENTION, *MLP) if number // len(RANKS) % 4 == 3 else ATTENTION


def model_and_adapters(name: str) -> tuple[Path, list[Path]]:
    """The directories of a bf16 model of shape `name` and of its adapters. They are made if the cache lacks them."""
    recipe = repr((RECIPE, SHAPES[name], DEVIATION, [(RANKS[i % 4], adapter_modules(i)) for i in range(ADAPTERS)]))
    home = _cache() / "bench" / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    adapters = [f"adapters/lora-{i:02}" for i in range(ADAPTERS)]
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix=f"{name}-") as unfinished:
            making = Path(unfinished) / name
            write_model(making / "model", SHAPES[name], dtype="bfloat16")
            for i, adapter in enumerate(adapters):
                write_adapter(making / adapter, SHAPES[name], rank=RANKS[i % 4], modules=adapter_modules(i), seed=i + 1)
            shutil.rmtree(home, ignore_errors=True)
            making.rename(home)  # at once: a run that is cut short leaves nothing half made
    return home / "model", [home / adapter for adapter in adapters]


def _cache() -> Path:
    if given := os.environ.get("MOTET_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "motet"


def write_model(path: Path, shape: Shape, *, dtype: str = "float32", seed: int = 0) -> None:
    """A random Llama with a word-level tokenizer, made without transformers."""
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    draw, kind = torch.Generator().manual_seed(seed), getattr(torch, dtype)

    def weight(*size: int) -> Any:
        return (torch.randn(*size, generator=draw) * DEVIATION).to(kind)

    norm = torch.ones(shape.hidden, dtype=kind)
    tensors = {"model.embed_tokens.weight": weight(shape.vocabulary, shape.hidden), "model.norm.weight": norm}
    tensors["lm_head.weight"] = weight(shape.vocabulary, shape.hidden)
    for i in range(shape.layers):
        for module, size in shape.projections().items():
            tensors[f"{_module(i, module)}.weight"] = weight(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = norm.clone()
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": dtype,
    }
    (path / "config.json").write_text(json.dumps(config))
    _write_tokenizer(path, shape.vocabulary)


def _write_tokenizer(path: Path, vocabulary: int) -> None:
    """Write a tokenizer whose tokens are words of four letters after a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz"
    base = len(letters)
    words = [f"Ġ{letters[i // base**2]}{letters[i // base % base]}{letters[i % base]}n" for i in range(vocabulary)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def write_adapter(path: Path, shape: Shape, *, rank: int, modules: tuple[str, ...], seed: int) -> None:
    """A PEFT directory with random bf16 matrices, neither of them zero."""
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    draw, shapes = torch.Generator().manual_seed(seed), shape.projections()
    tensors = {}
    for i in range(shape.layers):
        for module in modules:
            size_out, size_in = shapes[module]
            for half, size in (("lora_A", (rank, size_in)), ("lora_B", (size_out, rank))):
                matrix = (torch.randn(*size, generator=draw) * DEVIATION).to(torch.bfloat16)
                tensors[f"base_model.model.{_module(i, module)}.{half}.weight"] = matrix
    save_file(tensors, str(path / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "bench",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(modules),
    }
    (path / "adapter_config.json").write_text(json.dumps(config))


def _module(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{'self_attn' if module in ATTENTION else 'mlp'}.{module}"
