"""Promise: a worker takes the blocks of a prompt from another worker that has them cached, and answers the same in any case.

Two real workers on a real nats-server; the test is the gateway and the scheduler.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from motet.policies.memory import kv_travel
from motet.policies.memory.kv_blocks import cache_scope, short_key
from motet.policies.memory.kv_travel import MOVES, content_keys
from motet.services.worker import kv_transfer, metrics
from motet.services.worker.engines.thread import ThreadKv
from motet.shared import subjects
from motet.shared.errors import BadRequest, Conflict, MotetError, Overloaded, from_info
from motet.shared.model import AdapterRef, KvOffer
from motet.shared.wire.kv import KvOpened, KvPart, KvReply, OpenKv, ReadKv
from motet.shared.wire.refusal import Refused
from motet.shared.wire.request import Cancel, pack_tokens
from tests.services.worker.support_service import Running, generate
from tests.support import eventually, reading

BLOCK = 8
LONG = [7 + (31 * i) % 190 for i in range(150)]  # a prompt of 18 full blocks
FULL = 18 * BLOCK
WAIT_MS = 5_000.0


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """Whatever is predicted, a request waits for its blocks, because a tiny model would compute them in no time."""
    monkeypatch.setattr(kv_travel, "wait_ms", lambda perf, blocks, size, rank: WAIT_MS * (blocks.end > blocks.first))


@pytest.fixture
def small_pieces(monkeypatch) -> None:
    """Blocks come two at a time."""
    monkeypatch.setattr(kv_transfer, "PIECE_BYTES", 2 * BLOCK * 3 * 2 * 64 * 4)


def outcome(label: str) -> float:
    return reading(metrics.KV_FETCHES.labels(label))


async def answer(worker: Running, **changed: Any) -> tuple[list[int], int]:
    """The tokens of the answer to the long prompt, and how many tokens of that came from the cache."""
    await worker.accepted(request := generate(LONG, **changed))
    assert (await worker.mesh.ended(request.request_id)).finish == "length"
    return worker.mesh.tokens(request.request_id), worker.mesh.items(request.request_id)[0].cached_tokens


async def cold(worker: Running, **changed: Any) -> list[int]:
    """The tokens of the same answer without anything cached."""
    tokens, cached = await answer(worker, cache_salt=secrets.token_hex(4), **changed)
    assert not cached
    return tokens


def at(lender: Running, *, to_tokens: int = FULL) -> KvOffer:
    return KvOffer(worker_id=lender.service.worker_id, to_tokens=to_tokens)


async def let_go(*workers: Running) -> None:
    """Check that nothing is held for another worker any more, and that all accounts add up."""
    for worker in workers:
        await eventually(lambda worker=worker: not list(worker.engine.core.travelling.lists))
        worker.engine.check()


@pytest.mark.parametrize("adapted", [False, True])
async def test_a_prompt_that_another_worker_has_is_fetched_and_answered_the_same(start, adapters, small_pieces, adapted):
    lender, worker = await start(), await start()
    adapter: AdapterRef | None = await lender.mesh.publish_adapter(adapters[0]) if adapted else None
    told, _ = await answer(lender, adapter=adapter)
    before = outcome("whole")
    tokens, cached = await answer(worker, adapter=adapter, kv=at(lender))
    assert (tokens, cached) == (told, FULL)
    assert tokens == await cold(worker, adapter=adapter)
    assert outcome("whole") == before + 1
    assert (await answer(worker, adapter=adapter))[1] >= FULL, "the next one finds them here"
    await let_go(lender, worker)


async def test_only_what_the_scheduler_names_is_fetched(start):
    lender, worker = await start(), await start()
    told, _ = await answer(lender)
    assert await answer(worker, kv=at(lender, to_tokens=64)) == (told, 64)
    blocks = reading(metrics.KV_BLOCKS_MOVED)
    rest = KvOffer(worker_id=lender.service.worker_id, from_tokens=64, to_tokens=96)
    assert (await answer(worker, kv=rest))[0] == told
    assert reading(metrics.KV_BLOCKS_MOVED) == blocks, "the worker has computed them meanwhile"


@pytest.mark.parametrize(
    ("had", "found"),
    [({"ids": LONG[:50] + [3] * 60}, 48), ({"ids": [3] * 150}, 0), ({"tenant": "two"}, 0), ({"cache_salt": "s"}, 0)],
)
async def test_what_the_lender_has_of_it_is_taken_and_never_what_is_anothers(start, had, found):
    lender, worker = await start(), await start()
    ids = had.pop("ids", LONG)
    await lender.accepted(request := generate(ids, **had))
    await lender.mesh.ended(request.request_id)
    before = outcome("other_content")
    tokens, cached = await answer(worker, kv=at(lender))
    assert cached == found and tokens == await cold(worker)
    assert outcome("other_content") - before == (not found)
    await let_go(lender, worker)


async def test_blocks_of_one_adapter_are_not_given_for_another(start, adapters):
    lender, worker = await start(), await start()
    one, other = [await lender.mesh.publish_adapter(adapter) for adapter in adapters[:2]]
    await answer(lender, adapter=one)
    tokens, cached = await answer(worker, adapter=other, kv=at(lender))
    assert not cached and tokens == await cold(worker, adapter=other)


async def test_a_lender_that_is_gone_costs_nothing_but_the_blocks(start):
    worker = await start()
    before = outcome("absent")
    tokens, cached = await answer(worker, kv=KvOffer(worker_id="nobody", to_tokens=FULL))
    assert not cached and tokens == await cold(worker)
    assert outcome("absent") == before + 1


async def test_a_lender_that_dies_while_its_blocks_are_read_costs_time_and_no_answer(start, small_pieces, monkeypatch):
    lender, worker = await start(), await start()
    told, _ = await answer(lender)
    read, pieces = ThreadKv.read, 0

    def dies(kv: ThreadKv, *piece: Any) -> asyncio.Future[Any]:
        nonlocal pieces
        pieces += 1
        if pieces <= 6:
            return read(kv, *piece)
        lender.service.bus.spawn(lender.service.bus.nc.close())
        return asyncio.get_running_loop().create_future()

    monkeypatch.setattr(ThreadKv, "read", dies)
    monkeypatch.setattr(kv_travel, "wait_ms", lambda *_: 700.0)
    before = outcome("late") + outcome("absent")
    tokens, cached = await answer(worker, kv=at(lender))
    assert tokens == told and 0 < cached < FULL
    assert outcome("late") + outcome("absent") == before + 1
    await let_go(worker)


async def test_others_do_not_wait_for_a_fetch_and_a_cancelled_one_ends_at_once(start, monkeypatch):
    lender, worker = await start(), await start()
    await answer(lender)
    monkeypatch.setattr(ThreadKv, "read", lambda *_: asyncio.get_running_loop().create_future())
    waiting = generate(LONG, kv=at(lender))
    await worker.accepted(waiting)
    await eventually(lambda: list(lender.engine.core.travelling.lists))
    await worker.accepted(other := generate([9] * 20))
    await worker.mesh.ended(other.request_id, within_s=3.0)
    assert not worker.mesh.items(waiting.request_id)
    before = outcome("cancelled")
    await worker.control(Cancel(request_id=waiting.request_id, epoch=0))
    assert (await worker.mesh.ended(waiting.request_id, within_s=2.0)).finish == "cancelled"
    await eventually(lambda: outcome("cancelled") == before + 1)
    await let_go(worker)


async def test_requests_that_lack_the_same_blocks_wait_for_one_fetch(start, small_pieces):
    lender, worker = await start(), await start()
    told, _ = await answer(lender)
    whole, shared, blocks = outcome("whole"), outcome("shared"), reading(metrics.KV_BLOCKS_MOVED)
    answers = await asyncio.gather(*(answer(worker, kv=at(lender)) for _ in range(3)))
    assert answers == [(told, FULL)] * 3
    assert (outcome("whole") - whole, outcome("shared") - shared) == (1, 2)
    assert reading(metrics.KV_BLOCKS_MOVED) - blocks == 18
    await let_go(lender, worker)


async def test_a_request_beyond_the_number_of_fetches_is_computed_at_once(start, monkeypatch):
    lender, worker = await start(), await start()
    told, _ = await answer(lender)
    monkeypatch.setattr(ThreadKv, "read", lambda *_: asyncio.get_running_loop().create_future())
    for number in range(MOVES):
        await worker.accepted(generate(LONG, kv=at(lender, to_tokens=FULL - BLOCK * number)))
    before = outcome("busy")
    assert await answer(worker, kv=at(lender)) == (told, 0)
    assert outcome("busy") == before + 1


# ---- what a lender answers


def opening(lender: Running, token: str, *, keys: list[bytes] | None = None, **changed: Any) -> OpenKv:
    blocks = [pack_tokens(LONG[i : i + BLOCK]) for i in range(0, FULL, BLOCK)]
    named = content_keys(blocks, "", cache_scope("default")) if keys is None else keys
    fields = {"kv_format": lender.service.view.limits.kv_format, "keys": named, "within_s": 5.0, "cached": True}
    return OpenKv(token=token, **fields | changed)


async def ask(lender: Running, message: OpenKv | ReadKv) -> KvOpened | KvPart | MotetError:
    reply = await lender.mesh.bus.request(subjects.kv(lender.service.worker_id), message, KvReply, timeout_s=5.0)
    return from_info(reply.error) if isinstance(reply, Refused) else reply


async def test_a_lender_holds_few_prompts_at_a_time_and_lets_go_of_what_is_not_read(start):
    lender = await start()
    await answer(lender)
    for number in range(MOVES):
        opened = await ask(lender, opening(lender, f"t{number}", within_s=1.0))
        assert isinstance(opened, KvOpened) and opened.blocks == 18
    assert isinstance(await ask(lender, opening(lender, "t0")), Conflict), "the token is used"
    assert isinstance(await ask(lender, opening(lender, "more")), Overloaded)
    await let_go(lender)
    assert isinstance(await ask(lender, opening(lender, "more")), KvOpened)


async def test_held_blocks_stay_while_the_cache_is_filled_with_others(start):
    lender = await start(kv_blocks=60, device_memory="fixed")
    await answer(lender)
    opened = await ask(lender, opening(lender, "t"))
    assert isinstance(opened, KvOpened) and opened.blocks == 18
    for number in range(4):
        await lender.accepted(other := generate([11 + number] * 200))
        await lender.mesh.ended(other.request_id)
    assert (await answer(lender))[1] >= FULL, "they are still here"
    part = await ask(lender, ReadKv(token="t", offset=0, size=64))
    assert isinstance(part, KvPart) and len(part.data) == 64


@pytest.mark.parametrize(
    ("made", "refused"),
    [
        (lambda lender: opening(lender, "t", kv_format="other"), Conflict),
        (lambda lender: opening(lender, "t", keys=[bytes([number]) * 16 for number in range(101)]), BadRequest),
        (lambda lender: opening(lender, "t", keys=2 * opening(lender, "").keys[:1]), BadRequest),
    ],
)
async def test_bad_questions_hold_nothing(start, monkeypatch, made: Callable[..., OpenKv], refused):
    monkeypatch.setattr(kv_transfer, "MOST_KEYS", 100)
    lender = await start()
    await answer(lender)
    assert isinstance(await ask(lender, made(lender)), refused)
    assert not list(lender.engine.core.travelling.lists)


async def test_the_keys_that_schedulers_know_open_nothing(start):
    lender = await start()
    await answer(lender)
    whole = opening(lender, "t").keys
    for keys in ([short_key(key).to_bytes(8, "little") for key in whole], [key[:8] + bytes(8) for key in whole]):
        opened = await ask(lender, opening(lender, secrets.token_hex(4), keys=keys))
        assert isinstance(opened, KvOpened) and not opened.blocks
    await let_go(lender)
