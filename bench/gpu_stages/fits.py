"""Stage 6: errors of performance models: CaraServe's two for kernels, and `motet profile` and the twin for a live worker.

Padded BGMV takes a * rows * largest rank + b, per-token MBGMV a * sum of the rows' ranks + b (CaraServe, section 5, where both
have an R2 of at least 0.96).
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bench import twin_live
from bench.gpu_stages.bed import Bed
from bench.gpu_stages.layers import Layers, batched, make_pool, occupy
from bench.gpu_stages.results import Line, Point
from bench.gpu_stages.shapes import RANKS, projections, write_config
from bench.rig.workers import LiveWorker
from bench.rivals.triton_lora import mbgmv
from bench.watch import Watch
from motet.kernels.triton import LoraBatch
from motet.policies.times.least_squares import not_negative, r_squared
from motet.twin.workload import Workload

MODEL = "Llama-3.1-8B"
BATCHES = 24
LAYERS = 8
POOL_BYTES = 11 << 30
OPTIONS = {"max_running": "64", "max_waiting": "64", "lora_memory_mib": "1024"}
OPTIONS |= {"host_cache_mib": "1024", "disk_cache_mib": "4096"}


class Fits:
    """Stage 6: how well the models of step times fit."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed

    def points(self) -> list[Point]:
        return [
            Point("kernels' models", self._kernels, 150.0),
            Point("profile", self._profile, 200.0),
            Point("twin beside the worker", self._twin, 420.0),
        ]

    def _kernels(self) -> Line:
        """R2 of each model over random batches, and of ours: a * sum of the distinct adapters' ranks + b * rows + c."""
        bed, draw = self._bed, np.random.default_rng(0)
        shapes = projections(bed.pick(MODEL, "tiny"))
        layers = Layers(shapes, bed.pick(LAYERS, 1), bed.device)
        slots = bed.pick(64, 2)
        pool = make_pool(
            shapes, layers.layers, slots=slots, max_rank=64, nbytes=bed.pick(POOL_BYTES, 1 << 22), device=bed.device
        )
        seen: dict[str, list[tuple[list[float], float]]] = {"bgmv": [], "mbgmv": [], "ours": []}
        for _ in range(bed.pick(BATCHES, 2)):
            rows = int(draw.integers(1, slots + 1))
            row_slot = draw.integers(0, int(draw.integers(1, slots + 1)), rows).astype(np.int32)
            own = draw.choice(RANKS[: bed.pick(4, 2)], slots)
            x = layers.inputs(rows)
            base_us = bed.replayed_us(partial(layers.step, x))
            used = np.unique(row_slot)
            for name, ranks, numbers in (
                ("mbgmv", own, [float(own[row_slot].sum())]),
                ("ours", own, [float(own[used].sum()), float(rows)]),
                ("bgmv", np.full(slots, own[used].max()), [float(rows * own[used].max())]),
            ):
                occupy(pool, ranks.tolist())
                batch = LoraBatch.build(pool, row_slot) if name == "ours" else mbgmv(pool, row_slot)
                before, after = batched(pool, batch)
                took_us = bed.replayed_us(partial(layers.step, x, before, after), 11)
                seen[name].append((numbers, (took_us - base_us) / layers.layers))
        found: Line = {"batches": len(seen["ours"])}
        for name, rows_ in seen.items():
            found |= dict(zip((f"r2_{name}", f"weights_{name}"), _fit(rows_), strict=True))
        return found

    def _profile(self) -> Line:
        """`motet profile` of a worker with random weights."""
        with tempfile.TemporaryDirectory(prefix="motet-gpu-") as directory:
            home = Path(directory)
            model = write_config(self._bed.pick("Llama-3.2-1B", "tiny"), home)
            if self._bed.dry:  # what a profile measures is in the suite; here a worker with these options serves
                return asyncio.run(_served(model, self._options, home))
            profile = asyncio.run(twin_live._profile(model, self._options, home / "profile", 60.0))
        fit, steps = profile.fit, profile.engine_steps
        assert fit is not None and steps is not None, "it was measured"
        line: Line = {"r2_prefill": fit.r2_prefill, "r2_decode": fit.r2_decode, "r2_steps": steps.r2, "steps": fit.steps}
        return line | {"assign_ms": profile.hops.assign_ms, "frame_ms": profile.hops.frame_ms}

    def _twin(self) -> Line:
        """The twin of a live worker on the device: its error in percent, the worst of four load shapes."""
        if self._bed.dry:
            return {"skipped": "tests/bench/test_twin_live.py"}
        options = self._options | {"load_format": "auto"}
        setup = replace(twin_live.FULL, model="M", options=options, run_s=5.0, rounds=1, most_rounds=1)
        with tempfile.TemporaryDirectory(prefix="motet-gpu-") as directory:
            return asyncio.run(twin_live.compare(setup, Path(directory), Watch()))

    @property
    def _options(self) -> dict[str, str]:
        return OPTIONS | {"device": self._bed.kind, "load_format": "dummy"} | self._bed.pick({}, {"lora_memory_mib": "8"})


def _fit(seen: list[tuple[list[float], float]]) -> tuple[float, list[float]]:
    """(R2, weights and the constant) of a least-squares fit."""
    x = np.array([[*numbers, 1.0] for numbers, _ in seen])
    y = np.array([took for _, took in seen])
    weights = not_negative(x, y)
    return r_squared(y, x @ weights), weights.tolist()


async def _served(model: Path, options: dict[str, str], home: Path) -> Line:
    async with LiveWorker(model, options | {"kv_blocks": "64"}, home) as worker:
        adapters = [await worker.publish(8, 0)]
        workload = Workload(
            arrival_s=np.zeros(2),
            adapter=np.zeros(2, dtype=np.int64),
            prompt_tokens=np.full(2, 8),
            output_tokens=np.full(2, 4),
            ranks=np.array([8]),
            adapter_bytes=np.array([adapters[0].size_bytes]),
        )
        served = await worker.run(workload, adapters)
    return {"tokens": sum(one.tokens for one in served)}
