"""Promise: a step of vLLM has its own time, also when the worker was busy and reads several steps at once. What the worker
keeps of vLLM's requests and adapters is checked while vLLM has none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motet.services.worker.engines.request import StepReport
from motet.services.worker.vllm_engine import engine as vllm
from motet.services.worker.vllm_engine.core import VllmOptions
from tests.support import eventually


def step(ended_s: float, elapsed_ms: float) -> Any:
    """What vLLM's core reports of a step that decoded for one request."""
    details = SimpleNamespace(elapsed_ms=elapsed_ms, num_ctx_requests=0, num_ctx_tokens=0, num_generation_requests=1)
    stats = SimpleNamespace(kv_cache_usage=0.0, iteration_details=details)
    return SimpleNamespace(scheduler_stats=stats, outputs=[], timestamp=ended_s)


class Client:
    """A core that sends all outputs at once, and then nothing more."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = list(outputs)

    async def get_output_async(self) -> Any:
        if not self.outputs:
            await asyncio.Event().wait()
        return self.outputs.pop(0)

    def shutdown(self, timeout_s: float) -> None:
        pass


async def started(
    monkeypatch: pytest.MonkeyPatch, client: Client, deliver: Callable[[StepReport], None] = lambda report: None
) -> vllm.VllmEngine:
    """An engine whose core is `client`."""
    core = SimpleNamespace(client=client, kv_blocks=64, block_size=16, tells_cached=False)

    async def warm(core: Any) -> None:
        pass

    monkeypatch.setattr(vllm, "start_core", lambda options, events_endpoint: core)
    monkeypatch.setattr(vllm, "warm", warm)
    options = VllmOptions(model_dir=Path(), max_running=4, max_step_tokens=64, max_loras=2, max_lora_rank=8)
    engine = vllm.VllmEngine(options, deliver)
    await engine.start()
    return engine


async def test_steps_that_are_read_at_once_keep_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[StepReport] = []
    client = Client(step(10.008, 8.0), step(10.030, 18.0), step(10.041, 10.0))
    engine = await started(monkeypatch, client, reports.append)
    try:
        await eventually(lambda: len(reports) == 3)
    finally:
        await engine.stop()
    assert [report.began_s for report in reports] == pytest.approx([10.0, 10.012, 10.031])
    assert [report.output.stats.time_ms for report in reports] == [8.0, 18.0, 10.0]


async def test_the_ledgers_of_an_idle_engine_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await started(monkeypatch, Client())
    try:
        await engine.check()
        engine._entry.slots.bytes_free -= 1  # private: a ledger is broken on purpose
        with pytest.raises(AssertionError, match="bytes do not add up"):
            await engine.check()
        engine._live["r/0/1"] = None  # private: a ledger is broken on purpose
        await engine.check()  # not while vLLM has a request
    finally:
        engine._live.clear()  # private: a ledger is broken on purpose
        await engine.stop()
