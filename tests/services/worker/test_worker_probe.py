"""Promise: an adapter that is partly ignored, has no effect or is another one never answers, and everybody sees why."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from bench.probe_faults import Fault, ignored_module, swapped, truncated_rank, wrong_scale
from motet.policies.worker.probe import Reference
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.native.runner import ModelRunner
from motet.shared import subjects
from motet.shared.model import AdapterRef, Quarantine
from motet.shared.wire.registry import QuarantineAdapter, RegistryOk
from tests.services.worker.support_service import Running, generate, latest
from tests.support import eventually
from tests.support_models import AdapterFixture, make_checkpoint, random_prompts


class FakeRegistry:
    """Answers the workers' quarantines as the registry does, and ends them."""

    def __init__(self, bus) -> None:
        self.bus = bus
        self.told: list[QuarantineAdapter] = []

    async def start(self) -> None:
        await self.bus.serve("quarantine", subjects.registry("quarantine"), QuarantineAdapter, self._take, queue="registry")

    async def _take(self, ask: QuarantineAdapter) -> RegistryOk:
        self.told.append(ask)
        facts = {"verdict": ask.verdict, "reason": ask.reason, "worker_id": ask.worker_id, "since_unix_ms": 1}
        kv = await self.bus.key_value(subjects.KV_ADAPTERS)
        await kv.put(f"quarantine.{ask.digest}", msgspec.json.encode(Quarantine(digest=ask.digest, **facts)))
        return RegistryOk(adapters=[])

    async def release(self, digest: str) -> None:
        await (await self.bus.key_value(subjects.KV_PROBES)).delete(digest)
        await (await self.bus.key_value(subjects.KV_ADAPTERS)).delete(f"quarantine.{digest}")


@pytest.fixture
async def registry(bus) -> FakeRegistry:
    found = FakeRegistry(bus)
    await found.start()
    return found


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """From now on what goes to the device has this fault."""
    begin = ModelRunner.begin_load

    def planted(fault: Fault) -> None:
        monkeypatch.setattr(ModelRunner, "begin_load", lambda self, slot, weights: begin(self, slot, fault(weights)))

    return planted


@pytest.fixture
def others(checkpoint, adapters) -> list[HostAdapter]:
    config = read_model_config(checkpoint)
    return [HostAdapter.from_blob(one.blob, config) for one in adapters]


async def answer(worker: Running, prompt: list[int], ref: AdapterRef) -> list[int]:
    request = generate(prompt, adapter=ref)
    await worker.accepted(request)
    assert (await worker.mesh.ended(request.request_id)).finish == "length"
    return worker.mesh.tokens(request.request_id)


async def reference(worker: Running, digest: str) -> Reference:
    kv = await worker.mesh.bus.key_value(subjects.KV_PROBES)
    return msgspec.json.decode((await kv.get(digest)).value, type=dict[str, Reference])["none"]


def healthy(weights: HostAdapter) -> HostAdapter:
    return weights


async def quarantined(worker: Running, registry: FakeRegistry, ref: AdapterRef) -> QuarantineAdapter:
    """A request for the adapter gets the error and no token, and so does the next one; the registry has been told once."""
    request = generate([1, 2, 3], adapter=ref)
    await worker.accepted(request)
    end = await worker.mesh.ended(request.request_id)
    assert end.finish == "error" and end.error.code == "adapter_quarantined"
    assert worker.mesh.tokens(request.request_id) == []
    told = await eventually(lambda: registry.told)
    assert [one.digest for one in told] == [ref.digest]
    refusal = await worker.refusal(generate([1, 2, 3], adapter=ref))
    assert refusal.code == "adapter_quarantined" and told[0].reason in refusal.message
    await eventually(lambda: not [held for held in latest(worker).adapters if held.digest == ref.digest])
    base = generate([1, 2, 3])
    await worker.accepted(base)
    assert (await worker.mesh.ended(base.request_id)).finish == "length", "others go on"
    return told[0]


async def test_a_healthy_adapter_answers_and_its_first_load_is_the_reference(start, adapters, oracle):
    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[2])
    [prompt] = random_prompts(1)
    assert await answer(worker, prompt, ref) == oracle.greedy(prompt, 8, adapters[2])
    made = await reference(worker, ref.digest)
    assert made.dtype == "float32" and made.base != made.adapter


@pytest.mark.parametrize(
    ("fault", "says"),
    [(ignored_module, "missing"), (wrong_scale, "altered"), (lambda one: truncated_rank(one, 4), "altered")],
    ids=["ignored module", "wrong scale", "truncated rank"],
)
async def test_what_is_not_all_on_the_device_is_quarantined_at_its_very_first_load(
    start, registry, plant, adapters, fault: Fault, says: str
):
    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[2])
    plant(fault)
    told = await quarantined(worker, registry, ref)
    assert told.verdict == "partial" and says in told.reason


