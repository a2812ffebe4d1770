"""Motet's engine as a contestant of the engine bench: the engine of a worker, without the other services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.engine_child import Generate, serve


def make(setup: dict[str, Any]) -> Generate:
    """A function that answers laps with a warm engine, assembled as in a worker, and the adapters in host memory."""
    from bench.rig.engine import host_adapters, run_engine
    from motet.policies.times.step_times import StepTimes
    from motet.services.worker.config import WorkerConfig
    from motet.services.worker.engines.start_perf import START_PERF
    from motet.services.worker.native.assemble import assemble

    model = Path(setup["model"])
    config = WorkerConfig.of(
        model=setup["model"],
        threads=setup["threads"],
        kv_memory_gib=setup["kv_gib"],
        max_lora_rank=setup["max_rank"],
        max_loras=max(1, len(setup["adapters"])),
        lora_memory_mib=setup["lora_mib"],
        quantization=setup["quantization"],
    )
    assembly = assemble(config, model, StepTimes(START_PERF))
    runner: Any = assembly.engine.runner
    cache = runner.memory.cache
    cache.clear(torch.arange(cache.blocks))  # as llama.cpp does at start: memory that is used first takes the system some time
    adapters = host_adapters(assembly, model, setup["adapters"])

    def generate(prompts: list[list[int]], wanted: list[int], tokens: int) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        chosen = [None if number < 0 else adapters[number] for number in wanted]
        for i, new in run_engine(assembly.engine, prompts, tokens, chosen):
            outputs[i] += new
        return outputs

    return generate


if __name__ == "__main__":
    serve(make)
