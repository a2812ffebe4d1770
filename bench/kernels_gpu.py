"""`python -m bench kernels` on a GPU: what LoRA adds to a decode step and to a prefill, as a fraction of what it must.

A decode step here is a CUDA graph of 32 layers with weights of their own (nothing stays in a cache from one layer to the
next): the base model's four fused products, with and without LoRA on all seven projections. The floor of a configuration
is its adapters' bytes at the copy bandwidth measured in the same run, plus the graph nodes it adds at the measured cost
of an empty one.

Every line goes to bench/results/<gpu>/kernels.jsonl as soon as it is known.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bench import report
from kernels import GROUPS, LoraPool, PackedLora
from kernels.pool import MODULES
from kernels.triton import LoraBatch, add_lora, baselines, start_lora
from kernels.triton.lora import Plan

LLAMA_8B = {
    "q_proj": (4096, 4096),
    "k_proj": (4096, 1024),
    "v_proj": (4096, 1024),
    "o_proj": (4096, 4096),
    "gate_proj": (4096, 14336),
    "up_proj": (4096, 14336),
    "down_proj": (14336, 4096),
}
LAYERS = 32
DECODES = [(1, 1), (8, 8), (32, 32), (64, 64), (64, 1), (64, 8)]  # (rows, adapters)
RANKS: dict[str, tuple[int, ...]] = {"16": (16,), "64": (64,), "128": (128,), "mixed": (8, 16, 32, 64)}
PLANS: tuple[Plan, ...] = ("two_launches", "ticketed", "segmented")
PREFILL_TOKENS = (128, 512, 2048, 8192)
CAN_USE_64_BIT_STREAM_MEM_OPS = 122  # CUdevice_attribute; the 32-bit ones are always there
Start = Callable[[int, str, torch.Tensor], None]
Finish = Callable[[int, str, torch.Tensor, torch.Tensor], None]
"""(layer, group, x) before the base model's product, (layer, group, y, x) after it."""


@dataclass(frozen=True)
class Limits:
    """What this machine can do, measured."""

    read_gb_s: float
    bf16_tflop_s: float
    node_us: float
    upload_gb_s: float
    download_gb_s: float
    stream_memory_operations_64_bit: bool


class Layers:
    """Base weights of every layer, and the step over them."""

    def __init__(self, shapes: dict[str, tuple[int, int]], layers: int, device: str) -> None:
        self.layers, self.device = layers, device
        self.shapes = {group: (shapes[modules[0]][0], sum(shapes[m][1] for m in modules)) for group, modules in GROUPS.items()}
        self._weights = [
            {
                group: torch.randn(out, fan_in, dtype=torch.bfloat16, device=device)
                for group, (fan_in, out) in self.shapes.items()
            }
            for _ in range(layers)
        ]

    def inputs(self, rows: int) -> dict[str, torch.Tensor]:
        return {
            g: torch.randn(rows, fan_in, dtype=torch.bfloat16, device=self.device) for g, (fan_in, _) in self.shapes.items()
        }

    def step(self, x: dict[str, torch.Tensor], before: Start | None = None, after: Finish | None = None) -> None:
        """Every product once, in order."""
        for layer in range(self.layers):
            for group in GROUPS:
                if before is not None:
                    before(layer, group, x[group])
                y = torch.nn.functional.linear(x[group], self._weights[layer][group])
                if after is not None:
                    after(layer, group, y, x[group])


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures on the first GPU; returns the figures that are compared between commits."""
    device, results = "cuda", f"{_gpu_name()}/kernels"
    limits = measure_limits(device)
    report.append(results, {"part": "limits", **limits.__dict__})
    print(report.table("limits", ["what", "value"], list(limits.__dict__.items())))
    errors = check_plans(LLAMA_8B, device)
    for line in errors:
        report.append(results, {"part": "correctness", **line})
    print(report.table("relative error against fp64", list(errors[0]), [list(line.values()) for line in errors]))
    pool = LoraPool(LLAMA_8B, layers=LAYERS, slots=64, max_rank=128, bytes_total=50 << 30, dtype=torch.bfloat16, device=device)
    pool.arena.normal_(std=0.02)
    layers = Layers(LLAMA_8B, LAYERS, device)
    decodes = []
    for rows, adapters in DECODES[2:3] if options.quick else DECODES:
        for ranks in ("mixed",) if options.quick else RANKS:
            decodes.append(decode(pool, layers, limits, rows, adapters, ranks))
            report.append(results, {"part": "decode", **decodes[-1]})
    print(report.table("decode, us per layer over the base", list(decodes[0]), [list(line.values()) for line in decodes]))
    prefills = [prefill(pool, layers, limits, tokens) for tokens in PREFILL_TOKENS]
    for line in prefills:
        report.append(results, {"part": "prefill", **line})
    print(report.table("prefill, us per layer over the base", list(prefills[0]), [list(line.values()) for line in prefills]))
    typical = next(line for line in decodes if (line["rows"], line["adapters"], line["ranks"]) == (32, 32, "mixed"))
    return {
        "lora_decode_bandwidth_fraction": typical["bytes_us"] / min(typical["two_launches"], typical["ticketed"]),
        "worst_relative_error": max(line["error"] for line in errors),
        **limits.__dict__,
    }


def measure_limits(device: str) -> Limits:
    """Bandwidths over 1 GiB, a large product, and an empty node's share of a long graph."""
    size = 1 << 30
    here = torch.empty(size, dtype=torch.uint8, device=device)
    there, host = torch.empty_like(here), torch.empty(size, dtype=torch.uint8, pin_memory=True)
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device=device)
    small = torch.zeros(32, device=device)

    def nodes(count: int) -> Callable[[], None]:
        def launch() -> None:
            for _ in range(count):
                small.add_(1.0)

        return launch

    supported = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(supported), CAN_USE_64_BIT_STREAM_MEM_OPS, 0)
    return Limits(
        read_gb_s=2 * size / replayed_us(lambda: there.copy_(here)) / 1e3,
        bf16_tflop_s=2 * 8192**3 / replayed_us(lambda: a @ b) / 1e6,
        node_us=(replayed_us(nodes(2000)) - replayed_us(nodes(1000))) / 1000,
        upload_gb_s=size / replayed_us(lambda: here.copy_(host, non_blocking=True)) / 1e3,
        download_gb_s=size / replayed_us(lambda: host.copy_(here, non_blocking=True)) / 1e3,
        stream_memory_operations_64_bit=bool(supported.value),
    )


