"""What the options that say `auto` stand for on this worker: settled at the start, from its device, weights and cores."""

from __future__ import annotations

import os

from msgspec.structs import replace

from motet.services.worker.config import WorkerConfig

ASSIST_MOST = 4
"""CPU LoRA processes of `--assist-processes auto`."""
SERVICE_CORES = 4
"""Cores that a worker on a GPU keeps for itself: engine, event loop, loader, and NATS or a gateway beside it."""


def settled(config: WorkerConfig, *, device: str, quantization: str, shares_memory: bool) -> WorkerConfig:
    """The configuration with `auto` replaced where the start decides. Merging stays `auto` where it is possible.

    `quantization`: of the base's weights. `shares_memory`: KV blocks and adapters share the device's memory.
    """
    changed = config
    if config.adapters.merge == "auto" and (quantization != "none" or not shares_memory):
        changed = replace(changed, adapters=replace(config.adapters, merge="off"))
    if config.cold.assist_processes == "auto":
        processes = 0 if device == "cpu" else spare_processes(len(os.sched_getaffinity(0)))
        changed = replace(changed, cold=replace(config.cold, assist_processes=processes))
    return changed


def spare_processes(cores: int) -> int:
    """How many CPU LoRA processes a worker on a GPU has with so many cores."""
    return max(0, min(ASSIST_MOST, cores - SERVICE_CORES))
