"""The engine of the CPU assist bench. The same engine is used for all ways in which a cold request can start.

Two engines of the same model would differ by several percent, depending on the physical addresses of their memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.models import ATTENTION, MLP, SHAPES, prompts, write_adapter, write_model
from bench.stored_adapters import stored_adapter
from motet.policies.step.cold_start import ColdStartName
from motet.policies.times.step_times import StepTimes
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.engines.start_perf import START_PERF
from motet.services.worker.native.assemble import assemble
from motet.services.worker.native.engine import Engine
from motet.shared.clock import now_s
from motet.shared.model import SamplingParams

WAYS: dict[str, ColdStartName] = {
    "cached": "blocking",
    "on demand": "blocking",
    "layer-wise": "layerwise",
    "assist": "assist",
    "auto": "auto",
}
"""The ways to start, and the engine's `--cold-start` for each. Cached requests have their adapters before the clock starts."""
FILES = 4  # different adapters of one rank; the engine knows each under as many digests as it wants
WARM_PROMPTS = (16, 64, 256, 512)
IDLE_S = 0.001


@dataclass(frozen=True, slots=True)
class Asked:
    """One request with an adapter of its own. Times in seconds from the start, lengths in tokens."""

    at_s: float
    prompt: list[int]
    output_tokens: int


@dataclass(slots=True)
class Answered:
    """When the tokens of a request came, in seconds from its arrival."""

    times_s: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return self.times_s[0] * 1e3

    @property
    def latency_ms(self) -> float:
        return self.times_s[-1] * 1e3

    @property
    def tpot_ms(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) * 1e3 / max(1, len(self.times_s) - 1)


@dataclass(frozen=True, slots=True)
class Ran:
    """How long a step took, how long each of its parts, and how many prompt tokens it computed."""

    took_ms: float
    parts_ms: dict[str, float]
    prefill_tokens: int


class Files:
    """A model and adapters of some ranks in the form of a worker's disk. A context manager."""

    def __init__(self, model: str, ranks: Sequence[int]) -> None:
        self._shape, self._ranks = SHAPES[model], ranks

    def __enter__(self) -> Files:
        self._directory = tempfile.TemporaryDirectory(prefix="motet-bench-")
        home = Path(self._directory.name)
        self.model = home / "model"
        write_model(self.model, self._shape, dtype="bfloat16")
        self.blobs: dict[int, list[Path]] = {}
        for rank in self._ranks:
            for number in range(FILES):
                peft = home / f"peft-{rank}-{number}"
                write_adapter(peft, self._shape, rank=rank, modules=(*ATTENTION, *MLP), seed=1000 * rank + number)
                blob = home / f"{rank}-{number}"
                blob.write_bytes(stored_adapter(self.model, peft).blob)
                self.blobs.setdefault(rank, []).append(blob)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._directory.cleanup()


