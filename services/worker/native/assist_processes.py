"""Starts, pins, watches and replaces CPU LoRA processes, and decides how many rows of a step each of them computes.

    engine's thread    helpers(loading, rows) before a step with adapters being copied; observe(..) after every step
    watching thread    process exits, channels that failed (the step's watchdog): kill, new memory, new process

The engine's thread never waits for the other one: it uses the channels that are alive. A process and its channel begin and end
together, so a late write of an old process goes to memory that is no longer read.

A process gets as many rows as it computes within the time of a base layer (CaraServe, section 4: c tokens per core, ceil(L / c)
cores). Two measurements give this number: the time that a process needs to read an element of an adapter and to compute with it
for a row, first with requests of zeros and then in every step; and the time of a base layer as a linear function of the rows.
"""

from __future__ import annotations

import mmap
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import motet.kernels.cpu.assist_process
from motet.kernels import GROUPS, LoraPool, PackedLora
from motet.kernels.cpu import CpuEngine
from motet.kernels.cpu.assist import Channel, ChannelCounters, Helpers, loading_of
from motet.kernels.cpu.library import Loading
from motet.shared.clock import now_s
from motet.shared.telemetry import logger

MAIN = Path(motet.kernels.cpu.assist_process.__file__)
START_TIMEOUT_S = 10.0
RESTART_S = (0.0, 0.1, 0.5, 2.0, 10.0)  # waits before the first, second, .. restart in a row
LASTED_S = 30.0  # a process that served this long may be restarted at once
POLL_S = 0.01  # while a process is starting
MEASURED_ROWS, MEASURED_TIMES, MEASURED_BOUND_S = 16, 5, 5.0
ASLEEP_S = 0.002  # after which a process stops spinning and sleeps
FORGET = 0.97  # of what is known, with every step that is new
LEARN = 0.1  # of what a process's step was more or less than expected
LATE_FACTOR = 8  # times what a request is expected to take, as in a compiled step
LOOKS = 4  # for late processes, in the time after which one is
TYPICAL_ROWS = 16  # of a step that says as much about reading as about rows

log = logger("motet.worker.assist")


@dataclass(frozen=True, slots=True)
class Capacity:
    """The work that CPU processes can take over at present."""

    processes: int  # that are alive
    max_rows: int  # of each, in a step
    read_s: float  # of one process, to read an element of an adapter's pages of a layer
    row_s: float  # and more for each row; 0 before the first was measured
    start_s: float  # once, until one that sleeps has woken up and found an adapter that it does not know


class AssistProfile:
    """Estimates of the speed of a CPU process and of the base model. Recent measurements weigh most."""

    def __init__(self) -> None:
        self.read_s = self.row_s = self.start_s = 0.0
        self._weight = self._rows = self._rows2 = self._s = self._rows_s = 0.0

    def processes(self, elements: int, work: int, busy_s: float) -> None:
        """Take in a measurement: reading `elements` of adapters took `busy_s`. `work`: rows times elements.

        Each rate is corrected by its part of the prediction error (normalized least mean squares). Times above twice the
        expected time count as twice, because the process was probably without its core for a while.
        """
        if not elements or not self.row_s:
            return
        expected_s, scaled = self.read_s * elements + self.row_s * work, work / TYPICAL_ROWS
        gain = LEARN * (min(busy_s, 2 * expected_s) - expected_s) / (elements**2 + scaled**2)
        self.read_s = max(0.0, self.read_s + gain * elements)
        self.row_s = max(self.row_s / 2, self.row_s + gain * scaled / TYPICAL_ROWS)

    def base(self, rows: int, layer_s: float) -> None:
        """Take in a measurement: in a step of `rows` rows without adapters a layer took `layer_s`."""
        self._weight = FORGET * self._weight + 1
        self._rows = FORGET * self._rows + rows
        self._rows2 = FORGET * self._rows2 + rows * rows
        self._s = FORGET * self._s + layer_s
        self._rows_s = FORGET * self._rows_s + rows * layer_s

    def layer_s(self, rows: int) -> float:
        """Estimated seconds of a layer without adapters for `rows` rows; 0 before the first measurement."""
        if not self._weight:
            return 0.0
        mean_rows, mean_s = self._rows / self._weight, self._s / self._weight
        spread = self._rows2 / self._weight - mean_rows**2
        slope = (self._rows_s / self._weight - mean_rows * mean_s) / spread if spread > 1 else 0.0
        return max(mean_s + max(slope, 0.0) * (rows - mean_rows), mean_s / 10)


class _Member:
    """A process and its channel. `process` is None between the end of one process and the start of the next."""

    def __init__(self, core: int) -> None:
        self.core = core
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.channel: Channel | None = None
        self.serving = False
        self.began_s = self.due_s = 0.0
        self.failures = 0


