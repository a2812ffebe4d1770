"""The fleet of the paper: 16 machines with 4 GPUs each, 4 machines of each kind, and what a load of an adapter takes.

Each GPU keeps one base model. The paper does not say how the three models are spread: here in proportion to the work of the
earlier requests, over all kinds of GPU. Speeds are relative to the fleet's mean time. By dense 16-bit throughput (NVIDIA's data
sheets) an A40, a V100 and an RTX 3090 take about 2, 2.2 and 2.5 times as long as an A100.
"""

from __future__ import annotations

import csv
import gzip
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from bench.rock_fleet.jobs import KINDS, Asked, adapter_size


@dataclass(frozen=True, slots=True)
class GpuKind:
    """`slowness`: time of a step over an A100's. `tb_s`: memory bandwidth."""

    name: str
    memory_gb: float
    tb_s: float
    slowness: float


GPU_KINDS = (
    GpuKind("A100", 80.0, 2.0, 1.0),
    GpuKind("A40", 48.0, 0.70, 2.0),
    GpuKind("V100", 32.0, 0.90, 2.2),
    GpuKind("RTX 3090", 24.0, 0.94, 2.5),
)
MACHINES, GPUS_EACH = 16, 4
MEAN_SLOWNESS = sum(kind.slowness for kind in GPU_KINDS) / len(GPU_KINDS)
BASE_S = 22.0
"""Mean load time of a base model in the recorded table."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `base`: the index of its base model in KINDS. `room_bytes`: its memory for adapters."""

    at: int
    kind: GpuKind
    machine: int
    base: int
    room_bytes: int

    @property
    def speed(self) -> float:
        """Work per second; the mean of 1 / speed over the fleet is 1."""
        return MEAN_SLOWNESS / self.kind.slowness


def fleet(earlier: Sequence[Asked], room_mb: float) -> list[Gpu]:
    """The fleet's GPUs. `room_mb`: for adapters on a GPU with 24 GB, and in proportion to the memory on others."""
    work = np.array([sum(one.alone_s for one in earlier if one.kind == kind) for kind in range(len(KINDS))])
    count = MACHINES * GPUS_EACH
    others = np.maximum(2, np.round(work / work.sum() * count)).astype(int)[1:]
    bases = np.repeat(range(len(KINDS)), [count - int(others.sum()), *others])
    gpus = []
    for at in range(count):
        kind = GPU_KINDS[at % len(GPU_KINDS)]  # so that each base model has GPUs of all kinds
        machine = at % len(GPU_KINDS) + len(GPU_KINDS) * (at // MACHINES)
        room = room_mb * kind.memory_gb / GPU_KINDS[-1].memory_gb
        gpus.append(Gpu(at, kind, machine, int(bases[at]), round(room * 2**20)))
    return gpus


class Loads:
    """How long a load of an adapter takes: a quantile of measured load times, its own among all sizes, +- SPREAD.

    The measurements have no sizes; that a larger adapter takes longer is assumed. `base_s`: of a base model.
    """

    SPREAD = 0.25

    def __init__(self, measured_s: Sequence[float], adapters: Sequence[str], base_s: float = BASE_S) -> None:
        self.base_s = base_s
        self._measured = np.sort(np.asarray(measured_s, float))
        self._sizes = sorted(adapter_size(one)[1] for one in adapters)
        spread = np.linspace(-1.0, 1.0, 21)
        self._means = {
            one: float(np.mean([self._at(self._share(one) + self.SPREAD * by) for by in spread])) for one in adapters
        }

    def seconds(self, adapter: str, node: int, nth: int) -> float:
        """The `nth` load of the adapter on this node: the same in every system that is compared."""
        chance = crc32(f"{adapter} {node} {nth}".encode()) / 2**32
        return self._at(self._share(adapter) + self.SPREAD * (2.0 * chance - 1.0))

    def mean_s(self, adapter: str) -> float:
        """The expected time of a load."""
        return self._means[adapter]

    def line(self) -> tuple[float, float]:
        """The straight line through the mean times: seconds per MB, and the rest; as a worker's profile has it."""
        if len(self._means) < 2:
            return 0.0, next(iter(self._means.values()))
        mb = [adapter_size(one)[1] for one in self._means]
        slope, base = np.polyfit(mb, list(self._means.values()), 1)
        return float(slope), float(base)

    def _share(self, adapter: str) -> float:
        return (bisect_left(self._sizes, adapter_size(adapter)[1]) + 0.5) / len(self._sizes)

    def _at(self, share: float) -> float:
        share = abs(share)
        share = 2.0 - share if share > 1.0 else share  # mirrored at the ends, so that all times are as likely as measured
        return float(np.interp(share * (len(self._measured) - 1), np.arange(len(self._measured)), self._measured))


def recorded_loads(adapters: Sequence[str], adapter_times: Path, base_times: Path | None) -> Loads:
    """Load times from recorded tables (`value`, in ms); of base models the mean."""
    base_s = float(np.mean(_seconds(base_times))) if base_times is not None else BASE_S
    return Loads(_seconds(adapter_times), adapters, base_s)


def _seconds(path: Path) -> list[float]:
    with gzip.open(path, "rt") as file:
        return [float(row["value"]) / 1000.0 for row in csv.DictReader(file)]


def drawn_loads(adapters: Sequence[str], seed: int) -> Loads:
    """Load times with the recorded table's mean and spread: 4.4 s, 1.1 to 8.2 s at 5 and 99%."""
    return Loads(np.random.default_rng(seed).normal(4.4, 1.6, 2000).clip(0.6, 12.0).tolist(), adapters)
