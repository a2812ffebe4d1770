"""Reads `quantization_config` of config.json: how the weights are quantized. Imports no torch.

    gptq                 4 and 8 bits; zero points; groups in the order of the inputs
    awq                  4 bits, layout "gemm"
    compressed-tensors   "pack-quantized" (4 and 8 bits) and "int-quantized" or "naive-quantized" (8 bits)

Unknown fields are refused by name, and so are values that the kernels do not support.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from motet.services.worker.engines.safetensors_files import FLOATS
from motet.shared.hf_config import UnsupportedModel

GROUP = 32
"""A group size is a multiple of it: the compiled kernels' own."""


Shapes = dict[str, tuple[tuple[str, ...], list[int]]]
"""{tensor: (types as safetensors calls them, shape)}."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint stores the seven projections of each layer."""

    layout: Literal["gptq", "gptq_v2", "awq", "packed", "int8"]
    bits: int  # 4 or 8
    group_size: int  # inputs that share a scale; 0 for whole rows
    symmetric: bool
    per_tensor: bool = False  # one scale for a whole matrix
    reordered: bool = False  # inputs may be out of the order of their groups: then `g_idx` says so
    plain: tuple[str, ...] = ()  # modules stored as floats
    plain_means: Literal["name", "part"] = "name"  # whether `plain` has whole names (and "re:" patterns) or parts of names

    @property
    def name(self) -> str:
        """The value of `--quantization` that corresponds to it."""
        return f"int{self.bits}"

    def keeps(self, module: str) -> bool:
        """Whether this module ("model.layers.0.mlp.down_proj") is stored as floats."""
        if self.plain_means == "part":
            return any(part in module for part in self.plain)
        return any(_names(one, module) for one in self.plain)


# Fields that say how a checkpoint was made, or how another program should run it.
_WITHOUT_EFFECT = {
    "gptq": [
        "damp_percent",
        "damp_auto_increment",
        "static_groups",
        "true_sequential",
        "meta",
        "quantizer",
        "model_name_or_path",
        "model_file_base_name",
        "model_seqlen",
        "dataset",
        "tokenizer",
        "block_name_to_quantize",
        "module_name_preceding_first_block",
        "batch_size",
        "pad_token_id",
        "use_exllama",
        "use_cuda_fp16",
        "max_input_length",
        "exllama_config",
        "disable_exllama",
        "cache_block_outputs",
        "mse",
        "backend",
        "parallel_packing",
        "act_group_aware",
        "modules_in_block_to_quantize",
    ],
    "awq": ["backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse", "q_group_size"],
    "compressed-tensors": ["global_compression_ratio", "quantization_status", "version"],
}


