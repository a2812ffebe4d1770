"""A kernel that only reads: the bandwidth of the device's memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 1 << 14  # words that a program reads at once: 64 KiB


@triton.jit
def _read(words, sums, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    chunk = tl.program_id(0)
    tl.store(sums + chunk, tl.sum(tl.load(words + chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK))))


def read(words: torch.Tensor, sums: torch.Tensor) -> None:
    """Sum int32 `words` in chunks of CHUNK into `sums`, so that every word is read."""
    _read[(len(sums),)](words, sums, CHUNK=CHUNK, num_warps=8)
