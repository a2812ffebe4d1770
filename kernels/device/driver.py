"""Stream memory operations of the CUDA driver: a stream that writes and waits for 32-bit words in registered host memory.

Bound with ctypes, so that neither headers nor a build are needed on the machine. A wait costs the device less than a kernel
launch; a host function on the stream, the usual way to call a CPU, costs some 26 us.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

REGISTER_PORTABLE, REGISTER_DEVICEMAP = 1, 2
WAIT_GEQ = 0  # (int32_t)(word - value) >= 0: numbers may wrap
WRITE_AFTER_ALL_ELSE = 0  # the default: with a fence before it


class DriverError(Exception):
    """The driver refused a call. The message has the call's name and the driver's text."""


class MemoryOperations:
    """Memory operations of the process's CUDA driver. Words are given by their host addresses.

    Raises DriverError where they do not exist. The calling thread must have its device current; any CUDA call of torch ensures
    that.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            driver = ctypes.CDLL(library)
            self._register = driver.cuMemHostRegister_v2
            self._unregister = driver.cuMemHostUnregister
            self._pointer = driver.cuMemHostGetDevicePointer_v2
            self._write = driver.cuStreamWriteValue32_v2
            self._wait = driver.cuStreamWaitValue32_v2
            self._words_for = driver.cuGetErrorString
        except (OSError, AttributeError) as error:
            raise DriverError(f"{library}: {error}") from None
        self._register.argtypes = [c_void_p, c_size_t, c_uint]
        self._unregister.argtypes = [c_void_p]
        self._pointer.argtypes = [POINTER(c_uint64), c_void_p, c_uint]
        self._write.argtypes = self._wait.argtypes = [c_void_p, c_uint64, c_uint32, c_uint]
        self._words_for.argtypes = [c_int, POINTER(c_char_p)]
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
        self._call("cuStreamWriteValue32", self._write(stream, self._there(word), value & 0xFFFFFFFF, WRITE_AFTER_ALL_ELSE))

    def wait(self, stream: int, word: int, value: int) -> None:
        """Let later work on `stream` begin only when the word has reached `value`."""
        self._call("cuStreamWaitValue32", self._wait(stream, self._there(word), value & 0xFFFFFFFF, WAIT_GEQ))

    def _there(self, word: int) -> int:
        at = bisect_right(self._starts, word) - 1
        start = self._starts[at] if at >= 0 else 0
        nbytes, there = self._spans.get(start, (0, 0))
        if not start <= word < start + nbytes:
            raise DriverError(f"the word at {word:#x} is in no registered memory")
        return there + word - start

    def _call(self, name: str, result: int) -> None:
        if result:
            text = c_char_p()
            self._words_for(result, byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({result})")
