"""Reads the header of an adapter's safetensors file: which matrices it holds, and which of them the configuration selects.

scale = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora, with r and alpha per module (rank_pattern, alpha_pattern).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec

from motet.services.registry.files import quoted, shown
from motet.services.registry.patterns import assign
from motet.services.registry.peft_config import PeftConfig
from motet.services.registry.targets import selected
from motet.services.registry.tensors import MAX_NAME_CHARS, Tensor
from motet.shared.adapter_blob import DTYPE_BYTES, MAX_SCALE, TensorInfo
from motet.shared.base_shapes import BaseShapes
from motet.shared.errors import InvalidAdapter
from motet.shared.model import MODULES

_LAYER = re.compile(  # the text model of a model that takes images is called `language_model` or `text_model`
    r"(?:language_model\.)?(?:model\.)?(?:language_model\.|text_model\.)?layers\.(\d{1,5})\.(self_attn|mlp)\.([a-z]+_proj)"
)
_HALF = re.compile(r"([AB])(?:\.default)?\.weight")
_COPY = re.compile(r"(?:.*\.)?(embed_tokens|lm_head)(?:\.base_layer)?\.weight")
_PREFIX = "base_model.model."
_OF_IMAGES = ("unet.", "text_encoder.", "text_encoder_2.", "lora_unet_", "lora_te", "down_blocks.", "mid_block.", "up_blocks.")
"""How names of an image adapter's tensors begin."""
FOREIGN = " (it was trained for another base model: base_model_name_or_path in its adapter_config.json names it)"
MAX_LEFT_OUT = 20  # modules that are named


Pair = tuple[float, Tensor, Tensor]
"""(scale, A, B) of one module."""
Loras = dict[str, list[tuple[str, Tensor]]]
"""{module path: [(rest of the name after `.lora_`, tensor)]}."""


class Sorted(msgspec.Struct, frozen=True, kw_only=True):
    """A file's tensors by module."""

    loras: Loras
    copies: dict[str, Tensor]  # of whole modules of the base model, by `embed_tokens` and `lm_head`
    chosen: set[str]  # of the modules, those that the configuration selects


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is taken from a file."""

    pairs: dict[tuple[int, str], Pair]  # by (layer, module)
    copies: dict[str, Tensor]  # of whole modules of the base model, to be compared
    left_out: tuple[str, ...]  # paths of modules that the configuration does not select


def plan(config: PeftConfig, file: Sorted, base: BaseShapes, max_rank: int) -> Plan:
    """What a file's header holds, and what of it the configuration selects. Raises InvalidAdapter naming the tensor."""
    loras, copies, chosen = file.loras, file.copies, file.chosen
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    paths: dict[str, tuple[int, str]] = {}
    for path, parts in loras.items():
        if path not in chosen:
            continue
        for rest, tensor in parts:
            at, half = _place(tensor, path, rest, base)
            if half in found.setdefault(at, {}):
                raise InvalidAdapter(f"tensor {tensor.key}: the file holds this matrix twice")
            found[at][half] = tensor
            paths[path] = at
    return Plan(pairs=_scaled(config, found, paths, base, max_rank), copies=copies, left_out=left_out(loras, chosen))


def sort(config: PeftConfig, tensors: Mapping[str, TensorInfo], model_type: str) -> Sorted:
    """A file's tensors by module, and the modules that its configuration selects.

    Raises InvalidAdapter for another kind of tensor, when a copy is missing, and when no module is selected.
    """
    loras, copies = _by_module(tensors)
    missing = [name for name in config.modules_to_save or () if name.rsplit(".", 1)[-1] not in copies]
    if missing:
        raise InvalidAdapter(
            f"modules_to_save names {quoted(missing[0])}, which the file does not hold", param="modules_to_save"
        )
    if not loras:
        raise InvalidAdapter("adapter_model.safetensors holds no LoRA matrices")
    chosen = selected(config, list(loras), model_type)
    if not chosen:
        raise InvalidAdapter(
            f"target_modules {quoted(config.target_modules)} and the keys beside it leave out every tensor of the file",
            param="target_modules",
        )
    return Sorted(loras=loras, copies=copies, chosen=chosen)


def in_table(path: str, base: BaseShapes) -> tuple[int, str] | None:
    """(layer, module) of one of `MODULES` in its block, None for any other module. The layer may be beyond the last."""
    match = _LAYER.fullmatch(path)
    if match is None or match[3] not in MODULES or match[2] != base.parent(match[3]):
        return None
    return int(match[1]), match[3]


def _by_module(tensors: Mapping[str, TensorInfo]) -> tuple[Loras, dict[str, Tensor]]:
    """({module path: [(rest of the name, tensor)]}, {embed_tokens or lm_head: the copy of its weight})."""
    loras: Loras = {}
    copies: dict[str, Tensor] = {}
    for key, info in tensors.items():
        if len(key) > MAX_NAME_CHARS:
            raise InvalidAdapter(f"tensor {shown(key)}: its name is longer than {MAX_NAME_CHARS} characters")
        name = key.removeprefix(_PREFIX)
        if name.startswith(_OF_IMAGES):
            raise InvalidAdapter(f"tensor {shown(key)}: an adapter of an image model, but the base model here makes text")
        path, separator, rest = name.rpartition(".lora_")
        if separator:
            loras.setdefault(path, []).append((rest, Tensor(key, info)))
        elif (match := _COPY.fullmatch(name)) and match[1] not in copies:
            copies[match[1]] = Tensor(key, info)
        else:
            raise not_lora(key)
    return loras, copies


