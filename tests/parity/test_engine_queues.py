"""Promise: queues, evictions and prefetch change the order of requests in the live engine, but no token."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

import bench.rivals  # noqa: F401 (adds the names)
from motet.services.worker.engines.request import EngineRequest
from tests.services.worker.support_engine import PacedRunner, make_engine, request, run


def requests(adapters: list[Any]) -> list[EngineRequest]:
    made = []
    for i in range(40):
        adapter = adapters[i % len(adapters)] if i % 4 else None
        one = request(str(i), list(range(1, 5 + i * 7 % 50)), adapter, max_tokens=5 + i * 11 % 30)
        made.append(replace(one, predicted_tokens=3 + i * 5 % 40, tenant=f"t{i % 3}", arrival_s=float(i)))
    return made


@pytest.fixture(scope="module")
def undisturbed(checkpoint) -> dict[str, list[int]]:
    """The tokens of each request where there is room for all."""
    model_dir, adapters = checkpoint
    return run(make_engine(model_dir, max_running=12, max_step_tokens=48), requests(adapters), per_step=2).tokens


@pytest.mark.parametrize("queues", ["sjf", "static", "chameleon", "motet", "auto"])
@pytest.mark.parametrize("eviction", ["score", "next-use", "none"])
def test_queues_and_evictions_change_no_token(
    checkpoint, undisturbed: dict[str, list[int]], queues: str, eviction: str
) -> None:
    model_dir, adapters = checkpoint
    few = {"kv_blocks": 30, "max_running": 12, "max_step_tokens": 48, "max_loras": 4}
    engine = make_engine(model_dir, queues=queues, eviction=eviction, **few)
    done = run(engine, requests(adapters), per_step=2)
    assert done.tokens == undisturbed


def test_some_requests_of_this_test_are_preempted(checkpoint) -> None:
    model_dir, adapters = checkpoint
    engine = make_engine(model_dir, queues="motet", kv_blocks=30, max_running=12, max_step_tokens=48, max_loras=4)
    done = run(engine, requests(adapters), per_step=2)
    assert done.total("preempted") and done.total("adapters_loaded") > len(adapters)


def test_adapters_of_waiting_requests_are_copied_before_their_turn(checkpoint) -> None:
    model_dir, adapters = checkpoint

    def copied_by_its_turn(prefetch: int) -> bool:
        engine = make_engine(model_dir, runner=PacedRunner, max_running=1, prefetch=prefetch)
        engine.runner.bytes_per_s = 200e6
        result = run(engine, [request("a", [1] * 8, max_tokens=40), request("b", [2] * 8, adapters[0], max_tokens=4)])
        loaded = next(step for step, stats in enumerate(result.steps) if stats.adapters_loaded)
        return loaded < 39

    assert copied_by_its_turn(2) and not copied_by_its_turn(0)