async def test_another_adapter_in_its_place_is_quarantined(start, registry, plant, adapters, others):
    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[2])
    plant(swapped(others[3]))
    assert (await quarantined(worker, registry, ref)).verdict == "partial"


async def test_an_adapter_that_the_kernels_ignore_is_quarantined(start, registry, adapters, monkeypatch):
    forward = ModelRunner.forward

    def deaf(self, batch):
        batch.row_slot = np.full_like(batch.row_slot, -1)
        return forward(self, batch)

    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[2])
    monkeypatch.setattr(ModelRunner, "forward", deaf)
    assert (await quarantined(worker, registry, ref)).verdict == "ignored"


async def test_kernels_that_compute_another_adapter_are_found_by_the_reference(start, registry, adapters):
    """The account is right here: only the answers tell."""
    first = await start()
    ref = await first.mesh.publish_adapter(adapters[2])
    await answer(first, [1, 2, 3], ref)
    second = await start()
    other = await second.mesh.publish_adapter(adapters[3])
    await answer(second, [4, 5], other)
    (taken,) = np.flatnonzero(second.engine.runner.pool.loaded).tolist()
    forward = second.engine.runner.forward

    def crossed(batch):
        batch.row_slot = np.where(batch.row_slot >= 0, taken, -1).astype(np.int32)
        return forward(batch)

    second.engine.runner.forward = crossed
    assert (await quarantined(second, registry, ref)).verdict == "other"

    async def refused() -> bool:  # it counts for all workers
        return (await first.refusal(generate([1], adapter=ref))).code == "adapter_quarantined"

    await eventually(refused)


async def test_a_worker_with_another_base_declines_and_quarantines_nothing(start, registry, adapters, tmp_path):
    first = await start()
    ref = await first.mesh.publish_adapter(adapters[2])
    await answer(first, [1, 2, 3], ref)
    second = await start(model=str(make_checkpoint("llama2", tmp_path / "other", seed=5)))
    request = generate([1, 2, 3], adapter=ref)
    await second.accepted(request)
    end = await second.mesh.ended(request.request_id)
    assert end.error.code == "worker_full" and "base model" in end.error.message, "its gateway asks another worker"
    assert (await second.refusal(generate([1], adapter=ref))).code == "worker_full"
    assert registry.told == []
    assert await answer(first, [1, 2, 3], ref)


async def test_a_released_adapter_answers_again_and_nothing_of_the_bad_load_is_left(start, registry, plant, adapters, oracle):
    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[2])
    plant(wrong_scale)
    await quarantined(worker, registry, ref)
    plant(healthy)
    await registry.release(ref.digest)

    async def taken() -> bool:
        request = generate([9], adapter=ref, max_tokens=1)
        reply = await worker.assign(request)
        return hasattr(reply, "worker_id")

    await eventually(taken)
    assert await answer(worker, [1, 2, 3], ref) == oracle.greedy([1, 2, 3], 8, adapters[2])
    worker.service.core.check()
    worker.engine.check()


async def test_an_adapter_of_zeros_is_legal(start, adapters, oracle):
    worker = await start()
    zeros = _zeroed(adapters[2])
    ref = await worker.mesh.publish_adapter(zeros)
    assert await answer(worker, [1, 2, 3], ref) == oracle.greedy([1, 2, 3], 8, None)


def _zeroed(adapter: AdapterFixture) -> AdapterFixture:
    from motet.shared.adapter_blob import PAGE_RANKS, read_index

    blob = bytearray(adapter.blob)
    for part in (index := read_index(adapter.blob, len(adapter.blob))).parts:
        assert index.dtype == "F32"
        page = index.layers * PAGE_RANKS * (part.fan_in + part.fan_out)
        values = np.frombuffer(blob, np.float32, part.pages * page, part.start).reshape(part.pages, index.layers, -1)
        values[:, :, PAGE_RANKS * part.fan_in :] = 0
    return AdapterFixture(adapter.name, adapter.path, bytes(blob))


async def test_evictions_and_reloads_and_a_restart_raise_no_false_alarm(start, registry, adapters, oracle):
    worker = await start(max_loras=2)
    refs = [await worker.mesh.publish_adapter(one) for one in adapters]
    for round_ in range(2):
        if round_:
            worker = await start(max_loras=2)
        for prompt, ref, adapter in zip(random_prompts(len(refs)) * 2, refs * 2, adapters * 2, strict=True):
            assert await answer(worker, prompt, ref) == oracle.greedy(prompt, 8, adapter)
    assert registry.told == []


async def test_without_the_probe_everything_answers(start, plant, adapters):
    worker = await start(adapter_probe="off")
    ref = await worker.mesh.publish_adapter(adapters[2])
    plant(wrong_scale)
    assert await answer(worker, [1, 2, 3], ref)
