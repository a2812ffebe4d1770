"""The device that a stage runs on: the first GPU, or the CPU in a dry run.

In a dry run a graph is a call, a stream is the calling thread, and times mean nothing; everything else is the same code.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch

from motet.kernels.device import DeviceStreams, cuda_streams, host_streams
from motet.kernels.device.driver import MemoryOperations

REPLAYS = 21
T = TypeVar("T")
WARM = 3  # replays that do not count
READ_BYTES = 4 << 30


class Bed:
    """A device, and how time is measured on it."""

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu") if dry else torch.device("cuda", 0)
        self.kind = "cpu" if dry else "cuda"  # as a worker's --device
        if dry:
            os.environ["MOTET_KERNELS"] = "reference"  # the torch model, as on a GPU
        else:
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local, and there may be no network
            torch.cuda.set_device(self.device)

    def pick(self, real: T, tiny: T) -> T:
        """`real` on a GPU, `tiny` in a trial run."""
        return tiny if self.dry else real

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give back memory that nothing references."""
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()

    def replayed_us(self, work: Callable[[], object], replays: int = REPLAYS) -> float:
        """Median time of `work` as a CUDA graph, after a warm-up."""
        if self.dry:
            return 1e6 * timed_s(work, 1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        times = []
        for _ in range(replays):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) * 1000)
        return statistics.median(times[WARM:])

    def eager_us(self, work: Callable[[], object], repeats: int = REPLAYS) -> float:
        """Median time of `work` launched without a graph, until the device is done with it."""

        def whole() -> None:
            work()
            self.synchronize()

        whole()
        return 1e6 * timed_s(whole, 1 if self.dry else repeats)

    def streams(self) -> DeviceStreams:
        """New streams, with words in host memory. Raises DriverError where there are none."""
        if self.dry:
            from motet.kernels.cpu import CpuEngine

            return host_streams(CpuEngine(threads=1))
        return cuda_streams(self.device, MemoryOperations())

    @cached_property
    def read_gb_s(self) -> float:
        """Bytes per second of a kernel that only reads, which is the bandwidth of every lower bound."""
        from bench.gpu_stages.reading import CHUNK, read

        words = torch.ones(self.pick(READ_BYTES // 4, 4 * CHUNK), dtype=torch.int32, device=self.device)
        sums = torch.empty(len(words) // CHUNK, dtype=torch.int32, device=self.device)
        return words.nbytes / self.replayed_us(partial(read, words, sums)) / 1e3

    @cached_property
    def bf16_tflop_s(self) -> float:
        """Arithmetic of one large product, in 1e12 operations per second: the other lower bound."""
        n = self.pick(8192, 64)
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        return 2 * n**3 / self.replayed_us(lambda: a @ b) / 1e6

    @cached_property
    def node_us(self) -> float:
        """An empty node's share of a long graph."""
        small = torch.zeros(32, device=self.device)
        counts = self.pick((1000, 2000), (1, 20))

        def launch(count: int) -> None:
            for _ in range(count):
                small.add_(1.0)

        short_us, long_us = (self.replayed_us(partial(launch, count)) for count in counts)
        return max(long_us - short_us, 0.0) / (counts[1] - counts[0])


def scratch() -> Path:
    """A new directory for a stage's files, removed when the process ends."""
    directory = tempfile.mkdtemp(prefix="motet-gpu-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def timed_s(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(repeats):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return statistics.median(times)
