"""Promise: a worker on the bus answers every request it took exactly once, with the right tokens, or says why not.

Real nats-server, real engine, a tiny random Llama; what tokens are right is asked of transformers and peft.
"""

from __future__ import annotations

import time

import msgspec
import pytest

from motet.shared.model import AdapterRef
from motet.shared.wire.request import Cancel, pack_tokens
from motet.shared.wire.worker_state import WorkerSnapshot
from tests.policies.test_worker_view import apply, as_sets
from tests.services.worker.support_service import generate, latest
from tests.support import eventually
from tests.support_models import random_prompts


async def test_streams_of_the_base_and_eight_adapters_say_what_transformers_and_peft_say(start, adapters, oracle):
    worker = await start()
    refs = [None, *[await worker.mesh.publish_adapter(adapter) for adapter in adapters]]
    prompts = random_prompts(18)
    requests = [generate(prompt, adapter=refs[i % 9]) for i, prompt in enumerate(prompts)]
    await worker.accepted(*requests)
    for i, request in enumerate(requests):
        end = await worker.mesh.ended(request.request_id)
        assert (end.finish, end.error) == ("length", None)
        fixture = adapters[i % 9 - 1] if i % 9 else None
        assert worker.mesh.tokens(request.request_id) == oracle.greedy(prompts[i], 8, fixture), fixture
    await eventually(lambda: worker.service.not_ready() == [])  # the oracle stops the loop, so NATS seems not to answer


async def test_each_gateway_gets_one_message_per_step_with_all_its_tokens(start):
    worker = await start()
    worker.slow_down(0.02)
    requests = [generate([5, 6, 7 + i], gateway_id=f"g{i % 2}", max_tokens=12) for i in range(8)]
    await worker.accepted(*requests)
    for request in requests:
        await worker.mesh.ended(request.request_id)
    for gateway_id in ("g0", "g1"):
        steps = [frame.step for frame in worker.mesh.frames[gateway_id]]
        assert len(steps) == len(set(steps)) and steps == sorted(steps)
        assert max(len(frame.items) for frame in worker.mesh.frames[gateway_id]) == 4
    every = [item.request_id for frame in worker.mesh.frames["g0"] for item in frame.items]
    assert set(every) == {request.request_id for request in requests[::2]}


async def test_a_cancel_ends_a_request_within_one_step(start):
    worker = await start()
    worker.slow_down(0.1)
    request, other = generate([1, 2, 3], max_tokens=200), generate([1, 2, 4], max_tokens=30)
    await worker.accepted(request, other)
    await eventually(lambda: len(worker.mesh.tokens(request.request_id)) >= 2)
    began = time.monotonic()
    await worker.control(Cancel(request_id=request.request_id, epoch=0))
    end = await worker.mesh.ended(request.request_id)
    assert end.finish == "cancelled" and time.monotonic() - began < 0.5
    assert (await worker.mesh.ended(other.request_id)).finish == "length"


async def test_an_older_cancel_does_not_reach_a_newer_epoch(start):
    worker = await start()
    worker.slow_down(0.02)
    request = generate([1, 2, 3], max_tokens=20, epoch=2)
    await worker.accepted(request)
    await worker.control(Cancel(request_id=request.request_id, epoch=1))
    await worker.control(Cancel(request_id="unknown", epoch=1))
    assert (await worker.mesh.ended(request.request_id, 2)).finish == "length"


async def test_a_resumed_request_continues_where_it_was_and_says_the_same(start, oracle):
    worker = await start()
    [prompt] = random_prompts(1)
    right = oracle.greedy(prompt, 10, None)
    request = generate(prompt, max_tokens=10, output=pack_tokens(right[:4]), epoch=1)
    await worker.accepted(request)
    await worker.mesh.ended(request.request_id, 1)
    assert worker.mesh.items(request.request_id, 1)[0].index == 4
    assert worker.mesh.tokens(request.request_id, 1) == right[4:]


