"""The CUDA driver, bound with ctypes, so that neither headers nor a build are needed on the machine.

`MemoryOperations`: a stream that writes and waits for 32-bit words in registered host memory. A wait costs the device less than
a kernel launch; a host function on the stream, the usual way to call a CPU, costs some 26 us. `calls` are the driver's
functions for a compiled thread that copies (kernels/cpu/src/device_target.h).
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

from motet.kernels.cpu.library import DeviceCalls

REGISTER_PORTABLE, REGISTER_DEVICEMAP = 1, 2
WAIT_GEQ = 0  # (int32_t)(word - value) >= 0: numbers may wrap
WRITE_AFTER_ALL_ELSE = 0  # the default: with a fence before it
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class DriverError(Exception):
    """The driver refused a call. The message has the call's name and the driver's text."""


class OutOfMemory(DriverError, MemoryError):
    """The device has no memory for it."""


class Driver:
    """The process's CUDA driver. Raises DriverError where there is none."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._name = library
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(f"{library}: {error}") from None
        self._words_for = self._function("cuGetErrorString", c_int, POINTER(c_char_p))

    def _function(self, symbol: str, *types: Any) -> Callable[..., int]:
        """A function of the driver with arguments of these types. Raises DriverError if the driver is too old for it."""
        try:
            found = self._library[symbol]
        except AttributeError as error:
            raise DriverError(f"{self._name}: {error}") from None
        found.argtypes = types
        return found

    def _call(self, name: str, result: int) -> None:
        if result:
            text = c_char_p()
            self._words_for(result, byref(text))
            kind = OutOfMemory if result == OUT_OF_MEMORY else DriverError
            raise kind(f"{name}: {(text.value or b'unknown error').decode()} ({result})")


class MemoryOperations(Driver):
    """Memory operations of the process's CUDA driver. Words are given by their host addresses.

    Raises DriverError where they do not exist. The calling thread must have its device current; any CUDA call of torch ensures
    that.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        super().__init__(library)
        self._register = self._function("cuMemHostRegister_v2", c_void_p, c_size_t, c_uint)
        self._unregister = self._function("cuMemHostUnregister", c_void_p)
        self._pointer = self._function("cuMemHostGetDevicePointer_v2", POINTER(c_uint64), c_void_p, c_uint)
        self._write = self._function("cuStreamWriteValue32_v2", c_void_p, c_uint64, c_uint32, c_uint)
        self._wait = self._function("cuStreamWaitValue32_v2", c_void_p, c_uint64, c_uint32, c_uint)
        self._current = self._function("cuCtxGetCurrent", POINTER(c_void_p))
        u64, size, flags, p, to = c_uint64, c_size_t, c_uint, c_void_p, POINTER(c_void_p)
        self._copying = {
            "use": self._function("cuCtxSetCurrent", p),
            "copy": self._function("cuMemcpyHtoDAsync_v2", u64, p, size, p),
            "write": self._write,
            "create": self._function("cuEventCreate", to, flags),
            "record": self._function("cuEventRecord", p, p),
            "query": self._function("cuEventQuery", p),
            "destroy": self._function("cuEventDestroy_v2", p),
        }
        self._starts: list[int] = []  # of registered memory, sorted
        self._spans: dict[int, tuple[int, int]] = {}  # {start: (bytes, the device's address of it)}

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory and map it for the device."""
        self._call("cuMemHostRegister", self._register(address, nbytes, REGISTER_PORTABLE | REGISTER_DEVICEMAP))
        there = c_uint64()
        self._call("cuMemHostGetDevicePointer", self._pointer(byref(there), address, 0))
        self._spans[address] = nbytes, there.value
        self._starts = sorted(self._spans)

    def forget(self, address: int) -> None:
        """Undo `register`. Must be called before the memory is freed."""
        if self._spans.pop(address, None) is not None:
            self._starts = sorted(self._spans)
            self._call("cuMemHostUnregister", self._unregister(address))

    def write(self, stream: int, word: int, value: int) -> None:
        """Write `value` modulo 2^32 to the word when all earlier work on `stream` is done."""
        self._call("cuStreamWriteValue32", self._write(stream, self.there(word), value & 0xFFFFFFFF, WRITE_AFTER_ALL_ELSE))

    def wait(self, stream: int, word: int, value: int) -> None:
        """Let later work on `stream` begin only when the word has reached `value`."""
        self._call("cuStreamWaitValue32", self._wait(stream, self.there(word), value & 0xFFFFFFFF, WAIT_GEQ))

    def calls(self, stream: int) -> DeviceCalls:
        """The functions to copy on a stream with, for a thread that has no context yet: it takes that of this thread."""
        context = c_void_p()
        self._call("cuCtxGetCurrent", self._current(byref(context)))
        addresses = {name: ctypes.cast(function, c_void_p) for name, function in self._copying.items()}  # type: ignore[arg-type]
        return DeviceCalls(**addresses, context=context, stream=stream)

    def there(self, word: int) -> int:
        """The device's address of a word in registered memory."""
        at = bisect_right(self._starts, word) - 1
        start = self._starts[at] if at >= 0 else 0
        nbytes, there = self._spans.get(start, (0, 0))
        if not start <= word < start + nbytes:
            raise DriverError(f"the word at {word:#x} is in no registered memory")
        return there + word - start
