"""Promise: a whole worker with a slow link and a CPU process answers cold requests correctly, and its metrics show how."""

from __future__ import annotations

import asyncio
import os

import pytest

from motet.services.worker import metrics
from motet.services.worker.config import WorkerConfig
from motet.shared.config import ConfigError
from motet.shared.wire.request import Cancel
from tests.services.worker.support_service import generate, latest
from tests.services.worker.test_worker_pins import pin
from tests.support import eventually
from tests.support_models import random_prompts

SLOW = {"link_bytes_per_s": 1e6}  # a megabyte per second: adapters of this model take tens to hundreds of milliseconds


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps, and torch's as a device runs them."""
    monkeypatch.setenv("MOTET_KERNELS", request.param)


def options(mode: str) -> dict[str, object]:
    return {**SLOW, "cold_start": mode, "assist_processes": 1}


def value(metric, **labels: str) -> float:
    return sum(
        sample.value
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and labels.items() <= sample.labels.items()
    )


@pytest.mark.parametrize("mode", ["auto", "blocking", "layerwise", "assist"])
async def test_cold_requests_get_the_oracles_tokens_beside_others(start, adapters, oracle, mode: str):
    worker = await start(**options(mode))
    await eventually(lambda: worker.engine.runner.assist.capacity.processes == 1, within_s=30)
    said = "bridged" if mode in ("auto", "assist") else "wait"
    assert worker.service.facts.limits.copies == said, "schedulers are told whom a copy holds up"
    refs = [await worker.mesh.publish_adapter(adapters[i]) for i in (1, 3, 5)]
    before, copied = value(metrics.COLD_STARTS), value(metrics.LINK_BYTES)
    prompts = random_prompts(4, longest=30)
    requests = [generate(prompt, adapter=ref) for prompt, ref in zip(prompts, [*refs, None], strict=True)]
    await worker.accepted(*requests)
    for request, prompt, adapter in zip(requests, prompts, [adapters[1], adapters[3], adapters[5], None], strict=True):
        assert (await worker.mesh.ended(request.request_id)).finish == "length"
        assert worker.mesh.tokens(request.request_id) == oracle.greedy(prompt, 8, adapter)
    assert value(metrics.COLD_STARTS) - before == 3
    await eventually(lambda: value(metrics.LINK_BYTES) > copied)


async def test_leaving_cancelling_and_dropping_while_copies_are_under_way(start, adapters):
    worker = await start(**options("blocking"))
    refs = [await worker.mesh.publish_adapter(adapters[i]) for i in (3, 2, 5)]
    kept, cancelled = generate([1, 2, 3], adapter=refs[0]), generate([1, 2], adapter=refs[1])
    await worker.accepted(kept, cancelled)
    await worker.control(Cancel(request_id=cancelled.request_id, epoch=0))
    assert (await worker.mesh.ended(cancelled.request_id)).finish == "cancelled"
    await pin(worker.mesh, refs[2], "*")
    await worker.mesh.delete_adapter(refs[2])
    leaving = asyncio.create_task(worker.service.drain())
    assert (await worker.mesh.ended(kept.request_id)).finish == "length"
    await asyncio.wait_for(leaving, 10)


async def test_a_pinned_adapter_is_on_the_device_before_any_request(start, adapters):
    worker = await start(**options("auto"))
    ref = await worker.mesh.publish_adapter(adapters[3])
    await pin(worker.mesh, ref, "*")
    await eventually(lambda: [held.tier for held in latest(worker).adapters] == ["device"], within_s=20)


async def test_an_adapter_that_is_likely_to_be_asked_for_comes_back_to_the_device(start, adapters):
    worker = await start(**options("auto"), adapter_foresight="on")
    ref = await worker.mesh.publish_adapter(adapters[3])
    for _ in range(3):
        request = generate([1, 2, 3], adapter=ref)
        await worker.accepted(request)
        await worker.mesh.ended(request.request_id)
    await eventually(lambda: [held.tier for held in latest(worker).adapters] == ["device"], within_s=20)
    core = worker.service.core
    foresight, core.foresight = core.foresight, None
    worker.service.engine.unload_adapter(ref.digest)
    await eventually(lambda: [held.tier for held in latest(worker).adapters] == ["host"])
    core.foresight = foresight
    await eventually(lambda: [held.tier for held in latest(worker).adapters] == ["device"], within_s=20)


def test_assistants_have_cores_of_their_own():
    allowed = sorted(os.sched_getaffinity(0))

    def config(**flags) -> WorkerConfig:
        return WorkerConfig.of(model="m", **flags)

    assert config().cold.core_ids == () and config().engine_threads == len(allowed)
    assert config(assist_processes=1).cold.core_ids == (allowed[-1],)
    assert config(assist_processes=1, assist_cores=str(allowed[0])).cold.core_ids == (allowed[0],)
    assert config(assist_processes=1).engine_threads == max(1, len(allowed) - 1)
    for flags, flag in (
        ({"assist_processes": len(allowed) + 1}, "--assist-processes"),
        ({"assist_processes": 2, "assist_cores": f"{allowed[0]},{allowed[0]}"}, "--assist-processes"),
        ({"assist_processes": 1, "assist_cores": "4095"}, "--assist-cores"),
    ):
        with pytest.raises(ConfigError, match=flag):
            _ = config(**flags).cold.core_ids
