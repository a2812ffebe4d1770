"""A kernel of vLLM's CPU build, in place of one that does nothing. Only vLLM's environment imports this file.

With speculation, each drafted token is checked with the temperature, top-k and top-p of its request. vLLM spreads these numbers
over the tokens first. On a CPU vLLM 0.32 writes the result into a converted copy and drops that. What it uses is uninitialized
memory: as soon as one request of a batch is sampled, the logits of all are divided by it. So sampled requests have another
temperature, and greedy ones may get any token.
"""

from __future__ import annotations

from typing import Any

import torch
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


def mend() -> None:
    """Use `spread` in this process, whether vLLM has registered its own kernel already or not."""
    if current_platform.is_cpu():
        cpu_triton_utils._expand_kernel_impl = spread
        if SPREAD in dispatcher._registry:
            dispatcher.register_kernels({SPREAD: spread})
