"""A step on a device in which CPU processes compute the low-rank part of rows whose adapters are being copied.

    step = DeviceAssist(pool, streams, library).begin(row_slot, helpers)
    per layer              lora = step.layer(i)           the rows that the device computes in it
    per layer and group    step.start(x, i, group)        rows of x to the processes, and the request word
                           step.collect(y, group)         what they computed, added
    when the device is done, step.finish()                False: a process failed, and the step must be run again

Per group, on the assist stream, beside the base's own product (CaraServe, section 4.2):

    gather rows of x -> pinned memory | write request.{layer, group, slices, sequence} | wait done.sequence | y -> device

and the steps' stream adds y after the assist stream. The processes use the protocol of kernels/cpu/src/channel.h. When a layer
is enqueued, the number of copied layers of an adapter decides where its rows are computed. Rows that no process takes wait for
the copy, layer by layer; the stream waits, not the thread that enqueues.
"""

from __future__ import annotations

from ctypes import c_uint32
from dataclasses import dataclass

import numpy as np
import torch

from motet.kernels.cpu.assist import AssistCounts, Channel, Helpers, Part, divide
from motet.kernels.cpu.library import CpuEngine
from motet.kernels.device.streams import DeviceStreams
from motet.kernels.lora import LoraBatch
from motet.kernels.pool import GROUPS, LINE, MODULES, LoraPool
from motet.kernels.to_device import send

GROUP_NAMES = tuple(GROUPS)
X, Y = 0, 1  # sides of a channel


class _Line:
    """A channel as seen by the device: its memory is registered, and the device has buffers for the transferred rows."""

    def __init__(self, channel: Channel, streams: DeviceStreams) -> None:
        self.channel, self._streams = channel, streams
        streams.memory.register(*channel.memory)
        self.words = channel.words()
        self.host = [channel.rows(group) for group in range(len(GROUPS))]
        self.sequence = 0
        self._staged = [torch.empty(0, dtype=side.dtype, device=streams.device) for side in self.host[0]]

    def stage(self, side: int, group: int, rows: int) -> torch.Tensor:
        """A buffer on the device for `rows` rows of x or y, with the strides of the host."""
        stride = self.host[group][side].shape[1]
        if self._staged[side].numel() < rows * stride:
            widest = max(sides[side].shape[1] for sides in self.host)
            self._staged[side] = self._staged[side].new_empty(rows * widest)
        return self._staged[side][: rows * stride].view(rows, stride)

    def forget(self) -> None:
        self._streams.memory.forget(self.channel.memory[0])


@dataclass(slots=True)
class _Request:
    """A request to one process in one group of a layer. It is the same in every layer until an adapter becomes complete."""

    line: _Line
    slices: int
    end: int  # rows 0..end of the channel are sent
    sent: torch.Tensor  # int64 [end] rows of x
    added: torch.Tensor  # int64 [n] rows of y
    answered: torch.Tensor  # int64 [n] rows of the channel, for those
    elements: int
    work: int


@dataclass(slots=True)
class _Asked:
    """The requests to one process in this step."""

    requests: int = 0
    elements: int = 0
    work: int = 0
    failures: int = 0  # of its life, before this step


class DeviceAssist:
    """Channels and counts that exist longer than a step. One step at a time, in one thread.

    `library` may be None without channels.
    """

    def __init__(self, pool: LoraPool, streams: DeviceStreams, library: CpuEngine | None) -> None:
        self.pool, self.streams, self.library = pool, streams, library
        self.counts = AssistCounts()
        self._lines: dict[Channel, _Line] = {}

    def begin(self, row_slot: np.ndarray, helpers: Helpers) -> AssistedStep:
        """Begin a step of these rows, int32 [rows]: slots, -1 for the base model alone.

        `helpers`: the adapters being copied.
        """
        for channel in self._lines.keys() - set(helpers.channels):
            self._lines.pop(channel).forget()
        for channel in helpers.channels:
            if channel not in self._lines:
                self._lines[channel] = _Line(channel, self.streams)
        return AssistedStep(self, row_slot, helpers, [self._lines[channel] for channel in helpers.channels])

    def close(self) -> None:
        """Release everything. No step may follow."""
        for line in self._lines.values():
            line.forget()
        self._lines.clear()