async def test_an_assign_repeated_is_accepted_and_runs_once_and_a_newer_epoch_replaces_the_older(start):
    worker = await start()
    worker.slow_down(0.02)
    request = generate([1, 2, 3], max_tokens=40)
    await worker.accepted(request, request)
    await worker.accepted(request)
    await eventually(lambda: len(worker.mesh.tokens(request.request_id)) >= 3)
    so_far = worker.mesh.tokens(request.request_id)
    newer = msgspec.structs.replace(request, epoch=1, output=pack_tokens(so_far))
    await worker.accepted(newer)
    assert (await worker.mesh.ended(request.request_id, 0)).finish == "cancelled"
    assert (await worker.mesh.ended(request.request_id, 1)).finish == "length"
    assert len(so_far) + len(worker.mesh.tokens(request.request_id, 1)) == 40
    assert worker.mesh.tokens(request.request_id, 0)[: len(so_far)] == so_far


async def test_an_older_epoch_is_refused_while_a_newer_one_runs(start):
    worker = await start()
    worker.slow_down(0.02)
    request = generate([1, 2, 3], max_tokens=40, epoch=3)
    await worker.accepted(request)
    error = await worker.refusal(msgspec.structs.replace(request, epoch=2))
    assert error.status == 409 and "epoch 3" in error.message


@pytest.mark.parametrize(
    ("changed", "code", "says"),
    [
        ({"base_model": "other"}, "model_not_found", "'tiny', not 'other'"),
        ({"prompt": pack_tokens([1] * 256)}, "context_length_exceeded", "maximum context length is 256 tokens"),
        ({"prompt": pack_tokens([1] * 200), "output": pack_tokens([1] * 60)}, "context_length_exceeded", "256.*200.*60"),
        ({"prompt": b""}, "invalid_value", "no tokens"),
        ({"prompt": b"12345"}, "invalid_value", "four bytes"),
        ({"prompt": pack_tokens([1, 211])}, "invalid_value", r"\[0, 211\)"),
        ({"prompt": pack_tokens([-1])}, "invalid_value", r"\[0, 211\)"),
        ({"adapter": AdapterRef(name="big", digest="d", rank=256, size_bytes=9)}, "adapter_not_found", "not registered"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(start, changed, code, says):
    worker = await start()
    error = await worker.refusal(generate([1, 2, 3], **changed))
    assert error.code == code
    with pytest.raises(type(error), match=says):
        raise error


async def test_a_rank_over_the_limit_is_refused(start, adapters):
    worker = await start(max_lora_rank=16)
    ref = await worker.mesh.publish_adapter(adapters[3])
    error = await worker.refusal(generate([1], adapter=ref))
    assert error.status == 400 and "rank 64" in error.message and "1 to 16" in error.message


async def test_a_full_worker_refuses_with_a_time_to_come_back_and_takes_again_later(start):
    worker = await start(max_running=2, max_waiting=3)
    worker.slow_down(0.02)
    requests = [generate([1, 2, 3 + i], max_tokens=20) for i in range(5)]
    await worker.accepted(*requests)
    error = await worker.refusal(generate([9]))
    assert error.status == 429 and 0 < error.retry_after_s <= 10
    for request in requests:
        assert (await worker.mesh.ended(request.request_id)).finish == "length"
    last = generate([9])
    await worker.accepted(last)
    assert (await worker.mesh.ended(last.request_id)).finish == "length"


async def test_states_arrive_without_gaps_and_end_empty(start, adapters):
    worker = await start()
    refs = [None, *[await worker.mesh.publish_adapter(adapter) for adapter in adapters[:3]]]
    requests = [generate([1, i], adapter=refs[i % 4], max_tokens=3 + i) for i in range(12)]
    await worker.accepted(*requests)
    for request in requests:
        await worker.mesh.ended(request.request_id)
    await eventually(lambda: latest(worker).requests == [])
    snapshots = [i for i, state in enumerate(worker.mesh.states) if isinstance(state, WorkerSnapshot)]
    await eventually(lambda: isinstance(worker.mesh.states[-1], WorkerSnapshot) and len(worker.mesh.states) > snapshots[-1] + 1)
    states = worker.mesh.states
    assert [state.seq for state in states] == list(range(states[0].seq, states[0].seq + len(states)))
    known = states[0]
    for state in states[1:-1]:
        known = state if isinstance(state, WorkerSnapshot) else apply(known, state)
    final = as_sets(states[-1])
    assert as_sets(known)[:3] == final[:3]
    assert states[-1].limits.base_tensors.keys() == {"embed_tokens", "lm_head"}
    assert states[-1].kv_blocks_free <= states[-1].limits.kv_blocks_most and states[-1].perf.decode_base_ms >= 0
    assert {held.digest for held in states[-1].adapters if held.tier == "device"} == {ref.digest for ref in refs[1:]}
