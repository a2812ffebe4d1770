"""Stage 1: limits of the machine: links, bandwidth, the cost of a launch, of waiting for numbers in host memory, and of moving
physical pages from one range of addresses to another."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

import numpy as np
import torch
import triton
import triton.language as tl

from bench.gpu_stages.bed import Bed, timed_s
from bench.gpu_stages.results import Line, Point
from motet.kernels.device.virtual_memory import physical_pages
from motet.kernels.memory import expect, give_back, reserved

ATTRIBUTES = {  # CUdevice_attribute
    "multiprocessors": 16,
    "copy_engines": 40,
    "host_pointers_are_the_devices": 91,
    "stream_memory_operations_64_bit": 122,
    "virtual_memory": 102,
    "l2_bytes": 38,
}
MIB = 1 << 20


@triton.jit
def _nothing(x):  # type: ignore[no-untyped-def]
    tl.store(x, 1.0)


class Limits:
    """Stage 1: the limits of the machine."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed

    def points(self) -> list[Point]:
        return [
            Point("machine", self._machine),
            Point("words", self._words, 60.0),
            Point("nodes", self._nodes),
            Point("memory", self._memory),
            Point("link", self._link),
            Point("launches", self._launches),
            Point("registration", self._registration),
            Point("pages", self._pages),
        ]

    def _machine(self) -> Line:
        versions: Line = {"torch": torch.__version__, "triton": triton.__version__, "numpy": np.__version__}
        versions["cores"] = len(os.sched_getaffinity(0))
        if self._bed.dry:
            return versions | {"gpu": "none"}
        driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
        for name, number in ATTRIBUTES.items():
            failed = driver.cuDeviceGetAttribute(ctypes.byref(found), number, 0)
            versions[name] = None if failed else found.value
        query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,pcie.link.gen.max,pcie.link.width.max"
        asked = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True)
        return versions | {"gpu": torch.cuda.get_device_name(), "nvidia_smi": asked.stdout.strip()}

    def _memory(self) -> Line:
        bed = self._bed
        line: Line = {"read_gb_s": bed.read_gb_s, "bf16_tflop_s": bed.bf16_tflop_s}
        here = torch.ones(bed.pick(1 << 30, 1 << 14), dtype=torch.int32, device=bed.device)
        there = torch.empty_like(here)
        return line | {"copy_gb_s": 2 * here.nbytes / bed.replayed_us(lambda: torch.add(here, 1, out=there)) / 1e3}

    def _nodes(self) -> Line:
        bed, counts = self._bed, self._bed.pick((1000, 2000), (1, 3))
        x = torch.zeros(32, device=bed.device)

        def launch(count: int) -> None:
            for _ in range(count):
                _nothing[(1,)](x)

        short_us, long_us = (bed.replayed_us(partial(launch, count)) for count in counts)
        return {"node_us": bed.node_us, "triton_node_us": (long_us - short_us) / (counts[1] - counts[0])}

    def _launches(self) -> Line:
        """The time that a launch costs the launching thread, while the device is far behind."""
        bed, count = self._bed, self._bed.pick(2000, 3)
        x = torch.zeros(32, device=bed.device)

        def torchs() -> None:
            for _ in range(count):
                x.add_(1.0)

        def tritons() -> None:
            for _ in range(count):
                _nothing[(1,)](x)

        found: Line = {}
        for name, work in (("torch_launch_us", torchs), ("triton_launch_us", tritons)):
            work()
            bed.synchronize()
            found[name] = 1e6 * timed_s(work, 1) / count
            bed.synchronize()
        return found

    def _link(self) -> Line:
        """Copies from and to pinned and ordinary host memory: GB/s by MiB."""
        bed, found = self._bed, dict[str, float]()
        for size in bed.pick((MIB, 8 * MIB, 256 * MIB), (4096,)):
            here = torch.empty(size, dtype=torch.uint8, device=bed.device)
            for kind, pinned in (("pinned", True), ("pageable", False)):
                host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned and not bed.dry)
                up_us = bed.eager_us(partial(here.copy_, host, non_blocking=True))
                down_us = bed.eager_us(partial(host.copy_, here, non_blocking=True))
                found |= {
                    f"up_{kind}_{size // MIB}_mib": size / up_us / 1e3,
                    f"down_{kind}_{size // MIB}_mib": size / down_us / 1e3,
                }
        return {"gb_s": found}

    def _words(self) -> Line:
        """Words that a stream writes and waits for: the time for one word, and the round trip between host and device."""
        bed, count = self._bed, self._bed.pick(1000, 3)
        streams, memory = bed.streams(), mmap.mmap(-1, mmap.PAGESIZE)
        words = np.frombuffer(memory, dtype=np.uint32)
        asked = words.ctypes.data
        streams.memory.register(asked, mmap.PAGESIZE)
        try:
            with streams.copies as stream:
                began = stream.mark()
                for i in range(count):
                    stream.write(asked, i)
                    stream.wait(asked, i)
                ended = stream.mark()
                ended.synchronize()
                seconds = ended.seconds_since(began)
                began_ns = perf_counter_ns()
                for i in range(count):
                    stream.write(asked, i)
                call_us = (perf_counter_ns() - began_ns) / 1e3 / count
                stream.mark().synchronize()
                words[0] = words[16] = 0
                trips = [self._trip(stream, words, i) for i in range(1, self._bed.pick(300, 3))]
        finally:
            streams.memory.forget(asked)
        assert seconds is not None, "it was waited for"
        return {
            "word_us": 1e6 * seconds / (2 * count),
            "word_call_us": call_us,
            "round_trip_us_p50": statistics.median(trips),
            "round_trip_us_p95": float(np.quantile(trips, 0.95)),
        }

    def _trip(self, stream: object, words: np.ndarray, number: int) -> float:
        """Microseconds from writing a word here until the stream that waits for it has answered with another word."""
        at = words.ctypes.data
        if self._bed.dry:
            words[0] = number  # a stream that is this thread waits at once
        stream.wait(at, number)  # type: ignore[attr-defined]
        stream.write(at + 64, number)  # type: ignore[attr-defined]
        began_ns = perf_counter_ns()
        words[0] = number
        until_ns = began_ns + 1_000_000_000
        while words[16] != number:
            if perf_counter_ns() > until_ns:
                raise RuntimeError(f"no answer to word {number} within a second")
        return (perf_counter_ns() - began_ns) / 1e3

    def _registration(self) -> Line:
        """Milliseconds to pin memory that others share, by MiB."""
        streams, found = self._bed.streams(), dict[str, float]()
        for size in self._bed.pick((MIB, 64 * MIB, 512 * MIB), (mmap.PAGESIZE,)):
            memory = mmap.mmap(-1, size)
            at = np.frombuffer(memory, dtype=np.uint8).ctypes.data
            began_ns = perf_counter_ns()
            streams.memory.register(at, size)
            found[f"{size / MIB:g}"] = (perf_counter_ns() - began_ns) / 1e6
            streams.memory.forget(at)
        return {"register_ms": found}

    def _pages(self) -> Line:
        """Microseconds per page that is created, mapped again elsewhere, and unmapped, in runs of pages and alone.

        `moved_bytes`: free memory that pages of the same number cost on their way to another place: none. `left_bytes`: what
        is missing when all is over; the driver may keep some.
        """
        pages, count = physical_pages(self._bed.device), self._bed.pick(512, 4)
        size = pages.page_bytes if pages is not None else mmap.PAGESIZE
        at_first = self._free_bytes()
        memory = reserved(((2 * count + 1) * size,), dtype=torch.uint8, pages=pages)  # the first page is always there
        one, other = memory[size:].split(count * size)
        create_us = self._us(partial(expect, one)) / count
        one.fill_(1)
        before = self._free_bytes()
        unmap_us = self._us(partial(give_back, one)) / count
        map_us = self._us(partial(expect, other)) / count
        zero = bool(other.eq(0).all()) if pages is not None else True
        moved = before - self._free_bytes()
        alone = [(self._us(partial(give_back, part)), self._us(partial(expect, part))) for part in other.split(size)]
        unmap_one_us, map_one_us = (statistics.median(times) for times in zip(*alone, strict=True))
        del memory, one, other, alone, pages
        return {
            "page_bytes": size,
            "page_create_us": create_us,
            "page_map_us": map_us,
            "page_unmap_us": unmap_us,
            "page_map_alone_us": map_one_us,
            "page_unmap_alone_us": unmap_one_us,
            "moved_bytes": moved,
            "left_bytes": at_first - self._free_bytes(),
            "good": zero and moved == 0,
        }

    def _us(self, work: Callable[[], object]) -> float:
        """Of one call, until the device is done with it."""

        def whole() -> None:
            work()
            self._bed.synchronize()

        self._bed.synchronize()
        return 1e6 * timed_s(whole, 1)

    def _free_bytes(self) -> int:
        self._bed.release()
        return 0 if self._bed.dry else torch.cuda.mem_get_info(self._bed.device)[0]