class EngineRig:
    """An engine that answers requests in real time, with adapters of some ranks, in any of the ways. A context manager.

    `adapter` makes a new adapter of a rank; `times` are the step times that the engine predicts with.
    """

    def __init__(
        self,
        engine: Engine,
        times: StepTimes,
        ranks: Sequence[int],
        adapter: Callable[[int], HostAdapter],
        *,
        warm_prompts: Sequence[int] = WARM_PROMPTS,
    ) -> None:
        self._engine, self._times, self._adapter = engine, times, adapter
        self.link_bytes = 0
        self.modes: dict[str, int] = {}
        self.ran: list[Ran] = []  # steps of the last `serve`
        self.copied, self.copying_s = 0, 0.0  # bytes of adapters while the last `serve` ran, and how long the link was busy
        self._warm_up(ranks, warm_prompts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._engine.close()

    def serve(self, asked: Sequence[Asked], rank: int, way: str, beside: Sequence[Asked] = ()) -> list[Answered]:
        """Serve all requests in real time. Each has an adapter that the device has not seen before, unless the way is "cached".

        `beside`: further requests, whose adapters are always on the device. Their answers come last.
        """
        self._engine.cold_start = WAYS[way]
        adapters = [self._adapter(rank) for _ in (*asked, *beside)]
        for adapter in adapters if way == "cached" else adapters[len(asked) :]:
            self._engine.load_adapter(adapter)
        self._drain()
        self.link_bytes, self.modes, self.ran = 0, {}, []
        before = self._engine.runner.link
        answers = self._run([*asked, *beside], adapters)
        after = self._engine.runner.link
        self.copied, self.copying_s = after.bytes_copied - before.bytes_copied, after.busy_s - before.busy_s
        for adapter in adapters:
            self._engine.unload_adapter(adapter.digest)
        self._drain()
        return answers

    def _run(self, asked: Sequence[Asked], adapters: Sequence[Any]) -> list[Answered]:
        answers = [Answered() for _ in asked]
        waiting = sorted(range(len(asked)), key=lambda number: asked[number].at_s)
        began, left = now_s(), len(asked)
        while left:
            now = now_s()
            while waiting and asked[waiting[0]].at_s <= now - began:
                number = waiting.pop(0)
                one = asked[number]
                sampling = SamplingParams(max_tokens=one.output_tokens, temperature=0.0, ignore_eos=True)
                request = EngineRequest.local(
                    str(number), one.prompt, sampling, weights=adapters[number], arrival_s=began + one.at_s
                )
                self._engine.add(request, now)
            if not self._engine.has_work():
                time.sleep(IDLE_S)
                continue
            output = self._step()
            now = now_s()
            for item in (item for items in output.items.values() for item in items):
                if item.error is not None:
                    raise RuntimeError(item.error.message)
                number = int(item.request_id)
                answers[number].times_s += [now - began - asked[number].at_s] * len(item.tokens)
                left -= item.finish is not None
        return answers

    def _step(self) -> Any:
        began = now_s()
        output = self._engine.step(began)
        if output.failure is not None:
            raise output.failure
        stats = output.stats
        if stats.sampled:
            stats.time_ms = (now_s() - began) * 1000
            parts_ms = {part: 1000 * s for part, s in self._engine.clock.laps.items()}
            self.ran.append(Ran(stats.time_ms, parts_ms, stats.prefill_tokens))
            self._times.observe(stats)
        if stats.copies is not None:
            self.link_bytes += stats.copies.link_bytes
        for mode, _ in stats.cold_starts:
            self.modes[mode] = self.modes.get(mode, 0) + 1
        if self._engine.pause_s:
            time.sleep(self._engine.pause_s)
        return output

    def _drain(self) -> None:
        while self._engine.has_work():
            self._step()

    def _warm_up(self, ranks: Sequence[int], prompts_: Sequence[int]) -> None:
        """Let the engine learn step times and the speed of processes before any measurement."""
        for rank in ranks:
            for number, tokens in enumerate(prompts_):
                prompt = prompts(1, tokens, seed=number)[0]
                self.serve([Asked(0.0, prompt, 4)], rank, "cached" if number % 2 else "assist")
                self.serve([Asked(0.0, prompt, 4) for _ in range(4)], rank, "cached")


class Rig(EngineRig):
    """An engine assembled as in a worker: one thread for each core except those of its CPU LoRA processes.

    A context manager.
    """

    def __init__(self, files: Files, *, link_gbps: float, processes: int, adapters: int) -> None:
        largest = max(files.blobs)
        lora_mib = (files.blobs[largest][0].stat().st_size * adapters >> 20) + 16
        config = WorkerConfig.of(
            model=str(files.model),
            kv_memory_gib=0.5,
            max_lora_rank=largest,
            max_loras=adapters,
            lora_memory_mib=lora_mib,
            prefix_cache=False,
            assist_processes=processes,
        )
        times, numbers = StepTimes(START_PERF), count()
        assembly = assemble(config, files.model, times, link_bytes_per_s=link_gbps * 1e9)

        def adapter(rank: int) -> HostAdapter:
            number = next(numbers)
            return assembly.parse_adapter(files.blobs[rank][number % FILES], f"{rank}-{number}")

        super().__init__(assembly.engine, times, list(files.blobs), adapter)
