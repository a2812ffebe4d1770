"""Checkpoint weights into fused tensors. Reads safetensors, one file or sharded, mapped into memory; never pickle.

`random_weights` makes those of a config without a checkpoint, on the device: for measuring real shapes without a download.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from motet.services.worker.engine.model_config import ModelConfig, UnsupportedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANDOM_DEVIATION = 0.02  # what models are initialised with
M = TypeVar("M")  # a base-model matrix as the kernels want it
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # old checkpoints store what the config implies


@dataclass(slots=True)
class LayerWeights(Generic[M]):
    """One decoder layer. Fused matrices have the projections' outputs one after the other."""

    input_norm: torch.Tensor  # [hidden]
    qkv: M  # hidden -> (heads + 2 * kv_heads) * head_dim
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]: the q norm's weight per q head, then the k norm's
    o: M  # heads * head_dim -> hidden
    post_norm: torch.Tensor  # [hidden]
    gate_up: M  # hidden -> 2 * intermediate
    down: M  # intermediate -> hidden


@dataclass(slots=True)
class ModelWeights(Generic[M]):
    """All weights of a decoder, on one device in one type."""

    embed: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights[M]]
    norm: torch.Tensor  # [hidden]
    lm_head: M  # hidden -> vocab; of `embed` when tied


def resolve_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """`dtype` is "auto" (the checkpoint's), "float32", "bfloat16" or "float16". Raises UnsupportedModel otherwise."""
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r}: one of auto, {', '.join(DTYPES)} is expected")
    return DTYPES[name]


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    linear: Callable[[torch.Tensor, torch.Tensor | None], M],
    head: Callable[[torch.Tensor, torch.Tensor | None], M] | None = None,
) -> ModelWeights[M]:
    """Read, convert and fuse the checkpoint in `model_dir`; `linear` turns each matrix [out, in] and its bias into an M.

    `head` does that for the matrix to the vocabulary, where it is to be another.

    Every name and shape is checked against `config` before a byte of weights is read. Raises UnsupportedModel naming the
    file or tensor: a missing one, one of another shape, and one that the config does not know (it would be ignored
    silently otherwise).
    """
    with ExitStack() as stack:
        files = {path: stack.enter_context(_open(path)) for path in _files(model_dir)}
        where = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        _check(where, config)

        def read(*names: str) -> torch.Tensor:
            parts = [where[name].get_tensor(name) for name in names]
            whole = torch.empty((sum(p.shape[0] for p in parts), *parts[0].shape[1:]), dtype=dtype, device=device)
            at = 0
            for part in parts:
                whole[at : at + part.shape[0]].copy_(part)
                at += part.shape[0]
            return whole

        return _fused(config, read, linear, head or linear)


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    linear: Callable[[torch.Tensor, torch.Tensor | None], M],
    head: Callable[[torch.Tensor, torch.Tensor | None], M] | None = None,
) -> ModelWeights[M]:
    """Weights of `config`'s shapes from a normal distribution, the same for the same kind of device; norms are 1."""
    draw = torch.Generator(device).manual_seed(0)
    sizes = _expected(config)

    def read(*names: str) -> torch.Tensor:
        shape = [sum(sizes[name][0] for name in names), *sizes[names[0]][1:]]
        if names[0].endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, RANDOM_DEVIATION, generator=draw)

    return _fused(config, read, linear, head or linear)


def _fused(
    config: ModelConfig,
    read: Callable[..., torch.Tensor],
    linear: Callable[[torch.Tensor, torch.Tensor | None], M],
    head: Callable[[torch.Tensor, torch.Tensor | None], M],
) -> ModelWeights[M]:
    """`read` gives tensors by their names in a checkpoint, several one after the other."""
    embed = read("model.embed_tokens.weight")
    return ModelWeights(
        embed=embed,
        layers=[_layer(f"model.layers.{i}.", config, read, linear) for i in range(config.num_layers)],
        norm=read("model.norm.weight"),
        lm_head=head(embed if config.tied_embeddings else read("lm_head.weight"), None),
    )


