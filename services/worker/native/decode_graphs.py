"""Decode steps as CUDA graphs: one launch instead of hundreds.

    step (numpy) --padded to its bucket--> buffers that never move --replay--> logits

A graph is captured for a bucket (sequences, blocks of context) when a step first needs it, and serves every later step that
fits. Steps without any adapter have separate graphs, without LoRA. So do merged steps, because their weights have other
addresses; these graphs are dropped with the merged copy. Everything that differs between the steps of a graph (tokens, tables,
adapters, amount of work) is in the buffers. A padding row is token 0 of the base model; it writes and reads the scratch block,
which no sequence uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from motet.kernels import AttentionBatch, KvCache, LoraBatch, LoraPool
from motet.kernels.to_device import fill, send
from motet.services.worker.native.model import Model
from motet.services.worker.native.step_batch import StepBatch

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_COLUMNS = 16

GraphSize = tuple[int, int]
GraphMemory = Any  # what torch.cuda.graph_pool_handle returns


def bucket_for(rows: int, blocks: int, most_blocks: int) -> GraphSize | None:
    """The smallest bucket for `rows` sequences of up to `blocks` blocks; None when it would gather over `most_blocks`."""
    columns = max(LEAST_COLUMNS, 1 << (blocks - 1).bit_length())
    fitting = next((size for size in ROWS if size >= rows), None)
    return None if fitting is None or fitting * columns > most_blocks else (fitting, columns)


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
        self._every_row = torch.arange(rows, device=cache.data.device)
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

    def run(self) -> torch.Tensor:
        """Logits of every row, float32 [rows of the bucket, vocab].

        The kernels launched do not depend on the buffers' content.
        """
        return self._model.forward(
            self._token_ids, self._positions, self._every_row, self._cache, self._attention, self._pool, self._lora
        )


class DecodeGraphs:
    """The graphs of one model and its merged copy on one GPU.

    `memory` is for the results of graphs, which never run at the same time and so share it.
    """

    capture = staticmethod(captured)  # replaced where there are no graphs

    def __init__(self, cache: KvCache, pool: LoraPool, *, scratch_block: int, memory: GraphMemory) -> None:
        self._cache, self._pool, self.scratch_block, self.memory = cache, pool, scratch_block, memory
        self.captured: dict[tuple[GraphSize, bool, bool], tuple[DecodeBuffers, torch.cuda.CUDAGraph, torch.Tensor]] = {}

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
        gathers = self._cache.library is None  # a library reads blocks where they are
        bucket = bucket_for(rows, blocks, self._cache.tile_blocks if gathers else ROWS[-1] * self._cache.null_block)
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
        return buffers, *self.capture(buffers.run, self.memory)
