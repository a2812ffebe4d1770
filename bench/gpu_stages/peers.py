"""Stage 8: the time that LoRA adds to a decode step, with Motet's kernels and with those of vLLM and SGLang.

All times are microseconds per layer and measured as in stage 3: the step of 32 layers with LoRA on all seven projections minus
the step of the base, both as CUDA graphs. Every way computes with the same adapters, copied from Motet's pool to the others'
buffers in all layers. Before a way is measured, one layer of it is compared with the formula in fp64; a wrong one is not
measured. What depends on which row has which adapter is prepared outside of the graph, for all of them.

The others get as many slots as the batch has adapters and slots of the largest rank in it: what a server holds beyond that
would only cost them more.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace

import numpy as np
import torch

from bench.gpu_stages import peer_files
from bench.gpu_stages.bed import Bed
from bench.gpu_stages.decode import LAYERS, MODEL, RANKS
from bench.gpu_stages.layers import DTYPE, WAYS, Apply, Base, Layers, Way, make_pool, matrices, occupy
from bench.gpu_stages.peer_sglang import Sglang
from bench.gpu_stages.peer_vllm import Vllm
from bench.gpu_stages.plans import TOLERANCE
from bench.gpu_stages.results import Line, Point
from bench.gpu_stages.shapes import adapter_bytes, projections
from motet.kernels import GROUPS, LoraPool
from motet.kernels.triton import LoraBatch, add_lora, start_lora
from motet.kernels.triton.lora import LARGE, LaunchPlan

POOL_BYTES = 12 << 30  # 32 adapters of rank 64, or 64 of mixed ranks, on all modules of all layers
LOADS = [(32, 32, "mixed"), (256, 32, "mixed"), (256, 1, "64"), (8, 8, "mixed"), (1, 1, "64"), (64, 64, "mixed")]
LOADS += [(32, 32, "64"), (256, 32, "64")]
"""(rows, adapters, ranks), most valuable first."""
Ways = dict[str, Apply]


@dataclass(frozen=True, slots=True)
class Example:
    """One layer's inputs and right results."""

    x: dict[str, torch.Tensor]  # {group: [rows, in]}
    y: dict[str, torch.Tensor]  # {group: [rows, sum of out]}, in place of the base model's product
    want: dict[str, torch.Tensor]  # y with the adapters' part, in fp64


@dataclass(frozen=True, slots=True)
class Batch:
    """What all ways of a point share."""

    x: dict[str, torch.Tensor]  # {group: [rows, in]}
    base_us: float  # a layer without LoRA
    example: Example


