"""Converts a PEFT adapter (`adapter_config.json`, `adapter_model.safetensors`) to a validated `motet-lora/2` blob.

Cheap checks come first, so that a bad file costs little:

    config  ->  safetensors header  ->  every tensor's name, shape and dtype  ->  only then the weights: finite?  ->  blob

Options that would change the result and that workers do not compute are refused by name: an adapter that runs and answers
wrongly is worse than a refusal. Numpy only; all functions block, so call them in a thread.

scale = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora, with r and alpha per module (rank_pattern, alpha_pattern).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Meta

from motet.services.registry.files import MAX_CONFIG_BYTES, quoted, shown
from motet.services.registry.patterns import assign
from motet.shared.adapter_blob import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    MAX_SCALE,
    TensorInfo,
    data_bytes,
    digest_of,
    read_index,
    safetensors_header,
    write_blob,
)
from motet.shared.base_shapes import BaseShapes
from motet.shared.errors import InvalidAdapter, TooLarge
from motet.shared.model import MODULES

_Rank = Annotated[int, Meta(ge=1)]


class PeftConfig(msgspec.Struct, frozen=True):
    """The keys of `adapter_config.json` that affect the result."""

    peft_type: str
    r: _Rank
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, _Rank] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: list[str] | str | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """A validated adapter, ready to be stored."""

    blob: bytes
    digest: str
    rank: int  # the largest
    modules: tuple[str, ...]
    layers: int
    dtype: str


class _Tensor(msgspec.Struct, frozen=True):
    key: str
    info: TensorInfo


_MEANINGLESS = {
    # how it was made or trained, not what it computes
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode", "task_type", "lora_dropout",
    "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "velora_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
}  # fmt: skip

_UNSUPPORTED = {
    "modules_to_save": "it replaces whole modules of the base model, which is shared by all adapters",
    "use_dora": "DoRA rescales the base weights",
    "lora_bias": "biases on lora_B are not computed",
    "fan_in_fan_out": "transposed base weights are not supported",
    "trainable_token_indices": "changed token embeddings are not supported",
    "megatron_config": "Megatron's parallel layers are not supported",
    "layer_replication": "replicated layers would be another base model",
    "target_parameters": "adapters on bare parameters are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "arrow_config": "Arrow routing between adapters is not supported",
    "kasa_config": "KaSA changes the base weights",
    "monteclora_config": "sampled adapters are not supported",
}

_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")  # initialisations that also rewrite the base weights

_KEY = re.compile(  # the text model of a model that takes images is called `language_model` or `text_model`
    r"base_model\.model\.(?:language_model\.)?model\.(?:language_model\.|text_model\.)?layers\.(\d{1,5})"
    r"\.(self_attn|mlp)\.([a-z]+_proj)\.(lora_[AB])(?:\.default)?\.weight"
)
_EXPONENT = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
_NUMPY = {"F32": "<f4", "F16": "<u2", "BF16": "<u2"}
_CHUNK = 1 << 22  # elements checked at once, so that the check itself needs little memory


def parse_config(text: bytes) -> PeftConfig:
    """`adapter_config.json`, checked key by key. Raises InvalidAdapter naming the key and the reason."""
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidAdapter(f"adapter_config.json is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        raw = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidAdapter(f"adapter_config.json is not a JSON object: {shown(error)}") from None
    if raw.get("peft_type") != "LORA":
        raise InvalidAdapter(f"peft_type is {quoted(raw.get('peft_type'))}: only LORA adapters are served", param="peft_type")
    for key, value in raw.items():
        if not value or key in _MEANINGLESS or key in PeftConfig.__struct_fields__:
            continue
        reason = _UNSUPPORTED.get(key, "its meaning is not known here, so the result could be wrong")
        raise InvalidAdapter(f"{shown(key)} is set in adapter_config.json: {reason}", param=shown(key))
    known = {k: v for k, v in raw.items() if k in PeftConfig.__struct_fields__ and v is not None}
    try:
        config = msgspec.convert(known, PeftConfig)
    except msgspec.ValidationError as error:
        where = re.search(r"`\$\.(\w+)|field `(\w+)`", str(error))
        raise InvalidAdapter(f"adapter_config.json: {shown(error)}", param=where and (where[1] or where[2])) from None
    if config.bias != "none":
        raise InvalidAdapter(f"bias is {quoted(config.bias)}: trained biases are not supported", param="bias")
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights.lower().startswith(_CHANGES_BASE):
        raise InvalidAdapter(
            f"init_lora_weights is {quoted(config.init_lora_weights)}, which rewrites the base weights: convert it to a "
            "plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)",
            param="init_lora_weights",
        )
    for name in config.target_modules if isinstance(config.target_modules, list) else ():
        if name.rsplit(".", 1)[-1] not in MODULES:
            raise InvalidAdapter(
                f"target_modules names {quoted(name)}; adapters may target {', '.join(MODULES)}", param="target_modules"
            )
    return config


def plan(
    config: PeftConfig, tensors: Mapping[str, TensorInfo], base: BaseShapes, max_rank: int
) -> dict[tuple[int, str], tuple[float, _Tensor, _Tensor]]:
    """{(layer, module): (scale, A, B)} of a file's header. Raises InvalidAdapter naming the tensor and the reason."""
    found: dict[tuple[int, str], dict[str, _Tensor]] = {}
    for key, info in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or match[3] not in MODULES or match[2] != base.parent(match[3]):
            raise InvalidAdapter(f"tensor {shown(key)}: not a LoRA matrix of {', '.join(MODULES)}")
        layer, module, half = int(match[1]), match[3], match[4]
        if layer >= base.layers:
            raise InvalidAdapter(f"tensor {key}: the base model has layers 0 to {base.layers - 1}")
        if info.dtype not in DTYPE_BYTES:
            raise InvalidAdapter(f"tensor {key}: dtype {shown(info.dtype)}, one of {', '.join(DTYPE_BYTES)} is expected")
        if len(info.shape) != 2 or min(info.shape) < 1:
            raise InvalidAdapter(f"tensor {key}: shape {info.shape} is not a matrix")
        if half in found.setdefault((layer, module), {}):
            raise InvalidAdapter(f"tensor {key}: the file holds this matrix twice")
        found[layer, module][half] = _Tensor(key, info)
    if not found:
        raise InvalidAdapter("adapter_model.safetensors holds no LoRA matrices")
    paths = {base.path(layer, module): (layer, module) for layer, module in found}
    rank_keys = assign("rank_pattern", list(config.rank_pattern), list(paths))
    alpha_keys = assign("alpha_pattern", list(config.alpha_pattern), list(paths))
    planned = {}
    for path, at in paths.items():
        halves = found[at]
        if len(halves) != 2:
            there, missing = ("lora_A", "lora_B") if "lora_A" in halves else ("lora_B", "lora_A")
            raise InvalidAdapter(f"tensor {halves[there].key}: {missing} of the same module is missing")
        a, b = halves["lora_A"], halves["lora_B"]
        rank_key, alpha_key = rank_keys.get(path), alpha_keys.get(path)
        rank = config.r if rank_key is None else config.rank_pattern[rank_key]
        alpha = config.lora_alpha if alpha_key is None else config.alpha_pattern[alpha_key]
        _check_shapes(a, b, base.linear(at[1]), rank, "r" if rank_key is None else f"rank_pattern[{quoted(rank_key)}]")
        if rank > max_rank:
            raise InvalidAdapter(f"tensor {a.key}: rank {rank} is over the limit of {max_rank}", param="r")
        scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        if not abs(scale) <= MAX_SCALE:
            raise InvalidAdapter(f"lora_alpha {alpha} with rank {rank} gives no finite scale", param="lora_alpha")
        planned[at] = (scale, a, b)
    return planned


