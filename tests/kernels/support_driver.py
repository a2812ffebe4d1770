"""A stand-in for the CUDA driver, compiled with the prototypes of NVIDIA's own header.

What is registered appears to the device `MOVED` bytes further up, and nothing else does. There are two streams:

NOW     the calling thread: everything is done when a call returns
LATE    a queue. What is in it happens when a test says so (`Driver.proceed`), or in a thread of its own (`Driver.running`).
        Copies read their source only then, so memory that is filled again too early arrives wrong.

Functions of a copying thread want the context that was asked for in the thread that made it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motet.kernels.cpu import CpuEngine
from motet.kernels.device import DeviceStreams, host_streams
from motet.kernels.device.driver import MemoryOperations

NOW, LATE = 0x5EED, 0x1A7E
WARNINGS = ("-Wall", "-Werror")

SOURCE = r"""
#include <cuda.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#define MOVED (1ull << 40)
#define MOST (1 << 16)
#define CONTEXT ((CUcontext)0xC0DE)
static struct { uintptr_t at; size_t bytes; } spans[64];
static int registered(uintptr_t at, size_t bytes) {
  for (int i = 0; i < 64; ++i)
    if (spans[i].bytes && at >= spans[i].at && at + bytes <= spans[i].at + spans[i].bytes) return 1;
  return 0;
}
static uint32_t* word(CUdeviceptr there) {
  const uintptr_t at = there - MOVED;
  return at % 4 == 0 && registered(at, 4) ? (uint32_t*)at : NULL;
}

// The late stream.
enum Kind { COPY, WRITE, EVENT };
static struct Operation { enum Kind kind; uintptr_t to; const void* from; size_t n; } queue[MOST];
static size_t first, last;
static int running, failing;
static pthread_t thread;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread CUcontext current;

static void happen(const struct Operation* one) {
  if (one->kind == COPY) memcpy((void*)one->to, one->from, one->n);
  else if (one->kind == WRITE) __atomic_store_n((uint32_t*)one->to, (uint32_t)one->n, __ATOMIC_RELEASE);
  else __atomic_store_n((int*)one->to, 1, __ATOMIC_RELEASE);
}
static void enqueue(CUstream stream, struct Operation one) {
  pthread_mutex_lock(&lock);
  if ((uintptr_t)stream == 0x5EED) happen(&one);
  else queue[last++ % MOST] = one;
  pthread_mutex_unlock(&lock);
}
static int wrong(CUstream stream) { return (uintptr_t)stream != 0x5EED && (uintptr_t)stream != 0x1A7E; }
static size_t proceed_locked(size_t most) {
  size_t done = 0;
  for (; done < most && first != last; ++done) happen(&queue[first++ % MOST]);
  return done;
}
size_t test_proceed(size_t most) {
  pthread_mutex_lock(&lock);
  const size_t done = proceed_locked(most);
  pthread_mutex_unlock(&lock);
  return done;
}
size_t test_late(void) {
  pthread_mutex_lock(&lock);
  const size_t late = last - first;
  pthread_mutex_unlock(&lock);
  return late;
}
void test_fail(int error) { __atomic_store_n(&failing, error, __ATOMIC_RELEASE); }
static void* run(void* unused) {
  const struct timespec pause = {0, 5000};
  while (__atomic_load_n(&running, __ATOMIC_ACQUIRE)) {
    if (!test_proceed(3)) nanosleep(&pause, NULL);
  }
  return unused;
}
void test_run(int on) {
  if (on == running) return;
  __atomic_store_n(&running, on, __ATOMIC_RELEASE);
  if (on) pthread_create(&thread, NULL, run, NULL);
  else pthread_join(thread, NULL);
}