class AssistedStep:
    """One step with adapters that are being copied (see the module). `DeviceAssist.begin` makes it."""

    def __init__(self, assist: DeviceAssist, row_slot: np.ndarray, helpers: Helpers, lines: list[_Line]) -> None:
        self._assist, self._pool, self._streams = assist, assist.pool, assist.streams
        self._row_slot, self._lines = row_slot, lines
        self._slots = [one.slot for one in helpers.loading]
        self._rows_of = {slot: int(np.count_nonzero(row_slot == slot)) for slot in self._slots}
        parts = divide(assist.library, helpers, row_slot) if lines and assist.library is not None else []
        placed = dict.fromkeys(self._slots, 0)
        for part in parts:
            placed[self._slots[part.loading]] += len(part.rows)
        self._parts = {
            slot: [part for part in parts if self._slots[part.loading] == slot]
            for slot in self._slots
            if placed[slot] == self._rows_of[slot] > 0
        }
        self._elements = {
            slot: {group: sum(_elements(self._pool, slot, module) for module in modules) for group, modules in GROUPS.items()}
            for slot in self._parts
        }
        self._bridged: frozenset[int] | None = None  # slots whose rows processes compute in this layer
        self._lora: LoraBatch | None = None
        self._requests: dict[str, list[_Request]] = {}
        used = {part.channel for mine in self._parts.values() for part in mine}
        self._asked = {lines[c]: _Asked(failures=_word(lines[c].words.failures)) for c in sorted(used)}
        for line in self._asked:
            line.sequence = _word(line.words.sequence)
            line.channel.listen(True)

    @property
    def hardest(self) -> tuple[int, int]:
        """Upper bounds for any request of this step: elements of adapters' pages, and rows times elements."""
        elements, work = 0, 0
        for c in range(len(self._lines)):
            for group in GROUPS:
                mine = [
                    (self._elements[slot][group], len(part.rows))
                    for slot, parts in self._parts.items()
                    for part in parts
                    if part.channel == c
                ]
                elements = max(elements, sum(one for one, _ in mine))
                work = max(work, sum(one * rows for one, rows in mine))
        return elements, work

    @property
    def channels(self) -> list[Channel]:
        """The channels whose answers this step may wait for."""
        return [line.channel for line in self._asked]

    def layer(self, layer: int) -> LoraBatch:
        """The rows that the device computes in this layer. The steps' stream waits until their adapters are there."""
        loaded, counts = self._pool.loaded_layers, self._assist.counts
        missing = [slot for slot in self._slots if loaded[slot] <= layer]
        bridged = frozenset(slot for slot in missing if self._serve(slot))
        for slot, rows in self._rows_of.items():
            if slot in bridged:
                counts.by_processes += rows
            else:
                counts.on_device += rows
        if self._lora is None or bridged != self._bridged:
            self._bridged = bridged
            self._lora = LoraBatch.build(self._pool, np.where(np.isin(self._row_slot, list(bridged)), -1, self._row_slot))
            self._requests = {group: self._ask(group) for group in GROUPS}
        for slot in missing:  # after all allocations: they may wait for the device, and the copying thread needs the driver
            if slot not in bridged:
                self._streams.steps.wait(loaded.ctypes.data + slot * loaded.itemsize, layer + 1)
        return self._lora

    def start(self, x: torch.Tensor, layer: int, group: str) -> None:
        """`x` [rows, in] must not change until `collect`."""
        requests = self._requests[group]
        if not requests:
            return
        number = GROUP_NAMES.index(group)
        self._streams.assist.after(self._streams.steps)
        with self._streams.assist as stream:
            for one in requests:
                line, words = one.line, one.line.words
                staged = line.stage(X, number, one.end)
                staged[:, : x.shape[1]].copy_(x.index_select(0, one.sent))
                line.host[number][X][: one.end].copy_(staged, non_blocking=True)
                line.sequence += 1
                for word, value in ((words.layer, layer), (words.group, number), (words.slices, one.slices)):
                    stream.write(word, value)
                stream.write(words.sequence, line.sequence)
                asked = self._asked[line]
                asked.requests += 1
                asked.elements += one.elements
                asked.work += one.work

    def collect(self, y: torch.Tensor, group: str) -> None:
        """`y` [rows, sum of out] += what the processes computed."""
        requests = self._requests[group]
        if not requests:
            return
        number = GROUP_NAMES.index(group)
        with self._streams.assist as stream:
            for one in requests:
                stream.wait(one.line.words.done, one.line.sequence)
                staged = one.line.stage(Y, number, one.end)
                staged.copy_(one.line.host[number][Y][: one.end], non_blocking=True)
        self._streams.steps.after(self._streams.assist)
        for one in requests:
            staged = one.line.stage(Y, number, one.end)
            y.index_add_(0, one.added, staged[:, : y.shape[1]].index_select(0, one.answered).to(y.dtype))

    def finish(self) -> bool:
        """Call it when the device has finished the step.

        Returns whether all requests were computed; if not, discard the results.
        """
        good = True
        for line, asked in self._asked.items():
            line.channel.listen(False)
            line.channel.account(asked.requests, asked.elements, asked.work)
            good &= not asked.requests or _word(line.words.failures) == asked.failures
        if not good:
            self._assist.counts.repaired += len(self._row_slot)
        return good

    def _serve(self, slot: int) -> bool:
        """Whether processes compute all rows of this adapter."""
        parts = self._parts.get(slot)
        return parts is not None and all(self._lines[part.channel].channel.state == "alive" for part in parts)

    def _ask(self, group: str) -> list[_Request]:
        found = []
        assert self._bridged is not None
        device = self._streams.device
        for c, line in enumerate(self._lines):
            parts: list[tuple[Part, int]] = [
                (part, self._elements[slot][group])
                for slot in sorted(self._bridged)
                for part in self._parts[slot]
                if part.channel == c and self._elements[slot][group]
            ]
            if not parts:
                continue
            end = max(part.at + len(part.rows) for part, _ in parts)
            sent = np.zeros(end, dtype=np.int64)
            for part, _ in parts:
                sent[part.at : part.at + len(part.rows)] = part.rows
            found.append(
                _Request(
                    line=line,
                    slices=sum(1 << part.number for part, _ in parts),
                    end=end,
                    sent=send(sent, device),
                    added=send(np.concatenate([part.rows for part, _ in parts]).astype(np.int64), device),
                    answered=send(np.concatenate([part.at + np.arange(len(part.rows)) for part, _ in parts]), device),
                    elements=sum(elements for _, elements in parts),
                    work=sum(elements * len(part.rows) for part, elements in parts),
                )
            )
        return found


def _elements(pool: LoraPool, slot: int, module: str) -> int:
    """The number of elements in an adapter's pages of one layer."""
    return int(pool.pages[slot, MODULES.index(module)]) * LINE * sum(pool.shapes[module])


def _word(address: int) -> int:
    return c_uint32.from_address(address).value