def _check_shapes(a: _Tensor, b: _Tensor, linear: tuple[int, int], rank: int, rank_from: str) -> None:
    (rank_a, size_in), (size_out, rank_b) = a.info.shape, b.info.shape
    if size_in != linear[0]:
        raise InvalidAdapter(f"tensor {a.key}: shape {a.info.shape}, but the base model's layer has {linear[0]} inputs")
    if size_out != linear[1]:
        raise InvalidAdapter(f"tensor {b.key}: shape {b.info.shape}, but the base model's layer has {linear[1]} outputs")
    for tensor, actual in ((a, rank_a), (b, rank_b)):
        if actual != rank:
            raise InvalidAdapter(f"tensor {tensor.key}: rank {actual}, but {rank_from} says {rank}", param="r")


def _check_finite(tensor: _Tensor, data: memoryview) -> None:
    """Raises InvalidAdapter for NaN and infinite weights: floats with all exponent bits set."""
    kind, exponent = _EXPONENT[tensor.info.dtype]
    bits: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]] = np.frombuffer(data, dtype=kind)
    for begin in range(0, bits.size, _CHUNK):
        bad = (bits[begin : begin + _CHUNK] & exponent) == exponent
        if bad.any():
            row, column = divmod(begin + int(bad.argmax()), tensor.info.shape[1])
            raise InvalidAdapter(f"tensor {tensor.key}: NaN or infinity at [{row}, {column}]")