class Peers:
    """Stage 8: the kernels of vLLM and SGLang beside Motet's."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._shapes = projections(bed.pick(MODEL, "tiny"))
        self._dtype = bed.pick(DTYPE, torch.float16)  # Triton's interpreter does not multiply bf16

    def points(self) -> list[Point]:
        if self._bed.dry and not peer_files.there():
            print(f"{peer_files.directory()} is missing (`make gpu-peers`): the points of stage 8 are skipped")
            return []
        loads = self._bed.pick(LOADS, [(3, 2, "mixed")])
        return [Point(f"peers {r} rows {a} adapters rank {k}", partial(self._measure, r, a, k), 150.0) for r, a, k in loads]

    @cached_property
    def _layers(self) -> Layers:
        return Layers(self._shapes, self._bed.pick(LAYERS, 1), self._bed.device, self._dtype)

    @cached_property
    def _pool(self) -> LoraPool:
        count = self._bed.pick(POOL_BYTES, 1 << 22)
        device, layers = self._bed.device, self._layers.layers
        return make_pool(self._shapes, layers, slots=64, max_rank=64, nbytes=count, device=device, dtype=self._dtype)

    @cached_property
    def _files(self) -> tuple[SimpleNamespace, SimpleNamespace]:
        return peer_files.vllm(), peer_files.sglang()

    def _measure(self, rows: int, adapters: int, ranks: str) -> Line:
        """`good`: every way ran and was right. `worst_errors`: of one layer, relative to the norm of y."""
        vllm, sglang = self._files
        bed, layers, pool = self._bed, self._layers, self._pool
        own = [RANKS[ranks][i % len(RANKS[ranks])] for i in range(adapters)]
        occupy(pool, own)
        row_slot = (np.arange(rows) % adapters).astype(np.int32)
        x = layers.inputs(rows)
        base_us = bed.replayed_us(lambda: layers.step(x)) / layers.layers
        line: Line = {"rows": rows, "adapters": adapters, "ranks": ranks, "base": base_us}
        line["floor"] = adapter_bytes(self._shapes, own, 2) / bed.read_gb_s / 1e3
        line |= {"errors": {}, "worst_errors": {}, "wrong": []}
        batch = Batch(x, base_us, _example(pool, row_slot, x))
        makers: dict[str, Callable[[], Ways]] = {
            "motet": lambda: _motet(pool, row_slot),
            "sglang": lambda: Sglang(sglang, pool, own, row_slot).ways(),
            "vllm": lambda: Vllm(vllm, pool, own, row_slot).ways(),
        }
        for kind, make in makers.items():
            with _saying(line, kind):
                self._try_all(line, batch, make())
            with _saying(line, "device"):
                bed.synchronize()
                bed.release()  # the others' buffers
        if "device" in line["errors"]:  # nothing more can run in this process: the point has failed
            line["error"] = line["errors"]["device"]
        return line | {"good": not line["wrong"] and not line["errors"]}

    def _try_all(self, line: Line, batch: Batch, ways: Ways) -> None:
        for name, apply in ways.items():
            with _saying(line, name):
                error = line["worst_errors"][name] = _worst_error(apply, batch.example)
                if error < TOLERANCE[self._dtype]:
                    took_us = self._bed.replayed_us(partial(self._step, batch.x, apply))
                    line[name] = took_us / self._layers.layers - batch.base_us
                else:
                    line["wrong"].append(name)

    def _step(self, x: dict[str, torch.Tensor], apply: Apply) -> None:
        for layer in range(self._layers.layers):
            for group in GROUPS:
                apply(layer, group, x[group], partial(self._layers.product, layer, group, x[group]))


@contextmanager
def _saying(line: Line, name: str) -> Iterator[None]:
    """What does not run here says so in the line, beside what does."""
    try:
        yield
    except Exception:
        line["errors"][name] = traceback.format_exc()[-1500:]


def _motet(pool: LoraPool, row_slot: np.ndarray) -> Ways:
    """As in stage 3, but a part that is computed apart is added here, as the others do; the engine's next operation adds it
    while it reads. With many rows of an adapter, the plan for prefills too.
    """
    plans: list[LaunchPlan] = ["decode"]
    if np.bincount(row_slot).max() > LARGE.tile.some:
        plans.append("prefill")
    batches = {plan: LoraBatch.build(pool, row_slot, plan) for plan in plans}
    return {
        way if plan == "decode" else f"{way}_{plan}": partial(_ours, pool, batch, way)
        for plan, batch in batches.items()
        for way in reversed(WAYS)
    }


def _ours(pool: LoraPool, batch: LoraBatch, way: Way, layer: int, group: str, x: torch.Tensor, base: Base) -> torch.Tensor:
    delta = None if way == "after" else start_lora(x, pool, layer, group, batch, "all" if way == "apart" else "shrink")
    y = base()
    add_lora(y, x, pool, layer, group, batch)
    return y if delta is None else y.add_(delta.values)  # every row has an adapter


def _example(pool: LoraPool, row_slot: np.ndarray, x: dict[str, torch.Tensor]) -> Example:
    """The first layer's; y is as large as the adapters' part, so that a part that is wrong or missing shows."""
    example = Example(x, {}, {})
    for group, modules in GROUPS.items():
        part = torch.zeros(len(row_slot), sum(pool.shapes[m][1] for m in modules), dtype=torch.float64, device=x[group].device)
        for slot in np.unique(row_slot).tolist():
            rows = torch.from_numpy(np.flatnonzero(row_slot == slot)).to(part.device)
            pairs = [matrices(pool, slot, 0, module) for module in modules]
            part[rows] = torch.cat([x[group][rows].double() @ a.double().T @ b.double().T for a, b in pairs], dim=1)
        example.y[group] = (torch.randn_like(part) * part.std()).to(x[group].dtype)
        example.want[group] = example.y[group].double() + part
    return example


def _worst_error(apply: Apply, example: Example) -> float:
    """Of the four groups of the first layer, relative to the norm of y. NaN counts as infinite."""
    worst = 0.0
    for group, want in example.want.items():
        got = apply(0, group, example.x[group], example.y[group].clone)
        error = float((got.double() - want).norm() / want.norm())
        worst = max(worst, error if error == error else float("inf"))
    return worst
