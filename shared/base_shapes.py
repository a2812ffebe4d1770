"""The linear layers of a base model by name and size, read from its `config.json` alone. No torch, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from motet.shared.hf_config import LAYERS_MAX, canonical, read_raw_config, refused, size_in
from motet.shared.model import MODULES

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class BaseShapes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama-shaped decoder, in elements."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    model_type: str = ""  # as config.json names it
    vocab_size: int = 0  # rows of the embeddings; 0 for unknown

    def linear(self, module: str) -> tuple[int, int]:
        """(in, out) features of one of `shared.model.MODULES`."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return projections(self.hidden_size, self.intermediate_size, query, key)[module]

    def parent(self, module: str) -> str:
        """The block that holds `module`: `self_attn` or `mlp`."""
        return "self_attn" if module in ATTENTION else "mlp"

    def path(self, layer: int, module: str) -> str:
        """The module's full name in the base model, e.g. `model.layers.0.self_attn.q_proj`."""
        return f"model.layers.{layer}.{self.parent(module)}.{module}"

    def paths(self) -> list[str]:
        """Every linear layer an adapter can target."""
        return [self.path(layer, module) for layer in range(self.layers) for module in MODULES]


def projections(hidden: int, mlp: int, query: int, key: int) -> dict[str, tuple[int, int]]:
    """{module: (in, out)} of the linear layers of a decoder's layer, in the order of `shared.model.MODULES`."""
    return {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key),
        "v_proj": (hidden, key),
        "o_proj": (query, hidden),
        "gate_proj": (hidden, mlp),
        "up_proj": (hidden, mlp),
        "down_proj": (mlp, hidden),
    }


def shapes_of(config: Mapping[str, Any]) -> BaseShapes:
    """The shapes that a decoded `config.json` describes. Raises UnsupportedModel naming the key that is missing or wrong."""
    found = canonical(config)
    hidden, intermediate = size_in(found, "hidden_size"), size_in(found, "intermediate_size")
    layers = size_in(found, "num_hidden_layers", most=LAYERS_MAX)
    heads, kv_heads = size_in(found, "num_attention_heads"), size_in(found, "num_key_value_heads")
    if heads % kv_heads:
        raise refused("num_key_value_heads", kv_heads, f"{heads} attention heads cannot share them")
    return BaseShapes(
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size_in(found, "head_dim", default=hidden // heads),
        model_type=str(config.get("model_type", "")),
        vocab_size=size_in(found, "vocab_size", default=0),
    )


def read_shapes(directory: Path) -> BaseShapes:
    """The shapes of the model in `directory`. Raises UnsupportedModel when there is no usable `config.json`."""
    return shapes_of(read_raw_config(directory))
