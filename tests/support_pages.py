"""A CUDA driver's virtual memory over the host's: what is not mapped cannot be touched, and misuse is refused.

It has the prototypes of NVIDIA's header. Physical pages are parts of one file in memory, so a page that is mapped elsewhere
brings its old content along. Each page is mapped and unmapped by itself.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from motet.kernels.device.virtual_memory import CudaPages
from motet.kernels.pages import PagedRange, PhysicalPages

PAGE = 64 << 10
STREAM = 0x5EED

DRIVER = r"""
#define _GNU_SOURCE
#include <cuda.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#define PAGE (64ull << 10)
#define SPAN (1ull << 36) /* addresses of the device */
#define PAGES (SPAN / PAGE)
#define MOST 65536 /* physical pages */
typedef unsigned long long u64;
static char* base;
static int file;
static u64 next_address, limit = MOST, exists, mapped;
static unsigned char live[MOST], behind_any[MOST], readable[PAGES];
static int behind[PAGES];   /* physical page + 1 */
static u64 reserved[PAGES]; /* bytes, of the first page of a range */

static int init(void) {
  if (base) return 1;
  base = mmap(NULL, SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  file = memfd_create("pages", 0);
  return base != MAP_FAILED && file >= 0 && !ftruncate(file, MOST * PAGE);
}
static int right(const CUmemAllocationProp* p) {
  CUmemAllocationProp want;
  memset(&want, 0, sizeof want);
  want.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  want.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  want.location.id = 3;
  return !memcmp(p, &want, sizeof want);
}
/* the number of its first page; -1: not whole pages of the device */
static int64_t first(CUdeviceptr at, size_t size) {
  if (!base || at < (u64)base || at + size > (u64)base + SPAN || (at - (u64)base) % PAGE || !size || size % PAGE) return -1;
  return (at - (u64)base) / PAGE;
}
CUresult cuDeviceGetAttribute(int* found, CUdevice_attribute which, CUdevice device) {
  *found = which == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED && device == 3;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp* p, CUmemAllocationGranularity_flags option) {
  *size = PAGE;
  return right(p) && option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemAddressReserve(CUdeviceptr* to, size_t size, size_t alignment, CUdeviceptr wish, u64 flags) {
  if (!init() || !size || size % PAGE || alignment || wish || flags) return CUDA_ERROR_INVALID_VALUE;
  if (next_address + size > SPAN) return CUDA_ERROR_OUT_OF_MEMORY;
  *to = (u64)base + next_address;
  reserved[next_address / PAGE] = size;
  next_address += size + PAGE; /* never again, and with a gap */
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
  int64_t n = first(at, size);
  if (n < 0 || reserved[n] != size) return CUDA_ERROR_INVALID_VALUE;
  for (u64 i = n; i < n + size / PAGE; ++i)
    if (behind[i]) return CUDA_ERROR_INVALID_VALUE;
  reserved[n] = 0;
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* to, size_t size, const CUmemAllocationProp* p, u64 flags) {
  if (!init() || size != PAGE || !right(p) || flags) return CUDA_ERROR_INVALID_VALUE;
  if (exists >= limit) return CUDA_ERROR_OUT_OF_MEMORY;
  for (int i = 0; i < MOST; ++i)
    if (!live[i]) return live[i] = 1, ++exists, *to = i + 1000, CUDA_SUCCESS;
  return CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle page) {
  if (page < 1000 || page >= 1000 + MOST || !live[page - 1000] || behind_any[page - 1000]) return CUDA_ERROR_INVALID_VALUE;
  live[page - 1000] = 0, --exists;
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle page, u64 flags) {
  int64_t n = first(at, size);
  if (n < 0 || size != PAGE || offset || flags || behind[n]) return CUDA_ERROR_INVALID_VALUE;
  if (page < 1000 || page >= 1000 + MOST || !live[page - 1000] || behind_any[page - 1000]) return CUDA_ERROR_INVALID_VALUE;
  if (mmap((void*)at, PAGE, PROT_NONE, MAP_SHARED | MAP_FIXED, file, (page - 1000) * PAGE) == MAP_FAILED)
    return CUDA_ERROR_UNKNOWN;
  behind[n] = page - 1000 + 1, behind_any[page - 1000] = 1;
  ++mapped;
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc* to, size_t count) {
  int64_t n = first(at, size);
  if (n < 0 || count != 1 || to->location.type != CU_MEM_LOCATION_TYPE_DEVICE || to->location.id != 3 ||
      to->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    return CUDA_ERROR_INVALID_VALUE;
  for (u64 i = n; i < n + size / PAGE; ++i) {
    if (!behind[i]) return CUDA_ERROR_INVALID_VALUE;
    readable[i] = 1;
  }
  return mprotect((void*)at, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  int64_t n = first(at, size);
  if (n < 0 || size != PAGE || !behind[n]) return CUDA_ERROR_INVALID_VALUE; /* as it was mapped, and only once */
  if (mmap((void*)at, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
    return CUDA_ERROR_UNKNOWN;
  behind_any[behind[n] - 1] = 0, behind[n] = 0, readable[n] = 0, --mapped;
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t size, CUstream stream) {
  int64_t n = first(at, size);
  if (n < 0 || (uintptr_t)stream != 0x5EED) return CUDA_ERROR_INVALID_VALUE;
  for (u64 i = n; i < n + size / PAGE; ++i)
    if (!readable[i]) return CUDA_ERROR_INVALID_VALUE;
  memset((void*)at, value, size);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "out of memory";
  return CUDA_SUCCESS;
}
u64 count(int what) { return what ? mapped : exists; }
void allow(u64 pages) { limit = pages; }
"""


@cache
def driver_library() -> Path:
    """The built library; skips the test where it cannot be built."""
    triton = pytest.importorskip("triton")
    headers = Path(triton.__file__).parent / "backends/nvidia/include"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not (headers / "cuda.h").exists():
        pytest.skip("no C compiler, or a Triton without NVIDIA's header")
    directory = Path(tempfile.mkdtemp(prefix="motet-driver-"))
    source, library = directory / "driver.c", directory / "libcuda.so.1"
    source.write_text(DRIVER)
    command = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{headers}", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


class HostPages(CudaPages):
    """The binding as it is, on a driver of its own. Its one device is the fourth, and all work is done when a call returns.

    The driver's state is that of its file, which is copied into a directory under `directory`.
    """

    def __init__(self, directory: Path) -> None:
        own = tempfile.mkdtemp(dir=directory)
        super().__init__(torch.device("cuda", 3), shutil.copy(driver_library(), own))
        self._count = self._library["count"]
        self._count.restype = ctypes.c_uint64
        self.waits = 0

    @property
    def existing(self) -> int:
        """Physical pages."""
        return int(self._count(0))

    @property
    def mapped(self) -> int:
        """Pages behind addresses."""
        return int(self._count(1))

    def allow(self, pages: int) -> None:
        """From now on the device has so many physical pages."""
        self._library["allow"](ctypes.c_uint64(pages))

    def synchronize(self) -> None:
        self.waits += 1

    def tensor(self, owner: PagedRange, address: int, nbytes: int) -> torch.Tensor:
        described = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=described, owner=owner)))

    def _stream(self) -> int:
        return STREAM


def host_pages(directory: Path) -> PhysicalPages:
    """Physical pages of a device of their own."""
    return PhysicalPages(HostPages(directory))
