"""A device's streams, and words in host memory that order them with other readers and writers of these words.

    with stream: ...             torch operations go to this stream
    stream.after(other)          later work on this stream begins when the present work of `other` is done
    stream.write(word, value)    writes `value` to a 32-bit word, by its address, when the stream gets there
    stream.wait(word, value)     the stream continues when the word has reached `value`; numbers may wrap
    stream.mark()                a point that the host can wait for, and whose time it can read

There are three streams: for steps, for copies, and for rows that go to CPU processes and back. If the device is the CPU
itself, all three are the calling thread, and all work is done when a call returns.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, Self

import torch

from motet.kernels.cpu.library import CpuEngine, DeviceCalls
from motet.kernels.device.driver import DriverError, MemoryOperations

# Streams that wait for each other through words must not share a queue of the hardware, or neither goes on. CUDA has 8 queues
# unless told otherwise before it is initialised, and PyTorch spreads over them the 32 streams that it takes every stream from.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class Mark(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None: ...
    def seconds_since(self, earlier: Any) -> float | None:
        """The time between two marks; None when the stream has not reached this one yet."""


class Stream(Protocol):
    """A sequence of operations on the device (see the module)."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def after(self, other: Any) -> None: ...
    def write(self, word: int, value: int) -> None: ...
    def wait(self, word: int, value: int) -> None: ...
    def mark(self) -> Mark: ...


class Memory(Protocol):
    """Registers host memory with the driver, for words and for asynchronous copies."""

    def register(self, address: int, nbytes: int) -> None: ...
    def forget(self, address: int) -> None: ...
    def there(self, word: int) -> int:
        """The device's address of registered memory."""


@dataclass(frozen=True, slots=True)
class DeviceStreams:
    """The streams and the registered memory of one device."""

    steps: Stream
    copies: Stream
    assist: Stream
    memory: Memory
    calls: Callable[[], DeviceCalls]  # the functions of the copies' stream, for a compiled thread
    device: torch.device


def cuda_streams(device: torch.device, operations: MemoryOperations) -> DeviceStreams:
    """The streams of a CUDA device. The steps' stream is the current one.

    Raises DriverError where the driver cannot wait for words.
    """
    device = numbered(device)
    torch.cuda.set_device(device)  # of this thread, as registering memory needs it
    copies, assist = (_CudaStream(operations, device, torch.cuda.Stream(device)) for _ in range(2))
    try_waiting(operations, copies)
    steps = _CudaStream(operations, device, None)
    return DeviceStreams(steps, copies, assist, operations, lambda: operations.calls(copies.torch.cuda_stream), device)


def numbered(device: torch.device) -> torch.device:
    """ "cuda" as "cuda:<the current one>": torch.cuda.set_device refuses a device without a number, and tensors have one."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def host_streams(engine: CpuEngine) -> DeviceStreams:
    """Streams for a device that is the CPU."""
    here = _HostStream(engine.library)
    return DeviceStreams(here, here, here, here, here.calls, torch.device("cpu"))


def try_waiting(operations: MemoryOperations, stream: _CudaStream) -> None:
    """Write one word and wait for it, to see whether the driver can."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    word = ctypes.c_uint32.from_buffer(memory)
    at = ctypes.addressof(word)
    operations.register(at, len(memory))
    try:
        stream.write(at, 1)
        stream.wait(at, 1)
        stream.mark().synchronize()
        if word.value != 1:
            raise DriverError("a stream's write did not reach host memory")
    finally:
        operations.forget(at)


class _CudaStream:
    def __init__(self, operations: MemoryOperations, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._operations, self._device, self._stream = operations, device, stream
        self._entered: list[Any] = []

    @property
    def torch(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._device)

    def __enter__(self) -> Self:
        context = torch.cuda.stream(self.torch)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def after(self, other: _CudaStream) -> None:
        self.torch.wait_stream(other.torch)

    def write(self, word: int, value: int) -> None:
        self._operations.write(self.torch.cuda_stream, word, value)

    def wait(self, word: int, value: int) -> None:
        self._operations.wait(self.torch.cuda_stream, word, value)

    def mark(self) -> _CudaMark:
        return _CudaMark(self.torch)


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def synchronize(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: _CudaMark) -> float | None:
        return earlier._event.elapsed_time(self._event) / 1e3 if self._event.query() else None


class _HostStream:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def after(self, other: _HostStream) -> None:
        pass

    def write(self, word: int, value: int) -> None:
        self._library.motet_word_write(word, value & 0xFFFFFFFF)

    def wait(self, word: int, value: int) -> None:
        self._library.motet_word_wait(word, value & 0xFFFFFFFF)

    def mark(self) -> _HostMark:
        return _HostMark()

    def register(self, address: int, nbytes: int) -> None:
        pass

    def forget(self, address: int) -> None:
        pass

    def there(self, word: int) -> int:
        return word

    def calls(self) -> DeviceCalls:
        found = DeviceCalls()
        self._library.motet_host_calls(ctypes.byref(found))
        return found


class _HostMark:
    def __init__(self) -> None:
        self._at = perf_counter()

    def synchronize(self) -> None:
        pass

    def seconds_since(self, earlier: _HostMark) -> float | None:
        return self._at - earlier._at