def replayed_us(work: Callable[[], object], replays: int = 21) -> float:
    """Median time of `work` as a CUDA graph, after a warm-up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(replays):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1000)
    return statistics.median(times[3:])


def occupy(pool: LoraPool, ranks: list[int]) -> None:
    """Give slot i pages for rank ranks[i] of every projection, holding whatever the arena holds: weights at random."""
    for slot in range(len(pool.loaded)):
        pool.free(slot)
    for slot, rank in enumerate(ranks):
        pool.loaded[slot] = True
        pool.scales[slot] = 1.0
        for m, module in enumerate(MODULES):
            for page in range(-(-rank // 8)):
                pool.table[slot, m, page] = pool._allocate(pool.page_lines[module])
                pool.pages[slot, m] = page + 1
    pool.version += 1


def lora_bytes(pool: LoraPool, ranks: list[int], modules: tuple[str, ...] = MODULES) -> int:
    """What one layer of these adapters occupies."""
    per_rank = sum(sum(pool.shapes[module]) for module in modules) * pool.arena.element_size()
    return sum(-(-rank // 8) * 8 for rank in ranks) * per_rank


def check_plans(shapes: dict[str, tuple[int, int]], device: str) -> list[dict[str, Any]]:
    """Every plan on real shapes against fp64, in a pool whose other memory is NaN; the error is that of the whole y."""
    ranks = [8, 16, 64, 128, 24, 12]
    made = torch.Generator().manual_seed(0)
    pool = LoraPool(shapes, layers=1, slots=len(ranks), max_rank=128, bytes_total=1 << 28, dtype=torch.bfloat16, device=device)
    pool.arena.fill_(float("nan"))
    weights: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
    for slot, rank in enumerate(ranks):
        weights.append({})
        for module, (fan_in, fan_out) in shapes.items():
            a = (torch.randn(rank, fan_in, generator=made) / fan_in**0.5).bfloat16()
            b = (torch.randn(fan_out, rank, generator=made) / rank**0.5).bfloat16()
            weights[slot][module] = a, b
        adapter = {(0, module): (0.5, a, b) for module, (a, b) in weights[slot].items()}
        pool.load(slot, PackedLora.pack(adapter, shapes, layers=1))
    lines = []
    for rows in (7, 200):
        slots = (np.arange(rows) % (len(ranks) + 1) - 1).astype(np.int32)
        for plan in PLANS:
            batch = LoraBatch.build(pool, slots, plan)
            for group, modules in GROUPS.items():
                x = torch.randn(rows, shapes[modules[0]][0], generator=made).bfloat16()
                y = torch.randn(rows, sum(shapes[m][1] for m in modules), generator=made).bfloat16()
                want = y.double()
                for row, slot in enumerate(slots.tolist()):
                    if slot >= 0:
                        pairs = [weights[slot][module] for module in modules]
                        want[row] += 0.5 * torch.cat([b.double() @ (a.double() @ x[row].double()) for a, b in pairs])
                got = y.to(device)
                add_lora(got, x.to(device), pool, 0, group, batch)
                error = float((got.cpu().double() - want).norm() / want.norm())
                lines.append({"plan": plan, "rows": rows, "group": group, "error": error})
    return lines


def decode(pool: LoraPool, layers: Layers, limits: Limits, rows: int, adapters: int, ranks: str) -> dict[str, Any]:
    """Microseconds per layer that LoRA adds to a decode step, per way of computing it, and the floors."""
    own = [RANKS[ranks][i % len(RANKS[ranks])] for i in range(adapters)]
    row_slot = (np.arange(rows) % adapters).astype(np.int32)
    x = layers.inputs(rows)
    base_us = replayed_us(lambda: layers.step(x)) / layers.layers

    def added_us(batch: LoraBatch, *, beside: bool = False) -> float:
        before, after = lora_steps(pool, batch)
        return replayed_us(lambda: layers.step(x, before if beside else None, after)) / layers.layers - base_us

    occupy(pool, own)
    line: dict[str, Any] = {"rows": rows, "adapters": adapters, "ranks": ranks, "base": base_us}
    line["bytes_us"] = lora_bytes(pool, own) / limits.read_gb_s / 1e3
    line["nodes_us"] = 2 * len(GROUPS) * limits.node_us
    line["two_launches"] = added_us(LoraBatch.build(pool, row_slot, "two_launches"))
    line["beside"] = added_us(LoraBatch.build(pool, row_slot, "two_launches"), beside=True)
    line["ticketed"] = added_us(LoraBatch.build(pool, row_slot, "ticketed"))
    line["mbgmv"] = added_us(baselines.mbgmv(pool, row_slot))
    occupy(pool, [max(own)] * adapters)
    line["padded"] = added_us(LoraBatch.build(pool, row_slot, "two_launches"))
    line["grouped_mm"] = replayed_us(partial(layers.step, x, None, grouped_mm(pool, own, row_slot))) / layers.layers - base_us
    line["padded_bgmv"] = added_us(baselines.mbgmv(pool, row_slot))
    return line


def prefill(pool: LoraPool, layers: Layers, limits: Limits, tokens: int) -> dict[str, Any]:
    """The same for `tokens` tokens of prompts, a quarter for each of four adapters of ranks 8 to 64."""
    own = list(RANKS["mixed"])
    occupy(pool, own)
    row_slot = np.sort(np.arange(tokens) % len(own)).astype(np.int32)
    x = layers.inputs(tokens)
    base_us = replayed_us(lambda: layers.step(x)) / layers.layers
    line: dict[str, Any] = {"tokens": tokens, "base": base_us}
    activations = sum(tokens * (fan_in + 2 * out) * 2 for fan_in, out in layers.shapes.values())
    line["bytes_us"] = (lora_bytes(pool, own) + activations) / limits.read_gb_s / 1e3
    compared: tuple[Plan, ...] = ("two_launches", "segmented")
    for plan in compared:
        before, after = lora_steps(pool, LoraBatch.build(pool, row_slot, plan))
        line[plan] = replayed_us(partial(layers.step, x, None, after)) / layers.layers - base_us
        beside = replayed_us(partial(layers.step, x, before, after)) / layers.layers
        line[f"{plan}_beside"] = beside - base_us
    return line


def grouped_mm(pool: LoraPool, own: list[int], row_slot: np.ndarray) -> Finish:
    """PyTorch's grouped product over rows sorted by adapter and stacks padded to the largest rank.

    The stacks are pieces of the pool's memory, so that every layer reads its own; the sums mean nothing.
    """
    rank, device = max(own), pool.arena.device
    order = torch.from_numpy(np.argsort(row_slot, kind="stable")).to(device)
    ends = torch.from_numpy(np.cumsum(np.bincount(row_slot, minlength=len(own))).astype(np.int32)).to(device)
    at = 0

    def stack(width: int) -> torch.Tensor:
        nonlocal at
        size = len(own) * rank * width
        at = at + size if at + 2 * size <= len(pool.arena) else 0
        return pool.arena[at : at + size].view(len(own), rank, width)

    def after(layer: int, group: str, y: torch.Tensor, x: torch.Tensor) -> None:
        grouped, column = x.index_select(0, order), 0
        for module in GROUPS[group]:
            fan_in, fan_out = pool.shapes[module]
            shrunk = torch._grouped_mm(grouped, stack(fan_in).transpose(1, 2), offs=ends)
            y[:, column : column + fan_out].index_add_(0, order, torch._grouped_mm(shrunk, stack(fan_out), offs=ends))
            column += fan_out

    return after


def lora_steps(pool: LoraPool, batch: LoraBatch) -> tuple[Start, Finish]:
    """What runs before and after the base model's product."""

    def before(layer: int, group: str, x: torch.Tensor) -> None:
        start_lora(x, pool, layer, group, batch)

    def after(layer: int, group: str, y: torch.Tensor, x: torch.Tensor) -> None:
        add_lora(y, x, pool, layer, group, batch)

    return before, after


def _gpu_name() -> str:
    """ "NVIDIA H200" -> "h200"."""
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
