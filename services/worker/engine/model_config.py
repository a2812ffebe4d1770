"""Reads `config.json` into the parameters of the native engine, and refuses what it does not support. Imports no torch.

    LlamaForCausalLM     Llama 2, 3, 3.1+; attention_bias, mlp_bias, rope scaling
    MistralForCausalLM   sliding window on every layer
    Qwen2ForCausalLM     Qwen 2, 2.5; bias on q, k, v; sliding window on the upper layers when switched on
    Qwen3ForCausalLM     RMS norm on every head's q and k

An unknown key that may change the computation is refused by name, because a model that runs with wrong results is worse than
one that does not start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from motet.services.worker.engine.quantization_config import Quantization, parse_quantization
from motet.services.worker.engine.unsupported import UnsupportedModel

DTYPES = ("float32", "bfloat16", "float16")
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
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        mlp = self.intermediate_size
        return {
            "q_proj": (hidden, q),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (q, hidden),
            "gate_proj": (hidden, mlp),
            "up_proj": (hidden, mlp),
            "down_proj": (mlp, hidden),
        }


def read_model_config(model_dir: Path) -> ModelConfig:
    """The config of the checkpoint in `model_dir`. Raises UnsupportedModel, also when a file is missing or broken."""
    config = _read_json(model_dir / "config.json")
    if config is None:
        raise UnsupportedModel(f"{model_dir} has no config.json: a Hugging Face model directory is expected")
    generation = _read_json(model_dir / "generation_config.json") or {}
    return parse_model_config(config, generation)


def parse_model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config from decoded `config.json` and `generation_config.json`. Raises UnsupportedModel."""
    family = _family(config)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act is {activation!r}: only 'silu' is supported")
    if config.get("pretraining_tp", 1) not in (None, 1):
        raise UnsupportedModel("pretraining_tp is not 1: sliced pre-training arithmetic is not reproduced")

    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", default=heads)
    hidden = _size(config, "hidden_size")
    head_dim = _size(config, "head_dim", default=128 if family == "Qwen3" else hidden // heads)
    layers = _size(config, "num_hidden_layers")
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim is {head_dim}: rotary embedding needs an even one")

    attention_bias = _flag(config, "attention_bias", False)
    max_len = _size(config, "max_position_embeddings")
    return ModelConfig(
        architecture=f"{family}ForCausalLM",
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=max_len,
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, max_len),
        windows=_windows(config, family, layers),
        qkv_bias=family == "Qwen2" or (family in ("Llama", "Qwen3") and attention_bias),
        o_bias=family in ("Llama", "Qwen3") and attention_bias,
        mlp_bias=family == "Llama" and _flag(config, "mlp_bias", False),
        qk_norm=family == "Qwen3",
        tied_embeddings=_flag(config, "tie_word_embeddings", False),
        dtype=_dtype(config),
        eos_token_ids=_eos(config, generation or {}),
        quantization=parse_quantization(config),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} is not a JSON object")
    return value


def _family(config: Mapping[str, Any]) -> str:
    known = {f"{name}ForCausalLM": name for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
    for name in config.get("architectures") or ():
        if name in known:
            return known[name]
    raise UnsupportedModel(f"architectures is {config.get('architectures')!r}: one of {sorted(known)} is expected")


def _size(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            raise UnsupportedModel(f"{key} is missing")
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key} is {value!r}: a positive whole number is expected")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None) -> float:
    value = config.get(key)
    if value is None:
        if default is None:
            raise UnsupportedModel(f"{key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise UnsupportedModel(f"{key} is {value!r}: a positive number is expected")
    return float(value)


def _optional(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else _number(config, key, None)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{key} is {value!r}: true or false is expected")
    return value


def _rope(config: Mapping[str, Any], max_len: int) -> RopeConfig:
    """The rotary embedding, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise UnsupportedModel(f"rope_parameters is {parameters!r}: an object is expected")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModel("rope_parameters differs between layer types: one for all layers is expected")
    theta = _number(parameters, "rope_theta", _number(config, "rope_theta", 10000.0))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UnsupportedModel(f"partial_rotary_factor is {partial!r}: only full rotary embedding is supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("default", "dynamic"):
        # "dynamic" stretches only past max_position_embeddings, and the engine never goes there
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=_number(parameters, "factor", None))
    key = "original_max_position_embeddings"
    original = _size(config if config.get(key) is not None else parameters, key, default=max_len)
    if kind == "llama3":
        low, high = _number(parameters, "low_freq_factor", None), _number(parameters, "high_freq_factor", None)
        if low >= high:
            raise UnsupportedModel(f"low_freq_factor {low} is not below high_freq_factor {high}")
        return RopeConfig(
            theta=theta,
            type="llama3",
            factor=_number(parameters, "factor", None),
            original_max_len=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
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
    raise UnsupportedModel(f"rope_type is {kind!r}: default, linear, dynamic, llama3 or yarn is expected")


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    """Each layer's sliding window in tokens, the token itself included; 0 for none."""
    if family == "Llama":
        return (0,) * layers
    # absent means the families' default of 4096, null means none
    window = 0 if config.get("sliding_window", 4096) is None else _size(config, "sliding_window", default=4096)
    if family == "Mistral":
        return (window,) * layers
    if not window or not _flag(config, "use_sliding_window", False):
        return (0,) * layers
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"layer_types {kinds!r}: {layers} of 'full_attention' or 'sliding_attention' are expected")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype is {name!r}: one of {', '.join(DTYPES)} is expected")
    return str(name)


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens of the generation config, else of the model.

    Chat models name their end-of-turn token only in the former.
    """
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise UnsupportedModel(f"eos_token_id is {value!r}: a token id or a list of them is expected")
    return tuple(dict.fromkeys(ids))
