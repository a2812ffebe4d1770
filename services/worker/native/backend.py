"""The interface of a backend, which computes the model: one step's batch in, logits out, and adapters copied to the device.

A backend owns all device memory: base weights, KV cache and adapter pool. The engine decides what their blocks and slots mean.
`backends/` has one file per backend, and `docs/engines.md` says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from motet.kernels.cpu.assist import AssistCounts
from motet.kernels.link import LinkState
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import ModelConfig
from motet.services.worker.native.step_batch import StepBatch

if TYPE_CHECKING:
    from motet.services.worker.native.assist_processes import Capacity
    from motet.services.worker.native.merging import MergedWeights


class BackendMissing(Exception):
    """The backend cannot run on this machine or device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """The options of a backend: model, memory and kernels."""

    model_dir: Path
    dtype: str = "auto"
    """Type of weights, KV cache and adapters: "auto" (the checkpoint's), "float32", "bfloat16" or "float16"."""
    kv_cache_dtype: str = "auto"
    """"int8" keeps keys and values in 8 bits with a scale for each token and head; "auto" is `dtype`."""
    device: str = "cpu"
    load_format: str = "auto"
    """"dummy" makes random weights on the device and reads `config.json` alone."""
    quantization: str = "none"
    """"int8" or "int4" keeps the base's matrices as whole numbers, which are multiplied with activations of 8 bits."""
    packed_weights_dir: str = ""
    """Where compiled kernels keep their packed weights for later starts; "": they pack them at every start."""
    kernels: str = "auto"
    """A name of `backends.BACKENDS`, or "auto": that of the device, unless MOTET_KERNELS names one."""
    threads: int = 0
    """Threads of a step on a CPU; 0 leaves torch's setting."""
    graphs: bool = True
    """False launches a GPU's steps kernel by kernel."""
    block_size: int = 16
    kv_blocks: int
    lora_bytes: int
    max_lora_rank: int
    max_loras: int
    merge: bool = False
    """An adapter may be merged into a copy of the weights (`Backend.merged`)."""
    elastic: bool = False
    """KV blocks and adapters share memory (`Backend.elastic`)."""
    link_bytes_per_s: float = 0.0
    """Emulated rate of adapter copies, 0 for none."""
    assist_cores: Sequence[int] = ()
    """Cores of the CPU LoRA processes, one for each; -1 for any core."""
    loaded: Callable[[float], None] = lambda _: None
    """Called with the share of the base's weights that are in memory, as it grows."""
    assist_rows: int = 512
    """The most rows of a step that a process takes over."""
    max_running: int = 256
    """The most sequences of a step."""
    probe_tokens: int = 0
    """Tokens of the KV blocks that the cache has for probes of adapters (`Backend.probe_blocks`)."""


class Processes(Protocol):
    """CPU processes that compute the LoRA part of adapters that are being copied."""

    @property
    def capacity(self) -> Capacity:
        """The work that the processes can take over at present."""

    @property
    def failures(self) -> Mapping[str, int]:
        """Processes that were replaced so far, by reason."""


class Backend(Protocol):
    """One loaded model. Only the engine's thread calls it, and only `forward` may wait for the device."""

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""

    @property
    def dtype(self) -> torch.dtype:
        """The data type in which host copies of adapters should be."""

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block over all layers."""

    @property
    def lora_bytes_total(self) -> int:
        """Bytes of device memory for adapters. `divide` changes them."""

    @property
    def elastic(self) -> bool:
        """Whether `divide` can be called: KV blocks and adapters have no fixed regions."""

    def divide(self, kv_blocks: int, lora_bytes: int, moves: Sequence[tuple[int, int]]) -> None:
        """Divide the device's memory anew between KV blocks and adapters. Together they may not exceed the initial memory.

        First the content of blocks is copied, (from, to) in order. Afterwards everything in use lies within the new limits.
        """

    @property
    def probe_blocks(self) -> Sequence[int]:
        """KV blocks that no request gets, for probes of adapters; empty without."""

    def norms(self, slot: int) -> dict[str, np.ndarray]:
        """{module: float64 [layers, 2]} of the slot's adapter as it is on the device: norms of A and of scale * B."""

    @property
    def numerics(self) -> str:
        """Names what, besides the model and its type, determines the bytes of K and V.

        Backends with equal values compute the same bytes.
        """

    @property
    def kernels(self) -> str:
        """What computes: the instruction set of compiled kernels, "triton" or "reference" (plain torch)."""

    @property
    def kernels_note(self) -> str:
        """Why it is the reference where compiled kernels were expected, and what to do; else empty."""

    def read_kv(self, blocks: Sequence[int]) -> np.ndarray:
        """A copy of these KV blocks in host memory, uint8 [n * kv_block_bytes]. Call it between steps."""

    def write_kv(self, blocks: Sequence[int], content: bytearray) -> None:
        """Write blocks that another backend of the same numerics, model and type has read. Call it between steps.

        Raises ValueError when the content is not as long as the blocks.
        """

    def adapter_bytes(self, weights: HostAdapter) -> int:
        """Bytes of this adapter on the device."""

    def begin_load(self, slot: int, weights: HostAdapter) -> None:
        """Copy an adapter into an empty slot: beside the steps where that is possible, else before this returns.

        Raises kernels.PoolFull when memory is short, ValueError on a taken slot.
        """

    def loaded_layers(self, slot: int) -> int:
        """How many layers of the slot's adapter are on the device."""

    def bytes_ahead(self, slot: int) -> int:
        """Bytes to copy until the slot's adapter is complete, including the loads before it."""

    def free_adapter(self, slot: int) -> None:
        """Empty a slot, also during a load. No later step may use the slot before its next load."""

    @property
    def link(self) -> LinkState:
        """The link over which adapters reach the device. It is infinitely fast where a load is complete on return."""

    @property
    def assist(self) -> Processes | None:
        """The CPU LoRA processes; None without any."""

    @property
    def assist_relief(self) -> float:
        """The time that a CPU process saves the device, as a share of the process's own time."""

    @property
    def assisted(self) -> AssistCounts:
        """The rows of unfinished adapters so far, by where they were computed."""

    @property
    def merged(self) -> MergedWeights | None:
        """The copy of the weights with an adapter merged, for merged steps (`StepBatch.merged`); None if merging is off."""

    def prepare(self) -> None:
        """Do what later steps would otherwise wait for. No request is there yet."""

    @property
    def launch_s(self) -> float:
        """How long a step takes at least while adapters of it are being copied, because it is launched kernel by kernel.

        0 where it is launched like any other.
        """

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the rows' K and V and return the wanted logits, float32 [n, vocab], in the order of `logit_rows`.

        They are valid until the next call. Raises ValueError when a row names an empty adapter slot.
        """

    def close(self) -> None:
        """End everything that runs beside the steps. No step may follow."""
