"""Compares Motet's kernels with vLLM's own wrapper on a random batch, before they are used."""

from __future__ import annotations

import numpy as np
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from motet.kernels.cpu.layers import LayerBatch, LayerLora, add_layer_lora, layers_engine

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""The largest difference, of the largest result. vLLM rounds the adapters' part to the type before it adds it."""

FAN_IN, SLICES, RANKS, MAX_RANK = 160, (96, 32, 48), (3, 8, 16, 40, 64), 64
ROWS = 45


def kernels() -> str:
    """Build the compiled kernels, and name their instruction set. Raises BuildError."""
    return layers_engine().isa


def compare() -> None:
    """Raises RuntimeError when a random batch of any type, of prompts or of decoding, has other results than vLLM's."""
    for dtype in TOLERANCE:
        for prefill in (False, True):
            error = difference(dtype, prefill)
            if not error <= TOLERANCE[dtype]:  # NaN is a difference too
                raise RuntimeError(f"a random batch in {dtype} differs from vLLM's by {error:.2g} of its largest result")


def difference(dtype: torch.dtype, prefill: bool) -> float:
    """The largest difference of a random batch of mixed ranks and of rows without adapters, of the largest result."""
    draw = torch.Generator().manual_seed(1)
    slots = len(RANKS) + 1  # the last one is empty: vLLM computes rows without an adapter by it
    stacked_a = tuple(torch.zeros(slots, 1, MAX_RANK, FAN_IN, dtype=dtype) for _ in SLICES)
    stacked_b = tuple(torch.zeros(slots, 1, out, MAX_RANK, dtype=dtype) for out in SLICES)
    layer = LayerLora(FAN_IN, SLICES, slots=slots, max_rank=MAX_RANK, dtype=dtype)
    for slot, rank in enumerate(RANKS):
        a = [(torch.randn(rank, FAN_IN, generator=draw) / FAN_IN**0.5).to(dtype) for _ in SLICES]
        b = [(torch.randn(out, rank, generator=draw) / rank**0.5).to(dtype) for out in SLICES]
        for number in range(len(SLICES)):
            stacked_a[number][slot, 0, :rank] = a[number]
            stacked_b[number][slot, 0, :, :rank] = b[number]
        layer.set(slot, a, b)
    rows = torch.randint(-1, len(RANKS), (ROWS,), generator=draw)
    rows = rows.sort().values if prefill else rows
    x = torch.randn(ROWS, FAN_IN, generator=draw).to(dtype)
    own = torch.randn(ROWS, sum(SLICES), generator=draw).to(dtype)
    ours = own.clone()
    numbers = tuple((rows + 1).tolist())
    wrapper = PunicaWrapperCPU(ROWS, ROWS, "cpu")
    index_to_id = [*range(1, len(RANKS) + 1), None]
    wrapper.update_metadata(LoRAMapping(numbers, numbers, is_prefill=prefill), index_to_id, slots + 1, 1)
    wrapper.add_lora_linear(own, x, stacked_a, stacked_b, 1.0, SLICES)
    add_layer_lora(ours, x, layer, LayerBatch.build(rows.numpy().astype(np.int32)))
    return ((ours.double() - own.double()).abs().max() / own.double().abs().max()).item()
