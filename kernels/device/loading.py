"""Copies adapters into a device's LoraPool beside the steps: a thread sends layer by layer on its own stream.

    loader = DeviceLoader(pool, streams)
    pool.reserve(slot, packed)
    loader.begin(slot, source, kept)        returns at once; `pool.loaded_layers[slot]` counts up from 0
    loader.cancel(slot); pool.free(slot)    at any time

The copy stream writes `loaded_layers` after each layer's bytes: the host reads it, and a step's stream may wait for it. The
rules are those of the compiled loader (kernels/cpu/src/loader.h): loads run in order of `begin`, a layer counts when its last
byte is there, a page's move and a layer's copy exclude each other, and nothing is written after `cancel`.

Layers pass through pinned memory, one at a time: adapter files belong to the page cache and cannot be pinned.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from motet.kernels.device.streams import DeviceStreams
from motet.kernels.link import LinkMeter, LinkState, Sources
from motet.kernels.pool import LINE, MODULES, LoraPool, PackedLora

log = logging.getLogger("motet.kernels.device")


@dataclass(slots=True, eq=False)
class _Load:
    slot: int
    source: PackedLora
    pages: list[tuple[int, int]]  # module, page
    layer_bytes: int
    left: int  # bytes
    cancelled: bool = False


class DeviceLoader(Sources):
    """One thread that fills a pool's slots. Only the thread that runs the steps may call the pool's own methods.

    `link_bytes_per_s` emulates a rate, 0 for the link's own. A slot whose copy fails counts as loaded, so that no stream waits
    for it; `mend` must be called before a step reads it.
    """

    def __init__(self, pool: LoraPool, streams: DeviceStreams, *, link_bytes_per_s: float = 0.0) -> None:
        super().__init__(pool)
        self._streams, self._pace = streams, link_bytes_per_s
        self._meter = LinkMeter(link_bytes_per_s)
        self._changed = threading.Condition()  # and all that follows is read and written under it
        self._queue: deque[_Load] = deque()
        self._current: _Load | None = None
        self._copying = self._stop = False
        self._held = 0
        self._copied = self._busy_ns = self._copying_ns = 0
        self._failed: dict[int, _Load] = {}  # by slot
        self._staging = self._staged_layer() if pool.arena.is_cuda else None
        words = pool.loaded_layers
        streams.memory.register(words.ctypes.data, words.nbytes)
        pool.still = self._still
        self._thread = threading.Thread(target=self._run, name="motet-loader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Unfinished loads stay as they are."""
        with self._changed:
            if self._stop:
                return
            self._stop = True
            if self._current is not None:
                self._current.cancelled = True
            self._changed.notify_all()
        self._thread.join()
        self._pool.still = nullcontext
        self._sources.clear()
        self._streams.memory.forget(self._pool.loaded_layers.ctypes.data)

    def begin(self, slot: int, source: PackedLora, kept: Any) -> None:
        """Copy an adapter of the pool's type into `slot`, which is reserved for it.

        `kept` is the owner of the source's memory: it is referenced until the load is `finished` or cancelled.
        """
        pages = [(m, page) for m in range(len(MODULES)) for page in range(int(source.pages[0, m]))]
        layer_bytes = sum(self._row_elements(m) for m, _ in pages) * source.arena.element_size()
        self._streams.copies.after(self._streams.steps)  # what lay in these pages may still be on the move
        with self._changed:
            self._sources[slot] = kept
            self._queue.append(_Load(slot, source, pages, layer_bytes, layer_bytes * self._pool.layers))
            self._changed.notify_all()

    def cancel(self, slot: int) -> None:
        """Stop the load of this slot, if there is one. When this returns, nothing more is written."""
        with self._changed:
            self._queue = deque(load for load in self._queue if load.slot != slot)
            if self._current is not None and self._current.slot == slot:
                self._current.cancelled = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._copying)
            self._sources.pop(slot, None)
            self._failed.pop(slot, None)

    def bytes_ahead(self, slot: int) -> int:
        """Bytes to transfer until this slot is complete, including the loads before it."""
        ahead = 0
        with self._changed:
            for load in (self._current, *self._queue):
                if load is not None and not load.cancelled:
                    ahead += load.left
                    if load.slot == slot:
                        return ahead
        return 0

    @property
    def link(self) -> LinkState:
        """The present state of the link."""
        with self._changed:
            loads = [load for load in (self._current, *self._queue) if load is not None and not load.cancelled]
            counts = sum(load.left for load in loads), self._copied, self._busy_ns, self._copying_ns
        return self._meter.state(*counts)

    def give_up(self, slots: Collection[int]) -> None:
        """Abandon the copies of these adapters: no stream waits for them any longer. `mend` copies those that are incomplete.

        Any thread may call it.
        """
        for slot in slots:  # at once: the thread that holds the lock may wait for a stream that waits for this word
            self._pool.loaded_layers[slot] = self._pool.layers
        with self._changed:
            for load in (self._current, *self._queue):
                if load is not None and load.slot in slots and not load.cancelled:
                    load.cancelled = True
                    self._failed[load.slot] = load
                    self._pool.loaded_layers[load.slot] = self._pool.layers
            self._queue = deque(load for load in self._queue if load.slot not in slots)
            self._changed.notify_all()

    def mend(self, row_slot: np.ndarray) -> None:
        """Copy the adapters of these rows whose loads have failed, in this thread. Raises the error of a copy."""
        if not self._failed:
            return
        for slot in self._failed.keys() & set(row_slot.tolist()):
            load = self._failed[slot]
            with self._still():
                for layer in range(self._pool.layers):
                    self._send(load, layer, self._lines(load))
            del self._failed[slot]

    @contextmanager
    def _still(self) -> Iterator[None]:
        """A context without copying. Work that the steps' stream gets in it comes before the copies that follow."""
        with self._changed:
            self._held += 1
            self._changed.wait_for(lambda: not self._copying)
        try:
            self._streams.steps.after(self._streams.copies)
            yield
            self._streams.copies.after(self._streams.steps)
        finally:
            with self._changed:
                self._held -= 1
                self._changed.notify_all()

    # ---- the loader's thread

    def _run(self) -> None:
        if self._streams.device.type == "cuda":
            torch.cuda.set_device(self._streams.device)
        while (load := self._next()) is not None:
            try:
                with torch.inference_mode():
                    self._copy(load)
            except Exception as error:
                self._fail(load, error)

    def _next(self) -> _Load | None:
        with self._changed:
            self._current = None
            self._changed.wait_for(lambda: self._stop or self._queue)
            if self._stop:
                return None
            self._current = self._queue.popleft()
            return self._current

    def _copy(self, load: _Load) -> None:
        due_ns = began_ns = perf_counter_ns()
        for layer in range(self._pool.layers):
            with self._changed:
                self._changed.wait_for(lambda: not self._held or load.cancelled)
                if load.cancelled:
                    return
                self._copying = True
                lines = self._lines(load)
            copying_ns = perf_counter_ns()
            try:
                self._send(load, layer, lines)
            finally:
                with self._changed:
                    self._copying = False
                    self._changed.notify_all()
            due_ns += int(load.layer_bytes / self._pace * 1e9) if self._pace else 0
            with self._changed:
                now_ns = perf_counter_ns()
                self._copying_ns += now_ns - copying_ns
                if due_ns > now_ns:
                    self._changed.wait_for(lambda: load.cancelled, timeout=(due_ns - now_ns) / 1e9)
                if load.cancelled:
                    return
                self._tell(load.slot, layer + 1)
                now_ns = perf_counter_ns()
                load.left -= load.layer_bytes
                self._copied += load.layer_bytes
                self._busy_ns += now_ns - began_ns
                began_ns = now_ns

    def _send(self, load: _Load, layer: int, lines: list[int]) -> None:
        """Copy one layer's rows to the device. They are there when this returns."""
        arena, host = self._pool.arena, load.source
        sources, places = [], []
        for (m, page), line in zip(load.pages, lines, strict=True):
            n = self._row_elements(m)
            at, to = int(host.table[0, m, page]) * LINE + layer * n, line * LINE + layer * n
            sources.append(host.arena[at : at + n])
            places.append(arena[to : to + n])
        if arena.is_cuda:
            sources = self._pinned(sources)
        with self._streams.copies as stream:
            for source, place in zip(sources, places, strict=True):
                place.copy_(source, non_blocking=True)
            stream.mark().synchronize()

    def _staged_layer(self) -> torch.Tensor:
        """A pinned buffer for a layer of the largest adapter.

        It is allocated early: pinning memory may wait for the device, whose steps may wait for a copy.
        """
        elements = self._pool.table.shape[2] * sum(map(self._row_elements, range(len(MODULES))))
        return torch.empty(elements, dtype=self._pool.arena.dtype, pin_memory=True)

    def _pinned(self, sources: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in pinned memory, which the device can fetch by itself. Valid until the next call."""
        assert self._staging is not None, "the pool is on a GPU"
        parts = list(self._staging[: sum(map(len, sources))].split([len(source) for source in sources]))
        for part, source in zip(parts, sources, strict=True):
            part.copy_(source)
        return parts

    def _tell(self, slot: int, layers: int) -> None:
        with self._streams.copies as stream:
            stream.write(self._pool.loaded_layers.ctypes.data + slot * self._pool.loaded_layers.itemsize, layers)
            stream.mark().synchronize()

    def _fail(self, load: _Load, error: Exception) -> None:
        log.warning("copying the adapter of slot %d beside the steps failed: %r", load.slot, error)
        with self._changed:
            if not load.cancelled:
                self._failed[load.slot] = load
                self._pool.loaded_layers[load.slot] = self._pool.layers

    def _lines(self, load: _Load) -> list[int]:
        """The present places of the load's pages."""
        return [int(self._pool.table[load.slot, m, page]) for m, page in load.pages]

    def _row_elements(self, m: int) -> int:
        return LINE * sum(self._pool.shapes[MODULES[m]])
