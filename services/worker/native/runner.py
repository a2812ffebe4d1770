"""The common part of Motet's own backends: an adapter pool with a loader, the steps, and CPU LoRA processes.

    begin_load ──> LoraPool.reserve ──> Loader            beside the steps, or complete at once
    forward    ──> Steps(batch, helpers)                  helpers: for adapters of the step that are still being copied

`backends/` puts the parts together. One thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from motet.kernels import LoraPool, PackedLora
from motet.kernels.cpu.assist import AssistCounts, Helpers, loading_of
from motet.kernels.link import LinkState
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import ModelConfig
from motet.services.worker.native.assist_processes import CpuAssist
from motet.services.worker.native.cores import on_cores
from motet.services.worker.native.device_memory import DeviceMemory
from motet.services.worker.native.merging import MergedWeights
from motet.services.worker.native.step_batch import StepBatch


class Steps(Protocol):
    """Runs the model over a KV cache and an adapter pool."""

    @property
    def assisted(self) -> AssistCounts:
        """The rows of unfinished adapters so far, by where they were computed."""

    @property
    def launch_s(self) -> float:
        """As `Backend.launch_s`."""

    def __call__(self, batch: StepBatch, helpers: Helpers | None) -> torch.Tensor:
        """Logits of `batch.logit_rows`, float32 [n, vocab], valid until the next call; fills the cache.

        `helpers` must have the slots of all rows whose adapter is not completely loaded.
        """

    def prepare(self) -> None:
        """Do what later steps would otherwise wait for."""

    def close(self) -> None:
        """Release everything. No step may follow."""


class Loader(Protocol):
    """Copies adapters into reserved slots of a pool."""

    @property
    def under_way(self) -> Mapping[int, Any]:
        """{slot: source} of loads that `finished` has not returned yet."""

    @property
    def link(self) -> LinkState:
        """The present state of the link."""

    def begin(self, slot: int, source: PackedLora, kept: Any) -> None:
        """Copy an adapter of the pool's type. `kept` is referenced until the load is finished or cancelled."""

    def cancel(self, slot: int) -> None:
        """Stop the load of this slot, if there is one: nothing more is written."""

    def finished(self) -> list[Any]:
        """The sources of completed loads, each returned once."""

    def mend(self, row_slot: np.ndarray) -> None:
        """Copy the adapters of these rows whose loads have failed. Called before a step reads them."""

    def bytes_ahead(self, slot: int) -> int:
        """Bytes to copy until this slot is complete, including the loads before it."""

    def close(self) -> None:
        """End the copying."""


class LoadsBetweenSteps:
    """A loader whose loads are complete when `begin` returns."""

    under_way: Mapping[int, Any] = {}
    link = LinkState(0, 0, 0.0, math.inf)

    def __init__(self, pool: LoraPool) -> None:
        self._pool = pool

    @torch.inference_mode()
    def begin(self, slot: int, source: PackedLora, kept: Any) -> None:
        """Copy the adapter before returning. `kept` is not needed."""
        self._pool.fill(slot, source)

    def cancel(self, slot: int) -> None:
        """Does nothing: no load is under way."""

    def finished(self) -> list[Any]:
        """Nothing: `begin` has completed each load."""
        return []

    def mend(self, row_slot: np.ndarray) -> None:
        """Does nothing: a load that fails raises in `begin`."""

    def bytes_ahead(self, slot: int) -> int:
        """Always 0: no load is under way."""
        return 0

    def close(self) -> None:
        """Does nothing: no thread runs."""


