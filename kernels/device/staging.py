"""Sends layers of adapters to a device's LoraPool, each in one copy.

    staging = LayerStaging(pool, streams)
    parts = staging.parts(adapter)          once per adapter
    staging.send(slot, parts, layer)        enqueues the layer on the copy stream

    rows of all pages --gathered--> a pinned buffer --one copy--> a buffer on the device --scattered--> the slot's pages

An adapter has dozens of pages, so calls for each of them would take longer than the copy, and hold up the thread that enqueues
steps. Adapter files belong to the page cache and cannot be pinned. There are two pinned buffers: one is filled while the device
fetches the other. A buffer begins with the places of its pages:

    int64 [most pages, 3]: first line of the rows, lines, first line in the pool | the rows, page after page

On a CPU the rows go from the first buffer to the pages, in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from motet.kernels.device.streams import DeviceStreams, Mark
from motet.kernels.pool import LINE, MODULES, LoraPool, PackedLora

PLACE = 3  # words


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What is the same for all layers of an adapter."""

    modules: np.ndarray  # int64 [pages]
    pages: np.ndarray  # int64 [pages], of its module
    places: np.ndarray  # int64 [pages, 3]: first line in a buffer, lines, 0
    rows: list[tuple[torch.Tensor, ...]]  # of each layer: of each module [its pages, elements]
    staged: list[list[torch.Tensor]]  # where these go in each buffer
    words: int  # of a buffer in use


class LayerStaging:
    """Buffers for a layer of the largest adapter. One thread at a time may send.

    Everything is allocated and compiled here: later it could wait for the device, whose steps may wait for a layer.
    """

    def __init__(self, pool: LoraPool, streams: DeviceStreams) -> None:
        self._pool, self._copies = pool, streams.copies
        arena, most = pool.arena, pool.table.shape[2]
        self._lines = [sum(pool.shapes[module]) for module in MODULES]  # of a page, in one layer
        self._unit = LINE * arena.element_size() // 8
        self._head = -(-most * len(MODULES) * PLACE // 2) * 2  # words; rows begin at multiples of 16 bytes
        words = self._head + most * sum(self._lines) * self._unit
        self._buffers = [torch.zeros(words, dtype=torch.int64, pin_memory=arena.is_cuda) for _ in range(2)]
        self._fetched: list[Mark | None] = [None, None]
        self._next = 0
        self._there = torch.zeros(words, dtype=torch.int64, device=arena.device) if arena.is_cuda else None
        self._arena = arena.view(torch.int64)
        self._scatter = scatter_for(arena)
        self._spread(self._buffers[0] if self._there is None else self._there, 1)  # compiles: the page has no lines

    def parts(self, source: PackedLora) -> Parts:
        """The parts of an adapter of the pool's type and shapes. They reference its memory."""
        counts = source.pages[0]
        modules, pages = np.nonzero(np.arange(counts.max()) < counts[:, None])
        lines = np.array(self._lines)[modules]
        firsts = np.cumsum(lines) - lines
        sizes = [(int(counts[m]), LINE * self._lines[m]) for m in np.flatnonzero(counts)]
        end = self._head + int(lines.sum()) * self._unit
        staged = [
            _divided(buffer[self._head : end].view(source.arena.dtype), [count * row for count, row in sizes], sizes)
            for buffer in self._buffers
        ]
        layers = self._pool.layers
        whole = _divided(source.arena, [count * layers * row for count, row in sizes], [(c, layers, row) for c, row in sizes])
        rows = list(zip(*(module.unbind(1) for module in whole), strict=True))
        return Parts(modules, pages, np.stack([firsts, lines, np.zeros_like(lines)], axis=1), rows, staged, end)

    def send(self, slot: int, parts: Parts, layer: int) -> None:
        """Enqueue the copy of one layer to the slot's pages. It may wait for the copy of the layer before the last.

        The adapter's memory is not read any more when this returns. The slot's pages must not move meanwhile.
        """
        this, self._next = self._next, 1 - self._next
        buffer, fetched = self._buffers[this], self._fetched[this]
        if fetched is not None:
            fetched.synchronize()
        torch._foreach_copy_(parts.staged[this], parts.rows[layer])  # one call, and other threads of Python run meanwhile
        count = len(parts.places)
        places = buffer.numpy()[: PLACE * count].reshape(count, PLACE)
        places[:] = parts.places
        places[:, 2] = self._pool.table[slot, parts.modules, parts.pages] + layer * parts.places[:, 1]
        with self._copies as stream:
            if self._there is not None:
                buffer = self._there[: parts.words].copy_(buffer[: parts.words], non_blocking=True)
            self._spread(buffer, count)
            self._fetched[this] = stream.mark()

    def _spread(self, buffer: torch.Tensor, count: int) -> None:
        """Copy the rows of `count` pages from a buffer to the pool."""
        places = buffer[: PLACE * count].view(count, PLACE)
        self._scatter(places, buffer[self._head :], self._arena, unit=self._unit, most_lines=max(self._lines))


def scatter_for(arena: torch.Tensor) -> Callable[..., None]:
    if arena.is_cuda:
        from motet.kernels.triton.scatter import scatter

        return scatter
    return _scatter_here


def _scatter_here(pieces: torch.Tensor, source: torch.Tensor, target: torch.Tensor, *, unit: int, most_lines: int) -> None:
    """As kernels/triton/scatter.py."""
    for first, lines, to in pieces.tolist():
        target[to * unit : (to + lines) * unit] = source[first * unit : (first + lines) * unit]


def _divided(memory: torch.Tensor, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Consecutive parts of `memory` of these sizes, in these shapes."""
    return [part.view(shape) for part, shape in zip(memory.split(list(sizes)), shapes, strict=True)]
