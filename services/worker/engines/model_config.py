"""Reads `config.json` into the parameters of the native engine, and refuses what it does not support. Imports no torch.

    LlamaForCausalLM     Llama 2, 3, 3.1+; attention_bias, mlp_bias, rope scaling
    MistralForCausalLM   sliding window on every layer
    Qwen2ForCausalLM     Qwen 2, 2.5; bias on q, k, v; sliding window on the upper layers when switched on
    Qwen3ForCausalLM     RMS norm on every head's q and k

An unknown key that may change the computation is refused by name, because a model that runs with wrong results is worse than
one that does not start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from motet.services.worker.engines.quantization_config import Quantization, parse_quantization
from motet.services.worker.engines.safetensors_files import FLOATS, stored_type
from motet.shared.base_shapes import projections
from motet.shared.generation_config import eos_token_ids, read_generation_config
from motet.shared.hf_config import (
    FAMILIES,
    LAYERS_MAX,
    LENGTH_MAX,
    UnsupportedModel,
    canonical,
    read_raw_config,
    refused,
    size_in,
)

FLOAT32_MAX = 3.4e38
RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched. Unused numbers are None."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_max_len: int = 0  # llama3, yarn: the context length before stretching, in tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None derives it from factor and mscale
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder: sizes in elements, lengths in tokens. `windows[i]` is layer i's sliding window, 0 for full attention."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    dtype: str  # what the checkpoint says it is stored in
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None  # None: floats

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """{module: (in, out)} of the seven linear layers an adapter may target, in `shared.model.MODULES` order."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return projections(self.hidden_size, self.intermediate_size, query, key)


def read_model_config(model_dir: Path) -> ModelConfig:
    """The config of the checkpoint in `model_dir`. Raises UnsupportedModel, also when a file is missing or broken."""
    config = read_raw_config(model_dir)
    if canonical(config).get("dtype") is None:
        config["dtype"] = stored_type(model_dir)
    return parse_model_config(config, read_generation_config(model_dir))