def parse_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization in a decoded config.json; None for a checkpoint of floats. Raises UnsupportedModel."""
    value = config.get("quantization_config")
    if value is None:
        return None
    fields = _Fields("quantization_config", value)
    method = fields.choice("quant_method", ("gptq", "awq", "compressed-tensors"))
    parse = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}[method]
    found = parse(fields)
    fields.drop(*_WITHOUT_EFFECT[method])
    fields.end()
    return found


def tensors_of(q: Quantization, module: str, n: int, k: int) -> tuple[Shapes, Shapes]:
    """The tensors that a quantized `module` must have, and those that it may have.

    Raises UnsupportedModel for an impossible shape.
    """
    per_word = 32 // q.bits
    words_n, words_k = -(-n // per_word), -(-k // per_word)
    groups = -(-k // q.group_size) if q.group_size else 1
    if (q.layout == "awq" and n % per_word) or (q.layout.startswith("gptq") and (n % per_word or k % per_word)):
        raise UnsupportedModel(f"{module} is [{n}, {k}]: sizes in {q.layout} are multiples of {per_word}")
    found: Shapes
    scales: Shapes = {f"{module}.scales": (tuple(FLOATS), [groups, n]), f"{module}.qzeros": (("I32",), [groups, words_n])}
    if q.layout == "awq":
        return {f"{module}.qweight": (("I32",), [k, words_n])} | scales, {}
    if q.layout in ("gptq", "gptq_v2"):
        order: Shapes = {f"{module}.g_idx": (("I32",), [k])}
        found = {f"{module}.qweight": (("I32",), [words_k, n])} | scales
        return (found | order, {}) if q.reordered else (found, order)
    scale = [1] if q.per_tensor else [n, groups]
    found = {f"{module}.weight_scale": (tuple(FLOATS), scale)}
    zero = f"{module}.weight_zero_point"
    if q.layout == "int8":
        return found | {f"{module}.weight": (("I8",), [n, k])} | ({} if q.symmetric else {zero: (("I8",), scale)}), {}
    found |= {f"{module}.weight_packed": (("I32",), [n, words_k]), f"{module}.weight_shape": (("I64", "I32"), [2])}
    if not q.symmetric:
        found[zero] = (("I32",), [words_n, groups])
    order = {f"{module}.weight_g_idx": (("I32",), [k])}
    return (found | order, {}) if q.reordered else (found, order)


def _gptq(fields: _Fields) -> Quantization:
    layout: Any = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    fields.choice("format", (layout,), layout)
    fields.choice("method", ("gptq",), "gptq")
    fields.choice("pack_dtype", ("int32",), "int32")
    for name in ("lm_head", "is_marlin_format", "dynamic", "adapter", "rotation"):
        fields.empty(name)
    reordered = fields.flag("desc_act", False)
    bits, group_size, symmetric = fields.choice("bits", (4, 8)), fields.group_size("group_size"), fields.flag("sym", True)
    return Quantization(layout, bits, group_size, symmetric, reordered=reordered)


def _awq(fields: _Fields) -> Quantization:
    fields.choice("version", ("gemm", "GEMM"), "gemm")
    plain = fields.names("modules_to_not_convert")
    bits, group_size = fields.choice("bits", (4,)), fields.group_size("group_size")
    return Quantization("awq", bits, group_size, not fields.flag("zero_point", True), plain=plain, plain_means="part")


def _compressed_tensors(fields: _Fields) -> Quantization:
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        fields.empty(name)
    known = ("pack-quantized", "int-quantized", "naive-quantized")
    form = fields.choice("format", known)
    groups = fields.inner("config_groups")
    if len(groups.left) != 1:
        fields.refuse("config_groups", f"has {len(groups.left)} groups: one for all linear layers is expected")
    group = groups.inner(next(iter(groups.left)))
    if group.take("targets") != ["Linear"]:
        group.refuse("targets", 'is not ["Linear"]: one group for all linear layers is expected')
    group.choice("format", (form, None), None)
    group.empty("output_activations")
    if group.left.get("input_activations"):
        inputs = group.inner("input_activations")
        inputs.choice("num_bits", (8,))
        inputs.choice("type", ("int",), "int")
        inputs.choice("strategy", ("token",))
        if not inputs.flag("dynamic", False):
            inputs.refuse("dynamic", "is false: activations are rounded by their own rows, not by scales of the checkpoint")
        if not inputs.flag("symmetric", True):
            inputs.refuse("symmetric", "is false: activations are rounded to either side of zero")
        _drop_scheme(inputs)
    group.drop("input_activations")
    weights = group.inner("weights")
    bits = weights.choice("num_bits", (4, 8) if form == "pack-quantized" else (8,))
    weights.choice("type", ("int",), "int")
    strategy = weights.choice("strategy", ("tensor", "channel", "group"))
    if strategy != "group" and weights.left.get("group_size") in (None, -1):
        weights.drop("group_size")
    size = weights.group_size("group_size") if strategy == "group" else 0
    if weights.flag("dynamic", False):
        weights.refuse("dynamic", "is true: stored scales are expected")
    order = weights.choice("actorder", (None, "weight", "static", "group", "dynamic"))
    symmetric = weights.flag("symmetric", True)
    _drop_scheme(weights)
    for one in (weights, group, groups):
        one.end()
    plain = fields.names("ignore")
    layout: Literal["packed", "int8"] = "packed" if form == "pack-quantized" else "int8"
    reordered = order in ("group", "dynamic")
    return Quantization(layout, bits, size, symmetric, strategy == "tensor", reordered, plain)


def _drop_scheme(scheme: _Fields) -> None:
    """The remaining fields of an object that describes weights or activations."""
    for name in ("block_structure", "group_size"):
        scheme.empty(name)
    scheme.drop("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    scheme.end()


class _Fields:
    """An object of config.json. Every field must be consumed, so that none is ignored silently."""

    def __init__(self, path: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise UnsupportedModel(f"{path} is {value!r}: an object is expected")
        self._path, self.left = path, dict(value)

    def refuse(self, field: str, why: str) -> NoReturn:
        raise UnsupportedModel(f"{self._path}.{field} {why}")

    def take(self, name: str, default: Any = None) -> Any:
        return self.left.pop(name, default)

    def drop(self, *names: str) -> None:
        for name in names:
            self.left.pop(name, None)

    def choice(self, name: str, among: tuple[Any, ...], default: Any = None) -> Any:
        value = self.take(name, default)
        if not any(value == one and type(value) is type(one) for one in among):
            self.refuse(name, f"is {value!r}: {' or '.join(map(repr, among))} is expected")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            self.refuse(name, f"is {value!r}: true or false is expected")
        return value

    def empty(self, name: str) -> None:
        value = self.take(name)
        if value:
            self.refuse(name, f"is {value!r}: only a checkpoint without it is supported")

    def group_size(self, name: str) -> int:
        """The group size; 0 for whole rows."""
        value = self.take(name)
        if value == -1:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < GROUP or value % GROUP:
            self.refuse(name, f"is {value!r}: a multiple of {GROUP}, or -1 for whole rows, is expected")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        value = self.take(name) or []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self.refuse(name, f"is {value!r}: a list of names is expected")
        for one in value:
            if one.startswith("re:"):
                self._compiled(name, one)
        return tuple(value)

    def inner(self, name: str) -> _Fields:
        return _Fields(f"{self._path}.{name}", self.take(name))

    def end(self) -> None:
        """Refuse fields that were not consumed."""
        for name, value in self.left.items():
            self.refuse(name, f"is not known: it may change what the weights {value!r} mean"[:300])

    def _compiled(self, name: str, pattern: str) -> None:
        try:
            re.compile(pattern[3:])
        except re.error as error:
            self.refuse(name, f"has {pattern!r}, which is not a pattern: {error}")


def _names(one: str, module: str) -> bool:
    if one.startswith("re:"):
        return re.match(one[3:], module) is not None
    return one == module
