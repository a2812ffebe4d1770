"""Replaces two kernels of vLLM 0.32's CPU build: one has no effect, one fails. Only vLLM's environment imports this file.

With speculative decoding, each drafted token is checked with the temperature, top-k and top-p of its request. vLLM first
expands these numbers to one per token. On a CPU its kernel writes the result into a temporary copy, so vLLM then reads
uninitialized memory: as soon as one request of a batch is sampled, the logits of all requests are divided by it. Sampled
requests then have a wrong temperature, and greedy ones may get any token.

The LoRA part of the output layer expects one row for each sequence that draws a token. Log-probabilities of a prompt are
computed for each of its tokens, so with an adapter in the batch such a request ended the core. No adapter of ours changes this
layer.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.utils import cpu_triton_utils

SPREAD = "vllm.v1.sample.rejection_sampler.expand_kernel"


def spread(
    output: torch.Tensor,
    given: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
    max_num_tokens: Any = None,
) -> None:
    """Write each request's number once per token of it; `replace_from` becomes `replace_to`.

    `output`: [tokens]; `given`, `ends`: [requests], where `ends` are the sums of tokens up to each request.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(torch.repeat_interleave(given.masked_fill(given == replace_from, replace_to), counts))


def unchanged(*_: Any, **__: Any) -> None:
    """The LoRA part of the output layer, which adapters do not change."""


def mend() -> None:
    """Use `spread` and `unchanged` in this process, whether or not vLLM has registered its own kernel already."""
    if current_platform.is_cpu():
        PunicaWrapperCPU.add_lora_logits = unchanged
        cpu_triton_utils._expand_kernel_impl = spread
        if SPREAD in dispatcher._registry:
            dispatcher.register_kernels({SPREAD: spread})
