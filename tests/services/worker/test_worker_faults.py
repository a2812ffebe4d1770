"""Promise: a worker without free KV memory, or a NATS server that stops reading, costs time but no tokens and no memory."""

from __future__ import annotations

import os
import signal

import pytest

from motet.shared import bus as shared_bus
from tests.services.worker.support_service import generate
from tests.support import eventually
from tests.support_models import random_prompts


async def test_requests_that_outgrow_the_kv_cache_together_all_end_with_their_own_tokens(start, oracle):
    worker = await start(kv_blocks=12, block_size=8, max_running=8, device_memory="fixed")
    prompts = random_prompts(6)
    requests = [generate(prompt, max_tokens=30) for prompt in prompts]
    await worker.accepted(*requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert (await worker.mesh.ended(request.request_id)).finish == "length"
        assert worker.mesh.tokens(request.request_id) == oracle.greedy(prompt, 30, None)
    worker.engine.check()
    assert worker.engine.kv_blocks_free == 12
    error = await worker.refusal(generate([1] * 97))
    assert error.status == 400


async def test_a_broker_that_stands_still_for_a_moment_costs_no_token(start, nats_server):
    worker = await start()
    worker.slow_down(0.02)
    request = generate([1, 2, 3], max_tokens=100)
    await worker.accepted(request)
    await eventually(lambda: worker.mesh.tokens(request.request_id))
    os.kill(nats_server.pid, signal.SIGSTOP)
    try:
        began = worker.service.shell.step
        await eventually(lambda: worker.service.shell.step > began + 20)  # the engine goes on
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)
    assert (await worker.mesh.ended(request.request_id)).finish == "length"
    assert len(worker.mesh.tokens(request.request_id)) == 100


async def test_a_broker_that_reads_too_slowly_costs_its_requests_and_no_memory(start, monkeypatch: pytest.MonkeyPatch):
    worker = await start()
    worker.slow_down(0.01)
    request = generate([1, 2, 3], max_tokens=100)
    await worker.accepted(request)
    await eventually(lambda: worker.mesh.tokens(request.request_id))
    monkeypatch.setattr(shared_bus, "OUTBOX_BYTES", -1)  # as if so much was waiting to be sent
    await eventually(lambda: not len(worker.service.core))
    monkeypatch.undo()
    after = generate([1])
    await worker.accepted(after)
    await worker.mesh.ended(after.request_id)
    end = await worker.mesh.ended(request.request_id)
    assert end.error.code == "worker_lost", "its gateway resumes it elsewhere"
