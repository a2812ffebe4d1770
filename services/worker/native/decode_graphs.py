"""Decode steps as CUDA graphs: one launch instead of hundreds.

    step (numpy) --padded to its bucket--> buffers that never move --replay--> logits

A graph is captured for a bucket (sequences, blocks of context), and serves every step that fits. Those of contexts of up to
`PREPARED` columns are captured at start, because a capture stops all requests for as long as a dozen steps; others when a step
first needs them. Steps without any adapter have separate graphs, without LoRA. So do merged steps, because their weights have
other addresses; these graphs are dropped with the merged copy. Everything that differs between the steps of a graph (tokens,
tables, adapters, amount of work) is in the buffers. A padding row is token 0 of the base model; it writes and reads the scratch
block, which no sequence uses. All graphs have their logits in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from motet.kernels import AttentionBatch, KvCache, LoraBatch, LoraPool
from motet.kernels.to_device import fill, send
from motet.services.worker.native.model import Model
from motet.services.worker.native.step_batch import StepBatch

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_COLUMNS, NEXT_COLUMNS = 64, 4  # the next bucket has so many times as many; what lies past a context is never read
LEAST_GATHERED, NEXT_GATHERED = 16, 2  # the same without a library, where a step gathers all columns
PREPARED = (64, 256)  # columns of the graphs that are captured at start: 1,024 and 4,096 tokens in blocks of 16

GraphSize = tuple[int, int]
GraphMemory = Any  # what torch.cuda.graph_pool_handle returns


def columns_for(blocks: int, least: int = LEAST_COLUMNS, factor: int = NEXT_COLUMNS) -> int:
    """The smallest number of columns for contexts of up to `blocks` blocks."""
    columns = least
    while columns < blocks:
        columns *= factor
    return columns


def bucket_for(rows: int, blocks: int, most_gathered: int | None) -> GraphSize | None:
    """The smallest bucket for `rows` sequences of up to `blocks` blocks; None when there are too many.

    `most_gathered`: blocks that a step may gather; None where a library reads blocks where they are.
    """
    fitting = next((size for size in ROWS if size >= rows), None)
    if fitting is None or most_gathered is None:
        return None if fitting is None else (fitting, columns_for(blocks))
    columns = columns_for(blocks, LEAST_GATHERED, NEXT_GATHERED)
    return None if fitting * columns > most_gathered else (fitting, columns)


def captured(run: Callable[[], torch.Tensor], memory: GraphMemory) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `run` in the graphs' memory, and its result, which every replay replaces."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled and libraries initialised outside the capture
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):  # adapters go on being copied
        result = run()
    return graph, result


class StepBuffers:
    """Tokens, positions and adapters of the rows of a step, padded, at fixed addresses.

    `plan` is that of the LoRA kernels. Without `adapted` no row may use an adapter.
    """

    def __init__(
        self, rows: int, model: Model, cache: KvCache, pool: LoraPool, scratch_block: int, *, adapted: bool, plan: str | None
    ) -> None:
        self._rows, self._model, self._cache, self._pool = rows, model, cache, pool
        self._scratch_block = scratch_block
        self._scratch_slot = (scratch_block + 1) * cache.block_size - 1  # the last: its block never needs clearing
        self._inputs = torch.zeros((2, rows), dtype=torch.int64, device=cache.data.device)
        self._token_ids, self._positions = self._inputs
        self._row_slot = np.full(rows, -1, dtype=np.int32)
        self._adapted = adapted
        self._lora = LoraBatch.reserve(pool, rows, plan) if adapted else LoraBatch.build(pool, self._row_slot)

    def _fill_rows(self, batch: StepBatch) -> None:
        rows = len(batch.token_ids)
        inputs = np.zeros((2, self._rows), dtype=np.int64)
        inputs[0, :rows], inputs[1, :rows] = batch.token_ids, batch.positions
        fill(self._inputs, inputs)
        row_slot = self._padded(batch.row_slot, -1)
        if not self._adapted:
            assert (row_slot < 0).all(), "a graph without LoRA"
        elif self._lora.version != self._pool.version or not np.array_equal(row_slot, self._row_slot):
            self._lora.update(self._pool, row_slot)
            self._row_slot = row_slot

    def _padded(self, array: np.ndarray, value: int) -> np.ndarray:
        padded = np.full(self._rows, value, dtype=array.dtype)
        padded[: len(array)] = array
        return padded


class DecodeBuffers(StepBuffers):
    """The inputs of one bucket at fixed addresses, and the forward pass over them."""

    def __init__(
        self, bucket: GraphSize, model: Model, cache: KvCache, pool: LoraPool, scratch_block: int, *, adapted: bool = True
    ) -> None:
        rows, columns = bucket
        super().__init__(rows, model, cache, pool, scratch_block, adapted=adapted, plan=None)
        self._attention = AttentionBatch.reserve(cache, rows=rows, columns=columns, windows=model.config.windows)

    def fill(self, batch: StepBatch) -> None:
        """Copy the inputs of a step into the buffers: one row for each sequence, at most as many as the bucket has."""
        self._fill_rows(batch)
        tables = np.full((self._rows, batch.block_tables.shape[1]), self._scratch_block, dtype=np.int32)
        tables[: len(batch.block_tables)] = batch.block_tables
        self._attention.update(
            self._cache,
            context_lens=self._padded(batch.context_lens, 1),
            block_tables=tables,
            kv_slots=self._padded(batch.kv_slots, self._scratch_slot),
        )

    def run(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of every row, in the first rows of `logits`, float32 [rows of the bucket or more, vocab].

        The kernels launched do not depend on the buffers' content.
        """
        hidden = self._model.hidden(self._token_ids, self._positions, self._cache, self._attention, self._pool, self._lora)
        return self._model.all_logits(hidden, logits[: self._rows])


