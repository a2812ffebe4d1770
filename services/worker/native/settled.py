"""What the options that say `auto` stand for on this worker: settled at the start, from its device, weights and cores."""

from __future__ import annotations

import os

from msgspec.structs import replace

from motet.services.worker.config import WorkerConfig
from motet.shared.model import Mechanism

ASSIST_MOST = 4
"""CPU LoRA processes of `--assist-processes auto`."""
SERVICE_CORES = 4
"""Cores that a worker on a GPU keeps for itself: engine, event loop, loader, and NATS or a gateway beside it."""


def settled(
    config: WorkerConfig, *, device: str, quantization: str, shares_memory: bool
) -> tuple[WorkerConfig, dict[str, Mechanism]]:
    """The configuration with `auto` replaced where the start decides, and what was decided, by mechanism.

    Merging stays `auto` where it is possible. `quantization`: of the base's weights. `shares_memory`: KV blocks and adapters
    share the device's memory.
    """
    decided: dict[str, Mechanism] = {}
    if config.adapters.merge == "auto" and (why := _no_merging(device, quantization, shares_memory=shares_memory)):
        decided["merge"] = Mechanism("off", why)
        config = replace(config, adapters=replace(config.adapters, merge="off"))
    if config.cold.assist_processes == "auto":
        processes = 0 if device == "cpu" else spare_processes(len(os.sched_getaffinity(0)))
        why = "the engine uses all cores" if device == "cpu" else f"{processes} of the cores are to spare"
        decided["assist"] = Mechanism("on" if processes else "off", why)
        config = replace(config, cold=replace(config.cold, assist_processes=processes))
    return config, decided


def spare_processes(cores: int) -> int:
    """How many CPU LoRA processes a worker on a GPU has with so many cores."""
    return max(0, min(ASSIST_MOST, cores - SERVICE_CORES))


def _no_merging(device: str, quantization: str, *, shares_memory: bool) -> str:
    """Why no adapter is merged here; "" if one may be."""
    if device != "cpu":
        return "not measured on a GPU yet"
    if quantization != "none":
        return f"the weights are {quantization}"
    return "" if shares_memory else "device memory is fixed"
