"""Copies adapters into a device's LoraPool beside the steps: a thread sends layer by layer on its own stream.

    loader = DeviceLoader(pool, streams)
    pool.reserve(slot, packed)
    loader.begin(slot, source, kept)        returns at once; `pool.loaded_layers[slot]` counts up from 0
    loader.cancel(slot); pool.free(slot)    at any time

The copy stream writes `loaded_layers` after each layer's bytes: the host reads it, and a step's stream may wait for it. The
rules are those of the compiled loader (kernels/cpu/src/loader.h): loads run in order of `begin`, a layer counts when its last
byte is there, a page's move and a layer's copy exclude each other, and nothing is written after `cancel`.

The thread enqueues a layer while the device fetches the one before it (kernels/device/staging.py). It leaves a load only when
all that it has enqueued for it is done. Moves need not wait for that: the streams order them.
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

from motet.kernels.device.staging import LayerStaging
from motet.kernels.device.streams import DeviceStreams
from motet.kernels.link import LinkMeter, LinkState, Sources
from motet.kernels.pool import LINE, MODULES, LoraPool, PackedLora

GATHER_THREADS = 4  # of torch, on a GPU: as many keep up with its link, and more would take cores from the steps' thread
REWRITE_S = 0.01  # how often the word of an abandoned copy is written while the copy stream may write it too
log = logging.getLogger("motet.kernels.device")


@dataclass(slots=True, eq=False)
class _Load:
    slot: int
    source: PackedLora
    layer_bytes: int
    left: int  # bytes that were not there when `_count` looked
    counted_ns: int = 0  # when that changed
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
        self._staging = LayerStaging(pool, streams)
        words = pool.loaded_layers
        streams.memory.register(words.ctypes.data, words.nbytes)
        pool.still = self._still
        # Asked for here, because a thread that has not asked yet gets the number that was set last in any thread.
        self._torch_threads = min(torch.get_num_threads(), GATHER_THREADS)
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
        layer_bytes = LINE * source.arena.element_size() * int(source.pages[0] @ [sum(source.shapes[m]) for m in MODULES])
        self._streams.copies.after(self._streams.steps)  # what lay in these pages may still be on the move
        with self._changed:
            self._sources[slot] = kept
            self._queue.append(_Load(slot, source, layer_bytes, layer_bytes * self._pool.layers))
            self._changed.notify_all()

    def cancel(self, slot: int) -> None:
        """Stop the load of this slot, if there is one. When this returns, nothing more is written."""
        with self._changed:
            self._queue = deque(load for load in self._queue if load.slot != slot)
            if (load := self._current) is not None and load.slot == slot:
                load.cancelled = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._current is not load)
            self._sources.pop(slot, None)
            self._failed.pop(slot, None)

    def bytes_ahead(self, slot: int) -> int:
        """Bytes to transfer until this slot is complete, including the loads before it."""
        ahead = 0
        with self._changed:
            for load in self._unfinished():
                ahead += load.left
                if load.slot == slot:
                    return ahead
        return 0

    @property
    def link(self) -> LinkState:
        """The present state of the link."""
        with self._changed:
            queued = sum(load.left for load in self._unfinished())
            counts = queued, self._copied, self._busy_ns, self._copying_ns
        return self._meter.state(*counts)

    def give_up(self, slots: Collection[int]) -> None:
        """Abandon the copies of these adapters: no stream waits for them any longer. `mend` copies those that are incomplete.

        Any thread may call it. It returns when the loader's thread has left them.
        """
        words = self._pool.loaded_layers
        for slot in slots:  # at once: the thread that holds the lock may wait for a stream that waits for this word
            words[slot] = self._pool.layers
        with self._changed:
            for load in self._unfinished():
                if load.slot in slots:
                    load.cancelled = True
                    self._failed[load.slot] = load
                    words[load.slot] = self._pool.layers
            self._queue = deque(load for load in self._queue if load.slot not in slots)
            self._changed.notify_all()
            current = self._current
            while current is not None and self._failed.get(current.slot) is current:
                words[current.slot] = self._pool.layers  # the copy stream may have written a smaller number meanwhile
                if self._current is not current:
                    return
                self._changed.wait(REWRITE_S)

    def mend(self, row_slot: np.ndarray) -> None:
        """Copy the adapters of these rows whose loads have failed, in this thread. Raises the error of a copy."""
        if not self._failed:
            return
        for slot in self._failed.keys() & set(row_slot.tolist()):
            parts = self._staging.parts(self._failed[slot].source)
            with self._still():
                for layer in range(self._pool.layers):
                    self._staging.send(slot, parts, layer)
                self._streams.copies.mark().synchronize()
            del self._failed[slot]

    @contextmanager
    def _still(self) -> Iterator[None]:
        """A context in which nothing is enqueued. What the steps' stream gets in it comes after all copies before, and before
        those that follow.
        """
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
            torch.set_num_threads(self._torch_threads)
        while (load := self._next()) is not None:
            try:
                with torch.inference_mode():
                    self._copy(load)
            except Exception as error:
                self._fail(load, error)

    def _next(self) -> _Load | None:
        with self._changed:
            if self._current is not None:
                self._count(self._current)
                self._current = None
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._stop or self._queue)
            if self._stop:
                return None
            self._current = self._queue.popleft()
            self._current.counted_ns = perf_counter_ns()
            return self._current

    def _copy(self, load: _Load) -> None:
        due_ns = perf_counter_ns()
        word = self._pool.loaded_layers.ctypes.data + load.slot * self._pool.loaded_layers.itemsize
        parts = self._staging.parts(load.source)
        try:
            for layer in range(self._pool.layers):
                with self._changed:
                    self._changed.wait_for(lambda: not self._held or load.cancelled)
                    if load.cancelled:
                        return
                    self._copying = True
                began_ns = perf_counter_ns()
                try:
                    self._staging.send(load.slot, parts, layer)
                finally:
                    with self._changed:
                        self._copying = False
                        self._copying_ns += perf_counter_ns() - began_ns
                        self._changed.notify_all()
                due_ns += int(load.layer_bytes / self._pace * 1e9) if self._pace else 0
                with self._changed:
                    if (early_ns := due_ns - perf_counter_ns()) > 0:
                        self._changed.wait_for(lambda: load.cancelled, timeout=early_ns / 1e9)
                    if load.cancelled:
                        return
                    self._streams.copies.write(word, layer + 1)
                    self._count(load)
        finally:
            self._streams.copies.mark().synchronize()

    def _fail(self, load: _Load, error: Exception) -> None:
        log.warning("copying the adapter of slot %d beside the steps failed: %r", load.slot, error)
        with self._changed:
            if not load.cancelled:
                load.cancelled = True
                self._failed[load.slot] = load
                self._pool.loaded_layers[load.slot] = self._pool.layers

    def _unfinished(self) -> list[_Load]:
        """The loads with something to copy, in order. Under the lock."""
        if self._current is not None:
            self._count(self._current)
        return [load for load in (self._current, *self._queue) if load is not None and not load.cancelled]

    def _count(self, load: _Load) -> None:
        """Take in what has arrived of a load since the last call. Under the lock."""
        left = load.layer_bytes * (self._pool.layers - int(self._pool.loaded_layers[load.slot]))
        if load.cancelled or left >= load.left:
            return
        now_ns = perf_counter_ns()
        self._copied += load.left - left
        self._busy_ns += now_ns - load.counted_ns
        load.left, load.counted_ns = left, now_ns
