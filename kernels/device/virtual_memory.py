"""The CUDA driver's virtual memory: what kernels/pages.py needs of a GPU.

Constants and structures are those of the header cuda.h (CUDA 10.2 and later).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from types import SimpleNamespace

import torch

from motet.kernels.device.driver import Driver, DriverError
from motet.kernels.pages import PagedRange, PhysicalPages

VIRTUAL_MEMORY_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


class _Location(Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class _Flags(Structure):
    """CUmemAllocationProp's allocFlags."""

    _fields_ = [("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4)]


class _Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows_data", c_void_p),
        ("flags", _Flags),
    ]


class _Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", c_int)]


class CudaPages(Driver):
    """A `PageDriver` of one GPU, "cuda:<n>". Raises DriverError where the driver has no virtual memory for it.

    A thread that calls has its device current, which any of torch's CUDA calls sees to.
    """

    def __init__(self, device: torch.device, library: str = "libcuda.so.1") -> None:
        super().__init__(library)
        u64, size = c_uint64, c_size_t
        attribute = self._function("cuDeviceGetAttribute", POINTER(c_int), c_int, c_int)
        granularity = self._function("cuMemGetAllocationGranularity", POINTER(size), POINTER(_Properties), c_int)
        self._reserve = self._function("cuMemAddressReserve", POINTER(u64), size, size, u64, u64)
        self._free = self._function("cuMemAddressFree", u64, size)
        self._create = self._function("cuMemCreate", POINTER(u64), size, POINTER(_Properties), u64)
        self._release = self._function("cuMemRelease", u64)
        self._map = self._function("cuMemMap", u64, size, size, u64, u64)
        self._unmap = self._function("cuMemUnmap", u64, size)
        self._set_access = self._function("cuMemSetAccess", u64, size, POINTER(_Access), size)
        self._fill = self._function("cuMemsetD8Async", u64, c_ubyte, size, c_void_p)
        self._device = device
        here = _Location(ON_DEVICE, device.index)
        self._properties, self._access = _Properties(type=PINNED, location=here), _Access(here, READ_AND_WRITE)
        supported, page_bytes = c_int(), c_size_t()
        self._call("cuDeviceGetAttribute", attribute(byref(supported), VIRTUAL_MEMORY_SUPPORTED, device.index))
        if not supported.value:
            raise DriverError(f"{device} has no virtual memory management")
        self._call("cuMemGetAllocationGranularity", granularity(byref(page_bytes), byref(self._properties), MINIMUM))
        self.page_bytes = page_bytes.value

    def reserve(self, nbytes: int) -> int:
        """The start of a range of addresses that nothing is behind."""
        address = c_uint64()
        self._call("cuMemAddressReserve", self._reserve(byref(address), nbytes, 0, 0, 0))
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        """Undo `reserve`; nothing is behind the range."""
        self._call("cuMemAddressFree", self._free(address, nbytes))

    def create(self) -> int:
        """A physical page. Raises OutOfMemory."""
        page = c_uint64()
        self._call("cuMemCreate", self._create(byref(page), self.page_bytes, byref(self._properties), 0))
        return page.value

    def release(self, page: int) -> None:
        """Undo `create`; the page is behind no address."""
        self._call("cuMemRelease", self._release(page))

    def map(self, address: int, pages: Sequence[int]) -> None:
        """Put pages behind consecutive addresses, filled with zeros by the stream of the steps."""
        for number, page in enumerate(pages):
            self._call("cuMemMap", self._map(address + number * self.page_bytes, self.page_bytes, 0, page, 0))
        nbytes = len(pages) * self.page_bytes
        self._call("cuMemSetAccess", self._set_access(address, nbytes, byref(self._access), 1))
        self._call("cuMemsetD8Async", self._fill(address, 0, nbytes, self._stream()))

    def unmap(self, address: int, count: int) -> None:
        """Take away so many consecutive pages. The driver takes each as it was mapped."""
        for number in range(count):
            self._call("cuMemUnmap", self._unmap(address + number * self.page_bytes, self.page_bytes))

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        torch.cuda.synchronize(self._device)

    def tensor(self, owner: PagedRange, address: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] at `address`, where something is; its storage holds `owner`."""
        described = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described, owner=owner), device=self._device)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


def physical_pages(device: torch.device) -> PhysicalPages | None:
    """Of a GPU; None for a CPU, whose system has its own. Raises DriverError where the driver has no virtual memory."""
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)  # of this thread
    return PhysicalPages(CudaPages(device))