class DecodeGraphs:
    """The graphs of one model and its merged copy on one GPU.

    `memory` is for the results of graphs, which never run at the same time and so share it. `most_rows`: sequences of a step,
    at most.
    """

    capture = staticmethod(captured)  # replaced where there are no graphs

    def __init__(
        self, cache: KvCache, pool: LoraPool, *, scratch_block: int, memory: GraphMemory, most_rows: int = ROWS[-1]
    ) -> None:
        self._cache, self._pool, self.scratch_block, self.memory = cache, pool, scratch_block, memory
        self._sizes = [size for size in ROWS if size < most_rows] + [size for size in ROWS if size >= most_rows][:1]
        self._logits: torch.Tensor | None = None
        self.captured: dict[tuple[GraphSize, bool, bool], tuple[DecodeBuffers, torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def prepare(self, model: Model) -> None:
        """Capture what steps need in contexts of some length, while the scratch block is the only one that may be written.

        Nothing where steps gather their contexts.
        """
        if self._cache.library is None:
            return
        most = columns_for(-(-model.config.max_model_len // self._cache.block_size))
        for columns in (some for some in PREPARED if some <= most):
            for rows in reversed(self._sizes):  # the others fit in the memory of the largest
                for adapted in (True, False):
                    bucket = rows, columns
                    self.captured[bucket, adapted, False] = self._capture(bucket, adapted, without_rows(), model)

    def forget_merged(self) -> None:
        """Drop the graphs that read the merged copy of the weights, because its memory is about to be freed."""
        self.captured = {key: captured for key, captured in self.captured.items() if not key[2]}

    def forward(self, batch: StepBatch, model: Model) -> torch.Tensor | None:
        """The wanted logits by `model`, which is the merged one for a merged batch. They are valid until the next call.

        None when the step does more than decode or fits no bucket.
        """
        rows = len(batch.token_ids)
        if rows != len(batch.context_lens):
            return None
        blocks = -(-int(batch.context_lens.max()) // self._cache.block_size)
        bucket = bucket_for(rows, blocks, self._cache.tile_blocks if self._cache.library is None else None)
        if bucket is None:
            return None
        key = bucket, bool((batch.row_slot >= 0).any()), batch.merged
        if key not in self.captured:
            self.captured[key] = self._capture(bucket, key[1], batch, model)
        buffers, graph, logits = self.captured[key]
        buffers.fill(batch)
        graph.replay()
        if np.array_equal(batch.logit_rows, np.arange(rows)):  # what decoding wants
            return logits[:rows]
        return logits[send(batch.logit_rows, logits.device)]

    def _capture(
        self, bucket: GraphSize, adapted: bool, batch: StepBatch, model: Model
    ) -> tuple[DecodeBuffers, torch.cuda.CUDAGraph, torch.Tensor]:
        buffers = DecodeBuffers(bucket, model, self._cache, self._pool, self.scratch_block, adapted=adapted)
        buffers.fill(batch)
        if self._logits is None:
            shape = (self._sizes[-1], model.config.vocab_size)
            self._logits = torch.empty(shape, dtype=torch.float32, device=self._cache.data.device)
        return buffers, *self.capture(partial(buffers.run, self._logits), self.memory)


def without_rows() -> StepBatch:
    """A step of no sequence: what graphs are captured with."""
    longs, ints = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    return StepBatch(
        token_ids=longs,
        positions=longs,
        row_slot=ints,
        seq_starts=np.zeros(1, dtype=np.int32),
        context_lens=ints,
        block_tables=np.zeros((0, 1), dtype=np.int32),
        kv_slots=longs,
        logit_rows=longs,
    )