def _place(tensor: Tensor, path: str, rest: str, base: BaseShapes) -> tuple[tuple[int, str], str]:
    """((layer, module), A or B) of a tensor of the module `path`."""
    at, half = in_table(path, base), _HALF.fullmatch(rest)
    if at is None or half is None:
        raise not_lora(tensor.key)
    if at[0] >= base.layers:
        raise InvalidAdapter(f"tensor {tensor.key}: the base model has layers 0 to {base.layers - 1}{FOREIGN}")
    check_matrix(tensor)
    return at, half[1]


def check_matrix(tensor: Tensor) -> None:
    """Raises InvalidAdapter for a tensor of another type than weights have, or that is no matrix."""
    info = tensor.info
    if info.dtype not in DTYPE_BYTES:
        raise InvalidAdapter(f"tensor {tensor.key}: dtype {shown(info.dtype)}, one of {', '.join(DTYPE_BYTES)} is expected")
    if len(info.shape) != 2 or min(info.shape) < 1:
        raise InvalidAdapter(f"tensor {tensor.key}: shape {info.shape} is not a matrix")


def not_lora(key: str, why: str = "") -> InvalidAdapter:
    """The refusal of a tensor that is no half of a module's update."""
    return InvalidAdapter(f"tensor {shown(key)}: not a LoRA matrix of {', '.join(MODULES)}{why}")


def _scaled(
    config: PeftConfig,
    found: Mapping[tuple[int, str], Mapping[str, Tensor]],
    paths: Mapping[str, tuple[int, str]],
    base: BaseShapes,
    max_rank: int,
) -> dict[tuple[int, str], Pair]:
    rank_keys = assign("rank_pattern", list(config.rank_pattern), list(paths))
    alpha_keys = assign("alpha_pattern", list(config.alpha_pattern), list(paths))
    planned = {}
    for path, at in paths.items():
        halves = found[at]
        if len(halves) != 2:
            there, missing = ("A", "B") if "A" in halves else ("B", "A")
            raise InvalidAdapter(f"tensor {halves[there].key}: lora_{missing} of the same module is missing")
        a, b = halves["A"], halves["B"]
        planned[at] = scaled_pair(config, a, b, base.linear(at[1]), (rank_keys.get(path), alpha_keys.get(path)), max_rank)
    return planned


def scaled_pair(
    config: PeftConfig,
    a: Tensor,
    b: Tensor,
    linear: tuple[int, int],
    keys: tuple[str | None, str | None],
    max_rank: int,
) -> Pair:
    """A module's pair of a base's layer with `linear` (inputs, outputs), checked, and its scale.

    `keys`: those of rank_pattern and alpha_pattern that apply to it. Raises InvalidAdapter naming the tensor.
    """
    rank_key, alpha_key = keys
    rank = config.r if rank_key is None else config.rank_pattern[rank_key]
    alpha = config.lora_alpha if alpha_key is None else config.alpha_pattern[alpha_key]
    _check_shapes(a, b, linear, rank, "r" if rank_key is None else f"rank_pattern[{quoted(rank_key)}]")
    if rank > max_rank:
        raise InvalidAdapter(
            f"tensor {a.key}: rank {rank} is over the limit of {max_rank} (--max-lora-rank of registry and workers)",
            param="r",
        )
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    if not abs(scale) <= MAX_SCALE:
        raise InvalidAdapter(f"lora_alpha {alpha} with rank {rank} gives no finite scale", param="lora_alpha")
    return scale, a, b


def left_out(loras: Mapping[str, object], chosen: set[str]) -> tuple[str, ...]:
    """The modules that are not chosen, for people."""
    left = [path for path in loras if path not in chosen]
    more = len(left) - MAX_LEFT_OUT
    return (*map(shown, left[:MAX_LEFT_OUT]), *([f"and {more} more"] if more > 0 else []))


def _check_shapes(a: Tensor, b: Tensor, linear: tuple[int, int], rank: int, rank_from: str) -> None:
    (rank_a, size_in), (size_out, rank_b) = a.info.shape, b.info.shape
    if size_in != linear[0]:
        raise InvalidAdapter(
            f"tensor {a.key}: shape {a.info.shape}, but the base model's layer has {linear[0]} inputs{FOREIGN}"
        )
    if size_out != linear[1]:
        raise InvalidAdapter(
            f"tensor {b.key}: shape {b.info.shape}, but the base model's layer has {linear[1]} outputs{FOREIGN}"
        )
    for tensor, actual in ((a, rank_a), (b, rank_b)):
        if actual != rank:
            raise InvalidAdapter(f"tensor {tensor.key}: rank {actual}, but {rank_from} says {rank}", param="r")
