"""Quantized checkpoints in the published layouts of GPTQ, AWQ and compressed-tensors, written bit by bit.

    config, floats = quantize_checkpoint(model_dir, out, LAYOUTS["awq"])

`floats` are the values that the tensors stand for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Numbers:
    """values unsigned [n, k]; scales, zeros [n, groups]."""

    bits: int
    size: int
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def floats(self) -> torch.Tensor:
        group = torch.arange(self.values.shape[1]) // self.size
        return (self.values - self.zeros[:, group]).double() * self.scales[:, group].double()


def rounded(w: torch.Tensor, bits: int, group_size: int, symmetric: bool, dtype: torch.dtype) -> Numbers:
    """Minimum and maximum of every group; the last one may be shorter."""
    size = group_size if group_size > 0 else w.shape[1]
    groups = math.ceil(w.shape[1] / size)
    values, scales, zeros = (
        torch.empty(w.shape, dtype=torch.int64),
        torch.empty(len(w), groups, dtype=dtype),
        torch.empty(len(w), groups),
    )
    top = 2**bits - 1
    for g in range(groups):
        part = w[:, g * size : (g + 1) * size].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scales[:, g] = ((high - low) / top).clamp(min=1e-4).to(dtype)
        step = scales[:, g].float()
        zeros[:, g] = (top + 1) / 2 if symmetric else (-low / step).round().clamp(1, top)
        values[:, g * size : (g + 1) * size] = ((part / step[:, None]).round() + zeros[:, g, None]).clamp(0, top).long()
    return Numbers(bits, size, values, scales, zeros)


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, n] -> int32 [rows, words]: value `order[i]` of each word's values is at bit i * bits."""
    per_word = 32 // bits
    rows, n = values.shape
    out = torch.zeros(rows, math.ceil(n / per_word), dtype=torch.int64)
    for word in range(out.shape[1]):
        for i in range(per_word):
            at = word * per_word + (order[i] if order else i)
            if at < n:
                out[:, word] |= values[:, at].long() << (i * bits)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def gptq(x: Numbers, *, offset: int = 1) -> Tensors:
    return {
        "qweight": words(x.values, x.bits).t(),
        "qzeros": words(x.zeros.long().t() - offset, x.bits),
        "scales": x.scales.t(),
        "g_idx": (torch.arange(x.values.shape[1]) // x.size).int(),
    }


def awq(x: Numbers) -> Tensors:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(x.values.t(), 4, order), "qzeros": words(x.zeros.t(), 4, order), "scales": x.scales.t()}


def packed(x: Numbers, *, symmetric: bool = True) -> Tensors:
    found = {
        "weight_packed": words(x.values, x.bits),
        "weight_scale": x.scales,
        "weight_shape": torch.tensor(x.values.shape),
    }
    return found if symmetric else found | {"weight_zero_point": words(x.zeros.t(), x.bits).t()}


def int8(x: Numbers, *, symmetric: bool = True) -> Tensors:
    found = {"weight": (x.values - 128).to(torch.int8), "weight_scale": x.scales}
    return found if symmetric else found | {"weight_zero_point": (x.zeros - 128).to(torch.int8)}


@dataclass(frozen=True)
class Layout:
    """A format with its options, and what config.json says of it."""

    bits: int
    group_size: int
    symmetric: bool
    write: Callable[[Numbers], Tensors]
    config: dict[str, Any]
    scales: torch.dtype = torch.float16


def _gptq(bits: int, group_size: int, symmetric: bool, form: str = "gptq") -> Layout:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric, "desc_act": False}
    config |= {"checkpoint_format": form, "damp_percent": 0.01, "true_sequential": True, "lm_head": False}
    return Layout(bits, group_size, symmetric, lambda x: gptq(x, offset=1 if form == "gptq" else 0), config)


def _awq(group_size: int) -> Layout:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return Layout(4, group_size, False, awq, config | {"modules_to_not_convert": None})


def _compressed(form: str, bits: int, group_size: int, symmetric: bool, activations: bool = False) -> Layout:
    strategy = "group" if group_size > 0 else "channel"
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "observer": None}
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "dynamic": False,
        "actorder": None,
    }
    weights |= {"group_size": group_size if group_size > 0 else None, "block_structure": None, "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if activations else None}
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head"]}
    config |= {"config_groups": {"group_0": group | {"output_activations": None}}, "kv_cache_scheme": None}

    def write(x: Numbers) -> Tensors:
        return (packed if form == "pack-quantized" else int8)(x, symmetric=symmetric)

    return Layout(bits, group_size, symmetric, write, config, torch.float32 if activations else torch.bfloat16)


LAYOUTS = {
    "gptq-4-groups": _gptq(4, 32, True),
    "gptq-4-zeros-v2": _gptq(4, 64, False, "gptq_v2"),
    "gptq-8-groups": _gptq(8, 32, True),
    "gptq-8-rows": _gptq(8, -1, True),
    "awq": _awq(32),
    "awq-rows": _awq(-1),
    "packed-4-groups": _compressed("pack-quantized", 4, 32, True),
    "packed-4-zeros": _compressed("pack-quantized", 4, 32, False),
    "packed-8-rows": _compressed("pack-quantized", 8, -1, True),
    "int8-w8a8": _compressed("int-quantized", 8, -1, True, True),
    "int8-zeros": _compressed("int-quantized", 8, -1, False),
    "int8-naive-groups": _compressed("naive-quantized", 8, 32, True),
}


def quantize_checkpoint(model_dir: Path, out: Path, layout: Layout) -> tuple[dict[str, Any], Tensors]:
    """Write `model_dir`, a checkpoint of floats, in this layout. Returns its config.json and the floats that it stands for."""
    tensors = {name: value for path in model_dir.glob("*.safetensors") for name, value in load_file(path).items()}
    stored: Tensors = {}
    for name, weight in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        numbers = rounded(weight, layout.bits, layout.group_size, layout.symmetric, layout.scales)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": value.contiguous() for part, value in layout.write(numbers).items()}
        tensors[name] = numbers.floats().float()
    config = json.loads((model_dir / "config.json").read_text()) | {"quantization_config": layout.config}
    out.mkdir()
    save_file(stored, str(out / "model.safetensors"))
    (out / "config.json").write_text(json.dumps(config))
    return config, tensors
