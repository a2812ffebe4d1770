"""Drives the real Engine in tests: requests in, whole outputs out, books checked after every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.worker.engine.adapter_weights import HostAdapter
from services.worker.engine.engine import Engine
from services.worker.engine.request import EngineLimits, EngineRequest, StepStats
from services.worker.engine.runner import ModelRunner
from shared.messages import StreamItem
from shared.model import SamplingParams

BLOCK_SIZE = 8


def make_engine(model_dir: Path, **changes: Any) -> Engine:
    """An engine in float32 with room for everything; any field of EngineLimits may be given, and `lora_bytes`."""
    lora_bytes = changes.pop("lora_bytes", 8 << 20)
    fields: dict[str, Any] = {
        "max_running": 64,
        "max_waiting": 1000,
        "max_step_tokens": 256,
        "block_size": BLOCK_SIZE,
        "kv_blocks": 600,
        "max_loras": 16,
    }
    limits = EngineLimits(**fields | changes)
    runner = ModelRunner(
        model_dir,
        dtype="float32",
        block_size=limits.block_size,
        kv_blocks=limits.kv_blocks,
        lora_bytes=lora_bytes,
        max_lora_rank=64,
        max_loras=limits.max_loras,
        threads=1,  # tiny matrices: more would only wait for each other
    )
    return Engine(runner, limits)


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
    return EngineRequest(
        request_id=request_id,
        gateway_id=gateway_id,
        prompt=prompt,
        sampling=params,
        arrival_s=0.0,
        epoch=epoch,
        output=output or [],
        adapter=adapter,
    )


@dataclass
class Run:
    """All that came out: tokens and last items by request id, and every step's numbers."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    first: dict[str, StreamItem] = field(default_factory=dict)
    last: dict[str, StreamItem] = field(default_factory=dict)
    items: dict[str, list[StreamItem]] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)

    def total(self, name: str) -> int:
        """A step statistic, summed."""
        return sum(getattr(step, name) for step in self.steps)


def run(engine: Engine, requests: list[EngineRequest], *, per_step: int = 1000) -> Run:
    """Add `per_step` requests before each step until all are done. Asserts that indices run on and books add up."""
    result = Run()
    todo = list(requests)
    while todo or engine.has_work():
        for one in todo[:per_step]:
            result.tokens[one.request_id] = list(one.output)
            engine.add(one, now_s=float(len(result.steps)))
        todo = todo[per_step:]
        out = engine.step(float(len(result.steps)))
        assert out.failure is None, out.failure
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
