"""The parts of CPU assist by themselves, as in CaraServe's figures 17 and 18.

round_trips     16 tokens x 4096 to each of 1 to 8 processes and as much back: over the shared memory of
                kernels/cpu/src/channel.h, and over Unix domain sockets (raw bytes, nothing serialized); nothing computed
prefills        the LoRA part of one layer's q, k, v for a prompt of 128 tokens, rank 64, bfloat16: cut to as many processes as
                there are cores, and by torch's own threads. From x to a bfloat16 y, in shared memory and in torch's
"""

from __future__ import annotations

import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bench.rig.percentiles import quantile_ms
from bench.rig.waiting import until
from motet.kernels import GROUPS, LoraPool, PackedLora
from motet.kernels.cpu import CpuEngine
from motet.kernels.cpu.assist import Channel, loading_of
from motet.services.worker.native.assist_processes import CpuAssist

HIDDEN = 4096
TOKENS, PROCESSES = 16, (1, 2, 4, 8)
PROMPT, RANK = 128, 64
BOUND_S = 10.0
START_S = 30.0
SHAPES = {module: (HIDDEN, HIDDEN) for modules in GROUPS.values() for module in modules}
QKV, OUT = 0, 1

_ECHO = """
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
data = memoryview(bytearray(int(sys.argv[2])))
while True:
    at = 0
    while at < len(data):
        read = peer.recv_into(data[at:])
        if not read:
            sys.exit()
        at += read
    peer.sendall(data)
"""


