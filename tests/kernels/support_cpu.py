"""The compiled kernels on every instruction set that this machine has, and what their results are compared with."""

from __future__ import annotations

import os

import torch

from motet.kernels.cpu import CpuEngine, available_isas

ISAS = os.environ.get("MOTET_TEST_ISAS", "").split() or available_isas()  # `make sanitize` takes two of them
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def multiplies_bf16(engine: CpuEngine, dtype: torch.dtype) -> bool:
    """Whether activations are rounded to bf16 before they meet weights of `dtype`, LoRA's A x as PEFT rounds it."""
    return dtype == torch.bfloat16 and engine.isa in ("avx512bf16", "amx")


def as_activation(engine: CpuEngine, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.bfloat16().double() if multiplies_bf16(engine, dtype) else x.double()


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert not got.isnan().any()
    assert (got.double() - want).abs().max() <= tolerance * max(want.abs().max().item(), 1.0)
