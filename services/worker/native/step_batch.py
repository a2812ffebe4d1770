"""One engine step's rows, as the runner gets them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class StepBatch:
    """The rows of one engine step as numpy arrays. Rows of a sequence stand together, in order of position."""

    token_ids: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows]
    row_slot: np.ndarray  # int32 [rows] adapter slot of each row, -1 for the base alone
    seq_starts: np.ndarray  # int32 [seqs + 1] half-open row ranges; a decoding sequence has one row, a prefill chunk several
    context_lens: np.ndarray  # int32 [seqs] tokens in the KV cache once this step's rows are written
    block_tables: np.ndarray  # int32 [seqs, max_blocks] KV block ids; what lies past a sequence's context is not read
    kv_slots: np.ndarray  # int64 [rows] block * block_size + offset: where each row's K and V go
    logit_rows: np.ndarray  # int64 [n] rows whose logits are wanted
    merged: bool = False  # all rows are of the merged adapter, and `row_slot` is -1
    slot_modes: dict[int, str] = field(default_factory=dict)  # "assist" or "layerwise", of slots still being copied


def arranged(batch: StepBatch) -> StepBatch:
    """The same batch with decoding sequences first, ordered by length: attention computes neighbours of one length together."""
    counts = np.diff(batch.seq_starts)
    order = np.lexsort((-batch.context_lens, counts > 1))
    if (order[1:] > order[:-1]).all():
        return batch
    starts = np.concatenate(([0], np.cumsum(counts[order])))
    rows = np.repeat(batch.seq_starts[order] - starts[:-1], counts[order]) + np.arange(starts[-1])
    moved_to = np.empty_like(rows)
    moved_to[rows] = np.arange(len(rows))
    return StepBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        row_slot=batch.row_slot[rows],
        seq_starts=starts,
        context_lens=batch.context_lens[order],
        block_tables=batch.block_tables[order],
        kv_slots=batch.kv_slots[rows],
        logit_rows=moved_to[batch.logit_rows],
        merged=batch.merged,
    )
