"""Launches by kernels/triton/launch.py and by Triton, with a driver that notes them. Prints what it finds as JSON.

A program of its own, not interpreted: `python -m tests.kernels.triton_launches`.
"""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

from motet.kernels import GROUPS, LoraPool
from motet.kernels.triton import LoraBatch, prepare, sampling, start_lora
from motet.kernels.triton.launch import Kernel
from motet.kernels.triton.lora import SMALL_ROWS
from motet.kernels.types import DrawRules
from tests.kernels.null_driver import NullDriver, install

ROUNDS = 400


@triton.jit(do_not_specialize=["free"], do_not_specialize_on_alignment=["to"])
def _copy(source, to, other, stride, free, factor, SIZE: tl.constexpr, TWICE: tl.constexpr):
    at = tl.arange(0, SIZE)
    values = tl.load(source + at * stride) * factor + free
    if other is not None:
        values += tl.load(other + at)
    if TWICE:
        values *= 2
    tl.store(to + at, values)


def random_launches(driver: NullDriver, draw: random.Random) -> dict[str, Any]:
    """Launches that differ from one another in up to two arguments, each by Triton and by a Kernel: the pairs that are not the
    same, and how many Triton did not see.
    """
    kernels = [({"SIZE": 16, "TWICE": twice}, Kernel(_copy, SIZE=16, TWICE=twice, num_warps=2)) for twice in (False, True)]
    numbers = [0, 1, 2, 8, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, -(2**31), 2**31 + 16, 2**40 + 1]
    tensors = [torch.zeros(64, dtype=dtype)[at:] for dtype in (torch.float32, torch.float16) for at in (0, 1, 4, 8, 16)]
    choices = [tensors, tensors, [None, *tensors], numbers, numbers, [0.5, 1.0, 16.0]]
    different, seen = [], Seen()
    for _ in range(ROUNDS):
        arguments = [some[0] for some in choices]
        for at in draw.sample(range(len(choices)), draw.randrange(3)):
            arguments[at] = draw.choice(choices[at])
        grid, (constants, kernel) = draw.choice([(3,), (3, 2), (1, 2, 3)]), draw.choice(kernels)
        driver.launched.clear()
        _copy[grid](*arguments, **constants, num_warps=2)
        with seen:
            kernel(grid, *arguments)
        theirs, ours = driver.launched
        if theirs != ours:
            different.append(f"{theirs} {ours}")
    return {"different": different[:3], "launches": ROUNDS, "direct": ROUNDS - seen.count}


class Seen:
    """Counts the launches that Triton's Python code sees."""

    def __init__(self) -> None:
        self.count = 0
        self._run = JITFunction.run

    def __enter__(self) -> None:
        def run(kernel: Any, *arguments: Any, **how: Any) -> Any:
            self.count += 1
            return self._run(kernel, *arguments, **how)

        JITFunction.run = run

    def __exit__(self, *exception: object) -> None:
        JITFunction.run = self._run


def lora(driver: NullDriver) -> dict[str, int]:
    """Launches of a small and a large step after `prepare`, and how many of them Triton saw: those with an address or number of
    a new kind.
    """
    shapes = {module: (128, 256) for module in [module for modules in GROUPS.values() for module in modules]}
    pool = LoraPool(shapes, layers=8, slots=1, max_rank=16, bytes_total=1 << 20, dtype=torch.bfloat16, device="cpu")
    prepare(pool)
    launches, seen = 0, Seen()
    for rows in (SMALL_ROWS, SMALL_ROWS + 1):
        batch, x = LoraBatch.reserve(pool, rows), torch.zeros(rows, 128, dtype=torch.bfloat16)
        for layer in range(8):
            with seen if layer > 2 else nullcontext():  # 0, 1 and 2 are of different kinds
                driver.launched.clear()
                for group in GROUPS:
                    start_lora(x, pool, layer, group, batch)
                launches += len(driver.launched) if layer > 2 else 0
    return {"launches": launches, "seen": seen.count}


def draws(driver: NullDriver) -> dict[str, int]:
    """Launches of draws of several batches after `prepare`, and how many of them Triton saw."""
    vocab_size, device, seen = 5000, torch.device("cpu"), Seen()
    sampling.prepare(vocab_size, device)
    driver.launched.clear()
    with seen:
        for rows in (1, 3, 16):
            rules = DrawRules(*(np.full(rows, value) for value in (0.8, 0.0, 40, 0.9)))
            sampling.Draws(rules, vocab_size, device).launch(torch.zeros(rows, vocab_size))
    return {"launches": len(driver.launched), "seen": seen.count}


if __name__ == "__main__":
    null = install()
    found = {"random": random_launches(null, random.Random(0)), "lora": lora(null), "draws": draws(null)}
    print(json.dumps(found))
