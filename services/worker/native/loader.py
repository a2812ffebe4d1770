"""Loads the weights of a checkpoint as fused tensors. Reads safetensors, one file or sharded, mapped into memory; never pickle.

Matrices may be floats or quantized (`quantized.py`). q, k, v become one matrix, and so do gate and up.

`random_weights` makes random weights of a config's shapes on the device, to measure real shapes without a download.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from motet.kernels.quantized import QuantizedMatrix, joined
from motet.services.worker.engines.model_config import ModelConfig
from motet.services.worker.engines.safetensors_files import opened
from motet.services.worker.native.checkpoint import EMBEDDING, HEAD, check_files, float_shapes, unread
from motet.services.worker.native.quantized import read_module
from motet.shared.hf_config import UnsupportedModel
from motet.shared.telemetry import logger

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANDOM_DEVIATION = 0.02  # standard deviation of random weights
COMPARED_ELEMENTS = 1 << 24  # at once, of an lm_head that may equal the embedding
_log = logger(__name__)
M = TypeVar("M")  # a base-model matrix in the kernels' form


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


MakeLinear = Callable[[Sequence[torch.Tensor], "torch.Tensor | None"], M]


@dataclass(frozen=True, slots=True)
class Makers(Generic[M]):
    """Make a matrix M of a backend from weights [out, in] and their bias, or None.

    Weights of floats come in parts, one below the other, in the right type on the right device. A part may be mapped from the
    checkpoint's file.
    """

    linear: MakeLinear[M]
    head: MakeLinear[M] | None = None  # of the matrix to the vocabulary, where another
    whole: Callable[[QuantizedMatrix, torch.Tensor | None], M] | None = None  # of a quantized checkpoint; None: as floats
    reads: bool = True  # False: the matrices exist already, and parts that are mapped from a file are not read


def load_weights(
    model_dir: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, makers: Makers[M]
) -> ModelWeights[M]:
    """Read, convert and fuse the checkpoint in `model_dir`.

    Every name, type and shape is checked against `config` before a byte of weights is read. Raises UnsupportedModel naming the
    file or tensor: a missing one, one of another shape, one that the config does not know, and one with NaN or infinity.
    """
    stored = check_files(model_dir, config)
    with ExitStack() as stack:
        files = {path: stack.enter_context(opened(path)) for path in {one.path for one in stored.values()}}
        used: set[str] = set()

        def get(name: str) -> torch.Tensor | None:
            if name not in stored:
                return None
            used.add(name)
            tensor: torch.Tensor = files[stored[name].path].get_tensor(name)
            return tensor

        def one(name: str) -> torch.Tensor:
            tensor = get(name)
            assert tensor is not None, name
            return tensor

        def read(*names: str) -> torch.Tensor:
            parts = [one(HEAD if name == EMBEDDING and name not in stored else name) for name in names]
            whole = torch.empty((sum(p.shape[0] for p in parts), *parts[0].shape[1:]), dtype=dtype, device=device)
            at = 0
            for part in parts:
                whole[at : at + part.shape[0]].copy_(part)
                at += part.shape[0]
            return _finite(" and ".join(names), whole)

        def mapped(name: str) -> torch.Tensor:
            tensor = one(name).to(device, dtype)
            return _finite(name, tensor) if makers.reads else tensor

        def head(embed: torch.Tensor) -> torch.Tensor:
            if HEAD not in stored or (config.tied_embeddings and EMBEDDING not in stored):
                return embed
            if config.tied_embeddings and _equal(embed, one(HEAD)):
                return embed
            if config.tied_embeddings:
                _log.warning("lm_head.weight is used: it differs from the embedding, though tie_word_embeddings is true")
            return mapped(HEAD)

        def matrix(parent: str, modules: tuple[str, ...], bias: torch.Tensor | None) -> M:
            q = config.quantization
            if q is not None and bias is None:
                for name in (f"{parent}{module}.bias" for module in modules):
                    if (surplus := get(name)) is not None and bool(surplus.any()):
                        raise UnsupportedModel(f"tensor {name} is not zero, and config.json implies none")
            as_integers = [q is not None and not q.keeps(parent + module) for module in modules]
            if q is None or not any(as_integers):
                return makers.linear([mapped(f"{parent}{module}.weight") for module in modules], bias)
            if not all(as_integers):
                raise UnsupportedModel(
                    f"{parent}{modules[as_integers.index(False)]} is stored as floats and {modules} are one matrix"
                )
            shapes = config.projection_shapes()
            whole = joined([read_module(q, parent + module, *shapes[module][::-1], get) for module in modules])
            return makers.whole(whole, bias) if makers.whole else makers.linear([whole.floats(dtype).to(device)], bias)

        weights = _fused(config, read, matrix, head, makers.head or makers.linear)
    for name in stored.keys() - used:
        if not unread(name):
            raise UnsupportedModel(f"tensor {name} is stored, and nothing reads it")
    return weights


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, checked. Raises UnsupportedModel if an element is NaN or infinite."""
    if tensor.numel() and not all(math.isfinite(float(edge)) for edge in tensor.aminmax()):
        raise UnsupportedModel(f"tensor {name} has a NaN or an infinite number, as {str(tensor.dtype).removeprefix('torch.')}")
    return tensor


def _equal(embed: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a stored matrix is `embed` once it has the type of `embed`. Compares some rows at a time."""
    rows = max(1, COMPARED_ELEMENTS // embed.shape[1])
    pairs = zip(embed.split(rows), other.split(rows), strict=True)
    return all(torch.equal(mine, its.to(mine.device, mine.dtype)) for mine, its in pairs)


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, makers: Makers[M]) -> ModelWeights[M]:
    """Weights of `config`'s shapes from a normal distribution, always the same on one kind of device. Norms are 1."""
    draw = torch.Generator(device).manual_seed(0)
    sizes = float_shapes(config)

    def read(*names: str) -> torch.Tensor:
        shape = [sum(sizes[name][0] for name in names), *sizes[names[0]][1:]]
        if names[0].endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, RANDOM_DEVIATION, generator=draw)

    def matrix(parent: str, modules: tuple[str, ...], bias: torch.Tensor | None) -> M:
        return makers.linear([read(*(f"{parent}{module}.weight" for module in modules))], bias)

    def head(embed: torch.Tensor) -> torch.Tensor:
        return embed if config.tied_embeddings else read(HEAD)

    return _fused(config, read, matrix, head, makers.head or makers.linear)


Read = Callable[..., torch.Tensor]  # tensors by their names in a checkpoint, several one after the other
MakeMatrix = Callable[[str, tuple[str, ...], "torch.Tensor | None"], M]  # projections of a parent as one, with their biases


def _fused(
    config: ModelConfig,
    read: Read,
    matrix: MakeMatrix[M],
    head: Callable[[torch.Tensor], torch.Tensor],
    make_head: MakeLinear[M],
) -> ModelWeights[M]:
    embed = read(EMBEDDING)
    return ModelWeights(
        embed=embed,
        layers=[_layer(f"model.layers.{i}.", config, read, matrix) for i in range(config.num_layers)],
        norm=read("model.norm.weight"),
        lm_head=make_head([head(embed)], None),
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
