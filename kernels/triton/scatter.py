"""Copies pieces of a buffer to their places in another one, in a single launch: the pages of an adapter's layer.

Both buffers are int64, whatever they contain; a line is `unit` of these words (kernels/pool.py). Since `unit` is even and known
to the compiler, words move in pieces of 16 bytes.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from motet.kernels.triton.launch import Kernel

WARPS, BLOCK = 4, 2048  # words per program, 16 KiB


def scatter(pieces: torch.Tensor, source: torch.Tensor, target: torch.Tensor, *, unit: int, most_lines: int) -> None:
    """Copy every piece from `source` to `target`, both int64 [words]. Pieces must not overlap in `target`.

    `pieces` int64 [n, 3], n > 0: first line in `source`, lines, first line in `target`. None has more than `most_lines` > 0.
    """
    grid = (pieces.shape[0], triton.cdiv(most_lines * unit, BLOCK))
    _kernel(unit)(grid, pieces, source, target)


@cache
def _kernel(unit: int) -> Kernel:
    return Kernel(scatter_kernel, UNIT=unit, BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def scatter_kernel(pieces, source, target, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """One block of words of one piece."""
    piece = pieces + 3 * tl.program_id(0)
    first, lines, to = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < lines * UNIT
    tl.store(target + to * UNIT + word, tl.load(source + first * UNIT + word, mask=inside), mask=inside)
