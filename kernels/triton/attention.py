"""Paged attention in one launch per layer, for caches on a GPU: blocks are read where they are, nothing is gathered.

    tile     up to BM / G tokens of one sequence, with the G query heads of one KV head as rows of one product
    share    the part of a decoding sequence's context that one program reads
    launch   KV heads x tiles x shares programs; each walks its context in steps of BN tokens with a running softmax

Few sequences with long contexts are fewer programs than a GPU runs at a time, so each context is divided into shares of nearly
equal length. The last of a tile's programs to finish adds up what all found, in the order of the shares, so the same step gives
the same bits. Where there are programs enough, or the context is short, there is one share and nothing to add up.

Tiles and block tables lie in one buffer, sent in one copy per step. A captured graph serves every batch of as many rows: the
greatest number of shares is fixed, and their length follows from each context. What lies past a context is never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton

from motet.kernels.triton.attention_kernel import paged_attention
from motet.kernels.triton.launch import INTERPRETED, Kernel
from motet.kernels.triton.lora import multiprocessors_of
from motet.kernels.types import KvCache


@dataclass(frozen=True, slots=True)
class Launch:
    """Constants of the kernel."""

    rows: int  # BM
    context: int  # BN
    warps: int
    stages: int  # one more than the steps whose K and V are on their way
    joined: int = 4096  # values of shares that are added up at a time


@dataclass(frozen=True, slots=True)
class Splitting:
    """How contexts of decoding sequences are divided into shares."""

    programs: int  # at most, per multiprocessor
    least: int  # tokens of a share, if the context has as many
    most: int  # shares: adding them up takes time, too


LAUNCHES = {
    "decode": Launch(rows=16, context=32, warps=4, stages=3),
    "prefill": Launch(rows=64, context=64, warps=4, stages=2),
    "fp32": Launch(rows=16, context=16, warps=4, stages=2, joined=2048),  # without tensor cores, and registers hold less of it
}
SPLITTING = Splitting(programs=3, least=128, most=32)


class Workspace(NamedTuple):
    """Partial results of one launch at a time, see the kernel."""

    parts: torch.Tensor
    sums: torch.Tensor
    arrived: torch.Tensor


class PagedAttention:
    """A plan for one step at a time over `cache`.

    With `rows` it is for exactly that many decoding sequences of up to `columns` blocks, and a graph captured with it stays
    valid when it is planned again. With `prompts`, too, it is for any sequences that have together up to `rows` rows; there are
    `rows` tiles then, of which the last are empty. Rows beyond the step's attend to nothing, which gives zeros.
    """

    graphs_prompts = True

    def __init__(
        self,
        cache: KvCache,
        *,
        heads: int,
        rows: int = 0,
        columns: int = 0,
        prompts: bool = False,
        workspace: Workspace | None = None,
    ) -> None:
        self._cache, self._heads, self._rows, self._columns = cache, heads, rows, columns
        device, (kv_heads, head_dim) = cache.data.device, cache.data.shape[4:]
        self._group = group_of(heads, kv_heads)
        self._fp32 = cache.data.dtype == torch.float32
        self._kind = "prefill" if prompts else "decode"
        self._tiles, self._longest = rows, columns * cache.block_size
        programs = SPLITTING.programs * multiprocessors_of(device)
        self.workspace = workspace or Workspace(
            torch.empty(programs, self._group, head_dim, dtype=torch.float32, device=device),
            torch.empty(programs, 2, self._group, dtype=torch.float32, device=device),
            torch.zeros(programs, dtype=torch.int32, device=device),
        )
        self._buffer = torch.zeros(4 * rows + rows * columns, dtype=torch.int32, device=device)
        self._tables = self._buffer[4 * rows :]

    def for_graph(self, rows: int, columns: int, *, prompts: bool = False) -> PagedAttention:
        """A separate plan for a captured graph. Graphs run one at a time and share the workspace."""
        return PagedAttention(
            self._cache, heads=self._heads, rows=rows, columns=columns, prompts=prompts, workspace=self.workspace
        )

    def plan(self, seq_starts: np.ndarray, context_lens: np.ndarray, block_tables: np.ndarray) -> None:
        """Plan a step with these arrays, which are those of `AttentionBatch.build`."""
        counts = np.diff(seq_starts)
        if not self._rows:
            self._kind = "decode" if len(counts) == 0 or counts.max() == 1 else "prefill"
        if self._kind == "decode":
            tiles = np.column_stack([np.arange(len(counts)), seq_starts[:-1], counts, context_lens - counts])
        else:
            tiles = self._prefill_tiles(counts, seq_starts, context_lens)
            if self._rows:
                tiles = np.concatenate([tiles, self._padding_tiles(int(seq_starts[-1]))])
        if not self._rows:
            self._tiles, self._columns = len(tiles), block_tables.shape[1]
            self._longest = int(context_lens.max(initial=0))
            size = tiles.size + block_tables.size
            if size > len(self._buffer):
                self._buffer = self._buffer.new_empty(2 * size)
        at = 4 * self._tiles
        size = at + len(counts) * self._columns
        self._tables = self._buffer[at:]
        host = torch.empty(size, dtype=torch.int32, pin_memory=self._buffer.is_cuda)  # the caching allocator's
        raw = host.numpy()
        raw[: tiles.size].reshape(-1, 4)[:] = tiles
        raw[tiles.size : at] = 0
        tables = block_tables[:, : self._columns]  # the rest lies past every context
        raw[at:].reshape(len(counts), self._columns)[:, : tables.shape[1]] = tables
        self._buffer[:size].copy_(host, non_blocking=True)

    def _prefill_tiles(self, counts: np.ndarray, seq_starts: np.ndarray, context_lens: np.ndarray) -> np.ndarray:
        tokens = self._block_rows // self._group
        each = -(-counts // tokens)
        sequence = np.repeat(np.arange(len(counts)), each)
        within = tokens * (np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each))
        sizes = np.minimum(counts[sequence] - within, tokens)
        return np.column_stack([sequence, seq_starts[sequence] + within, sizes, (context_lens - counts)[sequence] + within])

    def _padding_tiles(self, start: int) -> np.ndarray:
        """Tiles of the rows from `start` on. Their positions are below 0, so the causal mask leaves them no key."""
        tokens = self._block_rows // self._group
        first = np.arange(start, self._rows, tokens)
        sizes = np.minimum(self._rows - first, tokens)
        return np.column_stack([np.zeros_like(first), first, sizes, -sizes])

    def attend(self, q: torch.Tensor, layer: int, window: int) -> torch.Tensor:
        """Attention of q [rows, heads, head_dim], in the same shape. The cache must have this step's K and V already."""
        kv_heads, head_dim = self._cache.kv_heads, self._cache.head_dim
        shares = self.shares(window)
        out = q.new_empty(q.shape)
        least = SPLITTING.least if shares > 1 else 0
        launch = _kernel(self._launch, self._heads, kv_heads, head_dim, self._cache.block_size, self._fp32, least)
        launch(
            (kv_heads, self._tiles, shares),
            q, q.stride(0), out, self._cache.tokens(layer), self._buffer, self._tables,
            self._columns, head_dim**-0.5, window, *self.workspace,
        )  # fmt: skip
        return out

    def shares(self, window: int) -> int:
        """How many programs at most divide the context of one tile and KV head, in a layer with this sliding window."""
        if self._kind != "decode":
            return 1
        visible = min(self._longest, window) if window else self._longest
        room = len(self.workspace.arrived) // max(self._tiles * self._cache.kv_heads, 1)
        return max(min(room, visible // SPLITTING.least, SPLITTING.most), 1)

    @property
    def _launch(self) -> Launch:
        return LAUNCHES["fp32" if self._fp32 else self._kind]

    @property
    def _block_rows(self) -> int:
        return max(self._launch.rows, self._group)


@cache
def _kernel(launch: Launch, heads: int, kv_heads: int, head_dim: int, block_size: int, fp32: bool, least: int) -> Kernel:
    group = group_of(heads, kv_heads)
    padded = max(triton.next_power_of_2(head_dim), 16)
    return Kernel(
        paged_attention,
        HEADS=heads, KV_HEADS=kv_heads, G=group, D=head_dim, DP=padded,
        BLOCK=block_size, BM=max(launch.rows, group), BN=launch.context,
        LEAST=least, CHUNK=max(launch.joined // (group * padded), 1),
        UPCAST=INTERPRETED or fp32, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def group_of(heads: int, kv_heads: int) -> int:
    """Query heads of a KV head, rounded up to a power of 2."""
    return triton.next_power_of_2(heads // kv_heads)
