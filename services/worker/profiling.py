"""Measures an engine's step times: batches of many sizes, rank mixes and context lengths, alone on the machine.

Every batch is prefilled together, decoded for a few steps, joined by newcomers (steps that do both), and ended. Adapters are
random weights made for the purpose: times do not depend on values.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from policies.perf_fit import Step
from services.worker.assemble import assemble
from services.worker.config import WorkerConfig
from services.worker.engine.adapter_weights import HostAdapter
from services.worker.engine.engine import Engine
from services.worker.engine.request import EngineRequest, StepOutput
from services.worker.state import START_PERF, StepTimes
from shared.base_shapes import ATTENTION, read_shapes
from shared.clock import now_s
from shared.model import SamplingParams, WorkerLimits

RANKS = (8, 16, 32, 64)
ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (16, 64, 200)  # tokens
DECODES = 8  # steps of each batch
ADAPTERS_PER_RANK = 4
MIB = 1 << 20


@dataclass(slots=True)
class Measured:
    """What was seen: steps without their adapter loads, and the loads as (MiB, ms)."""

    limits: WorkerLimits
    steps: list[Step] = field(default_factory=list)
    loads: list[tuple[float, float]] = field(default_factory=list)


def measure(
    config: WorkerConfig, model_dir: Path, *, seconds: float, progress: Callable[[float], None] = lambda share: None
) -> Measured:
    """Profile the engine that `config` describes for about so many seconds; at least one round of every batch."""
    assembly = assemble(config, model_dir, StepTimes(START_PERF))
    profiler = _Profiler(assembly.engine, assembly.limits, assembly.vocab_size, _adapters(model_dir, config.max_lora_rank))
    profiler.load_times()
    began_s = now_s()
    batches = list(profiler.batches())
    for number, batch in enumerate(itertools.cycle(batches)):
        if number >= len(batches) and now_s() - began_s >= seconds:
            return profiler.measured
        profiler.run(*batch, tell=number >= len(batches) // 8)  # the first ones warm up what is built lazily
        progress(min(1.0, max((now_s() - began_s) / seconds, 0.0) if number >= len(batches) else number / len(batches)))
    raise AssertionError("the cycle does not end")


class _Profiler:
    def __init__(self, engine: Engine, limits: WorkerLimits, vocab_size: int, adapters: dict[int, list[HostAdapter]]) -> None:
        self._engine, self._limits, self._vocab_size, self._adapters = engine, limits, vocab_size, adapters
        self._requests = itertools.count()
        self.measured = Measured(limits)

    def batches(self) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """(rows, ranks of the requests in turn, prompt tokens): small and large ones in turn, so that drift spreads."""
        ranks = [rank for rank in RANKS if rank in self._adapters]
        mixes = [(0,), *((rank,) for rank in ranks), tuple(ranks), (0, *ranks)]
        for prompt, mix, rows in itertools.product(PROMPTS, mixes, ROWS):
            tokens = rows * (prompt + 2 * DECODES + self._limits.block_size)
            fits = prompt + 2 * DECODES < self._limits.max_model_len
            if mix and rows <= self._limits.max_running and fits and 2 * tokens <= self._capacity:
                yield rows, mix, prompt

    @property
    def _capacity(self) -> int:
        return self._limits.kv_blocks_total * self._limits.block_size

    def run(self, rows: int, ranks: tuple[int, ...], prompt: int, *, tell: bool) -> None:
        """Prefill, decode, and let a quarter as many newcomers in."""
        for place in range(rows):
            self._add(ranks[place % len(ranks)], place, prompt, 2 * DECODES)
        for _ in range(DECODES):
            self._step(tell)
        for place in range(min(max(1, rows // 4), self._limits.max_running - rows)):
            self._add(ranks[place % len(ranks)], place, prompt, DECODES)
        while self._engine.has_work():
            self._step(tell)

    def _add(self, rank: int, place: int, prompt: int, tokens: int) -> None:
        self._ask(self._adapters[rank][place % ADAPTERS_PER_RANK] if rank else None, prompt, tokens)

    def _ask(self, adapter: HostAdapter | None, prompt: int, tokens: int) -> None:
        number = next(self._requests)
        request = EngineRequest(
            request_id=f"profile-{number}",
            gateway_id="",
            prompt=[(31 * number + 7 * i + 1) % self._vocab_size for i in range(prompt)],  # no two share a prefix
            sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            arrival_s=now_s(),
            adapter=adapter,
        )
        self._engine.add(request, now_s())

    def _step(self, tell: bool) -> None:
        began_s = now_s()
        output = self._engine.step(began_s)
        step_ms = (now_s() - began_s) * 1000
        if output.failure is not None:
            raise output.failure
        if tell:
            self._tell(output, step_ms)

    def _tell(self, output: StepOutput, step_ms: float) -> None:
        stats = output.stats
        rows = stats.prefill_requests + stats.decode_rows
        if stats.adapters_loaded:
            return  # a step of its own kind: `load_times` measures loads
        if not rows:
            return
        decode_rank_sum = stats.rank_sum * stats.decode_rows // rows
        self.measured.steps.append(
            Step(
                time_ms=step_ms,
                prefill_requests=stats.prefill_requests,
                prefill_tokens=stats.prefill_tokens,
                prefill_rank_sum=stats.rank_sum - decode_rank_sum,
                prefill_max_rank=stats.rank_max if stats.prefill_requests else 0,
                decode_rows=stats.decode_rows,
                decode_rank_sum=decode_rank_sum,
                decode_max_rank=stats.rank_max if stats.decode_rows else 0,
                context_tokens=stats.context_tokens,
            )
        )

    def load_times(self) -> None:
        """Bring every adapter to the device and drop it again, twice; the first time warms up."""
        for round_, adapters in itertools.product(range(2), self._adapters.values()):
            for adapter in adapters:
                self._engine.unload_adapter(adapter.digest)
                self._ask(adapter, PROMPTS[0], 1)
                while self._engine.has_work():
                    stats = self._engine.step(now_s()).stats
                    if stats.adapters_loaded and round_:
                        self.measured.loads.append((adapter.nbytes / MIB, stats.load_s * 1000))


def _adapters(model_dir: Path, max_rank: int) -> dict[int, list[HostAdapter]]:
    """Adapters of each rank on the attention's projections."""
    shapes = read_shapes(model_dir)
    generator = torch.Generator().manual_seed(0)

    def make(rank: int, number: int) -> HostAdapter:
        pairs = {}
        for layer, module in itertools.product(range(shapes.layers), ATTENTION):
            fan_in, fan_out = shapes.linear(module)
            a = torch.randn(rank, fan_in, generator=generator) * 0.01
            pairs[layer, module] = (1.0, a, torch.randn(fan_out, rank, generator=generator) * 0.01)
        nbytes = sum(2 * (a.numel() + b.numel()) for _, a, b in pairs.values())  # in 16 bits, as adapters come
        digest = hashlib.sha256(f"profile-{rank}-{number}".encode()).hexdigest()
        return HostAdapter(digest=digest, rank=rank, ranks=dict.fromkeys(ATTENTION, rank), nbytes=nbytes, pairs=pairs)

    return {rank: [make(rank, number) for number in range(ADAPTERS_PER_RANK)] for rank in RANKS if rank <= max_rank}
