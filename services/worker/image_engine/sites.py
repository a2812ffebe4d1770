"""The layers of a base that adapters change: each adds the adapters of its rows to its own output.

    y = layer(x)  +  sum over the row's adapters of weight * scale * (x A) B        (`kernels.add_lora`)

A forward pass has *request rows*, two for a request with guidance. A linear layer sees each with some tokens, or one time
embedding, so the kernels' rows are request rows x tokens; all tokens of a request row have its adapters. At a convolution A is
a convolution of its own, with a group for each request row, and B mixes its few channels; patches are never written out, which
would take many times longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from motet.kernels import PAGE_RANKS, LoraBatch, LoraPool, add_lora
from motet.shared.image_shapes import ImageShapes

TEXT_BYTES_MAX = 256 << 20
"""What is kept of layers that see the text alone."""
COMPOSITIONS = 8
"""Compositions of rows whose batches are kept: denoising steps and text encodings take turns."""


@dataclass(slots=True, eq=False)
class Text:
    """The encoded prompts of request rows that step together, and what layers made of them.

    Keys and values of cross-attention read nothing else, so they are the same at every step.
    """

    encoded: torch.Tensor  # [request rows, tokens, features]
    made: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    room_bytes: int = TEXT_BYTES_MAX

    def keep(self, key: tuple[str, int], y: torch.Tensor) -> None:
        """Keep the output of a site if there is room."""
        if y.nbytes <= self.room_bytes:
            self.made[key] = y
            self.room_bytes -= y.nbytes


@dataclass(slots=True)
class Rows:
    """The adapters of one composition of request rows."""

    row_slot: np.ndarray  # int32 [request rows, most adapters of a row], -1 for none
    weights: np.ndarray  # float32, likewise
    version: int  # of the pool
    touched: set[tuple[str, int]]  # (class, index) of the sites that one of the adapters changes
    batches: dict[int, LoraBatch] = field(default_factory=dict)  # of linear layers, by the rows that they see
    groups: dict[str, list[ConvRows]] = field(default_factory=dict)  # of convolutions, by class

    def batch(self, pool: LoraPool, rows: int) -> LoraBatch:
        """The batch of a layer that sees `rows` rows in all."""
        found = self.batches.get(rows)
        if found is None:
            tokens, rest = divmod(rows, len(self.row_slot))
            assert not rest, f"{rows} rows of {len(self.row_slot)} requests' rows"
            row_slot, weights = (np.repeat(one, tokens, axis=0) for one in (self.row_slot, self.weights))
            found = self.batches[rows] = LoraBatch.build(pool, row_slot, weights)
        return found

    def of_class(self, pool: LoraPool, name: str) -> list[ConvRows]:
        """The rows that have an adapter of the class, by its number of pages; rows with several adapters count for each."""
        found = self.groups.get(name)
        if found is None:
            m = pool.names.index(name)
            pages = np.where(self.row_slot >= 0, pool.pages[self.row_slot, m], 0) * (self.weights != 0)
            found = self.groups[name] = [
                _conv_rows(pool, m, self, column, int(count))
                for column in range(pages.shape[1])
                for count in np.unique(pages[:, column])
                if count
            ]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class ConvRows:
    """Request rows whose adapters have equally many pages of a class."""

    rows: torch.Tensor | None  # int64 [n]; None for all rows, in their order
    count: int  # n
    ranks: int  # of whole pages
    lines: torch.Tensor  # int64 [n * pages] rows of LoraPool.rows
    factors: torch.Tensor  # float32 [sites, n, 1, 1]: weight * scale

    def add(self, y: torch.Tensor, x: torch.Tensor, pool: LoraPool, key: tuple[str, int], conv: torch.nn.Conv2d) -> None:
        """Add the adapters' part of the site `key` to `y`, the output of `conv` for `x`."""
        name, index = key
        n, channels = self.count, x.shape[1]
        a = pool.rows(index, name, b=False).index_select(0, self.lines).view(n * self.ranks, channels, *conv.kernel_size)
        b = pool.rows(index, name, b=True).index_select(0, self.lines).view(n, self.ranks, -1).transpose(1, 2)
        mine = (x if self.rows is None else x.index_select(0, self.rows)).reshape(1, n * channels, *x.shape[2:])
        shrunk = functional.conv2d(mine, a, stride=conv.stride, padding=conv.padding, groups=n).view(n, self.ranks, -1)
        shrunk *= self.factors[index]
        if self.rows is None:
            y.view(n, y.shape[1], -1).baddbmm_(b, shrunk)
        else:
            y.index_add_(0, self.rows, torch.bmm(b, shrunk).view(n, *y.shape[1:]))


