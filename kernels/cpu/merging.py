"""A second copy of a decoder's matrices with one adapter merged into it: W + scale B A, made piece by piece.

    merged = MergedWeights(engine, forward.layers)
    merged.begin(adapter)                       `adapter.packed` is a PackedLora
    while not merged.advance(enough): ...       pieces until `enough()`; True when the copy is whole
    merged.drop()                               its memory goes back to the system

The base matrices are not changed, and every copy is made from them: sums are float32 and rounded once. Adding an adapter to
weights in place and subtracting it again would leave rounding errors. Only the matrices that the adapter changes are copied;
the others are shared with the base.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import byref
from typing import Protocol

from motet.kernels.cpu.library import TYPES, CpuEngine, Layer, Matrix, pool_struct
from motet.kernels.cpu.packing import PANEL
from motet.kernels.pool import GROUPS, MODULES, PackedLora

PIECE = 1 << 18  # elements: some tenths of a millisecond


class Adapter(Protocol):
    """An adapter in host memory. The memory is valid as long as this object exists."""

    @property
    def packed(self) -> PackedLora:
        """The adapter's matrices."""

    def rest(self) -> None:
        """The matrices are not needed for now, so their pages may be released."""


class MergedWeights:
    """The merged copy of one model's weights. It is used between two steps, by the thread that runs the steps.

    `layers` are the base model's layers.
    """

    def __init__(self, engine: CpuEngine, layers: ctypes.Array[Layer]) -> None:
        self._engine, self._pristine = engine, layers
        bytes_of = engine.library.motet_packed_bytes
        first = layers[0]
        self._group_bytes = [bytes_of(one.n, one.k, one.type) * len(layers) for one in _matrices(first)]
        self._groups = [[MODULES.index(module) for module in group] for group in GROUPS.values()]
        self._memory: tuple[int, int] | None = None  # address, bytes
        self._pieces: Iterator[None] = iter(())
        self.layers = type(layers)()
        """The layers of a merged step."""
        self.whole = False

    def __del__(self) -> None:
        self.drop()

    @property
    def nbytes(self) -> int:
        """Bytes of the present copy, complete or not, without the base weights."""
        return self._memory[1] if self._memory is not None else 0

    def size(self, adapter: Adapter) -> int:
        """Bytes of a copy with this adapter."""
        return sum(self._group_bytes[group] for group in self._changed(adapter.packed))

    def begin(self, adapter: Adapter) -> None:
        """Begin a copy with this adapter; it replaces the present copy. Raises MemoryError when the system has no room."""
        self.drop()
        nbytes = self.size(adapter)
        at = self._engine.library.motet_alloc(nbytes)
        if not at:
            raise MemoryError(f"{nbytes} bytes for merged weights")
        self._memory = at, nbytes
        ctypes.memmove(self.layers, self._pristine, ctypes.sizeof(self._pristine))
        self._pieces = self._make(adapter, at)

    def advance(self, enough: Callable[[], bool]) -> bool:
        """Compute pieces of the copy; `enough()` is called after each and ends the call.

        Returns whether the copy is complete.
        """
        while not self.whole and self._memory is not None:
            if next(self._pieces, self) is self:
                self.whole = True
            elif enough():
                break
        return self.whole

    def drop(self) -> None:
        """Drop the copy."""
        memory, self._memory = getattr(self, "_memory", None), None
        if memory is not None:
            self._pieces, self.whole = iter(()), False
            self._engine.library.motet_release(*memory)

    def _changed(self, adapter: PackedLora) -> list[int]:
        return [group for group, modules in enumerate(self._groups) if adapter.pages[0, modules].any()]

    def _make(self, adapter: Adapter, at: int) -> Iterator[None]:
        library, handle, packed = self._engine.library, self._engine.handle, adapter.packed
        struct, kind, groups = pool_struct(packed), TYPES[packed.arena.dtype], self._changed(packed)
        for layer in range(len(self._pristine)):
            pristine, merged = _matrices(self._pristine[layer]), _matrices(self.layers[layer])
            for group in groups:
                matrix = pristine[group]
                panels, each = -(-matrix.n // PANEL), max(1, PIECE // (PANEL * matrix.k))
                for first in range(0, panels, each):
                    count = min(each, panels - first)
                    library.motet_merge(handle, byref(struct), kind, layer, group, byref(matrix), at, first, count)
                    yield
                merged[group].data = at
                at += library.motet_packed_bytes(matrix.n, matrix.k, matrix.type)
        adapter.rest()


def _matrices(layer: Layer) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    return layer.qkv, layer.o, layer.gate_up, layer.down
