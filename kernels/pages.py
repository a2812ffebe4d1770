"""Ranges of device addresses with physical pages behind the parts that are in use.

    pages = PhysicalPages(driver)           of one device, created once and mapped where they are needed
    memory = PagedRange(pages, nbytes)      addresses only; `memory.tensor()` is a tensor of bytes over all of them
    memory.expect(start, end)               these bytes are in use from now on
    memory.give_back(start, end)            and now no longer

    bytes in use    |=====|            |==|              |====|
    pages           |  7  |  2  |     |  5  |     |     |  0  |       a page without any byte in use is behind no address

A page (2 MiB on NVIDIA's GPUs) is larger than a KV block of a layer, so neighbours share pages. Each page of a range counts its
bytes in use: it comes with the first one and goes with the last one. Pages that leave a range are kept for others, so memory
that one user gives back cannot go to anyone else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch


class PageDriver(Protocol):
    """Virtual memory of one device. Addresses and sizes are multiples of `page_bytes`."""

    page_bytes: int

    def reserve(self, nbytes: int) -> int:
        """The start of a range of addresses that nothing is behind."""

    def free(self, address: int, nbytes: int) -> None:
        """Undo `reserve`; nothing is behind the range."""

    def create(self) -> int:
        """A physical page. Raises MemoryError when the device has none."""

    def release(self, page: int) -> None:
        """Undo `create`; the page is behind no address."""

    def map(self, address: int, pages: Sequence[int]) -> None:
        """Put pages behind consecutive addresses. The device's next work finds zeros there, and may read and write."""

    def unmap(self, address: int, count: int) -> None:
        """Take away so many consecutive pages. No work of the device uses them."""

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""

    def tensor(self, owner: PagedRange, address: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] at `address`; its storage holds `owner`."""


class PhysicalPages:
    """The physical pages of one device for the ranges that are made of them. They are released after the last range."""

    def __init__(self, driver: PageDriver) -> None:
        self.driver, self.page_bytes = driver, driver.page_bytes
        self._free: list[int] = []

    def prepare(self, nbytes: int) -> None:
        """Create so many bytes of pages ahead. Raises MemoryError when the device has not as many."""
        self.put(self.take(-(-nbytes // self.page_bytes)))

    def take(self, count: int) -> list[int]:
        """So many pages. Raises MemoryError, and changes nothing, when the device has not as many."""
        while len(self._free) < count:
            self._free.append(self.driver.create())
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def put(self, pages: Sequence[int]) -> None:
        """They are behind no address any more."""
        self._free += pages

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the end of the process frees everything
            for page in self._free:
                self.driver.release(page)


class PagedRange:
    """See the module. One thread at a time, that of the steps."""

    def __init__(self, pages: PhysicalPages, nbytes: int) -> None:
        self._pages, self._driver, size = pages, pages.driver, pages.page_bytes
        count = max(-(-nbytes // size), 1)
        self.nbytes = nbytes
        self._in_use = np.zeros(count, dtype=np.int64)  # bytes of each page
        self._behind: dict[int, int] = {}  # {number in the range: physical page}
        self.address = self._driver.reserve(count * size)
        self.expect(0, 1)  # for good: libraries ask the driver whose memory it is that begins here

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes]. Only bytes in use may be touched. The range goes with the last tensor over its storage."""
        return self._driver.tensor(self, self.address, self.nbytes)

    def expect(self, start: int, end: int) -> None:
        """Bytes [start, end) are in use from now on. Zeros in new pages; pages that others use too are as they are.

        Raises MemoryError, and changes nothing, when the device has not enough pages.
        """
        first, counts = self._counts(start, end)
        new = first + np.flatnonzero(self._in_use[first : first + len(counts)] == 0)
        pages = self._pages.take(len(new))
        self._in_use[first : first + len(counts)] += counts
        self._behind |= zip(new.tolist(), pages, strict=True)
        for begin, stop in _runs(new):
            self._driver.map(self._address(begin), [self._behind[number] for number in range(begin, stop)])

    def give_back(self, start: int, end: int) -> None:
        """Bytes [start, end), which are in use, no longer are. Waits for the device when a page goes."""
        first, counts = self._counts(start, end)
        left = self._in_use[first : first + len(counts)]
        left -= counts
        assert (left >= 0).all(), "more is given back than was in use"
        self._unmap(first + np.flatnonzero(left == 0))

    def __del__(self) -> None:
        if hasattr(self, "address") and not sys.is_finalizing():
            self._unmap(np.array(sorted(self._behind)))
            self._driver.free(self.address, len(self._in_use) * self._pages.page_bytes)

    def _unmap(self, numbers: np.ndarray) -> None:
        if not len(numbers):
            return
        self._driver.synchronize()
        for begin, stop in _runs(numbers):
            self._driver.unmap(self._address(begin), stop - begin)
        self._pages.put([self._behind.pop(number) for number in numbers.tolist()])

    def _address(self, number: int) -> int:
        return self.address + number * self._pages.page_bytes

    def _counts(self, start: int, end: int) -> tuple[int, np.ndarray]:
        """The first page of bytes [start, end), and how many of them lie in it and in each of the following ones."""
        size = self._pages.page_bytes
        first, last = start // size, -(-end // size) if end > start else start // size
        return first, np.diff(np.clip(np.arange(first, last + 1) * size, start, end))


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """[3, 4, 5, 9] -> (3, 6), (9, 10)."""
    for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1) if len(numbers) else ():
        yield int(run[0]), int(run[-1]) + 1
