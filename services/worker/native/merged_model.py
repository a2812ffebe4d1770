"""The torch model's merged copy: its matrices with one adapter merged into them, W + scale B A, made piece by piece.

    merged = MergedModel(model, shapes, room=..., dropped=...)
    merged.begin(adapter)                       `adapter.packed` is a PackedLora
    while not merged.advance(enough): ...       pieces until `enough()`; True when the copy is whole
    merged.model.forward(...)                   a merged step, without LoRA
    merged.drop()                               its memory is free again; `dropped()` is called before

The base matrices are not changed. Sums are float32 and rounded once. Matrices that the adapter does not change are shared with
the base model. On a GPU `begin` takes the memory of the whole copy (`DeviceMemory.room`), so that a copy that does not fit is
refused before any work; on a CPU each matrix takes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from motet.kernels import PackedLora
from motet.kernels.pool import GROUPS, LINE, MODULES, PAGE_RANKS
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.native.linear import Linear
from motet.services.worker.native.model import Model

PIECE = 1 << 18  # elements: about a millisecond on a core


class MergedModel:
    """The merged copy of one model's weights (`merging.MergedWeights`), used between two steps by the thread that runs them.

    `shapes` is {module: (in, out)}; `room(elements)` gives memory for all matrices of a copy, or None if each takes its own;
    `dropped()` is called before the copy's matrices are freed.
    """

    def __init__(
        self,
        model: Model,
        shapes: Mapping[str, tuple[int, int]],
        *,
        room: Callable[[int], torch.Tensor | None] = lambda _: None,
        dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self._pristine, self._shapes, self._take_room, self.dropped = model.weights, shapes, room, dropped
        self._device = model.weights.embed.device
        self._itemsize = model.weights.embed.dtype.itemsize
        self._room: torch.Tensor | None = None
        self._pieces: Iterator[None] = iter(())
        self.model = Model(model.config, replace(model.weights, layers=list(model.weights.layers)))
        """The model of a merged step, once the copy is complete."""
        self.whole = False
        self.nbytes = 0
        """Bytes of the present copy, complete or not, beyond the base weights."""

    def size(self, adapter: HostAdapter) -> int:
        changed = [self._shapes[module] for group in self._changed(adapter.packed) for module in GROUPS[group]]
        return len(self._pristine.layers) * self._itemsize * sum(fan_in * fan_out for fan_in, fan_out in changed)

    def begin(self, adapter: HostAdapter) -> None:
        self.drop()
        size = self.size(adapter)
        self._room = self._take_room(size // self._itemsize)
        self.nbytes = size
        self._pieces = self._make(adapter)

    @torch.inference_mode()
    def advance(self, enough: Callable[[], bool]) -> bool:
        while not self.whole and self.nbytes:
            if next(self._pieces, self) is self:
                self.whole = True
            elif self._done() and enough():
                break
        return self.whole

    def drop(self) -> None:
        if self.nbytes:
            self.dropped()
        self.model.weights.layers[:] = self._pristine.layers
        self._pieces, self._room, self.whole, self.nbytes = iter(()), None, False, 0

    def _done(self) -> bool:
        """Wait until the piece is computed: a device works asynchronously, and `enough` measures time."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return True

    def _changed(self, adapter: PackedLora) -> list[str]:
        return [group for group, names in GROUPS.items() if any(adapter.pages[0, MODULES.index(name)] for name in names)]

    def _make(self, adapter: HostAdapter) -> Iterator[None]:
        packed, taken = adapter.packed, 0
        for index, layer in enumerate(self._pristine.layers):
            made: dict[str, Any] = {}
            for group in self._changed(packed):
                linear: Linear = getattr(layer, group)
                weight = linear.weight()
                if self._room is not None:
                    merged = self._room[taken : taken + weight.numel()].view_as(weight)
                    taken += weight.numel()
                else:
                    merged = torch.empty_like(weight)
                yield from self._merge(packed, index, group, weight, merged)
                made[group] = linear.like(merged)
            self.model.weights.layers[index] = replace(layer, **made)
        adapter.rest()

    def _merge(self, packed: PackedLora, layer: int, group: str, weight: torch.Tensor, merged: torch.Tensor) -> Iterator[None]:
        """Fill `merged` [out, in] with the pristine `weight` and the adapter's product, some rows at a time."""
        first = 0
        for module in GROUPS[group]:
            fan_in, fan_out = self._shapes[module]
            a, b = (part.to(self._device).float() for part in _factors(packed, layer, module))
            scale, rows = float(packed.scales[0, MODULES.index(module), layer]), max(1, PIECE // fan_in)
            for start in range(0, fan_out, rows):
                some = slice(start, min(start + rows, fan_out))
                here = slice(first + some.start, first + some.stop)
                merged[here] = torch.addmm(weight[here].float(), b[:, some].T, a, alpha=scale)
                yield
            first += fan_out


def _factors(packed: PackedLora, layer: int, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A [ranks, in] and B^T [ranks, out] of one layer; no ranks when the module is not adapted."""
    m, (fan_in, fan_out) = MODULES.index(module), packed.shapes[module]
    lines = packed.table[0, m, : packed.pages[0, m]] + layer * (fan_in + fan_out)
    starts = (LINE * lines.astype(np.int64)).tolist()
    a = [packed.arena[at : at + PAGE_RANKS * fan_in].view(PAGE_RANKS, fan_in) for at in starts]
    behind = [at + PAGE_RANKS * fan_in for at in starts]
    b = [packed.arena[at : at + PAGE_RANKS * fan_out].view(PAGE_RANKS, fan_out) for at in behind]
    if not starts:
        return packed.arena.new_empty((0, fan_in)), packed.arena.new_empty((0, fan_out))
    return torch.cat(a), torch.cat(b)
