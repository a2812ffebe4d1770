"""Promise: a step of vLLM has its own time, also when the worker was busy and reads several steps at once. What the worker
keeps of vLLM's requests and adapters is checked while vLLM has none of them. What vLLM has cached is told without delay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motet.policies.memory.kv_blocks import prompt_keys
from motet.services.worker.engines.request import StepReport
from motet.services.worker.vllm_engine import engine as vllm
from motet.services.worker.vllm_engine.cache_events import CacheEvents
from motet.services.worker.vllm_engine.core import VllmOptions, caches_prompts, words
from motet.shared.config import ConfigError
from motet.shared.wire.request import pack_tokens
from tests.services.worker.test_cached_blocks import batch_of, stored
from tests.support import eventually

SIZE = 64


def step(ended_s: float, elapsed_ms: float) -> Any:
    """What vLLM's core reports of a step that decoded for one request."""
    details = SimpleNamespace(elapsed_ms=elapsed_ms, num_ctx_requests=0, num_ctx_tokens=0, num_generation_requests=1)
    stats = SimpleNamespace(kv_cache_usage=0.0, iteration_details=details)
    return SimpleNamespace(scheduler_stats=stats, outputs=[], timestamp=ended_s)


class Client:
    """A core that sends all outputs at once, and then nothing more until it dies."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = list(outputs)
        self.dies = asyncio.Event()

    async def get_output_async(self) -> Any:
        if not self.outputs:
            await self.dies.wait()
            self.dies.clear()
            raise RuntimeError("dead")
        return self.outputs.pop(0)

    def shutdown(self, timeout_s: float) -> None:
        pass


async def started(
    monkeypatch: pytest.MonkeyPatch,
    client: Client,
    deliver: Callable[[StepReport], None] = lambda report: None,
    tells_cached: bool = False,
) -> vllm.VllmEngine:
    """An engine whose core is `client`."""
    core = SimpleNamespace(client=client, kv_blocks=64, block_size=SIZE, tells_cached=tells_cached)

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


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[tuple[int, bytes]]:
    """The core's KV cache events, without ZeroMQ, which comes with vLLM."""
    arrived: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()

    async def listen(self: Any, take: Callable[[int, bytes], None]) -> None:
        while True:
            take(*await arrived.get())

    monkeypatch.setattr(CacheEvents, "listen", listen)
    return arrived


async def test_what_an_idle_core_has_cached_is_told_at_once_and_what_a_dead_one_had_is_gone(
    monkeypatch: pytest.MonkeyPatch, batches: asyncio.Queue[tuple[int, bytes]]
) -> None:
    reports: list[StepReport] = []
    client = Client()
    engine = await started(monkeypatch, client, reports.append, tells_cached=True)
    try:
        prompt = list(range(SIZE))
        batches.put_nowait((0, batch_of(stored([1], prompt, scope=b"acme"))))
        [key] = prompt_keys(pack_tokens([*prompt, 1]), SIZE, "", b"acme")
        await eventually(lambda: [report.prefixes for report in reports] == [{key: True}])
        client.dies.set()
        await eventually(lambda: any(report.prefixes == {key: False} for report in reports))
    finally:
        await engine.stop()


async def test_what_a_core_with_requests_has_cached_is_told_with_its_next_step(
    monkeypatch: pytest.MonkeyPatch, batches: asyncio.Queue[tuple[int, bytes]]
) -> None:
    reports: list[StepReport] = []
    client = Client()
    engine = await started(monkeypatch, client, reports.append, tells_cached=True)
    try:
        engine._live["r/0/1"] = None  # private: a request that vLLM runs
        batches.put_nowait((0, batch_of(stored([1], list(range(SIZE)), scope=b"acme"))))
        await eventually(batches.empty)
        assert not reports
        engine._on_outputs(step(10.0, 8.0))  # private: what vLLM did is read there
        assert [len(report.prefixes or {}) for report in reports] == [1]
    finally:
        engine._live.clear()  # private: vLLM runs nothing
        await engine.stop()


@pytest.mark.parametrize(("runner", "caches", "ranks"), [("pooling", True, 1), ("generate", False, 1), ("generate", True, 2)])
def test_only_one_cache_of_prompts_for_text_is_told(runner: str, caches: bool, ranks: int) -> None:
    def config(runner: str, caches: bool, ranks: int) -> Any:
        return SimpleNamespace(
            model_config=SimpleNamespace(runner_type=runner),
            cache_config=SimpleNamespace(enable_prefix_caching=caches),
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
        )

    assert caches_prompts(config("generate", True, 1))
    assert not caches_prompts(config(runner, caches, ranks))


@pytest.mark.parametrize("option", ["--kv-events-config={}", "--kv_events_config {}", "--kv-events-config.topic x"])
def test_where_the_core_publishes_is_no_option(option: str) -> None:
    options = VllmOptions(model_dir=Path(), max_running=4, max_step_tokens=64, max_loras=2, max_lora_rank=8, extra=option)
    with pytest.raises(ConfigError, match="sets --kv-events-config itself"):
        words(options)


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
