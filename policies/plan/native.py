"""A native worker's settings for the law: how it can divide its memory into KV blocks and adapters."""

from __future__ import annotations

import numpy as np

from motet.policies.plan.capacity import Settings, StepLaw
from motet.shared.model import WorkerLimits
from motet.shared.worker_options import WorkerOptions

ADAPTER_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Shares of the memory of KV blocks and adapters that adapters may get, beside the profile's own division."""


def native_settings(limits: WorkerLimits, options: WorkerOptions, steps: StepLaw) -> Settings:
    """The profile's own division first, then others where it is known how many bytes a KV token takes.

    Slots cost a native worker nothing, so only bytes limit the adapters on the device. A block of headroom stays free for each
    running request (`policies.step.batch_admission`).
    """
    adapter_bytes = [float(limits.adapter_bytes_total)]
    kv_tokens = [float(limits.kv_blocks_total * limits.block_size)]
    if token := token_bytes(limits):
        both = adapter_bytes[0] + kv_tokens[0] * token
        adapter_bytes += [share * both for share in ADAPTER_SHARES]
        kv_tokens += [(1.0 - share) * both / token for share in ADAPTER_SHARES]
    return Settings(
        steps=steps,
        slots=np.full(len(kv_tokens), np.inf),
        adapter_bytes=np.array(adapter_bytes),
        max_rank=np.full(len(kv_tokens), float(limits.max_lora_rank)),
        kv_tokens=np.array(kv_tokens),
        seats=limits.max_running,
        step_tokens=options.max_step_tokens,
        block_tokens=limits.block_size,
        headroom_tokens=limits.block_size,
    )


def token_bytes(limits: WorkerLimits) -> float:
    """The KV bytes of a token; 0 where the worker does not say."""
    return limits.kv_block_bytes / limits.block_size or float(limits.kv_token_bytes)
