"""A plan in numbers: what the record of a step (`policies.times.step_record`) says before the step runs."""

from __future__ import annotations

from collections import abc

from motet.policies.step.batch_state import Sequence, pairs
from motet.policies.times.step_record import Step


def count_plan(step: Step, decodes: abc.Sequence[Sequence], prefills: abc.Sequence[Sequence], *, adapters: bool = True) -> None:
    """Fill in what a plan says before it runs: everything except time, context, sampled sequences and cold rows.

    `adapters`: also fill in `distinct_adapters` and `adapter_bytes`; otherwise both stay 0.
    """
    if decodes:
        ranks = [seq.rank for seq in decodes]
        step.decode_rows, step.decode_rank_sum, step.decode_max_rank = len(ranks), sum(ranks), max(ranks)
        step.row_rank_sum = step.decode_rank_sum
    if prefills:
        ranks = [seq.rank for seq in prefills]
        step.prefill_requests, step.prefill_rank_sum, step.prefill_max_rank = len(ranks), sum(ranks), max(ranks)
        step.prefill_tokens = sum([seq.scheduled for seq in prefills])
        step.row_rank_sum += sum([seq.rank * seq.scheduled for seq in prefills])
        step.prefill_pairs = sum([pairs(seq.computed, seq.scheduled) for seq in prefills])
    if adapters:
        slots = {seq.slot: seq.adapter_bytes for seq in decodes}
        slots.update([(seq.slot, seq.adapter_bytes) for seq in prefills])
        slots.pop(-1, None)
        step.distinct_adapters, step.adapter_bytes = len(slots), sum(slots.values())