def _conv_rows(pool: LoraPool, m: int, rows: Rows, column: int, pages: int) -> ConvRows:
    """The rows whose adapter in `column` has `pages` pages of class number `m`."""
    slots, weights = rows.row_slot[:, column], rows.weights[:, column]
    chosen = np.flatnonzero((slots >= 0) & (weights != 0) & (pool.pages[slots, m] == pages))
    mine = slots[chosen]
    factors = (pool.scales[mine, m] * weights[chosen, None]).T
    return ConvRows(
        rows=None if len(chosen) == len(slots) else torch.from_numpy(chosen),
        count=len(chosen),
        ranks=pages * PAGE_RANKS,
        lines=torch.from_numpy(pool.table[mine, m, :pages].reshape(-1)),
        factors=torch.from_numpy(factors[:, :, None, None].copy()),
    )


class Sites:
    """All sites of a checkpoint's models, and the rows of the forward pass to come."""

    def __init__(self, models: Mapping[str, Any], shapes: ImageShapes, pool: LoraPool) -> None:
        """Make every site of `models`, {part: module}, add its rows' adapters."""
        self.pool = pool
        self.rows: Rows | None = None
        self.text: Text | None = None
        self._known: OrderedDict[tuple[bytes, bytes, int], Rows] = OrderedDict()
        for name, sites in shapes.classes().items():
            for index, site in enumerate(sites):
                module = models[site.part].get_submodule(site.name)
                module.__class__ = _SiteLinear if site.kind == "linear" else _SiteConv
                module.sites, module.key = self, (name, index)

    def use(self, row_slot: np.ndarray | None, weights: np.ndarray | None = None, text: Text | None = None) -> None:
        """Say which adapters the rows of the next forward passes have; None for none at all.

        `row_slot`: int32 [request rows, k] of the pool's slots, -1 for none; `weights`: float32 of the same shape; `text`: the
        rows' prompts, where several passes have these rows and adapters.
        """
        self.text = text
        if row_slot is None or weights is None or not (row_slot >= 0).any():
            self.rows = None
            return
        key = (row_slot.tobytes(), weights.tobytes(), row_slot.shape[1])
        rows = self._known.pop(key, None)
        if rows is None or rows.version != self.pool.version:
            rows = Rows(row_slot, weights, self.pool.version, self._touched(row_slot, weights))
        self._known[key] = self.rows = rows
        if len(self._known) > COMPOSITIONS:
            self._known.popitem(last=False)

    def _touched(self, row_slot: np.ndarray, weights: np.ndarray) -> set[tuple[str, int]]:
        slots = np.unique(row_slot[(row_slot >= 0) & (weights != 0)])
        classes, indices = np.nonzero((self.pool.scales[slots] != 0).any(axis=0))
        return {(self.pool.names[at], int(index)) for at, index in zip(classes, indices, strict=True)}


class _SiteLinear(torch.nn.Linear):
    sites: Sites
    key: tuple[str, int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        text = self.sites.text
        if text is None or x is not text.encoded:
            return self._adapted(x)
        y = text.made.get(self.key)
        if y is None:
            y = self._adapted(x)
            text.keep(self.key, y)
        return y

    def _adapted(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.weight, self.bias)
        rows = self.sites.rows
        if rows is not None and self.key in rows.touched:
            flat = y.view(-1, y.shape[-1])
            name, index = self.key
            inputs = x.reshape(-1, x.shape[-1]).contiguous()  # a single row may come as a transposed view
            add_lora(flat, inputs, self.sites.pool, index, name, rows.batch(self.sites.pool, len(flat)))
        return y


class _SiteConv(torch.nn.Conv2d):
    sites: Sites
    key: tuple[str, int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        rows = self.sites.rows
        if rows is not None and self.key in rows.touched:
            for some in rows.of_class(self.sites.pool, self.key[0]):
                some.add(y, x, self.sites.pool, self.key, self)
        return y