CUresult cuCtxGetCurrent(CUcontext* to) { return *to = CONTEXT, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
CUresult cuMemHostRegister(void* p, size_t bytes, unsigned int flags) {
  if (!(flags & CU_MEMHOSTREGISTER_DEVICEMAP) || (uintptr_t)p % 4096) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 64; ++i)
    if (!spans[i].bytes) { spans[i].at = (uintptr_t)p, spans[i].bytes = bytes; return CUDA_SUCCESS; }
  return CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemHostUnregister(void* p) {
  for (int i = 0; i < 64; ++i)
    if (spans[i].bytes && spans[i].at == (uintptr_t)p) { spans[i].bytes = 0; return CUDA_SUCCESS; }
  return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
CUresult cuMemHostGetDevicePointer(CUdeviceptr* to, void* p, unsigned int flags) {
  *to = (uintptr_t)p + MOVED;
  return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  const int error = __atomic_exchange_n(&failing, 0, __ATOMIC_ACQ_REL);
  if (error) return (CUresult)error;
  if (current != CONTEXT) return CUDA_ERROR_INVALID_CONTEXT;
  if (wrong(stream) || !registered((uintptr_t)from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  return enqueue(stream, (struct Operation){COPY, to, from, bytes}), CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent* to, unsigned int flags) {
  static int events[MOST];
  static int made;
  if (current != CONTEXT) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags != CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_VALUE;
  return *to = (CUevent)&events[__atomic_fetch_add(&made, 1, __ATOMIC_RELAXED) % MOST], CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  if (wrong(stream)) return CUDA_ERROR_INVALID_VALUE;
  __atomic_store_n((int*)event, 0, __ATOMIC_RELEASE);
  return enqueue(stream, (struct Operation){EVENT, (uintptr_t)event, NULL, 0}), CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent event) {
  return __atomic_load_n((int*)event, __ATOMIC_ACQUIRE) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuEventDestroy(CUevent event) { return event && current == CONTEXT ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr there, cuuint32_t value, unsigned int flags) {
  uint32_t* at = word(there);
  if (!at || wrong(stream) || flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  return enqueue(stream, (struct Operation){WRITE, (uintptr_t)at, NULL, value}), CUDA_SUCCESS;
}
CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr there, cuuint32_t value, unsigned int flags) {
  uint32_t* at = word(there);
  if (!at || (uintptr_t)stream != 0x5EED || flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_INVALID_VALUE;
  while ((int32_t)(__atomic_load_n(at, __ATOMIC_ACQUIRE) - value) < 0) ;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "another error";
  return CUDA_SUCCESS;
}
"""


class Driver:
    """The compiled stand-in."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._functions = ctypes.CDLL(str(library))
        self._functions.test_proceed.argtypes = [ctypes.c_size_t]
        self._functions.test_proceed.restype = self._functions.test_late.restype = ctypes.c_size_t

    @staticmethod
    def build(directory: Path) -> Driver:
        """Skips the test where there is no compiler or no header."""
        triton = pytest.importorskip("triton")
        headers = Path(triton.__file__).parent / "backends/nvidia/include"
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None or not (headers / "cuda.h").exists():
            pytest.skip("no C compiler, or a Triton without NVIDIA's header")
        source, library = directory / "driver.c", directory / "libcuda.so.1"
        source.write_text(SOURCE)
        flags = os.environ.get("MOTET_CPU_CXXFLAGS", "-O1").split()  # `make sanitize` looks at it, too
        done = subprocess.run(
            [compiler, *flags, *WARNINGS, "-shared", "-fPIC", "-pthread", f"-I{headers}", str(source), "-o", str(library)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return Driver(library)

    @property
    def late(self) -> int:
        """How many operations are in the late stream."""
        return self._functions.test_late()

    def proceed(self, count: int = 1 << 30) -> int:
        """Let this many of them happen, or as many as there are. Returns how many."""
        return self._functions.test_proceed(count)

    def fail(self, error: int) -> None:
        """The next copy returns this error, in whatever thread."""
        self._functions.test_fail(error)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which a thread lets everything happen."""
        self._functions.test_run(1)
        try:
            yield
        finally:
            self._functions.test_run(0)

    def streams(self, engine: CpuEngine, copies: int) -> DeviceStreams:
        """Steps and assist are NOW, copies go to the stream of that number."""
        operations = MemoryOperations(str(self.library))
        here = DriverStream(self, operations, NOW)
        return replace(
            host_streams(engine),
            steps=here,
            copies=DriverStream(self, operations, copies),
            assist=here,
            memory=operations,
            calls=lambda: operations.calls(copies),
        )


class DriverStream:
    """A stream whose words go through the driver's calls. The calling thread, as a stream, waits for a late one."""

    def __init__(self, driver: Driver, operations: MemoryOperations, number: int) -> None:
        self._driver, self._operations, self.number = driver, operations, number

    def __enter__(self) -> DriverStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def after(self, other: DriverStream) -> None:
        if other.number == LATE:
            while self._driver.late:
                pass

    def write(self, word: int, value: int) -> None:
        self._operations.write(self.number, word, value)

    def wait(self, word: int, value: int) -> None:
        self._operations.wait(self.number, word, value)

    def mark(self) -> Any:
        return self

    def synchronize(self) -> None:
        pass

    def seconds_since(self, earlier: Any) -> float | None:
        return 0.0