def parse_model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config from decoded `config.json` and `generation_config.json`. Raises UnsupportedModel."""
    family = _family(config)
    quantization = parse_quantization(config)
    config = canonical(config)
    activation = config.get("hidden_act")
    if activation not in ("silu", "swish"):
        raise refused("hidden_act", activation, "only 'silu' is supported")
    if config.get("pretraining_tp", 1) not in (None, 1):
        raise refused("pretraining_tp", config["pretraining_tp"], "sliced pre-training arithmetic is not reproduced")
    if config.get("per_layer_config"):
        raise refused("per_layer_config", config["per_layer_config"], "layers that differ are not supported")

    heads, kv_heads = size_in(config, "num_attention_heads"), size_in(config, "num_key_value_heads")
    hidden, layers = size_in(config, "hidden_size"), size_in(config, "num_hidden_layers", most=LAYERS_MAX)
    if heads % kv_heads:
        raise refused("num_key_value_heads", kv_heads, f"num_attention_heads {heads} is not a multiple of it")
    head_dim = size_in(config, "head_dim", default=hidden // heads)
    if head_dim % 2:
        raise refused("head_dim", head_dim, "rotary embedding needs an even one")

    attention_bias = family in ("Llama", "Qwen3") and _flag(config, "attention_bias", False)
    max_len = size_in(config, "max_position_embeddings", most=LENGTH_MAX)
    return ModelConfig(
        architecture=f"{family}ForCausalLM",
        vocab_size=size_in(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=size_in(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=max_len,
        rms_norm_eps=_number(config, "rms_norm_eps"),
        rope=_rope(config["rope_parameters"], max_len),
        windows=_windows(config, family, layers),
        qkv_bias=family == "Qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family == "Llama" and _flag(config, "mlp_bias", False),
        qk_norm=family == "Qwen3",
        tied_embeddings=_flag(config, "tie_word_embeddings", False),
        dtype=_dtype(config),
        eos_token_ids=eos_token_ids(config, generation or {}),
        quantization=quantization,
    )


def quantization_of(option: str, config: ModelConfig) -> str:
    """The base model's quantization: `option` ("none", "int8" or "int4"), or that of the checkpoint.

    Raises UnsupportedModel when both differ.
    """
    if config.quantization is None:
        return option
    if option not in ("none", config.quantization.name):
        raise UnsupportedModel(
            f"the checkpoint is {config.quantization.name}: it cannot be served with --quantization {option}"
        )
    return config.quantization.name


def _family(config: Mapping[str, Any]) -> str:
    """The architecture, which `architectures` and `model_type` both name."""
    names, kind = config.get("architectures"), config.get("model_type")
    if names is None:
        names = [name for name, its in FAMILIES.items() if its == kind]
    found = next((name for name in map(str, names) if name in FAMILIES), None) if isinstance(names, list) else None
    if found is None:
        raise refused("architectures", config.get("architectures"), f"one of {', '.join(FAMILIES)} is expected")
    if kind not in (None, FAMILIES[found]):
        raise refused("model_type", kind, f"architectures names {found}, whose type is {FAMILIES[found]!r}")
    if isinstance(config.get("text_config"), dict):
        raise UnsupportedModel(
            "config.json: text_config describes the text part of another model; only text models are supported"
        )
    return found.removesuffix("ForCausalLM")


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        if default is None:
            raise UnsupportedModel(f"config.json: {key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= FLOAT32_MAX:
        raise refused(key, value, "a positive number is expected, of float32")
    return float(value)


def _optional(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else _number(config, key)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refused(key, value, "true or false is expected")
    return value


def _rope(parameters: Mapping[str, Any], max_len: int) -> RopeConfig:
    """The rotary embedding, from the canonical `rope_parameters`."""
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModel("config.json: rope_parameters differs between layer types: one for all layers is expected")
    theta = _number(parameters, "rope_theta")
    partial = parameters.get("partial_rotary_factor")
    if partial not in (None, 1):
        raise refused("partial_rotary_factor", partial, "only full rotary embedding is supported")
    kind = parameters["rope_type"]
    if kind in ("default", "dynamic"):
        # "dynamic" stretches only past max_position_embeddings, and the engine never goes there
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=_number(parameters, "factor"))
    original = size_in(parameters, "original_max_position_embeddings", most=LENGTH_MAX)
    if kind == "llama3":
        low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
        if low >= high:
            raise refused("low_freq_factor", low, f"it is not below high_freq_factor {high}")
        return RopeConfig(
            theta=theta,
            type="llama3",
            factor=_number(parameters, "factor"),
            original_max_len=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        if theta == 1.0:
            raise refused("rope_theta", theta, "yarn needs another base of the frequencies")
        return RopeConfig(
            theta=theta,
            type="yarn",
            factor=_number(parameters, "factor", max_len / original),
            original_max_len=original,
            beta_fast=_number(parameters, "beta_fast", 32.0),
            beta_slow=_number(parameters, "beta_slow", 1.0),
            attention_factor=_optional(parameters, "attention_factor"),
            mscale=_optional(parameters, "mscale"),
            mscale_all_dim=_optional(parameters, "mscale_all_dim"),
            truncate=_flag(parameters, "truncate", True),
        )
    raise refused("rope_type", kind, "default, linear, dynamic, llama3 or yarn is expected")


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    """Each layer's sliding window in tokens, the token itself included; 0 for none."""
    if family == "Llama" or config["sliding_window"] is None:
        return (0,) * layers
    if family == "Mistral":
        return (size_in(config, "sliding_window", most=LENGTH_MAX),) * layers
    if not _flag(config, "use_sliding_window", False):
        return (0,) * layers
    window, kinds = size_in(config, "sliding_window", most=LENGTH_MAX), config.get("layer_types")
    if kinds is None:
        first = config["max_window_layers"]
        if isinstance(first, bool) or not isinstance(first, int):
            raise refused("max_window_layers", first, "a whole number is expected")
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    known = {"sliding_attention": window, "full_attention": 0, "attention": 0}  # the last is an old name of full attention
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(one, str) and one in known for one in kinds):
        raise refused("layer_types", kinds, f"{layers} of 'full_attention' or 'sliding_attention' are expected")
    return tuple(known[one] for one in kinds)


def _dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or "float32"
    if name not in FLOATS.values():
        raise refused("dtype", name, f"one of {', '.join(FLOATS.values())} is expected")
    return str(name)
