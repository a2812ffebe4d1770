"""Copies adapters into a device's LoraPool beside the steps: a compiled thread sends layer by layer on the copy stream.

    loader = DeviceLoader(engine, pool, streams)
    pool.reserve(slot, packed)
    loader.begin(slot, source, kept)        returns at once; `pool.loaded_layers[slot]` counts up from 0
    loader.cancel(slot); pool.free(slot)    at any time

    source --memcpy--> a ring of pinned memory --the device's copies--> the slot's pages, then its number in loaded_layers

The copy stream writes `loaded_layers` after each layer's bytes: the host reads it, and a step's stream may wait for it. The
rules are those of kernels/cpu/src/loader.h; what is special to a device is in kernels/cpu/src/device_target.h. No Python runs
per layer, because it would wait for the thread that launches steps. Moves of pages need not wait for bytes that are on their
way: the streams order them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from ctypes import byref
from functools import partial
from typing import Any

import numpy as np

from motet.kernels.cpu.library import CpuEngine, pool_struct
from motet.kernels.cpu.loading import CompiledLoader, no_copying
from motet.kernels.device.streams import DeviceStreams
from motet.kernels.pool import LoraPool, PackedLora

PART_BYTES, PARTS = 4 << 20, 4
"""The ring: a part is sent while others are filled. A layer of rank 64 of an 8B has 10 MiB."""
GATHER_THREADS = 4
"""At most; of few cores a quarter. They keep up with a GPU's link, more would take cores from the steps' thread."""
log = logging.getLogger("motet.kernels.device")


class DeviceLoader(CompiledLoader):
    """A loader for a pool on a device. `link_bytes_per_s` emulates a rate, 0 for the link's own.

    A slot whose copy fails counts as loaded, so that no stream waits for it; `mend` must be called before a step reads it.
    """

    def __init__(
        self,
        engine: CpuEngine,
        pool: LoraPool,
        streams: DeviceStreams,
        *,
        link_bytes_per_s: float = 0.0,
        part_bytes: int = PART_BYTES,
    ) -> None:
        library, self._streams, words = engine.library, streams, pool.loaded_layers
        self.ring = mmap.mmap(-1, PARTS * part_bytes)  # what a piece passes on its way
        ring = ctypes.addressof(ctypes.c_char.from_buffer(self.ring))
        self._registered = {words.ctypes.data: words.nbytes, ring: len(self.ring)}
        for address, nbytes in self._registered.items():
            streams.memory.register(address, nbytes)
        calls = streams.calls()
        calls.words, calls.ring = streams.memory.there(words.ctypes.data), ring
        calls.part_bytes, calls.parts = part_bytes, PARTS
        there = pool_struct(pool)
        there.arena = pool.arena.data_ptr()
        handle = library.motet_loader_on_device(
            byref(there), byref(calls), pool.arena.element_size(), link_bytes_per_s, gather_threads()
        )
        super().__init__(library, handle, pool, link_bytes_per_s)
        pool.still = partial(_still, library, handle, streams)  # not `self`, so that the pool does not keep it alive

    def _released(self) -> None:
        for address in self._registered:
            self._streams.memory.forget(address)

    def begin(self, slot: int, source: PackedLora, kept: Any) -> None:
        """As for every loader. What lay in the slot's pages may still be on the move: the copy stream waits for that."""
        self._streams.copies.after(self._streams.steps)
        super().begin(slot, source, kept)

    def give_up(self, slots: Collection[int]) -> None:
        """Abandon the copies of these adapters: no stream waits for them any longer. `mend` copies those that are incomplete.

        Any thread may call it. It returns when the loader's thread has left them.
        """
        for slot in slots:  # all at once: the loader may wait for a stream that waits for one of these numbers
            self._pool.loaded_layers[slot] = self._pool.layers
        for slot in slots:
            self._library.motet_loader_give_up(self._handle, slot)

    def mend(self, row_slot: np.ndarray) -> None:
        """Copy the adapters of these rows whose loads have failed, in this thread. Raises the error of a copy."""
        if not self._sources:
            return
        for slot in self._sources.keys() & set(row_slot.tolist()):
            if failure := self._failure(slot):
                if failure > 0:
                    log.warning("copying the adapter of slot %d beside the steps failed: driver error %d", slot, failure)
                with self._pool.still():
                    self._pool.fill(slot, self._sources[slot][0])
                self._library.motet_loader_mended(self._handle, slot)

    def _whole(self, slot: int) -> bool:
        return super()._whole(slot) and not self._failure(slot)

    def _failure(self, slot: int) -> int:
        """The driver's error, -1 for a copy that was given up, 0 for none."""
        return self._library.motet_loader_failure(self._handle, slot)


def gather_threads() -> int:
    """How many threads copy into the ring."""
    return min(GATHER_THREADS, len(os.sched_getaffinity(0)) // 4) or 1


@contextmanager
def _still(library: ctypes.CDLL, handle: int, streams: DeviceStreams) -> Iterator[None]:
    """A context in which nothing is enqueued. What the steps' stream gets in it comes after all copies before, and before those
    that follow.
    """
    with no_copying(library, handle):
        streams.steps.after(streams.copies)
        yield
        streams.copies.after(streams.steps)
