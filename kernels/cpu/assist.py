"""The engine's side of the CPU LoRA processes: channels, and the structures that a step needs for them.

    channel = Channel(engine, pool, max_rows=512)       shared memory; a process gets `channel.fd`
    loading = loading_of(slot, host, layerwise=False)   an adapter that is being copied to the device
    forward(batch, Helpers([loading], [channel], ..))   kernels/cpu/forward.py: a step with such adapters

src/channel.h and src/assist.h describe the protocol and its rules.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from ctypes import byref, c_int64, c_uint32, c_void_p
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch

from motet.kernels.cpu.library import TYPES, Assist, CpuEngine, Loading, address, pool_struct
from motet.kernels.pool import GROUPS, LoraPool, PackedLora

MAX_SLICES = 16
"""Largest number of slices of one channel in one step; src/channel.h has room for no more."""

STATES = ("alive", "late", "died", "unreadable")
"""The states of a channel. All but the first are final."""


class HostMemory(Protocol):
    """An adapter in host memory that other processes can map through /proc/<pid>/fd/<fd>."""

    @property
    def packed(self) -> PackedLora: ...
    @property
    def memory(self) -> mmap.mmap: ...
    @property
    def fd(self) -> int: ...
    @property
    def data_start(self) -> int: ...


def loading_of(slot: int, host: HostMemory, *, layerwise: bool = False) -> Loading:
    """The adapter of `slot` as a step needs it while it is being copied. `host` has the pool's type and must stay alive."""
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
    """Totals of the work of one process."""

    requests: int
    elements: int  # of the adapters' pages, layer by layer
    work: int  # the same, times rows
    busy_s: float  # of the process
    answered_s: float  # from asking it to its answer


@dataclass(frozen=True, slots=True)
class ChannelWords:
    """Addresses of 32-bit words: those of the request, in the order in which they are written, and that of the answer."""

    sequence: int  # of the request, written last
    layer: int
    group: int
    slices: int
    done: int
    failures: int