def _layer(
    prefix: str,
    config: ModelConfig,
    read: Callable[..., torch.Tensor],
    linear: Callable[[torch.Tensor, torch.Tensor | None], M],
) -> LayerWeights[M]:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."

    def fused(parent: str, modules: tuple[str, ...], bias: bool) -> M:
        weight = read(*(f"{parent}{module}.weight" for module in modules))
        return linear(weight, read(*(f"{parent}{module}.bias" for module in modules)) if bias else None)

    qk_norm = None
    if config.qk_norm:
        q = read(attention + "q_norm.weight").expand(config.num_heads, -1)
        k = read(attention + "k_norm.weight").expand(config.num_kv_heads, -1)
        qk_norm = torch.cat([q, k])
    return LayerWeights(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=fused(attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
        qk_norm=qk_norm,
        o=fused(attention, ("o_proj",), config.o_bias),
        post_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=fused(mlp, ("gate_proj", "up_proj"), config.mlp_bias),
        down=fused(mlp, ("down_proj",), config.mlp_bias),
    )


def parameters(config: ModelConfig) -> int:
    """How many elements a checkpoint of this config has."""
    return sum(math.prod(shape) for shape in _expected(config).values())


def _expected(config: ModelConfig) -> dict[str, list[int]]:
    """{tensor name: shape} of a checkpoint of this config."""
    hidden, vocab = config.hidden_size, config.vocab_size
    names: dict[str, list[int]] = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    if not config.tied_embeddings:
        names["lm_head.weight"] = [vocab, hidden]
    has_bias = dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.qkv_bias)
    has_bias |= {"o_proj": config.o_bias} | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), config.mlp_bias)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        names[prefix + "input_layernorm.weight"] = names[prefix + "post_attention_layernorm.weight"] = [hidden]
        for module, (fan_in, fan_out) in config.projection_shapes().items():
            parent = prefix + ("self_attn." if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp.")
            names[f"{parent}{module}.weight"] = [fan_out, fan_in]
            if has_bias[module]:
                names[f"{parent}{module}.bias"] = [fan_out]
        if config.qk_norm:
            names[prefix + "self_attn.q_norm.weight"] = names[prefix + "self_attn.k_norm.weight"] = [config.head_dim]
    return names


def _check(where: dict[str, Any], config: ModelConfig) -> None:
    expected = _expected(config)
    missing = sorted(expected.keys() - where.keys())
    if missing:
        raise UnsupportedModel(f"checkpoint lacks {len(missing)} of {len(expected)} tensors, the first is {missing[0]}")
    for name, shape in expected.items():
        piece = where[name].get_slice(name)
        if list(piece.get_shape()) != shape:
            raise UnsupportedModel(f"tensor {name} has shape {list(piece.get_shape())}, config.json implies {shape}")
        if piece.get_dtype() not in ("F32", "F16", "BF16"):
            raise UnsupportedModel(f"tensor {name} is stored as {piece.get_dtype()}: F32, F16 or BF16 is expected")
    unknown = sorted(n for n in where.keys() - expected.keys() if not _IGNORED.search(n) and n != "lm_head.weight")
    if unknown:
        raise UnsupportedModel(f"checkpoint has {len(unknown)} tensors that config.json does not imply, as {unknown[0]}")


def _files(model_dir: Path) -> list[Path]:
    """The safetensors files of the checkpoint, confined to its directory."""
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UnsupportedModel(f"{index} is not a safetensors index: {error!r}") from None
        for name in names:
            if Path(name).name != name:
                raise UnsupportedModel(f"{index} names {name!r}: shards lie in the checkpoint's own directory")
            if not (model_dir / name).exists():
                raise UnsupportedModel(f"{index} names {name}, which is not there")
        return [model_dir / name for name in names]
    if single.exists():
        return [single]
    if any(model_dir.glob("*.bin")) or any(model_dir.glob("*.pt*")):
        raise UnsupportedModel(f"{model_dir} holds pickled weights only; convert them to safetensors, pickle is never opened")
    raise UnsupportedModel(f"{model_dir} has neither model.safetensors nor model.safetensors.index.json")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UnsupportedModel(f"{path} is not a readable safetensors file: {error}") from None
