"""Copies adapters into a LoraPool beside the steps: a thread copies layer by layer at the rate of a link.

    loader = CpuLoader(engine, pool, link_bytes_per_s=2e9)
    pool.reserve(slot, packed)
    loader.begin(slot, source, kept)        returns at once; `pool.loaded_layers[slot]` counts up from 0
    loader.cancel(slot); pool.free(slot)    at any time

A step may read the layers that are complete. src/loader.h describes the rules. `CompiledLoader` is what this loader and that of
a device (kernels/device/loading.py) have in common.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from ctypes import byref, c_int64
from functools import partial
from typing import Any

import numpy as np

from motet.kernels.cpu.library import CpuEngine, pool_struct
from motet.kernels.link import LinkMeter, LinkState, Sources
from motet.kernels.pool import LoraPool, PackedLora


class CompiledLoader(Sources):
    """One thread that fills a pool's slots. Only the thread that runs the steps may call the pool's own methods.

    `handle` is the thread of src/loader.h. The pool must exist until `close` of this object.
    """

    def __init__(self, library: ctypes.CDLL, handle: int, pool: LoraPool, link_bytes_per_s: float) -> None:
        super().__init__(pool)
        self._library, self._handle, self._meter = library, handle, LinkMeter(link_bytes_per_s)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. Unfinished loads stay as they are."""
        handle, self._handle = getattr(self, "_handle", 0), 0
        if handle:
            self._pool.still, self._pool.resizing = nullcontext, None
            self._library.motet_loader_free(handle)
            self._sources.clear()
            self._released()

    def _released(self) -> None:
        """Let go of what the thread has used, which is over now."""

    def begin(self, slot: int, source: PackedLora, kept: Any) -> None:
        """Copy an adapter of the pool's type into `slot`, which is reserved for it.

        `kept` is the owner of the source's memory: it is referenced until the load is `finished` or cancelled.
        """
        self._sources[slot] = source, kept
        self._library.motet_loader_begin(self._handle, slot, byref(pool_struct(source)))

    def cancel(self, slot: int) -> None:
        """Stop the load of this slot, if there is one. When this returns, nothing more is written."""
        self._library.motet_loader_cancel(self._handle, slot)
        self._sources.pop(slot, None)

    def mend(self, row_slot: np.ndarray) -> None:
        """Does nothing: a copy inside host memory does not fail."""

    def bytes_ahead(self, slot: int) -> int:
        """Bytes to transfer until this slot is complete, including the loads before it."""
        return self._library.motet_loader_ahead(self._handle, slot)

    @property
    def link(self) -> LinkState:
        """The present state of the link."""
        counts = (c_int64 * 4)()
        self._library.motet_loader_state(self._handle, counts)
        return self._meter.state(*counts)


class CpuLoader(CompiledLoader):
    """A loader for a pool in host memory. `link_bytes_per_s` is an emulated rate, 0 for the speed of memory."""

    def __init__(self, engine: CpuEngine, pool: LoraPool, *, link_bytes_per_s: float = 0.0) -> None:
        library, sizes = engine.library, (pool.bytes_total, pool.arena.element_size())
        handle = library.motet_loader_new(byref(pool_struct(pool)), *sizes, link_bytes_per_s)
        super().__init__(library, handle, pool, link_bytes_per_s)
        pool.resizing = partial(library.motet_loader_expect, handle)
        pool.still = partial(no_copying, library, handle)  # not `self`, so that the pool does not keep it alive


@contextmanager
def no_copying(library: ctypes.CDLL, handle: int) -> Iterator[None]:
    """A context in which the loader's thread writes nothing to the pool."""
    library.motet_loader_hold(handle)
    try:
        yield
    finally:
        library.motet_loader_release(handle)
