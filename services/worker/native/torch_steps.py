"""Steps of the torch model. They are enqueued on the device and complete when their logits are read.

decode alone                      a CUDA graph
prompts of few tokens             a CUDA graph, too; with longer contexts only from the third step of a size on
some adapters are being copied    with CPU LoRA processes and copies beside it (kernels/device), until all of it is computed
all other steps                   launch by launch
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import numpy as np
import torch

from motet.kernels import AttentionBatch, KvCache, LoraBatch, LoraPool
from motet.kernels.cpu.assist import AssistCounts, Helpers
from motet.kernels.device import AssistedStep, DeviceAssist, DeviceLoader, Mark
from motet.kernels.to_device import send
from motet.services.worker.native.assist_processes import CpuAssist
from motet.services.worker.native.decode_graphs import DecodeGraphs
from motet.services.worker.native.merged_model import MergedModel
from motet.services.worker.native.model import Model
from motet.services.worker.native.prompt_graphs import PromptGraphs
from motet.services.worker.native.step_batch import StepBatch, arranged
from motet.shared.clock import now_s
from motet.shared.telemetry import logger

STANDSTILL_S = 2.5  # twice this without a layer: copies of adapters, and the step that waits for them, stand still
_log = logger(__name__)


class TorchSteps:
    """The `runner.Steps` of a model over a KV cache and an adapter pool, all on one device.

    `graphs` and `prompts` are None without CUDA graphs; `beside` and `loader` are None where steps wait for copies;
    `processes` is None without CPU LoRA processes; `merged` is set where adapters can be merged.
    """

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        pool: LoraPool,
        *,
        graphs: DecodeGraphs | None,
        prompts: PromptGraphs | None,
        beside: DeviceAssist | None,
        loader: DeviceLoader | None,
        processes: CpuAssist | None,
    ) -> None:
        self.model, self._cache, self._pool = model, cache, pool
        self.merged: MergedModel | None = None
        self.graphs, self.prompts = graphs, prompts
        self._beside, self._loader, self._processes = beside, loader, processes
        self._lora_rows = np.empty(0, dtype=np.int32)
        self._lora_batch = LoraBatch.build(pool, self._lora_rows)
        self.launch_s = 0.0
        self._timed: tuple[int, Mark, Mark] | None = None  # the last step without adapters on their way: rows, begin, end

    @property
    def assisted(self) -> AssistCounts:
        return self._beside.counts if self._beside is not None else AssistCounts()

    def __call__(self, batch: StepBatch, helpers: Helpers | None) -> torch.Tensor:
        if helpers is not None:
            return self._assisted(arranged(batch), helpers)
        logits = self.graphs.forward(batch, self._model_of(batch)) if self.graphs is not None else None
        if logits is not None:
            return logits
        if self._processes is None or self._beside is None:
            return self._with_prompts(batch)
        steps = self._beside.streams.steps
        began = steps.mark()
        logits = self._with_prompts(batch)
        self._observe(self._processes, len(batch.token_ids), began, steps.mark())
        return logits

    def prepare(self) -> None:
        """Capture the graphs that the first steps would otherwise wait for."""
        began_s, counts = now_s(), dict[str, float]()
        if self.graphs is not None:
            self.graphs.prepare(self.model)
            counts["decode"] = len(self.graphs.captured)
        if self.prompts is not None:
            self.prompts.prepare()
            self.launch_s = self.prompts.launch_s()
            counts["prompts"] = len(self.prompts.captured)
        if counts:
            _log.info("CUDA graphs are captured", extra=counts | {"seconds": round(now_s() - began_s, 1)})

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()

    def _model_of(self, batch: StepBatch) -> Model:
        """The model of the step: the merged one or the base."""
        if not batch.merged:
            return self.model
        assert self.merged is not None and self.merged.whole, "a merged step needs a whole copy"
        return self.merged.model

    def _with_prompts(self, batch: StepBatch) -> torch.Tensor:
        logits = self.prompts.forward(batch) if self.prompts is not None else None
        if logits is not None:
            return logits
        batch = arranged(batch)
        return self._enqueue(batch, self._lora(batch.row_slot))

    def _assisted(self, batch: StepBatch, helpers: Helpers) -> torch.Tensor:
        """Run a step with CPU processes. If one fails or is late, the step runs again and waits for the copies instead.

        Copies can stand still too: a driver call of this thread may wait until the device is idle, and the loader then waits
        for the driver. Such copies are abandoned, and made again before the step is repeated.
        """
        assert self._beside is not None and self._loader is not None, "only a DeviceLoader has adapters on their way"
        processes, step = self._processes, self._beside.begin(batch.row_slot, helpers)
        watch = _CopyWatch(self._pool, self._loader, [one.slot for one in helpers.loading])
        with processes.guard(step.channels, step.hardest) if processes is not None else nullcontext():
            try:
                logits = self._enqueue(batch, step)
            finally:
                self._beside.streams.steps.mark().synchronize()
                gave_up = watch.end()
                good = step.finish() and not gave_up
        self._loader.mend(batch.row_slot)
        if processes is not None:
            processes.observe(len(batch.token_ids), 0.0, helpers)
        return logits if good else self._enqueue(batch, self._beside.begin(batch.row_slot, Helpers(helpers.loading)))

    def _enqueue(self, batch: StepBatch, lora: LoraBatch | AssistedStep) -> torch.Tensor:
        attention = AttentionBatch.build(
            self._cache,
            seq_starts=batch.seq_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            kv_slots=batch.kv_slots,
            windows=self.model.config.windows,
        )
        return self._model_of(batch).forward(
            self._to_device(batch.token_ids),
            self._to_device(batch.positions),
            self._to_device(batch.logit_rows),
            self._cache,
            attention,
            self._pool,
            lora,
        )

    def _observe(self, processes: CpuAssist, rows: int, began: Mark, ended: Mark) -> None:
        """Take in the duration of the step before this one, which is over by now."""
        last, self._timed = self._timed, (rows, began, ended)
        if last is not None:
            took_s = last[2].seconds_since(last[1])
            if took_s is not None:
                processes.observe(last[0], took_s, None)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return send(array, self._cache.data.device)

    def _lora(self, row_slot: np.ndarray) -> LoraBatch:
        """The adapter groups of the step. Steady decoding repeats those of the previous step."""
        if self._lora_batch.version != self._pool.version or not np.array_equal(row_slot, self._lora_rows):
            self._lora_batch = LoraBatch.build(self._pool, row_slot)
            self._lora_rows = row_slot.copy()
        return self._lora_batch


class _CopyWatch:
    """Abandons the copies of a step when no layer of any has arrived for `STANDSTILL_S`."""

    def __init__(self, pool: LoraPool, loader: DeviceLoader, slots: list[int]) -> None:
        self._pool, self._loader, self._slots = pool, loader, slots
        self._over, self._gave_up = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="copy-watch", daemon=True)
        self._thread.start()

    def end(self) -> bool:
        """The step is over. Returns whether its copies were abandoned."""
        self._over.set()
        self._thread.join()
        return self._gave_up

    def _run(self) -> None:
        seen = -1
        while not self._over.wait(STANDSTILL_S):
            there = int(self._pool.loaded_layers.sum())
            if there == seen:
                _log.warning("copies of adapters stand still, they are made again")
                self._gave_up = True
                self._loader.give_up(self._slots)
                return
            seen = there
