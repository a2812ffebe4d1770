"""The base's end of the CPU LoRA processes: channels, and what a step is told about them.

    channel = Channel(engine, pool, max_rows=512)       shared memory; a process is given `channel.fd`
    loading = loading_of(slot, host, layerwise=False)   an adapter that is on its way to the device
    forward(batch, Helpers([loading], [channel], ..))   kernels/cpu/forward.py: a step with such adapters

src/channel.h and src/assist.h have the protocol and its rules.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from ctypes import byref, c_int64, c_void_p
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from kernels.cpu.library import TYPES, Assist, CpuEngine, Loading, address, pool_struct
from kernels.pool import GROUPS, LoraPool, PackedLora

STATES = ("alive", "late", "died", "unreadable")
"""Of a channel; all but the first are for good."""


class HostMemory(Protocol):
    """An adapter in host memory that other processes can map by /proc/<pid>/fd/<fd>."""

    @property
    def packed(self) -> PackedLora: ...
    @property
    def memory(self) -> mmap.mmap: ...
    @property
    def fd(self) -> int: ...
    @property
    def data_start(self) -> int: ...


def loading_of(slot: int, host: HostMemory, *, layerwise: bool = False) -> Loading:
    """`slot`'s adapter as a step needs it while it is on its way. `host` stays alive and of the pool's type meanwhile."""
    file = os.fstat(host.fd)
    return Loading(
        host=pool_struct(host.packed),
        device=file.st_dev,
        inode=file.st_ino,
        data_start=host.data_start,
        file_bytes=len(host.memory),
        fd=host.fd,
        slot=slot,
        layerwise=int(layerwise),
    )


@dataclass(frozen=True, slots=True)
class ChannelCounters:
    """What one process has done, all told."""

    requests: int
    elements: int  # of the adapters' pages, layer by layer
    work: int  # the same, times rows
    busy_s: float  # of the process
    answered_s: float  # from asking it to its answer


class Channel:
    """Memory shared with one process, for `max_rows` rows of the pool's shapes; taken only as far as it is used.

    Numbers begin at `sequence`. The object belongs to whoever runs steps; `fail` and `state` are anybody's.
    """

    def __init__(self, engine: CpuEngine, pool: LoraPool, *, max_rows: int, sequence: int = 0) -> None:
        self._library, self._dtype, self._shapes = engine.library, pool.arena.dtype, pool.shapes
        shapes = pool_struct(pool)
        size = self._library.motet_channel_bytes(byref(shapes), max_rows)
        self.max_rows = max_rows
        self.fd = os.memfd_create("motet-assist", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self._memory = mmap.mmap(self.fd, size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        kind = TYPES[self._dtype]
        self._library.motet_channel_init(self._address, byref(shapes), max_rows, kind, os.getpid(), sequence)
        self.handle = self._library.motet_channel_new(self._address)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.motet_channel_free(self.handle)
            os.close(self.fd)

    @property
    def ready(self) -> bool:
        """Whether a process serves it."""
        return bool(self._library.motet_channel_ready(self.handle))

    @property
    def state(self) -> str:
        """One of STATES."""
        return STATES[self._library.motet_channel_state(self.handle)]

    @property
    def counters(self) -> ChannelCounters:
        """As of the last step."""
        counts = (c_int64 * 5)()
        self._library.motet_channel_counters(self.handle, counts)
        requests, elements, work, busy_ns, answered_ns = counts
        return ChannelCounters(requests, elements, work, busy_ns / 1e9, answered_ns / 1e9)

    def fail(self, state: str) -> None:
        """Never use it again; a step that waits for it stops waiting."""
        self._library.motet_channel_fail(self.handle, STATES.index(state))

    def stop(self) -> None:
        """Ask the process to end."""
        self._library.motet_channel_stop(self.handle)

    def serve(self) -> None:
        """The process's side in this thread, until `stop`."""
        self._library.motet_assist_serve(self._address, 0)

    def call(self, loading: Loading, x: torch.Tensor, y: torch.Tensor, *, layer: int, group: int, bound_s: float) -> bool:
        """One request beside any step: `y` float32 [rows, sum of out] = the adapter's part of `x` float32 [rows, in].

        False when the channel has failed. No more than `max_rows` rows.
        """
        modules = list(GROUPS.values())[group]
        wanted = len(x), sum(self._shapes[module][1] for module in modules)
        if y.shape != wanted:
            raise ValueError(f"y {tuple(y.shape)}: {wanted} is expected")
        self.start(loading, x, layer=layer, group=group, bound_s=bound_s)
        return self.finish(y)

    def start(self, loading: Loading, x: torch.Tensor, *, layer: int, group: int, bound_s: float) -> None:
        """The first half of `call`, which waits for nothing."""
        fan_in = self._shapes[list(GROUPS.values())[group][0]][0]
        if x.shape != (len(x), fan_in) or len(x) > self.max_rows:
            raise ValueError(f"x {tuple(x.shape)}: at most [{self.max_rows}, {fan_in}] is expected")
        at, bound_ns = address(x, torch.float32), int(bound_s * 1e9)
        self._library.motet_channel_start(self.handle, byref(loading), at, len(x), layer, group, bound_ns)

    def finish(self, y: torch.Tensor | None = None) -> bool:
        """The second half, for a `y` of the right shape; without one the answer stays in the shared memory."""
        at = address(y, torch.float32) if y is not None else None
        return bool(self._library.motet_channel_finish(self.handle, at))


@dataclass(slots=True)
class AssistCounts:
    """Rows times layers of adapters on their way, by where their low-rank part was computed; and what went wrong."""

    by_processes: int = 0
    on_device: int = 0
    in_place: int = 0
    repaired: int = 0  # rows of requests that failed
    layer_waited_ns: int = 0  # for copies
    layers_late: int = 0  # copies that did not come in that time

    def add(self, step: Assist) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(step, field.name))


@dataclass(frozen=True, slots=True)
class Helpers:
    """For one step: its adapters on their way and the processes that may help."""

    loading: Sequence[Loading]
    channels: Sequence[Channel] = ()
    read_ns: float = 0.0  # a process's time per element of an adapter's pages of a layer
    row_ns: float = 0.1  # and more, per row and element
    layer_ns: float = 0.0  # the base's for that layer; 0: one process takes all rows of an adapter
    watchdog_s: float = 0.02  # a process may be this much later than eight times what a request takes
    layer_wait_s: float = 1.0  # of a step, for layer-wise copies

    def struct(self) -> Assist:
        """Valid as long as this object."""
        return Assist(
            loading=(Loading * len(self.loading))(*self.loading),
            count=len(self.loading),
            channel=(c_void_p * max(1, len(self.channels)))(*(channel.handle for channel in self.channels)),
            channels=len(self.channels),
            read_ns=self.read_ns,
            row_ns=self.row_ns,
            layer_ns=self.layer_ns,
            watchdog_ns=int(self.watchdog_s * 1e9),
            layer_wait_ns=int(self.layer_wait_s * 1e9),
        )
