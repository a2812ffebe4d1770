"""Promise: where KV blocks and adapters share the device's memory, outputs are those of fixed regions, and nothing fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.native.engine import Engine
from motet.services.worker.native.runner import ModelRunner
from tests.services.worker.support_engine import WholeRunner, make_engine, request, run
from tests.support_models import make_adapters, make_checkpoint, random_prompts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[HostAdapter]]:
    directory = tmp_path_factory.mktemp("shared")
    model_dir = make_checkpoint("llama2", directory)
    config = read_model_config(model_dir)
    return model_dir, [HostAdapter.from_blob(one.blob, config) for one in make_adapters(model_dir, directory)]


def largest_bytes(model_dir: Path, adapters: list[HostAdapter]) -> int:
    engine = make_engine(model_dir)
    return max(engine.runner.adapter_bytes(adapter) for adapter in adapters)


def requests(adapters: list[HostAdapter]) -> list[EngineRequest]:
    """Prompts for all adapters and the base model. Every third one begins like the one before."""
    prompts = random_prompts(36, seed=3, longest=60)
    for i in range(0, len(prompts), 3):
        prompts[i + 1] = prompts[i][: len(prompts[i]) // 2] + prompts[i + 1]
    return [
        request(str(i), prompt[:90], [None, *adapters][i % (len(adapters) + 1)], max_tokens=10 + i % 30)
        for i, prompt in enumerate(prompts)
    ]


def engine_of(model_dir: Path, *, elastic: bool, runner: type[ModelRunner], **changes: Any) -> Engine:
    return make_engine(model_dir, runner=runner, runner_options={"elastic": elastic, "kernels": "cpu"}, **changes)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("runner", [WholeRunner, ModelRunner])
@pytest.mark.parametrize(("kv_blocks", "adapters_fit"), [(17, 3), (60, 1)])
def test_under_pressure_outputs_are_those_of_fixed_regions_and_no_request_fails(
    checkpoint, kv_blocks: int, adapters_fit: int, runner: type[ModelRunner], prefix_cache: bool
) -> None:
    model_dir, adapters = checkpoint
    roomy = run(make_engine(model_dir), requests(adapters))
    lora_bytes = adapters_fit * largest_bytes(model_dir, adapters)
    tight: dict[str, Any] = {"kv_blocks": kv_blocks, "lora_bytes": lora_bytes, "max_running": 8, "prefix_cache": prefix_cache}
    fixed = run(engine_of(model_dir, elastic=False, runner=runner, **tight), requests(adapters), per_step=2)

    engine = engine_of(model_dir, elastic=True, runner=runner, **tight)
    budget_bytes = kv_blocks * engine.runner.kv_block_bytes + lora_bytes
    totals = set()
    divide = engine.runner.divide

    def watched(blocks: int, pool_bytes: int, moves: list[tuple[int, int]]) -> None:
        divide(blocks, pool_bytes, moves)
        memory = engine.runner.memory
        assert blocks * engine.runner.kv_block_bytes + pool_bytes <= budget_bytes
        assert memory.cache.blocks == blocks and memory.pool.bytes_total <= pool_bytes
        totals.add(blocks)

    engine.runner.divide = watched
    shared = run(engine, requests(adapters), per_step=2)
    assert shared.tokens == fixed.tokens == roomy.tokens
    assert len(totals) > 3, "the boundary moved"
    assert not [item for item in shared.last.values() if item.finish != "length"]


def test_a_prefetched_adapter_takes_memory_that_no_request_needs(checkpoint) -> None:
    model_dir, adapters = checkpoint
    size = largest_bytes(model_dir, adapters)
    engine = engine_of(model_dir, elastic=True, runner=WholeRunner, kv_blocks=200, lora_bytes=size)
    for adapter in adapters[:2]:
        assert engine.load_adapter(adapter)
    assert len(engine.residency()) == 2 and engine.runner.lora_bytes_total >= size
    engine.check()
    tokens = run(engine, [request("a", [5, 6, 7], adapters[1])]).tokens["a"]
    assert tokens == run(make_engine(model_dir), [request("a", [5, 6, 7], adapters[1])]).tokens["a"]


def test_what_is_free_is_told_of_the_whole_budget(checkpoint) -> None:
    model_dir, adapters = checkpoint
    engine = engine_of(model_dir, elastic=True, runner=WholeRunner, kv_blocks=40, lora_bytes=1 << 20)
    block_bytes = engine.runner.kv_block_bytes
    assert engine.kv_blocks_free == 40 + (1 << 20) // block_bytes
    assert engine.adapter_bytes_free == 40 * block_bytes + (1 << 20)
    run(engine, [request("a", list(range(5, 40)), adapters[0])])
    assert engine.kv_blocks_free == 40 + (1 << 20) // block_bytes, "caches leave when they are in the way"
