"""The requests for pictures: read from a recorded trace (GenTD26), or drawn with its statistics.

Taken from the trace: the order, the adapter, the kind, the steps, and the execution time, which says how long the request takes
alone on a GPU of mean speed. Not in it, and drawn from the adapter's name: its rank, of 8, 16, 32 and 64, and its MB, 0.625 to
3.125 for each rank, so 5 to 200. Arrivals are Poisson: the trace has times for its last part only, and these at a hundredth of
the fleet's rate. Only requests with one adapter are taken (93% of those with any), of the 200 most used ones.
"""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from motet.policies.cluster.worker_table import hash_of

KINDS = ("TXT_2_IMG", "INPAINTING", "IMG_2_IMG")
"""The paper's task types: SDXL, SD 2 inpainting, SDXL refiner."""
ADAPTERS = 200
RANKS = (8, 16, 32, 64)
MB_PER_RANK = (0.625, 3.125)
STEPS = (20, 50)
ALONE_S = (4.0, 120.0)
"""Execution times outside are set to these limits."""
TOLERATES = 4.0
"""Delay that a task tolerates, over its time alone: the trace has no objectives."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request. `kind`: index in KINDS, which is also its base model. `alone_s`: its steps alone on a GPU of speed 1."""

    at: int
    arrival_s: float
    kind: int
    adapter: str
    rank: int
    mb: float
    steps: int
    alone_s: float

    @property
    def size_bytes(self) -> int:
        """Of its adapter."""
        return round(self.mb * 2**20)

    @property
    def request_id(self) -> str:
        """For policies, which draw by it."""
        return f"r{self.at}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the trace says of one request."""

    kind: int
    adapter: str
    steps: int
    alone_s: float


def recorded(path: Path) -> list[Asked]:
    """The requests of the recorded trace with one of the ADAPTERS most used adapters, in its order."""
    with gzip.open(path, "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["num_lora"] == "1"]
    used = Counter(row["lora_ids"] for row in rows)
    top = {adapter for adapter, _ in used.most_common(ADAPTERS)}
    return [
        Asked(
            KINDS.index(row["predict_type"]),
            row["lora_ids"],
            int(np.clip(int(row["num_inference_steps"]), *STEPS)),
            float(np.clip(float(row["exec_time_seconds"]), *ALONE_S)),
        )
        for row in rows
        if row["lora_ids"] in top
    ]


REPEATS, SLOPE, DRIFT = 0.45, 0.82, 1500
"""The recorded trace's share of requests for one of the last adapters, its slope of popularity, and how it drifts."""


def drawn(count: int, seed: int) -> list[Asked]:
    """Requests with the recorded trace's statistics: kinds, steps, times, popularity and repeats of the last 8 adapters."""
    rng = np.random.default_rng(seed)
    chance = np.arange(1, ADAPTERS + 1) ** -SLOPE
    chance /= chance.sum()
    order = rng.permutation(ADAPTERS)
    last: list[int] = []
    asked: list[Asked] = []
    for at in range(count):
        if at % DRIFT == DRIFT - 1:
            swap = rng.choice(ADAPTERS, 20, replace=False)
            order[np.sort(swap)] = order[swap]
        one = int(rng.choice(last)) if last and rng.random() < REPEATS else int(order[rng.choice(ADAPTERS, p=chance)])
        last = [*last[-7:], one]
        kind = int(rng.choice(3, p=(0.81, 0.02, 0.17)))
        steps = int(rng.choice((30, 35, 20, 40), p=(0.9, 0.04, 0.03, 0.03)))
        asked.append(Asked(kind, f"drawn-{one}", steps, float(np.clip(rng.lognormal(3.45, 0.5), *ALONE_S))))
    return asked


def arrange(asked: Sequence[Asked], rate: float, seed: int) -> list[Job]:
    """The jobs, with Poisson arrivals of so many per second."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, len(asked)))
    return [
        Job(at, float(arrival_s), one.kind, one.adapter, *adapter_size(one.adapter), one.steps, one.alone_s)
        for at, (one, arrival_s) in enumerate(zip(asked, times, strict=True))
    ]


def adapter_size(adapter: str) -> tuple[int, float]:
    """An adapter's rank and MB, drawn from its name."""
    word = hash_of(adapter)
    low, high = MB_PER_RANK
    rank = RANKS[word % len(RANKS)]
    return rank, rank * (low + (high - low) * ((word >> 8) % 1000) / 999.0)
