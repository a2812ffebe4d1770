"""Stage 4: the engine end to end on real shapes: its speed relative to its speed without LoRA, and to the roofline.

Requests come together, are prefilled, and decode together to their ends. A decode step's roofline is the slower of two: reading
the base's matrices and every distinct adapter once, or multiplying all rows by the matrices. Reading the KV of all contexts is
added. Bandwidth and arithmetic are measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.gpu_stages.bed import Bed, scratch
from bench.gpu_stages.results import Line, Point
from bench.gpu_stages.shapes import RANKS, another, host_adapter, write_config
from bench.models import prompts
from motet.policies.times.step_times import StepTimes
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.model_config import ModelConfig, read_model_config
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.engines.start_perf import START_PERF
from motet.services.worker.native.assemble import assemble
from motet.services.worker.native.checkpoint import parameters
from motet.services.worker.native.engine import Engine
from motet.shared.clock import now_s
from motet.shared.model import SamplingParams

LOADS = [(32, 0), (32, 32), (256, 0), (256, 32), (1, 0), (8, 0), (8, 8), (1, 1), (32, 1), (256, 1), (4, 0), (4, 4)]
"""(requests, adapters), most valuable first."""
SAMPLED_LOADS = [(32, 0), (256, 0), (32, 32), (1, 0)]
LARGE_LOADS = [(128, 0), (128, 128), (64, 0), (64, 64), (256, 256)]
MORE_LOADS = [(32, 0), (32, 32)]  # of the second model
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
LAPS = 2  # of each load; the figures are those of the faster one
PARTS = ("schedule", "load", "forward", "sample", "postprocess")  # of a step
PROMPT, OUTPUT = 128, 96
GIB = 1 << 30
MIB = 1 << 20
SPARE_BYTES = 8 * GIB  # for activations, logits and graphs


@dataclass(slots=True)
class Lap:
    """One load, from its arrival to its last token."""

    tokens: int = 0
    total_s: float = 0.0
    prefill_s: float = 0.0
    decode_ms: list[float] = field(default_factory=list)  # of steps in which all requests decode
    stats: list[Any] = field(default_factory=list)  # of those
    parts: list[dict[str, float]] = field(default_factory=list)  # seconds of the parts of each of those


class Served:
    """An engine assembled as in a worker, with random weights on the device and room for adapters of these ranks."""

    def __init__(
        self,
        bed: Bed,
        model: str,
        directory: Path,
        *,
        ranks: Sequence[int],
        requests: int,
        link_bytes_per_s: float = 0.0,
        **options: Any,
    ) -> None:
        home = write_config(bed.pick(model, "tiny"), directory)
        self.config: ModelConfig = read_model_config(home)
        page_bytes = self.config.num_layers * sum(map(sum, self.config.projection_shapes().values())) * 2
        lora_mib = -(-sum(ranks) * page_bytes // MIB) + 1
        kv_bytes = 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * 2
        kv_gib = 1.1 * requests * (PROMPT + OUTPUT + 16) * kv_bytes / GIB
        if not bed.dry:
            free = torch.cuda.mem_get_info()[0] - SPARE_BYTES - 2 * parameters(self.config) - int(kv_gib * GIB)
            lora_mib = min(lora_mib, free // MIB)
        worker = WorkerConfig.of(
            model=str(home),
            load_format="dummy",
            dtype="bfloat16",
            device=bed.kind,
            kv_memory_gib=kv_gib,
            max_running=requests,
            max_step_tokens=bed.pick(8192, max(128, requests)),
            max_lora_rank=max(ranks),
            lora_memory_mib=lora_mib,
            max_loras=len(ranks),
            prefix_cache=False,
            **options,
        )
        self.times = StepTimes(START_PERF)
        began_s = now_s()
        self.assembly = assemble(worker, home, self.times, link_bytes_per_s=link_bytes_per_s)
        self.start_s = now_s() - began_s
        self.engine: Engine = self.assembly.engine
        self.hosts = {rank: host_adapter(self.config, rank, torch.bfloat16) for rank in set(ranks)}
        self.adapters = [another(self.hosts[rank], f"{rank}-{i}") for i, rank in enumerate(ranks)]
        self.lora_mib = lora_mib

    @property
    def attention(self) -> str:
        """The name of the attention library."""
        runner: Any = self.engine.runner
        return type(runner.memory.cache.library).__name__

    @property
    def graphs(self) -> Line:
        """How many CUDA graphs there are, and how many seconds the whole assembly took, which captures most of them."""
        steps: Any = self.engine.runner.steps  # type: ignore[attr-defined]
        counts = {"decode_graphs": steps.graphs, "prompt_graphs": steps.prompts}
        return {name: 0 if kind is None else len(kind.captured) for name, kind in counts.items()} | {"start_s": self.start_s}

    def load(self, count: int) -> int:
        """Copy the first adapters to the device. Returns how many there was room for."""
        there = [self.engine.load_adapter(adapter) for adapter in self.adapters[:count]]
        while self.engine.has_work():
            self.step()
            time.sleep(self.engine.pause_s)
        return sum(there)

    def lap(self, requests: int, adapters: int, *, prompt: int, output: int, sampling: SamplingParams = GREEDY) -> Lap:
        """Serve `requests` requests at once, the i-th with adapter i modulo `adapters`; 0 for the base model alone."""
        lap, now = Lap(), now_s()
        sampling = msgspec.structs.replace(sampling, max_tokens=output, ignore_eos=True)
        for i, tokens in enumerate(prompts(requests, prompt, seed=requests)):
            adapter = self.adapters[i % adapters] if adapters else None
            self.engine.add(
                EngineRequest.local(f"{i}", tokens, sampling, weights=adapter, gateway_id="g", arrival_s=now),
                now,
            )
        while self.engine.has_work():
            began_s = now_s()
            stats = self.step(lap)
            took_s = now_s() - began_s
            if stats.prefill_requests:
                lap.prefill_s += took_s
            elif stats.decode_rows == requests:
                lap.decode_ms.append(took_s * 1e3)
                lap.stats.append(stats)
                lap.parts.append(dict(self.engine.clock.laps))
        lap.total_s = now_s() - now
        return lap

    def step(self, lap: Lap | None = None) -> Any:
        """Run one step and return its statistics. Raises the error of a failed step."""
        output = self.engine.step(now_s())
        if output.failure is not None:
            raise output.failure
        for items in output.items.values():
            for item in items:
                if item.error is not None:
                    raise RuntimeError(item.error.message)
                if lap is not None:
                    lap.tokens += len(item.tokens)
        return output.stats

    def roofline_ms(self, rows: int, contexts: int, adapter_bytes: int, bed: Bed) -> float:
        """The least time of a decode step of `rows` sequences with `contexts` KV tokens in all.

        Attention follows the products, so its reading does not overlap with their arithmetic. LoRA's arithmetic is left out: it
        is a hundredth of the base's.
        """
        config = self.config
        embedding = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size  # a few rows of it are read
        matrices = parameters(config) - embedding
        kv_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * contexts
        read_ms = (2 * matrices + adapter_bytes) / bed.read_gb_s / 1e6
        multiply_ms = 2 * matrices * rows / bed.bf16_tflop_s / 1e9
        return max(read_ms, multiply_ms) + kv_bytes / bed.read_gb_s / 1e6

    def close(self) -> None:
        self.engine.close()


class Serving:
    """Stage 4: the whole engine."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._served: tuple[str, Served] | None = None
        self._directory = scratch()

    def points(self) -> list[Point]:
        pick = self._bed.pick
        first, second = "Llama-3.1-8B", "Qwen2.5-7B"
        found = [self._point(first, load) for load in pick(LOADS, [(4, 0), (4, 4)])]
        found += [self._point(first, load, sampled=True) for load in pick(SAMPLED_LOADS, [(4, 0)])]
        found += [self._point(first, load) for load in pick(LARGE_LOADS, [])]
        return found + [self._point(second, load) for load in pick(MORE_LOADS, [])]

    def _point(self, model: str, load: tuple[int, int], *, sampled: bool = False) -> Point:
        requests, adapters = load
        name = f"{model}, {requests} requests, {adapters} adapters" + (", sampled" if sampled else "")
        return Point(name, partial(self._load, model, requests, adapters, sampled), 180.0)

    def _load(self, model: str, requests: int, adapters: int, sampled: bool) -> Line:
        bed, served = self._bed, self._of(model)
        there = served.load(adapters)
        prompt, output = bed.pick((PROMPT, OUTPUT), (8, 5))
        run = partial(served.lap, requests, min(adapters, there), prompt=prompt, sampling=SAMPLED if sampled else GREEDY)
        run(output=4)  # graphs are captured, kernels compiled
        laps = [run(output=output) for _ in range(LAPS)]
        each_ms = [statistics.median(lap.decode_ms) for lap in laps]
        lap = laps[each_ms.index(min(each_ms))]
        decode_ms = min(each_ms)
        middle = lap.stats[len(lap.stats) // 2]
        roofline_ms = served.roofline_ms(requests, middle.context_tokens, middle.adapter_bytes, bed)
        line: Line = {"model": model, "requests": requests, "adapters": adapters, "adapters_there": there, "sampled": sampled}
        line |= {"tokens_per_s": lap.tokens / lap.total_s, "decode_ms": decode_ms, "roofline_ms": roofline_ms}
        line |= {"laps_ms": each_ms, "decode_tokens_per_s": requests / decode_ms * 1e3, "prefill_s": lap.prefill_s}
        for part in PARTS:
            line[f"{part}_ms"] = 1e3 * statistics.median(one.get(part, 0.0) for one in lap.parts)
        line["attention"] = served.attention
        return line | {"prompt": prompt, "output": output, "lora_mib": served.lora_mib}

    def _of(self, model: str) -> Served:
        if self._served is None or self._served[0] != model:
            if self._served is not None:
                self._served[1].close()
                self._served = None
                self._bed.release()
            first = model == "Llama-3.1-8B"
            most = self._bed.pick(256 if first else 32, 4)
            ranks = [RANKS[i % len(RANKS)] for i in range(most)]
            served = Served(self._bed, model, self._directory, requests=most, ranks=ranks)
            self._served = model, served
        return self._served[1]
