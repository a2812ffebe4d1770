"""Promise: a worker on vLLM tells which KV blocks of prompts it can reuse, by the keys that gateways compute."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from motet.policies.memory.kv_blocks import cache_scope, prompt_keys, told_tokens
from motet.services.scheduler.config import SchedulerConfig
from motet.services.scheduler.service import SchedulerService
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.service import WorkerService
from motet.shared.bus import Bus
from motet.shared.wire.prefixes import PrefixKeys, pack_keys
from motet.shared.wire.request import pack_tokens
from tests.engines.conftest import PATIENCE_S, Driven
from tests.engines.support_mesh import core_of
from tests.services.scheduler.support import knows
from tests.services.worker.support_engine import request
from tests.services.worker.support_service import BASE, Mesh, Running, generate
from tests.support import eventually
from tests.support_models import make_adapters

pytestmark = pytest.mark.skipif(not os.environ.get("MOTET_TEST_VLLM"), reason="needs vLLM: make test-vllm")
one_core = pytest.mark.asyncio(loop_scope="module")
LENGTH = 193  # tokens of a prompt: three times 64 and one more


def prompt(number: int) -> list[int]:
    return [3 + (number * 31 + at * (number + 7)) % 97 for at in range(LENGTH)]


def told(driven: Driven) -> set[int]:
    """The keys of cached blocks by all reports so far."""
    known: dict[int, bool] = {}
    for report in driven.reports:
        known |= report.prefixes or {}
    return {key for key, there in known.items() if there}


def keys(asked: EngineRequest) -> set[int]:
    digest = asked.weights.digest if asked.weights is not None else ""
    return set(prompt_keys(asked.prompt, 32, digest, asked.cache_scope))


def asks(name: str, number: int, adapter: Any = None, scope: bytes = b"") -> EngineRequest:
    return replace(request(name, prompt(number), adapter, max_tokens=1), cache_scope=scope)


async def cached_tokens(driven: Driven, asked: EngineRequest) -> int:
    """How many tokens of a prompt vLLM had cached."""
    driven.engine.add(asked)
    await driven.ended(asked)
    return driven.items(asked.request_id)[0].cached_tokens


@one_core
async def test_exactly_the_blocks_of_prompts_are_told_by_adapter_tenant_and_salt(driven: Driven) -> None:
    alice, shared = cache_scope("acme", "alice"), cache_scope("acme", shared=True)
    asked = [
        asks("base", 1),
        asks("tenant", 1, scope=alice),
        asks("all tenants", 1, scope=shared),
        asks("adapter", 1, driven.adapters[0], cache_scope("acme")),
        asks("adapter and salt", 1, driven.adapters[1], alice),
    ]
    for one in asked:
        driven.engine.add(one)
    for one in asked:
        await driven.ended(one)
    wanted = set().union(*map(keys, asked))
    assert len(wanted) == 15
    await eventually(lambda: told(driven) == wanted)


@one_core
@pytest.mark.parametrize("of", ["base", "adapter"])
async def test_what_is_told_is_what_the_next_request_reuses(driven: Driven, of: str) -> None:
    adapter = driven.adapters[0] if of == "adapter" else None
    number, scope = (2, cache_scope("acme"))
    assert await cached_tokens(driven, asks("first", number, adapter, scope)) == 0
    await eventually(lambda: told(driven) == keys(asks("", number, adapter, scope)))
    assert await cached_tokens(driven, asks("second", number, adapter, scope)) == LENGTH - 1
    assert await cached_tokens(driven, asks("another tenant", number, adapter, cache_scope("globex"))) == 0


@one_core
async def test_blocks_of_an_adapter_are_found_by_its_next_copy_on_the_host_too(driven: Driven, tmp_path: Path) -> None:
    adapter = driven.adapters[0]
    again = dataclasses.replace(adapter, folder=shutil.copytree(adapter.folder, tmp_path / "again"))
    assert await cached_tokens(driven, asks("first", 3, adapter)) == 0
    driven.engine.unload_adapter(adapter.digest)
    await eventually(lambda: adapter.digest not in driven.on_device(), within_s=PATIENCE_S)
    assert await cached_tokens(driven, asks("second", 3, again)) == LENGTH - 1


@one_core
async def test_evicted_blocks_are_told_too(driven: Driven) -> None:
    first = asks("first", 4)
    assert await cached_tokens(driven, first) == 0
    await eventually(lambda: keys(first) <= told(driven))
    others = [asks(f"other {number}", number) for number in range(5, 55)]  # 300 blocks; the cache has 256
    for one in others:
        driven.engine.add(one)
    for one in others:
        await driven.ended(one)
    await eventually(lambda: not keys(first) & told(driven))
    assert keys(others[-1]) <= told(driven)


@one_core
async def test_a_core_that_dies_has_nothing_and_the_next_one_is_heard(driven: Driven) -> None:
    assert await cached_tokens(driven, asks("first", 60)) == 0
    await eventually(lambda: told(driven))
    for core in core_of(os.getpid()):
        os.kill(core, signal.SIGKILL)
    await eventually(lambda: not told(driven), within_s=PATIENCE_S)
    again = asks("again", 60)
    assert await cached_tokens(driven, again) == 0
    await eventually(lambda: told(driven) == keys(again))


async def test_a_scheduler_knows_what_the_worker_has_cached(bus: Bus, nats_url: str, model_dir: Path, tmp_path: Path) -> None:
    options = {"nats_url": nats_url, "model": str(model_dir), "served_model_name": BASE, "engine": "vllm", "dtype": "float32"}
    options |= {"kv_memory_gib": 0.016, "max_loras": 2, "max_lora_rank": 16, "max_model_len": 256, "max_running": 4}
    worker = WorkerService(WorkerConfig.of(**options, adapter_cache_dir=str(tmp_path / "adapters")), lambda: None)
    scheduler = SchedulerService(SchedulerConfig.of(nats_url=nats_url))
    running = Running(worker, Mesh(bus))
    await running.mesh.listen(worker.worker_id)
    try:
        await worker.start()
        await scheduler.start()
        await knows(scheduler, worker.worker_id)
        limits, state = worker.view.limits, scheduler.cluster.state
        assert (limits.prefix_cache, limits.block_size) == ("tenant", 32)
        ref = await running.mesh.publish_adapter(make_adapters(model_dir, tmp_path)[0])
        of_base = generate(prompt(1), tenant="acme", cache_salt="alice", max_tokens=1)
        of_adapter = generate(prompt(1), tenant="acme", adapter=ref, max_tokens=1)
        for asked, digest in ((of_base, ""), (of_adapter, ref.digest)):
            scope = cache_scope("acme", asked.cache_salt)
            packed = pack_keys(prompt_keys(pack_tokens(prompt(1)), limits.block_size, digest, scope))
            sent = (PrefixKeys(told_tokens(limits.block_size), packed),)
            assert not state.beginnings(sent, digest)
            await running.accepted(asked)
            await running.mesh.ended(asked.request_id, within_s=PATIENCE_S)
            await eventually(lambda sent=sent, digest=digest: state.beginnings(sent, digest))
            [found] = state.beginnings(sent, digest)
            assert found.rows.tolist() == [state.row(worker.worker_id)] and found.tokens == LENGTH - 1
    finally:
        await scheduler.stop()
        await worker.stop()
