"""Stage 2: paged attention against the formula in fp64 in a poisoned cache; and its time per layer, beside the lower bound."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu_stages.bed import Bed
from bench.gpu_stages.results import Line, Point
from motet.kernels import AttentionBatch, KvCache, attend, attend_stored
from motet.kernels.triton.attention import PagedAttention

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16  # Llama 8B's
UNCACHED_BYTES = 400 << 20  # of K and V: more than a GPU's L2 holds
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the norm
STEPS = (  # tokens of each sequence in the step, and in the cache already
    ((1, 64, 1, 200, 17), (300, 0, 0, 40, 1000)),
    ((1, 1, 1, 1, 1), (2999, 0, 300, 40, 1000)),
)


class Attention:
    """The points of stage 2 on attention."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._heads, self._kv_heads, self._head_dim = bed.pick((HEADS, KV_HEADS, HEAD_DIM), (4, 2, 16))

    def points(self) -> list[Point]:
        kinds = self._bed.pick((torch.bfloat16, torch.float32, torch.float16), (torch.float32,))
        return [
            *(Point(f"attention {str(dtype).removeprefix('torch.')}", partial(self._check, dtype)) for dtype in kinds),
            Point("attention, a decode step", self._decode),
        ]

    def _cache(self, blocks: int, dtype: torch.dtype, layers: int = 1) -> KvCache:
        return KvCache(
            layers=layers,
            blocks=blocks,
            block_size=BLOCK,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            dtype=dtype,
            device=self._bed.device,
        )

    def _check(self, dtype: torch.dtype) -> Line:
        """The errors of a mixed step and a decode step."""
        scale = self._bed.pick(1, 8)
        worst = max(self._error(dtype, *([-(-n // scale) for n in some] for some in step)) for step in STEPS)
        return {"worst_error": worst, "good": worst < TOLERANCE[dtype]}

    def _error(self, dtype: torch.dtype, takes: list[int], before: list[int]) -> float:
        """The error of a step whose earlier tokens are in scattered blocks. All other content of the cache is NaN."""
        bed = self._bed
        blocks = [-(-(a + b) // BLOCK) for a, b in zip(takes, before, strict=True)]
        cache = self._cache(sum(blocks), dtype)
        cache.data[:, :-1] = float("nan")
        order = np.random.default_rng(0).permutation(sum(blocks))
        tables = np.full((len(takes), max(blocks)), -1, dtype=np.int32)
        for row, (count, end) in enumerate(zip(blocks, np.cumsum(blocks), strict=True)):
            tables[row, :count] = order[end - count : end]
        draw = torch.Generator(bed.device).manual_seed(0)
        shape = (self._heads + 2 * self._kv_heads, self._head_dim)
        whole = [
            torch.randn(a + b, *shape, generator=draw, device=bed.device).to(dtype) for a, b in zip(takes, before, strict=True)
        ]

        def slots(row: int, start: int, end: int) -> np.ndarray:
            at = np.arange(start, end)
            return tables[row, at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK

        for row, (qkv, held) in enumerate(zip(whole, before, strict=True)):
            where = torch.from_numpy(slots(row, 0, held)).to(bed.device)
            cache.write(0, where, qkv[:held, self._heads :].unflatten(1, (2, -1)))
        cache.library = PagedAttention(cache, heads=self._heads)
        worst = 0.0
        for window in (0, 50):
            batch = AttentionBatch.build(
                cache,
                seq_starts=np.cumsum([0, *takes]).astype(np.int32),
                context_lens=np.array([a + b for a, b in zip(takes, before, strict=True)], dtype=np.int32),
                block_tables=tables,
                kv_slots=np.concatenate([slots(row, b, a + b) for row, (a, b) in enumerate(zip(takes, before, strict=True))]),
                windows=[window],
            )
            rows = torch.cat([qkv[b:] for qkv, b in zip(whole, before, strict=True)])
            got = attend(rows, cache, 0, batch, heads=self._heads, window=window).double()
            want = torch.cat([self._formula(qkv, window)[b:] for qkv, b in zip(whole, before, strict=True)])
            worst = max(worst, float((got - want).norm() / want.norm()))
        return worst

    def _formula(self, qkv: torch.Tensor, window: int) -> torch.Tensor:
        """Attention of one whole sequence, computed in fp64 by the formula."""
        q, k, v = qkv.double().split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        k, v = (part.repeat_interleave(self._heads // self._kv_heads, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self._head_dim**0.5
        at = torch.arange(len(qkv), device=qkv.device)
        seen = at[None, :] <= at[:, None]
        if window:
            seen &= at[None, :] > at[:, None] - window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)

    def _decode(self) -> Line:
        """Microseconds of a layer by {sequences x tokens}: ours, torch's with gathered context, and reading K and V once.

        One layer after the other, as in a step, so that no cache holds what is read.
        """
        bed, found = self._bed, dict[str, Line]()
        for rows, context in bed.pick(((32, 224), (256, 224), (8, 2048), (64, 1024), (1, 8192), (8, 8192)), ((2, 20),)):
            columns = -(-context // BLOCK)
            nbytes = 4 * rows * context * self._kv_heads * self._head_dim  # of K and V of a layer
            layers = -(-bed.pick(UNCACHED_BYTES, 1) // nbytes)
            cache = self._cache(rows * columns, torch.bfloat16, layers)
            step: dict[str, Any] = {
                "seq_starts": np.arange(rows + 1, dtype=np.int32),
                "context_lens": np.full(rows, context, dtype=np.int32),
                "block_tables": np.random.default_rng(0).permutation(rows * columns).reshape(rows, columns).astype(np.int32),
                "windows": [0],
            }
            step["kv_slots"] = step["block_tables"][:, -1].astype(np.int64) * BLOCK + (context - 1) % BLOCK
            qkv = torch.randn(rows, self._heads + 2 * self._kv_heads, self._head_dim, device=bed.device).bfloat16()
            line: Line = {"floor": nbytes / bed.read_gb_s / 1e3}
            for name, library in (("torch", None), ("ours", PagedAttention(cache, heads=self._heads))):
                cache.library = library
                batch = AttentionBatch.build(cache, **step)
                line[name] = bed.replayed_us(partial(self._attend, qkv, cache, batch, layers)) / layers
            found[f"{rows} x {context}"] = line
        return {"us": found, "good": True}

    def _attend(self, qkv: torch.Tensor, cache: KvCache, batch: AttentionBatch, layers: int) -> None:
        for layer in range(layers):
            attend_stored(qkv, cache, layer, batch, heads=self._heads)
