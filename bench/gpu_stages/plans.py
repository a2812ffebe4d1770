"""Stage 2, first half: every plan of the kernels against the formula in fp64, in pools whose other memory is NaN."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.gpu_stages.bed import Bed
from bench.gpu_stages.results import Line, Point
from bench.gpu_stages.shapes import projections
from bench.rivals.triton_lora import mbgmv
from motet.kernels import GROUPS, LoraPool, PackedLora
from motet.kernels.triton import LoraBatch, add_lora, start_lora
from motet.kernels.triton.lora import LaunchPlan

PLANS: tuple[LaunchPlan, ...] = ("decode", "prefill")
RANKS = [8, 16, 64, 128, 24, 12]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the norm of y
ROWS = (7, 200)  # the second fills large tiles
ROOT = Path(__file__).parents[2]
TESTS = [
    "test_triton_lora",
    "test_triton_attention",
    "test_triton_pointwise",
    "test_triton_sampling",
    "test_triton_batch",
    "test_device",
    "test_loading",
    "test_device_loading",
]


class Plans:
    """The first points of stage 2: the correctness of the LoRA kernels."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed

    def points(self) -> list[Point]:
        first = self._bed.pick([("Llama-3.1-8B", torch.bfloat16)], [("tiny", torch.bfloat16)])
        more = [("Qwen2.5-7B", torch.float16), ("tiny", torch.float32), ("Llama-3.2-1B", torch.float32)]
        models = first + self._bed.pick(more, [])
        return [
            Point(f"{plan} {model} {str(dtype).removeprefix('torch.')}", partial(self._check, plan, model, dtype), 120.0)
            for model, dtype in models
            for plan in PLANS
        ]

    def tests(self) -> Point:
        """The suite's own tests of the kernels and of what surrounds them, on this device."""
        return Point("tests", self._tests, 240.0)

    def _check(self, plan: LaunchPlan, model: str, dtype: torch.dtype) -> Line:
        """`error`: the worst error of the whole y.

        `good`: it is rounding only, and results that must be equal to the bit are.
        """
        shapes, device = projections(model), self._bed.device
        draw = torch.Generator(device).manual_seed(0)
        pool = _poisoned(shapes, dtype, device)
        ranks = self._bed.pick(RANKS, [24, 12])
        weights = [_adapter(shapes, rank, dtype, device, draw) for rank in ranks]
        for slot, adapter in enumerate(weights):
            pairs = {(0, module): (0.5, a.cpu(), b.cpu()) for module, (a, b) in adapter.items()}
            pool.load(slot, PackedLora.pack(pairs, shapes, layers=1))
        worst, wrong = 0.0, list[str]()
        for rows in self._bed.pick(ROWS, (4,)):
            slots = (np.arange(rows) % (len(ranks) + 1) - 1).astype(np.int32)
            batches = {plan: LoraBatch.build(pool, slots, plan), "reserved": LoraBatch.reserve(pool, rows, plan)}
            batches["reserved"].update(pool, slots)
            if plan == "decode":
                batches["mbgmv"] = mbgmv(pool, slots)
            for group in self._bed.pick(tuple(GROUPS), ("o",)):
                x, y, want = _formula(shapes, weights, slots, group, dtype, draw)
                for name, batch in batches.items():
                    got = [self._added(pool, batch, group, x, y, beside=i == 1) for i in range(self._bed.pick(3, 2))]
                    apart = [self._apart(pool, batch, group, x, y) for _ in range(2)]
                    where = f"{name}, {rows} rows, {group}"
                    for way, one in (("added", got[0]), ("apart", apart[0])):
                        error = float((one.double() - want).norm() / want.norm())
                        worst = max(worst, error)
                        if not error < TOLERANCE[dtype]:
                            wrong.append(f"{where}, {way}: error {error:.2e}")
                    if not all(torch.equal(some[0], one) for some in (got, apart) for one in some[1:]):
                        wrong.append(f"{where}: not the same bits every time")
                    if not torch.equal(got[0][torch.from_numpy(slots < 0)], y[torch.from_numpy(slots < 0)]):
                        wrong.append(f"{where}: rows of the base changed")
        return {"worst_error": worst, "wrong": wrong[:20], "good": not wrong}

    def _added(
        self, pool: LoraPool, batch: LoraBatch, group: str, x: torch.Tensor, y: torch.Tensor, *, beside: bool
    ) -> torch.Tensor:
        got = y.clone()
        if beside:
            start_lora(x, pool, 0, group, batch, "shrink")
        add_lora(got, x, pool, 0, group, batch)
        return got

    def _apart(self, pool: LoraPool, batch: LoraBatch, group: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        delta = start_lora(x, pool, 0, group, batch, "all")
        got = y.clone()
        add_lora(got, x, pool, 0, group, batch)
        return got if delta is None else torch.where(delta.adapted.bool()[:, None], got + delta.values, got)

    def _tests(self) -> Line:
        files = [f"tests/kernels/{name}.py" for name in TESTS]
        files += [f"tests/services/worker/{name}.py" for name in ("test_decode_graphs", "test_prompt_graphs")]
        options = ["-q", "-n", "8", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "--timeout", "100"]
        arguments = self._bed.pick([*files, *options], ["--version"])
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=230
        )
        return {"good": done.returncode == 0, "status": done.returncode, "tail": done.stdout[-3000:] + done.stderr[-500:]}


def _poisoned(shapes: dict[str, tuple[int, int]], dtype: torch.dtype, device: torch.device) -> LoraPool:
    elements = 2 * (sum(RANKS) + 8 * len(RANKS)) * sum(map(sum, shapes.values()))
    pool = LoraPool(
        shapes, layers=1, slots=len(RANKS), max_rank=128, bytes_total=elements * dtype.itemsize, dtype=dtype, device=device
    )
    pool.arena.fill_(float("nan"))
    return pool


def _adapter(
    shapes: dict[str, tuple[int, int]], rank: int, dtype: torch.dtype, device: torch.device, draw: torch.Generator
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=draw, device=device) / columns**0.5).to(dtype)

    return {module: (matrix(rank, fan_in), matrix(fan_out, rank)) for module, (fan_in, fan_out) in shapes.items()}


def _formula(
    shapes: dict[str, tuple[int, int]],
    weights: list[dict[str, tuple[torch.Tensor, torch.Tensor]]],
    slots: np.ndarray,
    group: str,
    dtype: torch.dtype,
    draw: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, y, and y with the adapters' part added, computed in fp64."""
    modules = GROUPS[group]
    rows, device = len(slots), draw.device
    x = torch.randn(rows, shapes[modules[0]][0], generator=draw, device=device).to(dtype)
    y = torch.randn(rows, sum(shapes[m][1] for m in modules), generator=draw, device=device).to(dtype)
    want = y.double()
    for slot, adapter in enumerate(weights):
        mine = torch.from_numpy(np.flatnonzero(slots == slot)).to(device)
        parts = [x[mine].double() @ adapter[m][0].double().T @ adapter[m][1].double().T for m in modules]
        want[mine] += 0.5 * torch.cat(parts, dim=1)
    return x, y, want