@dataclass(kw_only=True)
class ModelRunner:
    """A loaded model: a `Backend` made of these parts. `Backend` describes its methods."""

    memory: DeviceMemory
    steps: Steps
    loader: Loader
    numerics: str
    assist: CpuAssist | None = None
    assist_relief: float = 0.0  # a share of a process's time
    cores: set[int] | None = None  # those of the steps; None for all
    merged: MergedWeights | None = None
    kernels: str = "reference"
    kernels_note: str = ""

    @property
    def config(self) -> ModelConfig:
        return self.memory.config

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, adapters and, unless it is in int8, the KV cache."""
        return self.memory.dtype

    @property
    def pool(self) -> LoraPool:
        """The adapters on the device."""
        return self.memory.pool

    @property
    def kv_block_bytes(self) -> int:
        return self.memory.cache.data[:, 0].nbytes

    @property
    def lora_bytes_total(self) -> int:
        return self.pool.bytes_total

    @property
    def lora_bytes_free(self) -> int:
        """Bytes of adapter memory that are free."""
        return self.pool.bytes_free

    @property
    def elastic(self) -> bool:
        return self.memory.elastic

    def divide(self, kv_blocks: int, lora_bytes: int, moves: Sequence[tuple[int, int]]) -> None:
        self.memory.divide(kv_blocks, lora_bytes, moves)

    @property
    def probe_blocks(self) -> Sequence[int]:
        return self.memory.probe_blocks

    def norms(self, slot: int) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            return self.pool.norms(slot)

    def read_kv(self, blocks: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            return self.memory.cache.copy_out(blocks)

    def write_kv(self, blocks: Sequence[int], content: bytearray) -> None:
        with torch.inference_mode():
            self.memory.cache.copy_in(blocks, content)

    def adapter_bytes(self, weights: HostAdapter) -> int:
        """What this adapter occupies in the pool: whole pages of 8 ranks of each projection it has, over all layers."""
        return self.pool.bytes_needed(weights.ranks)

    def load_adapter(self, slot: int, weights: HostAdapter) -> None:
        """Copy an adapter into an empty slot. Raises kernels.PoolFull when pages are short, ValueError on a taken slot."""
        with torch.inference_mode():
            self.pool.load(slot, weights.packed)

    def begin_load(self, slot: int, weights: HostAdapter) -> None:
        """`load_adapter` beside the steps: its pages are taken now, and `loaded_layers` says how many layers are there.

        The load is complete on return where nothing copies beside the steps (torch on a CPU, unless a link or processes were
        asked for), or when a cast is needed.
        """
        if weights.packed.arena.dtype != self.pool.arena.dtype:
            self.load_adapter(slot, weights)
            return
        self.pool.reserve(slot, weights.packed)
        self.loader.begin(slot, weights.packed, weights)

    def loaded_layers(self, slot: int) -> int:
        return int(self.pool.loaded_layers[slot])

    def bytes_ahead(self, slot: int) -> int:
        return self.loader.bytes_ahead(slot)

    @property
    def link(self) -> LinkState:
        return self.loader.link

    @property
    def launch_s(self) -> float:
        return self.steps.launch_s

    @property
    def assisted(self) -> AssistCounts:
        return self.steps.assisted

    def free_adapter(self, slot: int) -> None:
        self.loader.cancel(slot)
        self.pool.free(slot)

    def close(self) -> None:
        if self.assist is not None:
            self.assist.close()
        self.loader.close()
        self.steps.close()

    @torch.inference_mode()
    def prepare(self) -> None:
        self._on_device()
        self.steps.prepare()

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._on_device()
        helpers = self._helpers(batch)
        with on_cores(self.cores):
            return self.steps(batch, helpers)

    def _on_device(self) -> None:
        if self.memory.device.type == "cuda":
            torch.cuda.set_device(self.memory.device)  # of this thread: streams, graphs and launches take the current one

    def _helpers(self, batch: StepBatch) -> Helpers | None:
        """Helpers for the adapters of this step that are still being copied; None when all are complete."""
        self.loader.mend(batch.row_slot)
        if not self.loader.under_way:
            return None
        self.loader.finished()  # releases the host copies that they were copied from
        named = set(batch.row_slot.tolist())
        loading = [
            loading_of(slot, weights, layerwise=batch.slot_modes.get(slot) != "assist")
            for slot, weights in self.loader.under_way.items()
            if slot in named
        ]
        if not loading:
            return None
        return self.assist.helpers(loading, len(batch.token_ids)) if self.assist is not None else Helpers(loading)
