"""Promise: a simulated scheduler that hears what a live one heard asks the same question and decides the same, to the bit."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import bench.rivals  # noqa: F401 (adds the names)
from motet.policies.cluster.describe import brief_of
from motet.policies.memory.kv_blocks import prompt_keys, told_tokens
from motet.services.scheduler import service as live
from motet.services.scheduler.config import SchedulerConfig
from motet.services.scheduler.decision_log import Decided, records
from motet.services.scheduler.events import Assigning, Heard, Taken
from motet.shared import subjects
from motet.shared.model import Slo
from motet.shared.wire.prefixes import PrefixKeys, pack_keys, unpack_keys
from motet.shared.wire.request import GenerateRequest, SubmitReply, pack_tokens
from motet.twin.scheduler import Scheduler, SchedulerSpec
from motet.twin.workload import BASE, Request
from tests.support import eventually
from tests.support_worker import PERF, FakeWorker, generate_request, worker_limits

REQUESTS = 80


BLOCK, SHARED = 16, 64  # tokens


def prompt(number: int) -> list[int]:
    """The tokens of a prompt: every other one begins like others, as `twin.content` has it."""
    shared = [token for block in range(number % 4) for token in [block] * SHARED] if number % 2 else []
    return shared + [~number] * (2 + 7 * number % 60)


def asked(number: int) -> GenerateRequest:
    """Requests of two tenants; every fifth was on another worker before, with or without tokens of its output."""
    moved = number % 5 == 4
    rank = (0, 8, 16, 64)[number % 4]
    keys = prompt_keys(pack_tokens(prompt(number)), BLOCK, f"digest{rank}" if rank else "", b"")
    return generate_request(
        str(number),
        prompt=prompt(number),
        prefix_keys=(PrefixKeys(told_tokens(BLOCK), pack_keys(keys)),),
        rank=rank,
        slo=Slo(ttft_slo_ms=250.0 * (1 + number % 3), tpot_slo_ms=50.0),
        tenant=f"t{number // 3 % 2}",
        tenant_weight=1.0 + number // 3 % 2,
        epoch=int(moved),
        output=pack_tokens(range(number % 2 * 9)) if moved else b"",
    )


def keys_of(requests: list[GenerateRequest]) -> list[int]:
    """The keys of their prompts' blocks."""
    return [key for one in requests for key in unpack_keys(asked(int(one.request_id)).prefix_keys[0].keys)]


def simulated(request: GenerateRequest) -> Request:
    """The same request in the twin."""
    number = int(request.request_id)
    return Request(
        index=int(request.request_id),
        arrival_ps=0,
        adapter=request.adapter or BASE,
        prompt_tokens=request.prompt_tokens,
        output_tokens=1,
        slo=request.slo,
        tenant=request.tenant,
        tenant_weight=request.tenant_weight,
        prefix=tuple(range(number % 4)) if number % 2 else (),
        prefix_tokens=SHARED,
    )


@pytest.mark.parametrize("policy", ["motet", "rank-aware"])
async def test_one_history_gives_the_same_questions_and_decisions(bus, nats_url, connect, tmp_path, monkeypatch, policy: str):
    path, now_s = tmp_path / "decisions", 100.0
    monkeypatch.setattr(live, "now_s", lambda: now_s)
    config = SchedulerConfig.of(nats_url=nats_url, policy=policy, decision_log=str(path), predict_ms=1000)
    scheduler = live.SchedulerService(config)
    limits = [worker_limits(max_running=6 + n, prefix_cache="tenant", kv_format="f", kv_token_bytes=1024) for n in range(3)]
    perf = replace(PERF, kv_base_ms=0.5, kv_ms_per_mib=1.0)
    workers = [FakeWorker(await connect(f"worker-{n}"), f"w{n}", limits=one, perf=perf) for n, one in enumerate(limits)]
    for worker in workers:
        await worker.start()
    await scheduler.start()
    requests = [asked(number) for number in range(REQUESTS)]
    try:
        await eventually(lambda: all(scheduler.cluster.knows(worker.worker_id) for worker in workers))
        for number, request in enumerate(requests):
            now_s += 0.05
            await bus.request(subjects.SUBMIT, request, SubmitReply, timeout_s=10.0)
            if number % 10 == 9:
                one = workers[number // 10 % 3]
                done = one.assigned[:-2]
                await one.delta(
                    removed=[taken.request_id for taken in done], cached=keys_of(done[::2]), uncached=keys_of(done[::4])
                )
    finally:
        await scheduler.stop()

    twin = Scheduler(SchedulerSpec(policy=policy, max_tokens=64))
    compared = told = 0
    described = decided = None
    fetches = {}
    for record in records(path):
        match record:
            case Heard():
                twin.hear(record.message, record.now_s)
            case Assigning():
                assert twin.expect(record.worker_id, described, record.now_s, *decided) == record.brief
                told += record.brief.cached_tokens
                fetches[record.worker_id, record.brief.request_id] = decided[1].kv
            case Taken():
                twin.flights.accepted(record.worker_id, record.request_id, record.now_s)
            case Decided():
                live_request = requests[compared]
                request, produced = simulated(live_request), live_request.output_tokens
                tokens = twin.predict(request, produced)
                brief = brief_of(request, predicted_tokens=tokens, epoch=live_request.epoch, output_tokens=produced)
                ask = twin.ask(request, brief, record.now_s)
                decision = twin.decide(ask, record.now_s)
                assert ask == record.ask
                described, decided = brief, (ask, decision)
                assert (decision.worker_id, decision.total_cost) == (record.worker_id, record.total_cost)
                compared += 1
    assert compared == REQUESTS
    assert told, "no worker had a prompt"
    assert fetches == {(one.worker_id, taken.request_id): taken.kv for one in workers for taken in one.assigned}
    assert any(fetches.values()), "no worker fetches a prompt"
