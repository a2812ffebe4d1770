"""Draws the next tokens on a GPU, by the rules of kernels/sampling.py: six launches, and one copy of the outcome to the host.

    peak_tiles      rows x tiles   the largest logit
    measure_tiles   rows x tiles   what lies above SECTIONS keys     \\
    gather_keys     rows x tiles   the keys of the one section         > only if a row has top_k or top_p
    select_key      rows           the threshold, to the last bit    /
    weigh_tiles     rows x tiles   what each tile's tokens weigh     only if a row draws
    pick_token      rows           the tile, and the token inside

A tile is TILE logits of a row, so that a single row uses many multiprocessors. The logits are read once by each of the launches
over tiles.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton

from motet.kernels.to_device import fetch, fill, send
from motet.kernels.triton import sampling_kernels as kernels
from motet.kernels.triton.launch import Kernel
from motet.kernels.types import DrawRules

TILE = 4096  # logits of a program
ROOM = 16384  # keys of a row that `gather_keys` keeps; with more `select_key` reads the whole row in each of its passes
CHUNK = 2048  # keys that `select_key` looks at together
WARPS = {"peak_tiles": 4, "measure_tiles": 4, "gather_keys": 4, "select_key": 4, "weigh_tiles": 4, "pick_token": 8}
LARGEST = float(np.finfo(np.float32).max)


class Workspace(NamedTuple):
    """What the launches leave to each other, see the kernels."""

    peaks: torch.Tensor
    means: torch.Tensor
    pivots: torch.Tensor
    table: torch.Tensor
    gathered: torch.Tensor
    found: torch.Tensor
    cuts: torch.Tensor
    sums: torch.Tensor


class Draws:
    """`draw` for a set of rows with these rules; see kernels/sampling.py."""

    def __init__(self, rules: DrawRules, vocab_size: int, device: torch.device) -> None:
        rows, tiles = len(rules.temperature), triton.cdiv(vocab_size, TILE)
        self._vocab_size, self._tiles = vocab_size, tiles
        self.kernels = dict(kernels_for(vocab_size, ROOM))
        self._drawing = bool(rules.drawing.any())
        filtered = rules.drawing & ((rules.top_k > 0) | (rules.top_p < 1))
        self._filtered = bool(filtered.any())
        self._rules = send(_table(rules), device)
        self._noise = torch.zeros(rows, dtype=torch.float64, device=device)

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        searched, sections = rows if self._filtered else 0, kernels.SECTIONS.value
        self.workspace = Workspace(
            peaks=room(rows, tiles, dtype=torch.int64),
            means=room(rows, tiles, dtype=torch.float32),
            pivots=room(searched, sections),
            table=room(searched, tiles, sections, dtype=torch.float32),
            gathered=room(searched),
            found=room(searched, ROOM),
            cuts=room(rows),
            sums=torch.zeros(rows, tiles, dtype=torch.int64, device=device),  # stay 0 for rows that take the argmax
        )
        self._out = room(rows, 2)

    def draw(self, logits: torch.Tensor, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Each row's token and largest logit. The host waits once, for both."""
        if noise is not None:
            fill(self._noise, noise)
        self.launch(logits)
        tokens, best = fetch(self._out).T
        return tokens.astype(np.int64), best.copy().view(np.float32)

    def launch(self, logits: torch.Tensor) -> None:
        """The launches alone, with the noise of the last `draw`."""
        rows, rules, work = len(logits), self._rules, self.workspace
        assert logits.is_contiguous() and logits.shape[1] == self._vocab_size, "the kernels derive addresses from shapes alone"
        run, tiles = self.kernels, (self._tiles, rows)
        run["peak_tiles"](tiles, logits, work.peaks, work.means)
        if self._filtered:
            searched = work.pivots, work.table, work.gathered
            run["measure_tiles"](tiles, logits, rules, work.peaks, work.means, *searched)
            run["gather_keys"](tiles, logits, rules, work.peaks, *searched, work.found)
            run["select_key"]((rows,), logits, rules, work.peaks, *searched, work.found, work.cuts)
        if self._drawing:
            run["weigh_tiles"](tiles, logits, rules, work.peaks, work.cuts, work.sums)
        run["pick_token"]((rows,), logits, rules, work.peaks, work.cuts, work.sums, self._noise, self._out)


@cache
def kernels_for(vocab_size: int, room: int) -> dict[str, Kernel]:
    """The kernels by name, in the order of the launches."""
    tiles = triton.cdiv(vocab_size, TILE)
    constants = {"VOCAB": vocab_size, "TILES": tiles, "PADDED": triton.next_power_of_2(tiles)}
    constants |= {"TILE": TILE, "CHUNK": CHUNK, "ROOM": room}
    found = {}
    for name, warps in WARPS.items():
        kernel = getattr(kernels, name)
        mine = {constant: value for constant, value in constants.items() if constant in kernel.arg_names}
        found[name] = Kernel(kernel, **mine, num_warps=warps)
    return found


def prepare(vocab_size: int, device: torch.device) -> None:
    """Compile and load every kernel: each runs once on a row of zeros."""
    one = DrawRules(np.ones(1, np.float32), np.zeros(1, np.float32), np.ones(1, np.int64), np.full(1, 0.5))
    Draws(one, vocab_size, device).draw(torch.zeros(1, vocab_size, device=device), np.zeros(1))


def _table(rules: DrawRules) -> np.ndarray:
    """The rules as the kernels take them, float64 [n, 4]."""
    warm = np.where(rules.drawing, rules.temperature, 1.0).astype(np.float64)
    with np.errstate(divide="ignore"):
        limit = np.minimum(warm * np.abs(np.log(rules.min_p.astype(np.float64))), LARGEST)
    scale = np.where(rules.drawing, math.log2(math.e) / warm, 0.0)
    return np.column_stack([scale, limit, rules.top_k, rules.top_p])