class _Guarded:
    """The channels of a step on a device, and when the present request of each began."""

    def __init__(self, channels: Sequence[Channel], late_s: float) -> None:
        self._late_s = late_s
        self._since = {channel: (-1, 0.0) for channel in channels}

    def look(self) -> float:
        """Fail late channels; seconds until the next look."""
        now = now_s()
        for channel, (number, since_s) in self._since.items():
            pending = channel.pending
            if pending is None or channel.state != "alive":
                continue
            if pending != number:
                self._since[channel] = pending, now
            elif now > since_s + self._late_s:
                channel.fail("late")
                return 0.0
        return self._late_s / LOOKS


class CpuAssist:
    """CPU LoRA processes. `cores` [n]: one process on each, -1 for any core. The processes start in the background.

    A process that has not answered a request `watchdog_s` after eight times the expected time is ended and replaced.
    """

    def __init__(self, engine: CpuEngine, pool: LoraPool, *, cores: Sequence[int], max_rows: int) -> None:
        self.watchdog_s = 0.05
        self.profile = AssistProfile()
        self.failures: Counter[str] = Counter()  # by reason: late, died, unreadable, not started
        self._engine, self._pool, self._max_rows = engine, pool, max_rows
        self._members = [_Member(core) for core in cores]
        self._channels: tuple[Channel, ...] = ()
        self._seen: dict[Channel, ChannelCounters] = {}
        self._closing = False
        self._guarded: _Guarded | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="assist-watch", daemon=True)
        self._thread.start()

    # ---- the engine's thread

    @property
    def capacity(self) -> Capacity:
        """The work that the processes can take over at present."""
        profile = self.profile
        return Capacity(len(self._channels), self._max_rows, profile.read_s, profile.row_s, profile.start_s)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that are in service."""
        return [member.process.pid for member in self._members if member.serving and member.process is not None]

    def helpers(self, loading: Sequence[Loading], rows: int) -> Helpers:
        """What the compiled step needs to use the processes. `loading`: the adapters that are being copied."""
        return Helpers(
            loading=loading,
            channels=self._channels,
            read_ns=self.profile.read_s * 1e9,
            row_ns=self.profile.row_s * 1e9,
            layer_ns=self.profile.layer_s(rows) * 1e9,
            watchdog_s=self.watchdog_s,
        )

    def observe(self, rows: int, step_s: float, helpers: Helpers | None) -> None:
        """Take in the measurements of a step that has ended. `helpers`: those that the step used."""
        if helpers is None:
            self.profile.base(rows, step_s / self._pool.layers)
            return
        seen, self._seen = self._seen, {}
        for channel in helpers.channels:
            new, old = channel.counters, seen.get(channel)
            if old is not None:
                self.profile.processes(new.elements - old.elements, new.work - old.work, new.busy_s - old.busy_s)
            if channel.state == "alive":
                self._seen[channel] = new
            else:
                self._wake_up()

    @contextmanager
    def guard(self, channels: Sequence[Channel], hardest: tuple[int, int]) -> Iterator[None]:
        """A context in which a device uses these channels. The watching thread ends a process that leaves a request unanswered.

        `hardest`: no request has more elements of adapters' pages, nor more rows times elements, than these.
        """
        if not channels:
            yield
            return
        profile, (elements, work) = self.profile, hardest
        late_s = self.watchdog_s + LATE_FACTOR * (profile.read_s * elements + profile.row_s * work)
        self._guarded = _Guarded(channels, late_s)
        self._wake_up()
        try:
            yield
        finally:
            self._guarded = None

    def close(self) -> None:
        """End the processes and wait for them."""
        if self._closing:
            return
        self._closing = True
        self._wake_up()
        self._thread.join()
        os.close(self._wake)

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    # ---- the watching thread; processes are its children and go when it goes

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            try:
                while not self._closing:
                    waits = [self._advance(member, selector) for member in self._members]
                    self._channels = tuple(m.channel for m in self._members if m.serving and m.channel is not None)
                    guarded = self._guarded
                    if guarded is not None:
                        waits.append(guarded.look())
                    for key, _ in selector.select(min((wait for wait in waits if wait is not None), default=None)):
                        if key.fd == self._wake:
                            os.eventfd_read(self._wake)
            finally:
                self._channels = ()
                for member in self._members:
                    self._end(member, selector)

    def _advance(self, member: _Member, selector: selectors.BaseSelector) -> float | None:
        """Take the next step in starting or watching a process.

        Returns the seconds until the next call, None to wait for an event.
        """
        now = now_s()
        if member.process is None:
            if now < member.due_s:
                return member.due_s - now
            try:
                self._start(member, selector)
            except OSError as error:  # no memory, or too many processes or files: the engine goes on without
                log.warning("CPU LoRA process on core %d: %s", member.core, error)
                return self._replace(member, selector, "not started", now)
            return POLL_S
        assert member.channel is not None, "a process has one"
        reason = None
        if member.process.poll() is not None:
            reason = "died" if member.serving else "not started"
            member.channel.fail("died")
        elif member.channel.state != "alive":
            reason = member.channel.state
        elif not member.serving:
            if not member.channel.ready:
                if now < member.began_s + START_TIMEOUT_S:
                    return POLL_S
                reason = "not started"
            elif not self._measure(member.channel):
                reason = member.channel.state
            else:
                member.serving = True
                member.began_s = now
        if reason is None:
            return None
        log.warning("CPU LoRA process %d on core %d: %s", member.process.pid, member.core, reason)
        return self._replace(member, selector, reason, now)

    def _replace(self, member: _Member, selector: selectors.BaseSelector, reason: str, now: float) -> float:
        """End a member's process and channel, and schedule its next start."""
        self.failures[reason] += 1
        member.failures = 0 if member.serving and now > member.began_s + LASTED_S else member.failures + 1
        member.due_s = now + RESTART_S[min(member.failures, len(RESTART_S)) - 1] if member.failures else now
        self._end(member, selector)
        return 0.0

    def _start(self, member: _Member, selector: selectors.BaseSelector) -> None:
        member.channel = Channel(self._engine, self._pool, max_rows=self._max_rows)
        told = (self._engine.path, member.channel.fd, member.core, os.getpid())
        member.process = subprocess.Popen(
            [sys.executable, "-I", "-S", MAIN, *map(str, told)], stdin=subprocess.DEVNULL, pass_fds=(member.channel.fd,)
        )
        pidfd = os.pidfd_open(member.process.pid)
        selector.register(pidfd, selectors.EVENT_READ)
        member.pidfd, member.began_s = pidfd, now_s()

    def _end(self, member: _Member, selector: selectors.BaseSelector) -> None:
        if member.pidfd >= 0:
            selector.unregister(member.pidfd)
            os.close(member.pidfd)
        if member.process is not None:
            member.process.kill()
            member.process.wait()
        if member.channel is not None:
            member.channel.release()  # a device may wait for an answer
        member.process, member.pidfd, member.channel, member.serving = None, -1, None, False

    def _measure(self, channel: Channel) -> bool:
        """Whether the process answers. Its times for adapters of zeros are the first estimate for all processes."""
        modules = GROUPS["qkv"]
        elements = sum(2 * 8 * self._pool.layers * sum(self._pool.shapes[module]) for module in modules)
        most = min(MEASURED_ROWS, self._max_rows)
        asleep, awake, full = list[tuple[float, float]](), list[tuple[float, float]](), list[tuple[float, float]]()
        for _ in range(MEASURED_TIMES):
            with _Zeros(elements, self._pool, modules) as zeros:
                time.sleep(ASLEEP_S)
                for rows, found in ((1, asleep), (1, awake), (most, full)):
                    time_s = self._time(channel, zeros, rows)
                    if time_s is None:
                        return False
                    found.append(time_s)
        if not self.profile.row_s:
            (asleep_s, _), (awake_s, _) = min(asleep), min(awake)
            one, many = (min(element_s for _, element_s in found) for found in (awake, full))
            self.profile.row_s = max((many - one) / max(most - 1, 1), many / (2 * most))
            self.profile.read_s = max(one - self.profile.row_s, 0.0)
            self.profile.start_s = max(asleep_s - awake_s, 0.0)
        return True

    def _time(self, channel: Channel, zeros: _Zeros, rows: int) -> tuple[float, float] | None:
        """Seconds until a request was answered, and the process's seconds per element; None without an answer."""
        shapes, modules = self._pool.shapes, GROUPS["qkv"]
        x = torch.zeros(rows, shapes[modules[0]][0])
        y = torch.empty(rows, sum(shapes[module][1] for module in modules))
        before = channel.counters
        if not channel.call(loading_of(0, zeros), x, y, layer=0, group=0, bound_s=MEASURED_BOUND_S):
            return None
        after = channel.counters
        return after.answered_s - before.answered_s, (after.busy_s - before.busy_s) / (after.elements - before.elements)


class _Zeros:
    """An adapter of rank 16 on some modules, all zeros; of its memory only what is read is there."""

    def __init__(self, elements: int, pool: LoraPool, modules: Sequence[str]) -> None:
        dtype = pool.arena.dtype
        self.fd = os.memfd_create("motet-zeros", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, elements * dtype.itemsize)
        self.memory = mmap.mmap(self.fd, 0, access=mmap.ACCESS_COPY)
        self.data_start = 0
        self.packed = PackedLora.over(
            torch.frombuffer(self.memory, dtype=dtype),
            pool.shapes,
            layers=pool.layers,
            pages=dict.fromkeys(modules, 2),
            scales=dict.fromkeys(modules, [1.0] * pool.layers),
        )

    def __enter__(self) -> _Zeros:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
