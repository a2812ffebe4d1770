"""The linear layers of a base model by name and size, read from its `config.json` alone. No torch, no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from motet.shared.errors import BadRequest
from motet.shared.model import MODULES

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MAX_CONFIG_BYTES = 4 * 1024 * 1024

_Size = Annotated[int, Meta(ge=1, le=1 << 24)]


class _Config(msgspec.Struct, frozen=True):
    """The keys that fix the shapes, as Hugging Face spells them."""

    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: Annotated[int, Meta(ge=1, le=4096)]
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None


TEXT_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
}
"""What the `text_config` of LLaVA and Gemma 3 leaves out: transformers' defaults for the type of the text model."""


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a `config.json` that describes the text model: all of it, or `text_config` of a model that takes images."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    return TEXT_DEFAULTS.get(str(text.get("model_type")), {}) | text


class BaseShapes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama-shaped decoder, in elements."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    model_type: str = ""  # as config.json names it

    def linear(self, module: str) -> tuple[int, int]:
        """(in, out) features of one of `shared.model.MODULES`."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "q_proj": (self.hidden_size, query),
            "k_proj": (self.hidden_size, key),
            "v_proj": (self.hidden_size, key),
            "o_proj": (query, self.hidden_size),
            "gate_proj": (self.hidden_size, self.intermediate_size),
            "up_proj": (self.hidden_size, self.intermediate_size),
            "down_proj": (self.intermediate_size, self.hidden_size),
        }
        return shapes[module]

    def parent(self, module: str) -> str:
        """The block that holds `module`: `self_attn` or `mlp`."""
        return "self_attn" if module in ATTENTION else "mlp"

    def path(self, layer: int, module: str) -> str:
        """The module's full name in the base model, e.g. `model.layers.0.self_attn.q_proj`."""
        return f"model.layers.{layer}.{self.parent(module)}.{module}"

    def paths(self) -> list[str]:
        """Every linear layer an adapter can target."""
        return [self.path(layer, module) for layer in range(self.layers) for module in MODULES]


def parse_shapes(config_json: bytes) -> BaseShapes:
    """The shapes a `config.json` describes. Raises BadRequest naming the key that is missing or out of range."""
    try:
        whole = msgspec.json.decode(config_json, type=dict[str, Any])
        config = msgspec.convert(text_config(whole), _Config)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"base model's config.json: {error}") from None
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % kv_heads:
        raise BadRequest(
            f"base model's config.json: {config.num_attention_heads} attention heads cannot share {kv_heads} key/value heads"
        )
    return BaseShapes(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        model_type=str(whole.get("model_type", "")),
    )


def read_shapes(directory: Path) -> BaseShapes:
    """The shapes of the model in `directory`. Raises BadRequest when there is no usable `config.json`."""
    try:
        with (directory / "config.json").open("rb") as file:
            return parse_shapes(file.read(MAX_CONFIG_BYTES))
    except OSError as error:
        raise BadRequest(f"base model's config.json: {error.strerror}: {directory / 'config.json'}") from None
