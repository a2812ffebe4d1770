"""The limits of this machine (memory bandwidth and arithmetic), and the share of them that a batch of requests uses.

Probes on as many threads as the contestants have: torch reads and adds long vectors (bandwidth) and multiplies large bfloat16
matrices (arithmetic); Motet's kernels read, and multiply from registers. The better of the two counts.

A batch must read all weights and its adapters once per step, multiply every token by them, and in attention read and multiply
all keys and values before a token. The limit of a step is the slower of reading and multiplying.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.models import RANKS, Shape, adapter_modules
from motet.kernels.cpu import BuildError, CpuEngine, available_isas

VECTOR, MATRIX = 1 << 26, 2048  # float32 elements (256 MiB each, more than most caches); rows and columns
REPEATS = 5
SUSTAINED_S = 0.1
ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a machine: bytes and floating-point operations per second."""

    bytes_per_s: float
    flops_per_s: float
    bytes_beside: int = 2
    """How many 8-bit integers a vector holds for each number that it multiplies at `flops_per_s`: two for bfloat16, four where
    bfloat16 is multiplied as float32."""

    def better(self, other: Limits) -> Limits:
        """The higher value of each limit."""
        bytes_per_s, flops_per_s = max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s)
        return Limits(bytes_per_s, flops_per_s, other.bytes_beside)

    def mean(self, other: Limits) -> Limits:
        """The value between the two of each limit."""
        bytes_per_s, flops_per_s = (self.bytes_per_s + other.bytes_per_s) / 2, (self.flops_per_s + other.flops_per_s) / 2
        return Limits(bytes_per_s, flops_per_s, other.bytes_beside)

    @property
    def of_whole_numbers(self) -> Limits:
        """Limits for products of 8-bit integers: as many instructions per second with more operations each.

        No machine does more; some need several instructions where others need one.
        """
        return Limits(self.bytes_per_s, self.flops_per_s * self.bytes_beside)


@dataclass(frozen=True, slots=True)
class Share:
    """Shares of the machine's bandwidth, of its arithmetic, and of the speed that the two allow together."""

    bandwidth: float
    flops: float
    limit: float


def probe(threads: int, *, vector: int = VECTOR, matrix: int = MATRIX) -> Limits:
    """Measure both limits, the best of some repetitions. `vector`: float32 elements; `matrix`: rows and columns."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b, c = (torch.ones(vector) for _ in range(3))
        # torch multiplies bfloat16 very slowly where the processor does not: floats are the limit there
        native = available_isas()[-1] in ("avx512bf16", "amx")
        x = torch.ones(matrix, matrix, dtype=torch.bfloat16 if native else torch.float32)
        y = torch.empty_like(x)
        triad_s = _best_s(lambda: torch.add(b, c, alpha=2.0, out=a))
        read_s = _best_s(lambda: torch.sum(a))
        gemm_s = _best_s(lambda: torch.mm(x, x, out=y))
    finally:
        torch.set_num_threads(before)
    found = Limits(max(3 * a.nbytes / triad_s, a.nbytes / read_s), 2 * matrix**3 / gemm_s, 2 if native else 4)
    try:
        engine = CpuEngine(threads=threads)
    except BuildError:
        return found
    flops, read = (
        max(call() for _ in range(REPEATS)) for call in (lambda: engine.peak_flops(x.dtype), lambda: engine.read_bandwidth(a))
    )
    return Limits(max(found.bytes_per_s, read), max(found.flops_per_s, flops), found.bytes_beside)


class Present:
    """Measures the limits of the moment. The other tenants of a machine, and where it places our processors, change them.

    `best` is used where our kernels cannot be compiled.
    """

    def __init__(self, threads: int, best: Limits, *, vector: int = VECTOR) -> None:
        self._best = best
        self._memory = torch.ones(vector)
        self._type = torch.bfloat16 if best.bytes_beside == 2 else torch.float32
        self._engine: CpuEngine | None
        try:
            self._engine = CpuEngine(threads=threads)
        except BuildError:
            self._engine = None

    def __call__(self) -> Limits:
        """The better of two readings, and what arithmetic sustains for SUSTAINED_S."""
        if self._engine is None:
            return self._best
        times_s: list[float] = []
        until_s = time.perf_counter() + SUSTAINED_S
        while not times_s or time.perf_counter() < until_s:
            times_s.append(1 / self._engine.peak_flops(self._type))  # of one operation
        bytes_per_s = max(self._engine.read_bandwidth(self._memory) for _ in range(2))
        return Limits(bytes_per_s, len(times_s) / sum(times_s), self._best.bytes_beside)


def _best_s(call: Callable[[], object]) -> float:
    call()
    times_s = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - began_s)
    return min(times_s)


def share(
    limits: Limits,
    shape: Shape,
    adapters: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    seconds: float,
    *,
    weight_bytes: float,
) -> Share:
    """The shares that a batch of `len(adapters)` requests reached in `seconds`.

    An adapter is given by its number (bench.models), -1 for none. `weight_bytes` per base weight: 2 for bfloat16, 1 for int8,
    9/16 for int4 with its scales.
    """
    layers = shape.layer_weights()
    head = shape.hidden * shape.vocabulary
    loras = [_elements(shape, number) for number in adapters]
    step_bytes = weight_bytes * (layers + head) + ELEMENT_BYTES * sum(_elements(shape, one) for one in set(adapters))
    token_flops = 2 * (layers * len(adapters) + sum(loras))
    head_flops = 2 * head * len(adapters)
    seen_flops = 4 * shape.hidden * shape.layers * len(adapters)  # of a token of the context, for one after it
    seen_bytes = 2 * ELEMENT_BYTES * shape.kv_heads * shape.hidden // shape.heads * shape.layers * len(adapters)
    prefill = (step_bytes, prompt_tokens * token_flops + head_flops + seen_flops * prompt_tokens * (prompt_tokens + 1) // 2)
    contexts = range(prompt_tokens + 1, prompt_tokens + output_tokens)
    steps = [prefill, *((step_bytes + seen_bytes * n, token_flops + head_flops + seen_flops * n) for n in contexts)]
    return Share(
        bandwidth=sum(read for read, _ in steps) / seconds / limits.bytes_per_s,
        flops=sum(flops for _, flops in steps) / seconds / limits.flops_per_s,
        limit=sum(max(read / limits.bytes_per_s, flops / limits.flops_per_s) for read, flops in steps) / seconds,
    )


def kept_with_adapters(bytes_per_s: float, shape: Shape, adapters: Sequence[int], steps: int, seconds: float) -> float:
    """The share of its speed that a batch would keep that takes `seconds` without adapters, if each of its `steps` read them at
    `bytes_per_s` and did nothing else meanwhile.
    """
    read_s = steps * ELEMENT_BYTES * sum(_elements(shape, one) for one in set(adapters)) / bytes_per_s
    return seconds / (seconds + read_s)


def _elements(shape: Shape, number: int) -> int:
    """The number of weights of adapter `number`; 0 for -1."""
    if number < 0:
        return 0
    sizes = shape.projections()
    return RANKS[number % len(RANKS)] * shape.layers * sum(sum(sizes[module]) for module in adapter_modules(number))
