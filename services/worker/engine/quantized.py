"""Tensors of quantized checkpoints as WholeNumbers: `n` outputs, `k` inputs, `g` groups, words of 32 bits.

    gptq, gptq_v2   qweight [words of k, n], scales [g, n], qzeros [g, words of n], g_idx [k] (optional); gptq stores zeros - 1
    awq             qweight [k, words of n], scales [g, n], qzeros [g, words of n]; a word has outputs 0, 2, 4, 6, 1, 3, 5, 7
    packed          weight_packed [n, words of k], weight_scale [n, g], weight_shape [2], weight_zero_point [words of n, g],
                    weight_g_idx [k] (optional)
    int8            weight int8 [n, k], weight_scale [n, g] or [1], weight_zero_point int8 like the scale

`g_idx` says the group of each input. Groups in another order than the inputs (`desc_act` of GPTQ, `actorder` "group") are
refused: the kernels multiply neighbouring inputs with one scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from motet.kernels.whole_numbers import WholeNumbers
from motet.services.worker.engine.quantization_config import Quantization
from motet.services.worker.engine.unsupported import UnsupportedModel

Shapes = dict[str, tuple[tuple[str, ...], list[int]]]
"""{tensor: (types as safetensors calls them, shape)}."""

FLOATS = ("F32", "F16", "BF16")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of the outputs 0 to 7 in a 32-bit word of AWQ."""


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
    scales: Shapes = {f"{module}.scales": (FLOATS, [groups, n]), f"{module}.qzeros": (("I32",), [groups, words_n])}
    if q.layout == "awq":
        return {f"{module}.qweight": (("I32",), [k, words_n])} | scales, {}
    if q.layout in ("gptq", "gptq_v2"):
        order: Shapes = {f"{module}.g_idx": (("I32",), [k])}
        found = {f"{module}.qweight": (("I32",), [words_k, n])} | scales
        return (found | order, {}) if q.reordered else (found, order)
    scale = [1] if q.per_tensor else [n, groups]
    found = {f"{module}.weight_scale": (FLOATS, scale)}
    zero = f"{module}.weight_zero_point"
    if q.layout == "int8":
        return found | {f"{module}.weight": (("I8",), [n, k])} | ({} if q.symmetric else {zero: (("I8",), scale)}), {}
    found |= {f"{module}.weight_packed": (("I32",), [n, words_k]), f"{module}.weight_shape": (("I64", "I32"), [2])}
    if not q.symmetric:
        found[zero] = (("I32",), [words_n, groups])
    order = {f"{module}.weight_g_idx": (("I32",), [k])}
    return (found | order, {}) if q.reordered else (found, order)


def read_module(q: Quantization, module: str, n: int, k: int, get: Callable[[str], torch.Tensor | None]) -> WholeNumbers:
    """The weights of a quantized `module`. `get` returns a tensor of the checkpoint, with its shape checked, or None.

    Raises UnsupportedModel for invalid content.
    """

    def one(name: str) -> torch.Tensor:
        tensor = get(f"{module}.{name}")
        assert tensor is not None, name
        return tensor

    zeros: torch.Tensor | None = None
    if q.layout == "int8":
        values, scales = _unsigned(one("weight")), one("weight_scale")
        zeros = None if q.symmetric else one("weight_zero_point").float() + 128.0
    elif q.layout == "packed":
        _check_order(f"{module}.weight_g_idx", get(f"{module}.weight_g_idx"), q.group_size)
        if one("weight_shape").tolist() != [n, k]:
            raise UnsupportedModel(f"{module}.weight_shape is {one('weight_shape').tolist()}, config.json implies {[n, k]}")
        values, scales = _unpacked(one("weight_packed"), q.bits)[:, :k], one("weight_scale")
        zeros = None if q.symmetric else _unpacked(one("weight_zero_point").t(), q.bits).t()[:n].float()
    elif q.layout == "awq":
        values, zeros = (_awq(one(name)).t() for name in ("qweight", "qzeros"))
        zeros, scales = zeros.float(), one("scales").t()
    else:
        _check_order(f"{module}.g_idx", get(f"{module}.g_idx"), q.group_size)
        values, scales = _unpacked(one("qweight").t(), q.bits), one("scales").t()
        zeros = _unpacked(one("qzeros"), q.bits).t().float() + (1.0 if q.layout == "gptq" else 0.0)
    if not bool(scales.isfinite().all()) or float(scales.abs().max()) > torch.finfo(torch.float16).max:
        raise UnsupportedModel(f"{module} has scales that are not finite numbers of float16")
    scales = scales.expand(n, 1) if q.per_tensor else scales
    zeros = zeros.expand(n, 1) if zeros is not None and q.per_tensor else zeros
    return WholeNumbers(q.bits, values, scales.contiguous(), zeros, q.group_size or k)


def _unsigned(values: torch.Tensor) -> torch.Tensor:
    """int8 with 128 added."""
    return values.view(torch.uint8) ^ 128


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, words] -> uint8 [rows, values], the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)  # safetensors are little-endian, as every machine of ours
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(1)


def _awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, words] -> uint8 [rows, 8 * words], in the order of the outputs."""
    return _unpacked(words, 4).unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1)


def _check_order(name: str, groups: torch.Tensor | None, group_size: int) -> None:
    if groups is None:
        return
    at = torch.arange(len(groups), dtype=torch.int32)
    if not torch.equal(groups, at // (group_size or len(groups))):
        raise UnsupportedModel(
            f"{name}: inputs are not in the order of their groups (desc_act, actorder); only a checkpoint that was quantized"
            " without reordering, or with static groups, is supported"
        )