class Adapter:
    """An adapter of the pool's type in memory that the CPU LoRA processes map."""

    def __init__(self, pool: LoraPool, modules: Sequence[str], rank: int) -> None:
        dtype = pool.arena.dtype
        elements = sum(rank * pool.layers * sum(SHAPES[module]) for module in modules)
        self.fd = os.memfd_create("bench-adapter", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, elements * dtype.itemsize)
        self.memory = mmap.mmap(self.fd, 0)
        self.data_start = 0
        arena = torch.frombuffer(self.memory, dtype=dtype)
        arena.copy_(torch.randn(elements) * 0.01)
        pages, scales = dict.fromkeys(modules, rank // 8), dict.fromkeys(modules, [1.0] * pool.layers)
        self.packed = PackedLora.over(arena, SHAPES, layers=pool.layers, pages=pages, scales=scales)


@contextmanager
def _on_one_core() -> Iterator[list[int]]:
    """A context with this thread on the first core, as an engine that leaves the others to its processes. Yields the others."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    try:
        yield cores[1:] or cores
    finally:
        os.sched_setaffinity(0, cores)


def round_trips(*, quick: bool, counts: Sequence[int] = ()) -> list[dict[str, Any]]:
    """For each number of processes: milliseconds until all have answered, median and 95th percentile, in both ways."""
    repeats = 50 if quick else 400
    found = []
    for count in counts or PROCESSES:
        x = torch.randn(TOKENS, HIDDEN)
        ys = [torch.empty(TOKENS, HIDDEN) for _ in range(count)]
        with _on_one_core() as cores:
            shared = _over_memory(x, ys, cores, repeats)
            sockets = _over_sockets(x, ys, cores, repeats)
        found.append({"processes": count, **_quantiles("shm", shared), **_quantiles("socket", sockets)})
    return found


def prefills(*, quick: bool, counts: Sequence[int] = ()) -> list[dict[str, Any]]:
    """For each number of cores: milliseconds of one process per core, and of torch with as many threads."""
    repeats = 5 if quick else 30
    engine, pool = made_pool()
    adapter = Adapter(pool, GROUPS["qkv"], RANK)
    x = torch.randn(PROMPT, HIDDEN)
    allowed = sorted(os.sched_getaffinity(0))
    found = []
    for count in counts or range(1, len(allowed) + 1):
        assist = started(engine, pool, allowed[-count:], PROMPT)
        channels = assist.helpers([], 0).channels
        xs = x.tensor_split(count)

        def by_processes(channels: Sequence[Channel] = channels, xs: Any = xs) -> None:
            ask(channels, adapter, xs, [None] * len(xs), QKV)

        processes = _times(by_processes, repeats)
        assist.close()
        found.append({"cores": count, "processes_ms": _ms(processes), "torch_ms": _ms(_by_torch(adapter, x, count, repeats))})
    return found


def made_pool() -> tuple[CpuEngine, LoraPool]:
    """A pool with shapes and type only; nothing is loaded."""
    pool = LoraPool(SHAPES, layers=1, slots=1, max_rank=RANK, bytes_total=1 << 16, dtype=torch.bfloat16)
    return CpuEngine(threads=1), pool


def started(engine: CpuEngine, pool: LoraPool, cores: Sequence[int], max_rows: int) -> CpuAssist:
    assist = CpuAssist(engine, pool, cores=cores, max_rows=max_rows)

    def all_there() -> bool:
        return assist.capacity.processes >= len(cores)

    until(all_there, lambda: f"processes did not start: {dict(assist.failures)}", within_s=START_S, every_s=0.01)
    return assist


def _over_memory(x: torch.Tensor, ys: Sequence[torch.Tensor], cores: Sequence[int], repeats: int) -> list[float]:
    engine, pool = made_pool()
    adapter = Adapter(pool, ["q_proj"], 8)  # nothing on o: a request there is a round trip and no more
    assist = started(engine, pool, [cores[i % len(cores)] for i in range(len(ys))], TOKENS)
    channels = assist.helpers([], 0).channels
    times = _times(lambda: ask(channels, adapter, [x] * len(ys), ys, OUT), repeats)
    assist.close()
    return times


def ask(
    channels: Sequence[Channel], adapter: Adapter, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor | None], group: int
) -> None:
    loading = loading_of(0, adapter)
    for channel, x in zip(channels, xs, strict=True):
        channel.start(loading, x, layer=0, group=group, bound_s=BOUND_S)
    if not all([channel.finish(y) for channel, y in zip(channels, ys, strict=True)]):
        raise RuntimeError("a process did not answer")


def _over_sockets(x: torch.Tensor, ys: Sequence[torch.Tensor], cores: Sequence[int], repeats: int) -> list[float]:
    data = x.numpy().data.cast("B")
    peers, processes = [], []
    for i in range(len(ys)):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        told = [str(theirs.fileno()), str(len(data))]
        processes.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", _ECHO, *told], pass_fds=(theirs.fileno(),)))
        os.sched_setaffinity(processes[-1].pid, [cores[i % len(cores)]])
        theirs.close()
        peers.append(ours)

    def trip() -> None:
        for peer in peers:
            peer.sendall(data)
        for peer, y in zip(peers, ys, strict=True):
            into, at = y.numpy().data.cast("B"), 0
            while at < len(into):
                at += peer.recv_into(into[at:])

    times = _times(trip, repeats)
    for peer, process in zip(peers, processes, strict=True):
        peer.close()
        process.wait()
    return times


def matrices(adapter: Adapter) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A and B^T [rank, hidden] of q, k, v."""
    pages = adapter.packed.arena.view(3, RANK // 8, 2, 8, HIDDEN)  # of one layer: [module, page, A and B^T, rank]
    return [(page[:, 0].reshape(RANK, HIDDEN).clone(), page[:, 1].reshape(RANK, HIDDEN).clone()) for page in pages]


def _by_torch(adapter: Adapter, x: torch.Tensor, threads: int, repeats: int) -> list[float]:
    parts = matrices(adapter)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            return _times(lambda: _lora(x.bfloat16(), parts), repeats)
    finally:
        torch.set_num_threads(before)


def _lora(x: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([x @ a.T @ b for a, b in parts], dim=1)


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, after a warm-up."""
    for _ in range(max(3, repeats // 10)):
        call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def _ms(times: Sequence[float]) -> float:
    return round(statistics.median(times) * 1e3, 3)


def _quantiles(name: str, times: Sequence[float]) -> dict[str, float]:
    return {f"{name}_ms_p50": _ms(times), f"{name}_ms_p95": round(quantile_ms(times, 0.95), 3)}
