"""Steps with prompts as CUDA graphs: those of up to 512 rows, which take longer to launch than to compute.

    step (numpy) --padded to its bucket--> buffers that never move --replay--> hidden states --lm_head--> logits

As for decode steps (decode_graphs.py), with these differences:

- A bucket is (rows, blocks of context, plan of the LoRA kernels); any sequences that have together that many rows fit. Padding
  rows are token 0 of the base model. They write the scratch block, belong to no sequence and attend to nothing.
- The graph ends before the logits, because a step wants those of few rows, which differ from step to step.
- Those of short contexts are captured at start. Another is captured when its bucket has been needed `after` times before,
  because that takes as long as several steps, and there are at most MOST.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from motet.kernels import AttentionBatch, KvCache, LoraPool, lora_plan, lora_plans
from motet.kernels.to_device import send
from motet.services.worker.native.decode_graphs import (
    LEAST_COLUMNS,
    GraphMemory,
    StepBuffers,
    captured,
    columns_for,
    without_rows,
)
from motet.services.worker.native.model import Model
from motet.services.worker.native.step_batch import StepBatch
from motet.shared.clock import now_s

ROWS = (64, 128, 256, 384, 512)
AFTER, MOST = 2, 24


class Bucket(NamedTuple):
    """What the steps of a graph have in common."""

    rows: int
    columns: int  # blocks of the longest context
    plan: str | None  # of the LoRA kernels; None without adapters


def bucket_for(rows: int, blocks: int, plan: str | None) -> Bucket | None:
    """The smallest bucket for `rows` rows of sequences of up to `blocks` blocks; None for too many rows."""
    fitting = next((size for size in ROWS if size >= rows), None)
    return None if fitting is None else Bucket(fitting, columns_for(blocks), plan)


class PromptBuffers(StepBuffers):
    """The inputs of one bucket at fixed addresses, and the layers over them.

    The cache's library must support it (`graphs_prompts`).
    """

    def __init__(self, bucket: Bucket, model: Model, cache: KvCache, pool: LoraPool, scratch_block: int) -> None:
        adapted = bucket.plan is not None
        super().__init__(bucket.rows, model, cache, pool, scratch_block, adapted=adapted, plan=bucket.plan)
        sizes = {"rows": bucket.rows, "columns": bucket.columns}
        self._attention = AttentionBatch.reserve(cache, windows=model.config.windows, prompts=True, **sizes)

    def fill(self, batch: StepBatch) -> None:
        """Copy the inputs of a step into the buffers."""
        self._fill_rows(batch)
        self._attention.update(
            self._cache,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            kv_slots=self._padded(batch.kv_slots, self._scratch_slot),
            seq_starts=batch.seq_starts,
        )

    def run(self) -> torch.Tensor:
        """What `Model.hidden` returns, of every row of the bucket.

        The kernels launched do not depend on the buffers' content.
        """
        return self._model.hidden(self._token_ids, self._positions, self._cache, self._attention, self._pool, self._lora)


class PromptGraphs:
    """The graphs of one model on one GPU. They use the memory of its decode graphs."""

    capture = staticmethod(captured)  # replaced where there are no graphs

    def __init__(self, model: Model, cache: KvCache, pool: LoraPool, *, scratch_block: int, memory: GraphMemory) -> None:
        self._model, self._cache, self._pool, self._scratch_block = model, cache, pool, scratch_block
        self._memory = memory
        self._needed: dict[Bucket, int] = {}
        self.after = AFTER
        self.captured: dict[Bucket, tuple[PromptBuffers, torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def prepare(self) -> None:
        """Capture what short contexts need, while the cache's scratch block is the only one that may be written."""
        if not self._possible:
            return
        for rows in reversed(ROWS):  # the others fit in the memory of the largest
            for plan in (None, *lora_plans(self._pool)):
                bucket = Bucket(rows, LEAST_COLUMNS, plan)
                self.captured[bucket] = self._capture(bucket, without_rows())

    def launch_s(self) -> float:
        """How long the host takes to launch the least step with adapters kernel by kernel; 0 without graphs."""
        adapted = [one for bucket, (one, *_) in self.captured.items() if bucket.plan is not None]
        if not adapted:
            return 0.0
        adapted[-1].run()  # the first may allocate
        began_s = now_s()
        adapted[-1].run()
        return now_s() - began_s

    @property
    def _possible(self) -> bool:
        return self._cache.library is not None and self._cache.library.graphs_prompts

    def forward(self, batch: StepBatch) -> torch.Tensor | None:
        """The wanted logits. None when the step has no graph: it has too many rows, is merged, or is one of the first."""
        if batch.merged or not self._possible:
            return None
        blocks = -(-int(batch.context_lens.max()) // self._cache.block_size)
        plan = lora_plan(self._pool, batch.row_slot) if (batch.row_slot >= 0).any() else None
        bucket = bucket_for(len(batch.token_ids), blocks, plan)
        if bucket is None or not self._wanted(bucket):
            return None
        if bucket not in self.captured:
            self.captured[bucket] = self._capture(bucket, batch)
        buffers, graph, hidden = self.captured[bucket]
        buffers.fill(batch)
        graph.replay()
        return self._model.logits(hidden, send(batch.logit_rows, hidden.device))

    def _wanted(self, bucket: Bucket) -> bool:
        needed = self._needed[bucket] = self._needed.get(bucket, 0) + 1
        return bucket in self.captured or (needed > self.after and len(self.captured) < MOST)

    def _capture(self, bucket: Bucket, batch: StepBatch) -> tuple[PromptBuffers, torch.cuda.CUDAGraph, torch.Tensor]:
        buffers = PromptBuffers(bucket, self._model, self._cache, self._pool, self._scratch_block)
        buffers.fill(batch)
        return buffers, *self.capture(buffers.run, self._memory)
