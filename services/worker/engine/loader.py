"""Loads the weights of a checkpoint as fused tensors. Reads safetensors, one file or sharded, mapped into memory; never pickle.

Matrices may be floats or quantized (`quantized.py`). q, k, v become one matrix, and so do gate and up.

`random_weights` makes random weights of a config's shapes on the device, to measure real shapes without a download.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from motet.kernels.whole_numbers import WholeNumbers, joined
from motet.services.worker.engine.model_config import ModelConfig
from motet.services.worker.engine.quantized import FLOATS, Shapes, read_module, tensors_of
from motet.services.worker.engine.unsupported import UnsupportedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANDOM_DEVIATION = 0.02  # standard deviation of random weights
M = TypeVar("M")  # a base-model matrix in the kernels' form
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
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


MakeLinear = Callable[[Sequence[torch.Tensor], "torch.Tensor | None"], M]


@dataclass(frozen=True, slots=True)
class Makers(Generic[M]):
    """Make a matrix M of a backend from weights [out, in] and their bias, or None.

    Weights of floats come in parts, one below the other, in the right type on the right device. A part may be mapped from the
    checkpoint's file.
    """

    linear: MakeLinear[M]
    head: MakeLinear[M] | None = None  # of the matrix to the vocabulary, where another
    whole: Callable[[WholeNumbers, torch.Tensor | None], M] | None = None  # of a quantized checkpoint; None: as floats


def load_weights(
    model_dir: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, makers: Makers[M]
) -> ModelWeights[M]:
    """Read, convert and fuse the checkpoint in `model_dir`.

    Every name and shape is checked against `config` before a byte of weights is read. Raises UnsupportedModel naming the
    file or tensor: a missing one, one of another shape, and one that the config does not know (it would be ignored
    silently otherwise).
    """
    with ExitStack() as stack:
        files = {path: stack.enter_context(opened(path)) for path in _files(model_dir)}
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

        def get(name: str) -> torch.Tensor | None:
            tensor: torch.Tensor | None = where[name].get_tensor(name) if name in where else None
            return tensor

        def mapped(name: str) -> torch.Tensor:
            tensor: torch.Tensor = where[name].get_tensor(name).to(device, dtype)
            return tensor

        def matrix(parent: str, modules: tuple[str, ...], bias: torch.Tensor | None) -> M:
            q = config.quantization
            stored = [q is not None and not q.keeps(parent + module) for module in modules]
            if q is None or not any(stored):
                return makers.linear([mapped(f"{parent}{module}.weight") for module in modules], bias)
            if not all(stored):
                raise UnsupportedModel(
                    f"{parent}{modules[stored.index(False)]} is stored as floats and {modules} are one matrix"
                )
            shapes = config.projection_shapes()
            whole = joined([read_module(q, parent + module, *shapes[module][::-1], get) for module in modules])
            return makers.whole(whole, bias) if makers.whole else makers.linear([whole.floats(dtype).to(device)], bias)

        return _fused(config, read, matrix, makers.head or makers.linear)


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, makers: Makers[M]) -> ModelWeights[M]:
    """Weights of `config`'s shapes from a normal distribution, always the same on one kind of device. Norms are 1."""
    draw = torch.Generator(device).manual_seed(0)
    sizes = _expected(config)

    def read(*names: str) -> torch.Tensor:
        shape = [sum(sizes[name][0] for name in names), *sizes[names[0]][1:]]
        if names[0].endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, RANDOM_DEVIATION, generator=draw)

    def matrix(parent: str, modules: tuple[str, ...], bias: torch.Tensor | None) -> M:
        return makers.linear([read(*(f"{parent}{module}.weight" for module in modules))], bias)

    return _fused(config, read, matrix, makers.head or makers.linear)


Read = Callable[..., torch.Tensor]  # tensors by their names in a checkpoint, several one after the other
MakeMatrix = Callable[[str, tuple[str, ...], "torch.Tensor | None"], M]  # projections of a parent as one, with their biases


def _fused(config: ModelConfig, read: Read, matrix: MakeMatrix[M], head: MakeLinear[M]) -> ModelWeights[M]:
    embed = read("model.embed_tokens.weight")
    return ModelWeights(
        embed=embed,
        layers=[_layer(f"model.layers.{i}.", config, read, matrix) for i in range(config.num_layers)],
        norm=read("model.norm.weight"),
        lm_head=head([embed if config.tied_embeddings else read("lm_head.weight")], None),
    )


