"""Tensors of quantized checkpoints as `QuantizedMatrix`: `n` outputs, `k` inputs, `g` groups, words of 32 bits.

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

from motet.kernels.quantized import QuantizedMatrix
from motet.services.worker.engines.quantization_config import Quantization
from motet.shared.hf_config import UnsupportedModel

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of the outputs 0 to 7 in a 32-bit word of AWQ."""


def read_module(q: Quantization, module: str, n: int, k: int, get: Callable[[str], torch.Tensor | None]) -> QuantizedMatrix:
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
    return QuantizedMatrix(q.bits, values, scales.contiguous(), zeros, q.group_size or k)


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