class Channel:
    """Memory shared with one process, for `max_rows` rows of the pool's shapes. Pages are allocated when first used.

    Numbers of requests begin at `sequence`. Only the thread that runs steps may use the object, except for `fail` and `state`.
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
        """Whether a process serves this channel."""
        return bool(self._library.motet_channel_ready(self.handle))

    @property
    def state(self) -> str:
        """The state of the channel, one of STATES."""
        return STATES[self._library.motet_channel_state(self.handle)]

    def words(self) -> ChannelWords:
        """The words that a device writes and waits for."""
        addresses = (c_int64 * 6)()
        self._library.motet_channel_words(self.handle, addresses)
        return ChannelWords(*addresses)

    def rows(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the rows of x and y of a group, [max_rows, stride of a row] each, in the type of activations."""
        found = (c_int64 * 5)()
        self._library.motet_channel_rows(self.handle, group, found)
        dtype = next(one for one, kind in TYPES.items() if kind == found[4])
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        spans = []
        for at, stride in ((found[0], found[1]), (found[2], found[3])):
            start = at - self._address
            spans.append(whole[start : start + self.max_rows * stride * dtype.itemsize].view(dtype).view(self.max_rows, stride))
        return spans[0], spans[1]

    @property
    def pending(self) -> int | None:
        """The number of the request that is not answered; None if all are."""
        words = self.words()
        asked, done = (c_uint32.from_address(at).value for at in (words.sequence, words.done))
        return asked if (asked - done) & 0xFFFFFFFF in range(1, 1 << 30) else None

    def listen(self, on: bool) -> None:
        """Say whether a device is about to send requests: the process then polls for them and does not sleep."""
        self._library.motet_channel_listen(self.handle, on)

    def release(self) -> None:
        """The process has ended: every request counts as answered, with a wrong result."""
        self._library.motet_channel_release(self.handle)

    def account(self, requests: int, elements: int, work: int) -> None:
        """Count the requests of a device. The process has counted its time already."""
        self._library.motet_channel_account(self.handle, requests, elements, work)

    @property
    def memory(self) -> tuple[int, int]:
        """The address and the size in bytes of the shared memory."""
        return self._address, len(self._memory)

    @property
    def counters(self) -> ChannelCounters:
        """The totals up to the last step."""
        counts = (c_int64 * 5)()
        self._library.motet_channel_counters(self.handle, counts)
        requests, elements, work, busy_ns, answered_ns = counts
        return ChannelCounters(requests, elements, work, busy_ns / 1e9, answered_ns / 1e9)

    def fail(self, state: str) -> None:
        """Mark the channel as failed for ever. A step that waits for it stops waiting."""
        self._library.motet_channel_fail(self.handle, STATES.index(state))

    def stop(self) -> None:
        """Ask the process to end."""
        self._library.motet_channel_stop(self.handle)

    def serve(self) -> None:
        """Run the process's side of the channel in this thread, until `stop`."""
        self._library.motet_assist_serve(self._address, 0)

    def call(self, loading: Loading, x: torch.Tensor, y: torch.Tensor, *, layer: int, group: int, bound_s: float) -> bool:
        """Make one request outside of any step: `y` float32 [rows, sum of out] = the adapter's part for `x` float32 [rows, in].

        At most `max_rows` rows. Returns False when the channel has failed.
        """
        modules = list(GROUPS.values())[group]
        wanted = len(x), sum(self._shapes[module][1] for module in modules)
        if y.shape != wanted:
            raise ValueError(f"y {tuple(y.shape)}: {wanted} is expected")
        self.start(loading, x, layer=layer, group=group, bound_s=bound_s)
        return self.finish(y)

    def start(self, loading: Loading, x: torch.Tensor, *, layer: int, group: int, bound_s: float) -> None:
        """The first half of `call`: send the request, without waiting."""
        fan_in = self._shapes[list(GROUPS.values())[group][0]][0]
        if x.shape != (len(x), fan_in) or len(x) > self.max_rows:
            raise ValueError(f"x {tuple(x.shape)}: at most [{self.max_rows}, {fan_in}] is expected")
        at, bound_ns = address(x, torch.float32), int(bound_s * 1e9)
        self._library.motet_channel_start(self.handle, byref(loading), at, len(x), layer, group, bound_ns)

    def finish(self, y: torch.Tensor | None = None) -> bool:
        """The second half of `call`: wait, and copy the answer to `y` of the right shape.

        Without `y` it stays in the shared memory.
        """
        at = address(y, torch.float32) if y is not None else None
        return bool(self._library.motet_channel_finish(self.handle, at))


@dataclass(slots=True)
class AssistCounts:
    """Rows times layers of unfinished adapters, by where their low-rank part was computed; and failures."""

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
    """For one step: its adapters that are being copied, and the processes that may help."""

    loading: Sequence[Loading]
    channels: Sequence[Channel] = ()
    read_ns: float = 0.0  # a process's time per element of an adapter's pages of a layer
    row_ns: float = 0.1  # and more, per row and element
    layer_ns: float = 0.0  # the base's for that layer; 0: one process takes all rows of an adapter
    watchdog_s: float = 0.02  # a process may be this much later than eight times what a request takes
    layer_wait_s: float = 1.0  # of a step, for layer-wise copies

    def struct(self) -> Assist:
        """The same facts for the compiled library. Valid as long as this object."""
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


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one adapter that one process takes in a step."""

    loading: int  # index of the adapter
    channel: int  # index
    number: int  # of the channel's slices
    at: int  # first row in the channel
    rows: np.ndarray  # of the step


def divide(engine: CpuEngine, helpers: Helpers, row_slot: np.ndarray) -> list[Part]:
    """Which process computes which rows, as the compiled step would divide them. The channels are prepared for it."""
    assist = helpers.struct()
    slices = np.empty((max(1, len(helpers.channels)) * MAX_SLICES, 6), dtype=np.int32)
    rows = np.empty(len(row_slot), dtype=np.int32)
    row_slot = np.ascontiguousarray(row_slot, dtype=np.int32)
    count = engine.library.motet_assist_divide(
        byref(assist), row_slot.ctypes.data, len(row_slot), slices.ctypes.data, rows.ctypes.data
    )
    return [
        Part(loading, channel, number, at, rows[first : first + n])
        for loading, channel, number, at, first, n in slices[:count].tolist()
    ]