def _layer(prefix: str, config: ModelConfig, read: Read, matrix: MakeMatrix[M]) -> LayerWeights[M]:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."

    def fused(parent: str, modules: tuple[str, ...], bias: bool) -> M:
        return matrix(parent, modules, read(*(f"{parent}{module}.bias" for module in modules)) if bias else None)

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


def check_files(model_dir: Path, config: ModelConfig) -> list[Path]:
    """The checkpoint's files, after a check of every tensor against `config`. Raises UnsupportedModel."""
    paths = _files(model_dir)
    with ExitStack() as stack:
        files = [stack.enter_context(opened(path)) for path in paths]
        _check({name: file for file in files for name in file.keys()}, config)  # noqa: SIM118 (not a mapping)
    return paths


def projection_names(config: ModelConfig) -> set[str]:
    """The names of the projections' matrices in a checkpoint of floats."""
    return {f"{parent}{module}.weight" for parent, module, _ in _projections(config)}


def parameters(config: ModelConfig) -> int:
    """The number of elements in a checkpoint of this config."""
    return sum(math.prod(shape) for shape in _expected(config).values())


def _expected(config: ModelConfig) -> dict[str, list[int]]:
    """{tensor name: shape} of a checkpoint of this config."""
    hidden, vocab = config.hidden_size, config.vocab_size
    names: dict[str, list[int]] = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    if not config.tied_embeddings:
        names["lm_head.weight"] = [vocab, hidden]
    has_bias = dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.qkv_bias)
    has_bias |= {"o_proj": config.o_bias} | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), config.mlp_bias)
    for parent, module, (fan_in, fan_out) in _projections(config):
        names[f"{parent}{module}.weight"] = [fan_out, fan_in]
        if has_bias[module]:
            names[f"{parent}{module}.bias"] = [fan_out]
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        names[prefix + "input_layernorm.weight"] = names[prefix + "post_attention_layernorm.weight"] = [hidden]
        if config.qk_norm:
            names[prefix + "self_attn.q_norm.weight"] = names[prefix + "self_attn.k_norm.weight"] = [config.head_dim]
    return names


def _projections(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """(parent, module, (in, out)) of every projection."""
    for i in range(config.num_layers):
        for module, shape in config.projection_shapes().items():
            yield f"model.layers.{i}.{'self_attn' if module in ATTENTION else 'mlp'}.", module, shape


def _stored(config: ModelConfig) -> tuple[Shapes, Shapes]:
    """The tensors that a checkpoint of this config must have, and those that it may have."""
    needed: Shapes = {name: (FLOATS, shape) for name, shape in _expected(config).items()}
    allowed: Shapes = {"lm_head.weight": needed.get("lm_head.weight", needed["model.embed_tokens.weight"])}
    q = config.quantization
    if q is not None and not config.tied_embeddings and q.layout in ("packed", "int8") and not q.keeps("lm_head"):
        raise UnsupportedModel(
            "quantization_config.ignore lacks lm_head: a quantized matrix to the vocabulary is not supported"
        )
    for parent, module, (fan_in, fan_out) in _projections(config) if q is not None else ():
        assert q is not None
        if not q.keeps(parent + module):
            del needed[f"{parent}{module}.weight"]
            more, optional = tensors_of(q, parent + module, fan_out, fan_in)
            needed |= more
            allowed |= optional
    return needed, allowed


def _check(where: dict[str, Any], config: ModelConfig) -> None:
    needed, allowed = _stored(config)
    missing = sorted(needed.keys() - where.keys())
    if missing:
        raise UnsupportedModel(f"checkpoint lacks {len(missing)} of {len(needed)} tensors, the first is {missing[0]}")
    for name, (types, shape) in (needed | {name: one for name, one in allowed.items() if name in where}).items():
        piece = where[name].get_slice(name)
        if list(piece.get_shape()) != shape:
            raise UnsupportedModel(f"tensor {name} has shape {list(piece.get_shape())}, config.json implies {shape}")
        if piece.get_dtype() not in types:
            raise UnsupportedModel(f"tensor {name} is stored as {piece.get_dtype()}: {' or '.join(types)} is expected")
    unknown = sorted(name for name in where.keys() - needed.keys() - allowed.keys() if not _IGNORED.search(name))
    if config.quantization is not None:  # old GPTQ programs gave every projection a bias
        unknown = [n for n in unknown if not n.endswith("_proj.bias") or bool(where[n].get_tensor(n).any())]
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


def opened(path: Path) -> Any:
    """A context with a mapped safetensors file. Raises UnsupportedModel."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UnsupportedModel(f"{path} is not a readable safetensors file: {error}") from None