def _matrix(tensor: _Tensor, data: memoryview, dtype: str) -> np.ndarray[Any, Any]:
    """The weights for a blob of `dtype`: in their own type, or as F32, which is exact for F16 and BF16."""
    own = tensor.info.dtype
    numbers: np.ndarray[Any, Any] = np.frombuffer(data, dtype=_NUMPY[own])
    if own != dtype:
        numbers = numbers.view("<f2").astype("<f4") if own == "F16" else (numbers.astype("<u4") << 16).view("<f4")
    return numbers.reshape(tensor.info.shape)


def convert(
    config_json: bytes, weights: BinaryIO, size_bytes: int, base: BaseShapes, *, max_rank: int, max_bytes: int
) -> Converted:
    """Validate an adapter and write its blob. `weights` is an open safetensors file of `size_bytes`, at its beginning.

    Tensors keep their dtype; a file with mixed dtypes becomes F32, which is exact. Raises InvalidAdapter or TooLarge with the
    reason: `max_bytes` applies to the file and to the blob, which can be many times larger because of padding. For a moment
    memory holds the file and two blobs.
    """
    if size_bytes > max_bytes:
        raise TooLarge(f"adapter_model.safetensors has {size_bytes} bytes, the limit is {max_bytes}")
    config = parse_config(config_json)
    head = weights.read(8)
    length = int.from_bytes(head, "little")
    if len(head) == 8 and length <= min(MAX_HEADER_BYTES, size_bytes - 8):
        head += weights.read(length)
    tensors, _, start = safetensors_header(head, size_bytes)
    planned = plan(config, tensors, base, max_rank)
    dtypes = {info.dtype for info in tensors.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
    _check_blob_size(planned, base, dtype, max_bytes)
    data = memoryview(weights.read(size_bytes - start))
    if len(data) != size_bytes - start:
        raise InvalidAdapter("adapter_model.safetensors changed while it was read")
    pairs = {}
    for at, (scale, *halves) in planned.items():
        parts = [data[slice(*tensor.info.data_offsets)] for tensor in halves]
        for tensor, part in zip(halves, parts, strict=True):
            _check_finite(tensor, part)
        a, b = (_matrix(tensor, part, dtype) for tensor, part in zip(halves, parts, strict=True))
        pairs[at] = (scale, a, b)
    blob = write_blob(pairs, dtype=dtype, layers=base.layers)
    index = read_index(blob, len(blob))
    return Converted(
        blob=blob,
        digest=digest_of(blob),
        rank=index.rank,
        modules=index.modules,
        layers=index.adapted_layers,
        dtype=index.dtype,
    )


def _check_blob_size(
    planned: Mapping[tuple[int, str], tuple[float, _Tensor, _Tensor]], base: BaseShapes, dtype: str, max_bytes: int
) -> None:
    ranks: dict[str, int] = {}
    for (_, module), (_, a, _) in planned.items():
        ranks[module] = max(a.info.shape[0], ranks.get(module, 0))
    needed = data_bytes({m: (rank, *base.linear(m)) for m, rank in ranks.items()}, dtype=dtype, layers=base.layers)
    if needed > max_bytes:
        raise TooLarge(
            f"adapter_model.safetensors needs {needed} bytes in whole pages of 8 ranks over {base.layers} layers, "
            f"the limit is {max_bytes}"
        )
