"""The tensors that a checkpoint of a configuration has: their names, types and shapes. Reads no weights, imports no torch.

Every stored tensor is used, or left out for a reason in `UNREAD`, or refused by name. Two kinds are read, compared and then
left out: an `lm_head.weight` that equals the embedding it is tied to, and biases of zeros in quantized checkpoints, since old
GPTQ programs gave every projection one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from motet.services.worker.engines.model_config import ModelConfig
from motet.services.worker.engines.quantization_config import Shapes, tensors_of
from motet.services.worker.engines.safetensors_files import FLOATS, Stored, files_of, headers
from motet.shared.base_shapes import ATTENTION
from motet.shared.hf_config import UnsupportedModel

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNREAD = {re.compile(r"(^|\.)rotary_emb\.inv_freq$"): "old checkpoints store what config.json implies"}
"""{names of tensors that nothing reads: the reason}."""


def check_files(model_dir: Path, config: ModelConfig) -> dict[str, Stored]:
    """The tensors in the checkpoint's files, each checked against `config`. Raises UnsupportedModel."""
    stored = headers(files_of(model_dir))
    check(stored, config)
    return stored


def check(stored: Mapping[str, Stored], config: ModelConfig) -> None:
    """Raise UnsupportedModel for a missing tensor, one of another shape or type, and one that nothing would read."""
    needed, allowed = expected(config)
    if config.tied_embeddings and EMBEDDING not in stored and HEAD in stored:
        del needed[EMBEDDING]  # the same matrix under its other name
    missing = sorted(needed.keys() - stored.keys())
    if missing:
        raise UnsupportedModel(f"checkpoint lacks {len(missing)} of {len(needed)} tensors, the first is {missing[0]}")
    for name, (types, shape) in (needed | {name: one for name, one in allowed.items() if name in stored}).items():
        if stored[name].shape != shape:
            raise UnsupportedModel(f"tensor {name} has shape {stored[name].shape}, config.json implies {shape}")
        if stored[name].dtype not in types:
            raise UnsupportedModel(f"tensor {name} is stored as {stored[name].dtype}: {' or '.join(types)} is expected")
    unknown = sorted(name for name in stored.keys() - needed.keys() - allowed.keys() if not unread(name))
    if unknown:
        raise UnsupportedModel(f"checkpoint has {len(unknown)} tensors that config.json does not imply, as {unknown[0]}")


def unread(name: str) -> str:
    """Why nothing reads this tensor; "" for a tensor that must be read."""
    return next((reason for pattern, reason in UNREAD.items() if pattern.search(name)), "")


def projection_names(config: ModelConfig) -> set[str]:
    """The names of the projections' matrices in a checkpoint of floats."""
    return {f"{parent}{module}.weight" for parent, module, _ in _projections(config)}


def parameters(config: ModelConfig) -> int:
    """The number of elements in a checkpoint of this config."""
    return sum(math.prod(shape) for shape in float_shapes(config).values())


def float_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """{tensor name: shape} of a checkpoint of this config in floats."""
    hidden, vocab = config.hidden_size, config.vocab_size
    names: dict[str, list[int]] = {EMBEDDING: [vocab, hidden], "model.norm.weight": [hidden]}
    if not config.tied_embeddings:
        names[HEAD] = [vocab, hidden]
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


def expected(config: ModelConfig) -> tuple[Shapes, Shapes]:
    """The tensors that a checkpoint of this config must have, and those that it may have. Raises UnsupportedModel."""
    needed: Shapes = {name: (tuple(FLOATS), shape) for name, shape in float_shapes(config).items()}
    allowed: Shapes = {HEAD: needed[EMBEDDING]}
    q = config.quantization
    if q is None:
        return needed, allowed
    if not config.tied_embeddings and q.layout in ("packed", "int8") and not q.keeps("lm_head"):
        raise UnsupportedModel(
            "quantization_config.ignore lacks lm_head: a quantized matrix to the vocabulary is not supported"
        )
    for parent, module, (fan_in, fan_out) in _projections(config):
        allowed[f"{parent}{module}.bias"] = tuple(FLOATS), [fan_out]
        if not q.keeps(parent + module):
            del needed[f"{parent}{module}.weight"]
            more, optional = tensors_of(q, parent + module, fan_out, fan_in)
            needed |= more
            allowed |= optional
    return needed, allowed


def _projections(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """(parent, module, (in, out)) of every projection."""
    for i in range(config.num_layers):
        for module, shape in config.projection_shapes().items():
            yield f"model.layers.{i}.{'self_attn' if module in ATTENTION else 'mlp'}.", module, shape
