"""Drives the real Engine in tests: requests in, whole outputs out, its accounts checked after every step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from motet.kernels import PAGE_RANKS
from motet.kernels.link import LinkState
from motet.kernels.pool import LINE, MODULES
from motet.policies.times.step_times import StepTimes
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.opening import Wiring
from motet.services.worker.engines.request import EngineLimits, EngineRequest, StepStats
from motet.services.worker.engines.start_perf import START_PERF
from motet.services.worker.native.backend import BackendOptions
from motet.services.worker.native.backends import open_backend
from motet.services.worker.native.engine import Engine
from motet.services.worker.native.runner import ModelRunner
from motet.services.worker.native.step_batch import StepBatch
from motet.shared.model import SamplingParams
from motet.shared.wire.request import unpack_tokens
from motet.shared.wire.stream import StreamItem
from motet.shared.worker_options import WorkerOptions

BLOCK_SIZE = 8


class WholeRunner(ModelRunner):
    """A runner whose loads are complete on return, as with torch on a CPU, so that steps depend on requests alone."""

    @property
    def link(self) -> LinkState:
        return LinkState(0, 0, 0.0, math.inf)

    def begin_load(self, slot: int, weights: HostAdapter) -> None:
        self.load_adapter(slot, weights)


class PacedRunner(ModelRunner):
    """A runner whose copies proceed only when the test says so: layer after layer, first come first served.

    Missing layers are NaN. A step that names a slot under copy gets right weights, as CPU processes or a wait in the layers
    would provide; `seen` records the modes of such steps.
    """

    bytes_per_s = 1e6
    processes = 0

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.queue: dict[int, tuple[HostAdapter, float]] = {}  # slot -> weights, bytes left
        self.seen: list[dict[int, str]] = []
        self.begun: list[str] = []
        self.copied = 0.0  # bytes

    @property
    def link(self) -> LinkState:
        return LinkState(int(sum(left for _, left in self.queue.values())), round(self.copied), 0.0, self.bytes_per_s)

    @property
    def assist(self) -> Any:
        """CPU processes that take no time."""
        capacity = SimpleNamespace(processes=self.processes, max_rows=512, read_s=0.0, row_s=1e-15, start_s=0.0)
        return SimpleNamespace(capacity=capacity, failures={}, observe=lambda *_: None, close=lambda: None)

    @assist.setter
    def assist(self, value: None) -> None:
        """There are as many processes as `processes` says."""

    def begin_load(self, slot: int, weights: HostAdapter) -> None:
        self.pool.reserve(slot, weights.packed)
        self._copy(slot, weights, range(self.config.num_layers), math.nan)
        self.queue[slot] = weights, float(self.adapter_bytes(weights))
        self.begun.append(weights.digest)

    def bytes_ahead(self, slot: int) -> int:
        slots = list(self.queue)
        return math.ceil(sum(self.queue[one][1] for one in slots[: slots.index(slot) + 1])) if slot in self.queue else 0

    def free_adapter(self, slot: int) -> None:
        self.queue.pop(slot, None)
        self.pool.free(slot)

    def elapse(self, seconds: float) -> None:
        """Let the link transfer for `seconds`."""
        budget, layers = seconds * self.bytes_per_s, self.config.num_layers
        for slot, (weights, left) in list(self.queue.items()):
            part = min(left, budget)
            budget -= part
            self.copied += part
            self.queue[slot] = weights, left - part
            size = self.adapter_bytes(weights)
            loaded = int((size - left + part) * layers / size + 1e-9)
            self._copy(slot, weights, range(self.pool.loaded_layers[slot], loaded), 1.0)
            self.pool.loaded_layers[slot] = loaded
            if loaded == layers:
                del self.queue[slot]

    def forward(self, batch: StepBatch) -> torch.Tensor:
        named = {int(slot) for slot in batch.row_slot if slot in self.queue}
        assert named == set(batch.slot_modes), "the batch says how it is with every slot under way"
        self.seen.append(dict(batch.slot_modes))
        for slot in named:
            self._copy(slot, self.queue[slot][0], range(self.config.num_layers), 1.0)
        loaded = self.pool.loaded_layers.copy()
        self.pool.loaded_layers[list(named)] = self.config.num_layers
        logits = super().forward(batch)
        self.pool.loaded_layers[:] = loaded
        for slot in named:
            self._copy(slot, self.queue[slot][0], range(loaded[slot], self.config.num_layers), math.nan)
        return logits

    def _copy(self, slot: int, weights: HostAdapter, layers: range, factor: float) -> None:
        packed, pool = weights.packed, self.pool
        for m, module in enumerate(MODULES):
            width = sum(pool.shapes[module])
            for page in range(int(packed.pages[0, m])):
                for layer in layers:
                    source, to = (int(t[m, page]) + layer * width for t in (packed.table[0], pool.table[slot]))
                    rows = packed.arena[source * LINE : (source + width) * PAGE_RANKS]
                    pool.arena[to * LINE : (to + width) * PAGE_RANKS] = rows * factor


def make_engine(model_dir: Path, **changes: Any) -> Engine:
    """An engine in float32 with room for everything.

    Options may be any field of EngineLimits and of WorkerOptions, and `lora_bytes`, the class of its `runner`, further
    `runner_options`, and the engine's `perf` and `merging`.
    """
    lora_bytes, runner_class = changes.pop("lora_bytes", 8 << 20), changes.pop("runner", WholeRunner)
    options = {name: changes.pop(name) for name in ("perf", "merging") if name in changes}
    runner_options = changes.pop("runner_options", {})
    held = {field.name: changes.pop(field.name) for field in dataclasses.fields(EngineLimits) if field.name in changes}
    limits = EngineLimits(**{"max_running": 64, "block_size": BLOCK_SIZE, "kv_blocks": 600} | held)
    decides = WorkerOptions(**{"max_step_tokens": 256, "max_loras": 16, "prefix_cache": True} | changes)
    backend = open_backend(
        BackendOptions(
            model_dir=model_dir,
            dtype="float32",
            block_size=limits.block_size,
            kv_blocks=limits.kv_blocks,
            lora_bytes=lora_bytes,
            max_lora_rank=64,
            max_loras=decides.max_loras,
            merge=decides.merge != "off",
            threads=1,  # tiny matrices: more would only wait for each other
            **runner_options,
        )
    )
    return Engine(runner_class(**vars(backend)), limits, decides, tokenizer=model_dir / "tokenizer.json", **options)


def wiring() -> Wiring:
    """A worker's side of an engine, which looks at nothing."""
    return Wiring(lambda report: None, StepTimes(START_PERF))


