"""Promise: a step's record says how many rows, ranks, tokens and adapters its plan has."""

from __future__ import annotations

from array import array

from motet.policies.step.batch_state import Sequence
from motet.policies.step.plan_numbers import count_plan
from motet.policies.times.step_record import Step


def sequence(rank: int, slot: int, *, computed: int = 0, scheduled: int = 1) -> Sequence:
    seq = Sequence(order=0, tokens=array("i", [1] * 64), rank=rank, adapter_bytes=100 * rank)
    seq.slot, seq.computed, seq.scheduled = slot, computed, scheduled
    return seq


def test_a_step_counts_rows_ranks_tokens_and_each_adapter_once() -> None:
    """Decodes of rank 8, 8 (one adapter) and 0 (the base); prefills of 10 tokens of rank 16 and 4 of rank 8, after 20."""
    decodes = [sequence(8, 0), sequence(8, 0), sequence(0, -1)]
    prefills = [sequence(16, 1, scheduled=10), sequence(8, 0, computed=20, scheduled=4)]
    step = Step()
    count_plan(step, decodes, prefills)
    assert (step.decode_rows, step.decode_rank_sum, step.decode_max_rank) == (3, 16, 8)
    assert (step.prefill_requests, step.prefill_rank_sum, step.prefill_max_rank) == (2, 24, 16)
    assert step.prefill_tokens == 14
    assert step.row_rank_sum == 16 + 10 * 16 + 4 * 8
    assert step.prefill_pairs == (10 * 11 / 2) + (21 + 22 + 23 + 24), "each token attends to those before it and to itself"
    assert (step.distinct_adapters, step.adapter_bytes) == (2, 800 + 1600)
    without = Step()
    count_plan(without, decodes, prefills, adapters=False)
    assert (without.distinct_adapters, without.adapter_bytes) == (0, 0) and without.decode_rows == 3


def test_an_empty_step_counts_nothing() -> None:
    step = Step()
    count_plan(step, [], [])
    assert step == Step()
