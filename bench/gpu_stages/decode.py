"""Stage 3: the time that LoRA adds to a decode step and to a prefill, with Motet's kernels and others, beside the lower bound.

A decode step is a CUDA graph of 32 layers: the base model's four fused products, without LoRA and with it on all seven
projections. `floor` is the time to read the adapters' bytes at the bandwidth measured in the same run, `nodes` the time of as
many empty graph nodes. All times are microseconds per layer; the added time is the step with LoRA minus the step of the base.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import cached_property, partial

import numpy as np

from bench.gpu_stages.bed import Bed
from bench.gpu_stages.layers import WAYS, Finish, Layers, Start, Way, batched, einsum, grouped_mm, make_pool, occupy
from bench.gpu_stages.results import Line, Point
from bench.gpu_stages.shapes import adapter_bytes, projections
from bench.rivals.triton_lora import mbgmv
from motet.kernels import GROUPS, LoraPool
from motet.kernels.triton import LoraBatch
from motet.kernels.triton.lora import LaunchPlan

MODEL = "Llama-3.1-8B"
LAYERS = 32
POOL_BYTES = 44 << 30  # 64 adapters of rank 128 on all modules of all layers
RANKS: dict[str, tuple[int, ...]] = {"mixed": (8, 16, 32, 64), "16": (16,), "64": (64,), "128": (128,), "8": (8,)}
DECODES = [(32, 32, "mixed"), (8, 8, "mixed"), (64, 64, "mixed"), (8, 8, "64"), (32, 32, "64"), (1, 1, "64")]
DECODES += [(64, 8, "mixed"), (64, 1, "64"), (32, 32, "16"), (8, 8, "16"), (64, 64, "16"), (64, 64, "64"), (1, 1, "16")]
DECODES += [(32, 32, "128"), (8, 8, "128"), (64, 64, "128"), (32, 32, "8"), (256, 64, "mixed"), (64, 1, "16"), (1, 1, "128")]
"""(rows, adapters, ranks), most valuable first."""
PREFILL_TOKENS = (2048, 512, 128, 8192)


Launches = tuple[Start | None, Finish]


class Decode:
    """Stage 3: the time that LoRA adds to a decode step and to a prefill."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._shapes = projections(bed.pick(MODEL, "tiny"))

    def points(self) -> list[Point]:
        decodes, tokens = self._bed.pick((DECODES, PREFILL_TOKENS), ([(3, 2, "8")], (5,)))
        found = [Point(f"decode {r} rows {a} adapters rank {k}", partial(self._decode, r, a, k), 120.0) for r, a, k in decodes]
        found[6:6] = [Point(f"prefill {count} tokens", partial(self._prefill, count), 120.0) for count in tokens]
        return found

    @cached_property
    def _layers(self) -> Layers:
        return Layers(self._shapes, self._bed.pick(LAYERS, 1), self._bed.device)

    @cached_property
    def _pool(self) -> LoraPool:
        count = self._bed.pick(POOL_BYTES, 1 << 22)
        return make_pool(self._shapes, self._layers.layers, slots=64, max_rank=128, nbytes=count, device=self._bed.device)

    def _decode(self, rows: int, adapters: int, ranks: str) -> Line:
        bed, layers, pool = self._bed, self._layers, self._pool
        own = [RANKS[ranks][i % len(RANKS[ranks])] for i in range(adapters)]
        row_slot = (np.arange(rows) % adapters).astype(np.int32)
        x = layers.inputs(rows)
        base_us = bed.replayed_us(lambda: layers.step(x)) / layers.layers
        line: Line = {"rows": rows, "adapters": adapters, "ranks": ranks, "base": base_us, "errors": {}}
        line["base_floor"] = layers.nbytes / bed.read_gb_s / 1e3
        line["floor"] = adapter_bytes(self._shapes, own, 2) / bed.read_gb_s / 1e3
        line["nodes"] = 2 * len(GROUPS) * bed.node_us

        def ours(way: Way = "after") -> Launches:
            return batched(pool, LoraBatch.build(pool, row_slot, "decode"), way)

        ways: dict[str, Callable[[], Launches]] = {
            "apart": lambda: ours("apart"),
            "beside": lambda: ours("beside"),
            "after": ours,
            "mbgmv": lambda: batched(pool, mbgmv(pool, row_slot)),
        }
        padded: dict[str, Callable[[], Launches]] = {
            "padded": ours,
            "padded_bgmv": lambda: batched(pool, mbgmv(pool, row_slot)),
            "grouped_mm": lambda: (None, grouped_mm(pool, own, row_slot)),
            "einsum": lambda: (None, einsum(pool, own, row_slot)),
        }
        for stored, kinds in ((own, ways), ([max(own)] * adapters, padded)):
            occupy(pool, stored)
            for name, make in kinds.items():
                try:
                    before, after = make()
                    line[name] = bed.replayed_us(partial(layers.step, x, before, after)) / layers.layers - base_us
                except Exception:  # a way that does not run here says so, beside those that do
                    line["errors"][name] = traceback.format_exc()[-1500:]
                    bed.synchronize()  # raises when nothing more can run in this process
        return line

    def _prefill(self, tokens: int) -> Line:
        """A prefill of `tokens` tokens, a quarter of them for each of four adapters."""
        bed, layers, pool = self._bed, self._layers, self._pool
        own = list(RANKS["mixed"])
        occupy(pool, own)
        row_slot = np.sort(np.arange(tokens) % len(own)).astype(np.int32)
        x = layers.inputs(tokens)
        base_us = bed.replayed_us(lambda: layers.step(x)) / layers.layers
        line: Line = {"tokens": tokens, "base": base_us}
        activations = sum(tokens * (fan_in + 2 * out) * 2 for fan_in, out in layers.shapes.values())
        line["floor"] = (adapter_bytes(self._shapes, own, 2) + activations) / bed.read_gb_s / 1e3
        plans: tuple[LaunchPlan, ...] = ("prefill", "decode")
        for plan in plans:
            for way in WAYS:
                before, after = batched(pool, LoraBatch.build(pool, row_slot, plan), way)
                took_us = bed.replayed_us(partial(layers.step, x, before, after)) / layers.layers
                line[f"{plan}_{way}"] = took_us - base_us
        return line