def request(
    request_id: str,
    prompt: list[int],
    adapter: HostAdapter | None = None,
    *,
    output: list[int] | None = None,
    epoch: int = 0,
    gateway_id: str = "g1",
    **sampling: Any,
) -> EngineRequest:
    """A greedy request that EOS does not end, unless `sampling` says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 12} | sampling)
    return EngineRequest.local(
        request_id, prompt, params, output=output or (), weights=adapter, gateway_id=gateway_id, epoch=epoch
    )


@dataclass
class Run:
    """The results of a run: tokens and last items by request id, and the statistics of every step."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    first: dict[str, StreamItem] = field(default_factory=dict)
    last: dict[str, StreamItem] = field(default_factory=dict)
    items: dict[str, list[StreamItem]] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)

    def total(self, name: str) -> int:
        """A step statistic, summed."""
        return sum(getattr(step, name) for step in self.steps)


def run(
    engine: Engine, requests: list[EngineRequest], *, per_step: int = 1000, step_s: float = 1e-3, clock_s: float = 1.0
) -> Run:
    """Add `per_step` requests before each step, and run until all have ended.

    Asserts that indices are consecutive and accounts add up. The link of a PacedRunner transfers for `step_s` with every step;
    on the engine's clock a step takes `clock_s`.
    """
    result = Run()
    todo = list(requests)
    while todo or engine.has_work():
        for one in todo[:per_step]:
            result.tokens[one.request_id] = unpack_tokens(one.output)
            engine.add(one, now_s=len(result.steps) * clock_s)
        todo = todo[per_step:]
        out = engine.step(len(result.steps) * clock_s)
        assert out.failure is None, out.failure
        if isinstance(engine.runner, PacedRunner):
            engine.runner.elapse(step_s)
        result.steps.append(out.stats)
        for item in (item for items in out.items.values() for item in items):
            assert item.index == len(result.tokens[item.request_id]), "a token is missing or comes twice"
            assert item.request_id not in result.last, "an item after the last"
            result.tokens[item.request_id] += item.tokens
            result.first.setdefault(item.request_id, item)
            result.items.setdefault(item.request_id, []).append(item)
            if item.finish is not None:
                result.last[item.request_id] = item
        engine.check()
    assert set(result.last) == {one.request_id for one in requests}
    return result
