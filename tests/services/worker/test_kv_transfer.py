"""Promise: a request that moves finds its KV blocks at its next worker, and says the same tokens whether they come or not.

Two real workers on a real nats-server; the test is the gateway and the scheduler.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from motet.policies.memory import kv_travel
from motet.policies.memory.kv_blocks import cache_scope
from motet.policies.memory.kv_travel import content_keys
from motet.services.worker import kv_transfer, metrics
from motet.services.worker.engines.thread import ThreadKv
from motet.services.worker.kv_transfer import KvTransfer
from motet.shared import subjects
from motet.shared.errors import Conflict, NotFound, from_info
from motet.shared.model import KvOffer, SamplingParams
from motet.shared.wire.kv import KvOpened, KvPart, KvReply, OpenKv, ReadKv
from motet.shared.wire.refusal import Refused
from motet.shared.wire.request import Cancel, GenerateRequest, pack_tokens, unpack_tokens
from tests.services.worker.support_service import Running, generate, latest
from tests.support import eventually, reading
from tests.support_models import random_prompts

BLOCK = 8
BLOCK_BYTES = BLOCK * 3 * 2 * 64 * 4  # tokens, layers, K and V, width, float32
LONG = [7 + (31 * i) % 190 for i in range(150)]  # a prompt of 18 full blocks
WAIT_S = 5.0


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """Whatever is predicted, a moved request waits for its blocks, because a tiny model would compute them in no time."""
    monkeypatch.setattr(KvTransfer, "wait_s", lambda self, offer, tokens, rank: WAIT_S)


@pytest.fixture
def small_pieces(monkeypatch) -> None:
    """Blocks come four at a time, in several parts."""
    monkeypatch.setattr(kv_transfer, "PIECE_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr(kv_transfer, "PART_BYTES", 5000)


def outcome(label: str) -> float:
    return reading(metrics.KV_FETCHES.labels(label))


async def leave(worker: Running, request: GenerateRequest, *, tokens: int) -> GenerateRequest:
    """Run the request until it has `tokens` tokens, then move it: cancel it, and return its next epoch."""
    await worker.accepted(request)
    await eventually(lambda: len(worker.mesh.tokens(request.request_id)) >= tokens)
    token = secrets.token_hex(8)
    await worker.control(Cancel(request_id=request.request_id, epoch=0, kv_token=token))
    output = worker.mesh.tokens(request.request_id)
    offer = KvOffer(worker_id=worker.service.worker_id, token=token)
    return msgspec.structs.replace(request, epoch=1, output=pack_tokens(output), kv=offer)


async def finish(worker: Running, request: GenerateRequest) -> list[int]:
    """All tokens of a request that has moved here."""
    await worker.accepted(request)
    assert (await worker.mesh.ended(request.request_id, 1)).finish == "length"
    return [*unpack_tokens(request.output), *worker.mesh.tokens(request.request_id, 1)]


async def stays(worker: Running, **changed: Any) -> list[int]:
    """The tokens of the same request when it does not move, computed without a cached block."""
    await worker.accepted(request := generate(LONG, cache_salt=secrets.token_hex(4), **changed))
    await worker.mesh.ended(request.request_id)
    return worker.mesh.tokens(request.request_id)


async def pair(start: Callable[..., Any], **changed: Any) -> tuple[Running, Running]:
    old, new = await start(), await start(**changed)
    old.slow_down(0.01)
    return old, new


def held(worker: Running) -> list[list[int]]:
    return list(worker.engine.core.travelling.lists)


async def let_go(*workers: Running) -> None:
    """Check that nothing is held for a move any more, and that all accounts add up."""
    for worker in workers:
        await eventually(lambda worker=worker: not held(worker))
        worker.engine.check()


async def test_a_moved_request_finds_its_blocks_and_continues_as_if_it_had_stayed(start, adapters, small_pieces):
    old, new = await pair(start)
    ref = await old.mesh.publish_adapter(adapters[0])
    for adapter in (None, ref):
        before, blocks = outcome("whole"), reading(metrics.KV_BLOCKS_MOVED)
        moved = await leave(old, generate(LONG, max_tokens=24, adapter=adapter), tokens=4)
        assert await finish(new, moved) == await stays(new, max_tokens=24, adapter=adapter)
        assert new.mesh.items(moved.request_id, 1)[0].cached_tokens == len(LONG)
        assert outcome("whole") == before + 1 and reading(metrics.KV_BLOCKS_MOVED) - blocks >= len(LONG) // BLOCK
    await let_go(old, new)


async def test_a_sampled_request_draws_the_same_tokens_with_blocks_and_without(start):
    old, new = await pair(start)
    drawn = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True)
    right = await stays(new, sampling=drawn)
    for travels in (True, False):
        request = generate(LONG, sampling=drawn, cache_salt=f"travels {travels}")
        moved = await leave(old, request, tokens=6)
        if not travels:
            moved = msgspec.structs.replace(moved, kv=None)
        assert await finish(new, moved) == right
        assert (new.mesh.items(moved.request_id, 1)[0].cached_tokens > 0) is travels


async def test_no_more_bytes_of_a_request_travel_than_are_allowed(start, monkeypatch):
    monkeypatch.setattr(kv_travel, "MOST_BYTES", 6 * BLOCK_BYTES)
    old, new = await pair(start)
    right = await stays(new, max_tokens=20)
    moved = await leave(old, generate(LONG, max_tokens=20), tokens=3)
    assert await finish(new, moved) == right
    assert new.mesh.items(moved.request_id, 1)[0].cached_tokens == 6 * BLOCK


async def test_blocks_that_are_here_already_are_not_fetched_again(start):
    old, new = await pair(start)
    await new.accepted(same := generate(LONG))
    await new.mesh.ended(same.request_id)
    blocks = reading(metrics.KV_BLOCKS_MOVED)
    moved = await leave(old, generate(LONG, max_tokens=40), tokens=20)
    assert await finish(new, moved) == await stays(new, max_tokens=40)
    assert 1 <= reading(metrics.KV_BLOCKS_MOVED) - blocks <= 4, "only those behind the prompt"


async def test_a_fetch_that_stops_in_the_middle_ends_in_time_with_what_has_come(start, small_pieces, monkeypatch):
    monkeypatch.setattr(KvTransfer, "wait_s", lambda self, offer, tokens, rank: 0.4)
    old, new = await pair(start)
    read, pieces = ThreadKv.read, 0

    def dies(kv: ThreadKv, *piece: Any) -> asyncio.Future[Any]:
        nonlocal pieces
        pieces += 1
        return read(kv, *piece) if pieces <= 2 else asyncio.get_running_loop().create_future()

    monkeypatch.setattr(ThreadKv, "read", dies)
    right = await stays(new, max_tokens=20)
    moved = await leave(old, generate(LONG, max_tokens=20), tokens=3)
    before, began = outcome("late"), time.monotonic()
    assert await finish(new, moved) == right
    assert 0.4 <= time.monotonic() - began < 1.5 and outcome("late") == before + 1
    assert 0 < new.mesh.items(moved.request_id, 1)[0].cached_tokens < len(LONG) // BLOCK * BLOCK
    await let_go(new, old)


async def test_an_old_worker_that_is_gone_does_not_stop_a_moved_request(start):
    old, new = await pair(start)
    moved = await leave(old, generate(LONG, max_tokens=20), tokens=3)
    before = outcome("absent")
    gone = KvOffer(worker_id="nobody", token="t")
    assert await finish(new, msgspec.structs.replace(moved, kv=gone)) == await stays(new, max_tokens=20)
    assert outcome("absent") == before + 1


async def test_blocks_in_int8_travel_between_workers_that_both_have_them_so(start):
    old, new = await start(kv_cache_dtype="int8"), await start(kv_cache_dtype="int8")
    old.slow_down(0.01)
    size = reading(metrics.KV_BYTES_MOVED), reading(metrics.KV_BLOCKS_MOVED)
    moved = await leave(old, generate(LONG, max_tokens=24), tokens=4)
    assert await finish(new, moved) == await stays(new, max_tokens=24)
    assert new.mesh.items(moved.request_id, 1)[0].cached_tokens == len(LONG)
    moved_bytes, blocks = reading(metrics.KV_BYTES_MOVED) - size[0], reading(metrics.KV_BLOCKS_MOVED) - size[1]
    assert 0 < moved_bytes < 0.4 * blocks * BLOCK_BYTES


@pytest.mark.parametrize("changed", [{"block_size": 16}, {"kv_cache_dtype": "int8"}])
async def test_workers_that_compute_otherwise_take_no_blocks_of_each_other(start, changed):
    old, new = await pair(start, **changed)
    before = outcome("refused")
    moved = await leave(old, generate(LONG, max_tokens=20), tokens=3)
    assert await finish(new, moved) == await stays(new, max_tokens=20)
    assert outcome("refused") == before + 1 and not new.mesh.items(moved.request_id, 1)[0].cached_tokens


async def test_blocks_of_another_tenant_are_not_given_out_even_with_the_token(start):
    old, new = await pair(start)
    before = outcome("other_content")
    moved = await leave(old, generate(LONG, tenant="one", max_tokens=20), tokens=3)
    await finish(new, msgspec.structs.replace(moved, tenant="two"))
    assert outcome("other_content") == before + 1 and not new.mesh.items(moved.request_id, 1)[0].cached_tokens


async def test_a_worker_without_room_for_the_blocks_computes_them_when_it_has_room(start):
    old, new = await pair(start, kv_blocks=32, device_memory="fixed")
    new.slow_down(0.01)
    await new.accepted(other := generate([9] * 100, max_tokens=60))
    await eventually(lambda: new.mesh.tokens(other.request_id))
    before = outcome("full")
    moved = await leave(old, generate(LONG, max_tokens=20), tokens=3)
    assert await finish(new, moved) == await stays(new, max_tokens=20)
    assert outcome("full") == before + 1
    assert not new.mesh.items(moved.request_id, 1)[0].cached_tokens
    assert (await new.mesh.ended(other.request_id)).finish == "length"
    await let_go(old, new)


async def test_a_request_that_is_cancelled_while_its_blocks_come_ends_at_once(start, monkeypatch):
    old, new = await pair(start)

    monkeypatch.setattr(ThreadKv, "hold", lambda *_: asyncio.get_running_loop().create_future())
    moved = await leave(old, generate(LONG, max_tokens=20), tokens=3)
    await new.accepted(moved)
    await new.control(Cancel(request_id=moved.request_id, epoch=1))
    assert (await new.mesh.ended(moved.request_id, 1, within_s=2.0)).finish == "cancelled"


async def ask(worker: Running, message: OpenKv | ReadKv) -> KvReply:
    return await worker.mesh.bus.request(subjects.kv(worker.service.worker_id), message, KvReply, timeout_s=5.0)


async def refusal(worker: Running, message: OpenKv | ReadKv) -> Exception:
    reply = await ask(worker, message)
    assert isinstance(reply, Refused), reply
    return from_info(reply.error)


async def test_blocks_are_given_once_to_the_worker_with_the_token_and_no_more_than_was_asked_for(start):
    old = await start()
    old.slow_down(0.01)
    moved = await leave(old, generate(LONG, max_tokens=20), tokens=3)
    await eventually(lambda: held(old))
    blocks = [pack_tokens(LONG[at : at + BLOCK]) for at in range(0, 4 * BLOCK, BLOCK)]
    keys = content_keys(blocks, "", cache_scope("default"))
    kind = old.service.view.limits.kv_format
    first = OpenKv(token=moved.kv.token, kv_format=kind, keys=keys, within_s=5.0)
    assert isinstance(await refusal(old, ReadKv(token=moved.kv.token, offset=0, size=8)), NotFound), "not before it is opened"
    assert isinstance(await refusal(old, msgspec.structs.replace(first, token="guessed")), NotFound)
    opened = await ask(old, first)
    assert isinstance(opened, KvOpened) and opened.blocks == 4
    assert isinstance(await refusal(old, first), Conflict), "the token is used"
    total = 4 * opened.block_bytes
    for offset, size in ((total, 8), (total - 4, 8), (-8, 8), (0, 0), (0, kv_transfer.PART_BYTES + 1)):
        assert (await refusal(old, ReadKv(token=moved.kv.token, offset=offset, size=size))).status == 400
    part = await ask(old, ReadKv(token=moved.kv.token, offset=0, size=total))
    assert isinstance(part, KvPart) and len(part.data) == total
    await let_go(old)
    assert isinstance(await refusal(old, ReadKv(token=moved.kv.token, offset=0, size=8)), NotFound), "it has been read"


async def test_blocks_that_are_not_requested_are_held_for_a_moment_and_for_few_requests(start, monkeypatch):
    monkeypatch.setattr(kv_transfer, "OFFER_S", 0.5)
    monkeypatch.setattr(kv_transfer, "MOVES", 2)
    old = await start()
    old.slow_down(0.01)
    for prompt in random_prompts(3):
        await leave(old, generate(prompt, max_tokens=60), tokens=1)
    await eventually(lambda: len(held(old)) == 2)
    await let_go(old)


async def test_a_worker_measures_its_link_before_it_promises_anything(start):
    worker = await start()
    await eventually(lambda: latest(worker).perf.kv_ms_per_mib > 0)
    assert latest(worker).perf.kv_base_ms > 0
    assert worker.service.view.limits.kv_format and worker.service.view.limits.kv_token_bytes == BLOCK_BYTES // BLOCK
    assert not isinstance(await ask(worker, OpenKv(token="x", kv_format="", keys=[], within_s=1.0)), KvOpened)


async def test_a_worker_without_a_prefix_cache_announces_that_it_takes_no_blocks(start):
    old, new = await pair(start, prefix_cache=False)
    assert not new.service.view.limits.kv_format and new.service.shell.travel is None
    moved = await leave(old, generate(LONG, max_tokens=20), tokens=3)
    assert await finish(new, moved) == await stays(new, max_tokens=20)
