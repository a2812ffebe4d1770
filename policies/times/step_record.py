"""One engine step in numbers. The engine reports it, metrics count it, step-time models are fitted to it, and the twin's models
predict its duration.

`services.worker.engines.request.StepStats` and `twin.steps.Batch` are this record with additional fields of the live or the
simulated engine. `policies.step.plan_numbers` fills in what is known before the step runs.
"""

from __future__ import annotations

import msgspec


class Step(msgspec.Struct, kw_only=True):
    """Rows, ranks, context and duration of a step.

    Rank sums and maxima are over its sequences; the base model counts as rank 0.
    """

    time_ms: float = 0.0
    prefill_requests: int = 0
    prefill_tokens: int = 0  # rows of prefill chunks
    prefill_rank_sum: int = 0
    prefill_max_rank: int = 0
    decode_rows: int = 0
    decode_rank_sum: int = 0
    decode_max_rank: int = 0
    row_rank_sum: int = 0  # over rows: a prefill chunk counts once per token
    prefill_pairs: int = 0  # tokens that prefill rows attend to, summed
    distinct_adapters: int = 0
    adapter_bytes: int = 0  # on the device, of the distinct adapters
    context_tokens: int = 0  # in the KV cache after the step, over its sequences
    longest_context: int = 0  # of one sequence
    sampled: int = 0  # sequences that drew a token
    cold_rows: int = 0  # of adapters that were still being copied

    def without_lora(self) -> None:
        """Treat the step as one of the base model, because its adapter is merged."""
        self.prefill_rank_sum = self.prefill_max_rank = self.decode_rank_sum = self.decode_max_rank = 0
        self.row_rank_sum = self.distinct_adapters = self.adapter_bytes = 0
