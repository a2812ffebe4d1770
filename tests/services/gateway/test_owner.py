"""The Owner keeps a request whole: no token twice, none lost, whatever workers, schedulers and frames do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from motet.policies.owner import owner_core
from motet.policies.owner.owner_core import LOSSES_MAX
from motet.services.gateway.owner import owner
from motet.services.gateway.owner import stream as stream_states
from motet.services.gateway.owner.detokenize import Detokenizer
from motet.services.gateway.owner.fleet import Fleet
from motet.services.gateway.owner.owner import Owner
from motet.services.gateway.owner.stream import Job, SlowReader, Stream, TextDelta
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import BadRequest, DeadlineExceeded, MotetError, Overloaded, Unavailable, WorkerFull, WorkerLost
from motet.shared.model import SamplingParams, StructuredOutput
from motet.shared.wire.prediction import Outcome
from motet.shared.wire.request import GenerateRequest, Move, pack_tokens, unpack_tokens
from motet.shared.wire.stream import StreamItem, TokenFrame, TokenLogprobs
from motet.shared.wire.worker_state import WorkerNotice
from tests.services.gateway.support import Connect, FakeScheduler, assigned, cancelled, start_workers
from tests.services.gateway.support_tokenizers import byte_level
from tests.support import eventually
from tests.support_worker import FakeWorker

TOKENIZER = byte_level()
TEXT = "hello world, größere 🎉 hello"
TOKENS = TOKENIZER.encode(TEXT).ids


def job(request_id: str = "r1", **changed: Any) -> Job:
    sampling = SamplingParams(max_tokens=changed.pop("max_tokens", 200), **changed.pop("sampling", {}))
    return Job(
        **({"request_id": request_id, "model": "demo", "prompt": pack_tokens([5, 6, 7]), "sampling": sampling} | changed)
    )


class Mesh:
    """An Owner, a scheduler and two workers on one real server."""

    def __init__(self, owner: Owner, scheduler: FakeScheduler, workers: list[FakeWorker], bus: Bus) -> None:
        self.owner, self.scheduler, self.workers, self.bus = owner, scheduler, workers, bus

    @property
    def first(self) -> FakeWorker:
        return self.workers[0]

    @property
    def second(self) -> FakeWorker:
        return self.workers[1]


@pytest.fixture
async def mesh(connect: Connect, bus: Bus, request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    """A mesh whose owner takes 64 requests, or as many as the parameter says."""
    workers = await start_workers(connect, "w1", "w2")
    scheduler = FakeScheduler(await connect("scheduler"), ["w1", "w2"])
    await scheduler.start()
    gateway_bus = await connect("g1")
    fleet = Fleet(gateway_bus, "demo")
    await fleet.start()
    owner = Owner(
        gateway_bus,
        fleet,
        Detokenizer(TOKENIZER),
        gateway_id="g1",
        base_model="demo",
        max_inflight=getattr(request, "param", 64),
        stream_buffer_tokens=64,
    )
    await owner.start()
    await eventually(lambda: len(fleet.workers()) == 2 and owner.alive("w1") and owner.alive("w2"))
    yield Mesh(owner, scheduler, workers, bus)
    await owner.stop()


async def read(stream: Stream) -> list[TextDelta]:
    return [delta async for delta in stream]


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: list[TextDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


async def speak(worker: FakeWorker, request: GenerateRequest, *, until: int | None = None) -> None:
    """Emit TOKENS one by one from the request's present index on, to the end or up to index `until`."""
    start = len(unpack_tokens(request.output))
    stop = len(TOKENS) if until is None else until
    for index in range(start, stop):
        await worker.emit(request, index, [TOKENS[index]], "length" if index == len(TOKENS) - 1 else None)


async def test_a_request_streams_from_its_worker_to_its_end(mesh: Mesh) -> None:
    mesh.first.speak = lambda _: TOKENS
    stream = await mesh.owner.open(job())
    deltas = await read(stream)
    assert text_of(deltas) == TEXT
    assert tokens_of(deltas) == TOKENS
    assert deltas[-1].finish == "length"
    assert mesh.owner.inflight == 0


async def test_frames_that_come_before_the_schedulers_answer_count(mesh: Mesh) -> None:
    mesh.scheduler.before_answer = lambda request: speak(mesh.first, request)
    stream = await mesh.owner.open(job())
    assert text_of(await read(stream)) == TEXT
    assert not mesh.first.controls


async def test_a_lost_worker_is_continued_on_another_without_a_token_lost_or_repeated(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    await speak(mesh.first, await assigned(mesh.first), until=4)
    await eventually(lambda: len(stream.tokens) == 4)
    await mesh.first.goodbye()
    resumed = await assigned(mesh.second)
    assert (resumed.epoch, resumed.exclude_workers, unpack_tokens(resumed.output)) == (1, ("w1",), TOKENS[:4])
    assert (resumed.sampling, resumed.prompt) == (mesh.first.assigned[0].sampling, mesh.first.assigned[0].prompt)
    await speak(mesh.second, resumed)
    deltas = await read(stream)
    assert tokens_of(deltas) == TOKENS
    assert text_of(deltas) == TEXT


async def test_a_worker_that_vanishes_silently_is_noticed_by_its_lease(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    await speak(mesh.first, await assigned(mesh.first), until=2)
    await mesh.first.die()
    await speak(mesh.second, await assigned(mesh.second))
    assert tokens_of(await read(stream)) == TOKENS


async def test_a_worker_that_returns_under_its_old_name_may_get_the_request_back(mesh: Mesh, connect: Connect) -> None:
    mesh.scheduler.workers = ["w1"]
    stream = await mesh.owner.open(job())
    await speak(mesh.first, await assigned(mesh.first), until=3)
    await eventually(lambda: len(stream.tokens) == 3)
    await mesh.first.die()
    reborn = FakeWorker(await connect("w1-again"), "w1", limits=mesh.first.limits)
    await reborn.start()
    await speak(reborn, await assigned(reborn))
    assert tokens_of(await read(stream)) == TOKENS


async def test_a_running_request_waits_as_long_as_its_only_worker_loads_the_model(
    mesh: Mesh, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_core, "RESUME_PATIENCE_S", 0.5)
    mesh.scheduler.workers = ["w1"]
    stream = await mesh.owner.open(job())
    await speak(mesh.first, await assigned(mesh.first), until=3)
    await eventually(lambda: len(stream.tokens) == 3)
    for worker in (mesh.second, mesh.first):
        worker.mute()
        await worker.goodbye()
    notice = WorkerNotice(worker_id="w1", incarnation="second", base_model="demo", event="starting")
    await mesh.bus.publish(subjects.notice("w1"), notice)
    began, submitted = now_s(), len(mesh.scheduler.submitted)
    await eventually(lambda: now_s() - began > 1.0 and len(mesh.scheduler.submitted) > submitted)
    assert stream.error is None
    await mesh.first.die()
    reborn = FakeWorker(await connect("w1-again"), "w1", limits=mesh.first.limits)
    await reborn.start()
    await speak(reborn, await assigned(reborn))
    assert tokens_of(await read(stream)) == TOKENS


async def test_repeated_and_overlapping_frames_show_each_token_once(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    request, worker = await assigned(mesh.first), mesh.first
    for index, count in [(0, 2), (0, 2), (1, 3), (0, 1), (3, 2), (2, len(TOKENS) - 2)]:
        last = index + count == len(TOKENS)
        await worker.emit(request, index, TOKENS[index : index + count], "length" if last else None)
    assert tokens_of(await read(stream)) == TOKENS
    assert len(mesh.scheduler.submitted) == 1


async def test_frames_out_of_order_are_put_in_order(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    request, worker = await assigned(mesh.first), mesh.first
    for index in (2, 1, 3, 0):
        await worker.emit(request, index, [TOKENS[index]])
    await worker.emit(request, 5, TOKENS[5:], "length")
    await worker.emit(request, 4, [TOKENS[4]])
    assert tokens_of(await read(stream)) == TOKENS
    assert len(mesh.scheduler.submitted) == 1


async def test_a_gap_that_stays_is_filled_by_resuming(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    request = await assigned(mesh.first)
    await speak(mesh.first, request, until=2)
    await mesh.first.emit(request, 4, [TOKENS[4]])
    await cancelled(mesh.first, "r1", epoch=0)
    resumed = await assigned(mesh.first, 2)
    assert (resumed.epoch, resumed.exclude_workers, unpack_tokens(resumed.output)) == (1, (), TOKENS[:2])
    await speak(mesh.first, resumed)
    assert tokens_of(await read(stream)) == TOKENS


async def test_frames_of_an_older_epoch_or_another_worker_are_ignored_and_stopped(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    request = await assigned(mesh.first)
    await speak(mesh.first, request, until=2)
    await eventually(lambda: len(stream.tokens) == 2)
    await mesh.second.emit(request, 2, [0])
    await cancelled(mesh.second, "r1", epoch=0)
    await mesh.first.emit(request, 5, [0])  # tokens are missing, so it is resumed
    resumed = await assigned(mesh.first, 2)
    told = len(mesh.first.controls)
    await mesh.first.emit(request, 2, [0])
    await eventually(lambda: len(mesh.first.controls) > told)
    await cancelled(mesh.first, "r1", epoch=0)
    await speak(mesh.first, resumed)
    assert tokens_of(await read(stream)) == TOKENS


async def test_frames_for_a_request_without_owner_are_answered_with_a_cancel_at_most_once_a_second(mesh: Mesh) -> None:
    item = StreamItem("ghost", 3, 0, [1])
    for step in range(50):
        await mesh.bus.publish(subjects.stream("g1"), TokenFrame("w1", step, [item]))
    cancel = await cancelled(mesh.first, "ghost")
    await mesh.bus.flush()
    assert cancel.epoch == 3
    assert len(mesh.first.controls) == 1


async def test_a_worker_that_gives_a_request_up_is_replaced(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    request = await assigned(mesh.first)
    await speak(mesh.first, request, until=3)
    lost = WorkerLost("draining")
    await mesh.first.emit(request, 3, [], "error", error=lost.info())
    await speak(mesh.second, await assigned(mesh.second))
    assert tokens_of(await read(stream)) == TOKENS


async def test_an_error_that_no_other_worker_can_mend_reaches_the_caller(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    request = await assigned(mesh.first)
    await speak(mesh.first, request, until=1)
    await mesh.first.emit(request, 1, [], "error", error=BadRequest("no such thing", param="seed").info())
    seen = []
    with pytest.raises(BadRequest, match="no such thing"):
        async for delta in stream:
            seen.append(delta)  # noqa: PERF401  what came before the error counts
    assert tokens_of(seen) == TOKENS[:1]
    assert mesh.owner.inflight == 0


async def test_a_request_its_worker_forgot_is_resumed(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    request = await assigned(mesh.first)
    await speak(mesh.first, request, until=2)
    mesh.first.requests.clear()  # its last frames were lost; the lease and the heartbeats go on
    resumed = await assigned(mesh.first, 2)
    assert unpack_tokens(resumed.output) == TOKENS[:2]
    await speak(mesh.first, resumed)
    assert tokens_of(await read(stream)) == TOKENS


async def test_a_request_whose_last_item_was_lost_is_finished_here(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job(max_tokens=2))
    request = await assigned(mesh.first)
    await mesh.first.emit(request, 0, TOKENS[:2])
    await mesh.first.goodbye()
    deltas = await read(stream)
    assert (tokens_of(deltas), deltas[-1].finish) == (TOKENS[:2], "length")


async def test_a_request_that_keeps_losing_workers_without_progress_is_ended(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    for count in range(1, LOSSES_MAX + 1):
        mesh.scheduler.workers = ["w1"]
        request = await assigned(mesh.first, count)
        await mesh.first.emit(request, 0, [], "error", error=WorkerLost("crashed").info())
    with pytest.raises(WorkerLost, match="in a row"):
        await read(stream)


async def test_losses_count_in_a_row_a_token_in_between_begins_anew(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    for count in range(1, LOSSES_MAX + 3):
        mesh.scheduler.workers = ["w1"]
        request = await assigned(mesh.first, count)
        await speak(mesh.first, request, until=count)
        await mesh.first.emit(request, count, [], "error", error=WorkerLost("crashed").info())
    await speak(mesh.first, await assigned(mesh.first, LOSSES_MAX + 3))
    assert tokens_of(await read(stream)) == TOKENS


async def test_the_gateway_waits_for_a_part_that_is_away_for_a_while(mesh: Mesh) -> None:
    """A worker that cannot fetch an adapter now is not lost: accepted requests wait until the object store is back."""
    mesh.scheduler.workers = ["w1"]
    stream = await mesh.owner.open(job())
    for count in range(1, LOSSES_MAX + 3):
        request = await assigned(mesh.first, count)
        mesh.scheduler.workers = ["w1"]
        await mesh.first.emit(request, 0, [], "error", error=Unavailable("the object store is away").info())
    await speak(mesh.first, await assigned(mesh.first, LOSSES_MAX + 3))
    assert tokens_of(await read(stream)) == TOKENS


async def test_what_one_worker_can_never_do_another_does(mesh: Mesh) -> None:
    mesh.scheduler.workers = ["w1"]
    stream = await mesh.owner.open(job())
    await mesh.first.emit(await assigned(mesh.first), 0, [], "error", error=WorkerFull("the disk is full").info())
    await eventually(lambda: len(mesh.scheduler.submitted) >= 4)  # the other one is away for a moment
    mesh.scheduler.workers = ["w1", "w2"]
    request = await assigned(mesh.second)
    assert request.exclude_workers == ("w1",) and len(mesh.first.assigned) == 1
    await speak(mesh.second, request)
    assert tokens_of(await read(stream)) == TOKENS


async def test_what_no_worker_can_ever_do_is_said_at_once_with_their_reason(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    began_s = now_s()
    for worker in mesh.workers:
        await worker.emit(await assigned(worker), 0, [], "error", error=WorkerFull(f"{worker.worker_id}: disk full").info())
    with pytest.raises(WorkerFull, match="w2: disk full"):
        await read(stream)
    assert now_s() - began_s < owner_core.SET_BACK_S / 2
    assert [len(worker.assigned) for worker in mesh.workers] == [1, 1], "none was asked twice"
    assert mesh.owner.inflight == 0


async def test_a_caller_that_cancels_stops_the_worker_at_once(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    await speak(mesh.first, await assigned(mesh.first), until=2)
    stream.cancel()
    await cancelled(mesh.first, "r1", epoch=0)
    assert mesh.owner.inflight == 0


async def test_leaving_the_iteration_early_cancels(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    await speak(mesh.first, await assigned(mesh.first), until=1)
    async with contextlib.aclosing(stream.__aiter__()) as deltas:  # type: ignore[type-var]
        await anext(deltas)
    assert mesh.owner.inflight == 0
    await cancelled(mesh.first, "r1")


async def test_a_deadline_ends_the_request_here_and_at_the_worker(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job(timeout_s=0.2))
    with pytest.raises(DeadlineExceeded):
        await read(stream)
    await cancelled(mesh.first, "r1")


async def test_a_stop_string_ends_the_request_here_and_at_the_worker(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job(stop=("größ",)))
    await speak(mesh.first, await assigned(mesh.first), until=len(TOKENS) - 1)
    deltas = await read(stream)
    assert text_of(deltas) == "hello world, "
    assert (deltas[-1].finish, deltas[-1].stop_reason) == ("stop", "größ")
    await cancelled(mesh.first, "r1")


async def test_a_stop_string_among_the_first_tokens_does_not_count_however_many_come_at_once(mesh: Mesh) -> None:
    spoken = 2 * TOKENS
    for number, size in enumerate((1, 3, len(spoken))):
        limits = {"min_tokens": len(TOKENS) + 1}
        stream = await mesh.owner.open(job(f"r{number}", stop=("größ",), sampling=limits, max_tokens=len(spoken)))
        request = await assigned(mesh.first, number + 1)
        for index in range(0, len(spoken), size):
            await mesh.first.emit(request, index, spoken[index : index + size])
        deltas = await read(stream)
        assert (deltas[-1].finish, deltas[-1].stop_reason) == ("stop", "größ")
        assert text_of(deltas).startswith("hello world, größe") and text_of(deltas).endswith("hello world, ")


async def test_the_token_that_ended_it_is_counted_and_not_shown(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job(sampling={"stop_token_ids": (99,)}))
    await mesh.first.emit(await assigned(mesh.first), 0, [*TOKENS[:2], 99], "stop", stop_token=99)
    deltas = await read(stream)
    assert (tokens_of(deltas), deltas[-1].stop_reason) == (TOKENS[:2], 99)
    assert len(stream.tokens) == 3


async def test_a_caller_that_does_not_read_loses_only_its_own_request(mesh: Mesh) -> None:
    slow, quick = await mesh.owner.open(job("slow")), await mesh.owner.open(job("quick"))
    for_slow, for_quick = await assigned(mesh.first), await assigned(mesh.first, 2)
    for index in range(70):  # the buffer holds 64
        await mesh.first.emit(for_slow, index, [TOKENS[0]])
    await cancelled(mesh.first, "slow")
    await speak(mesh.first, for_quick)
    assert tokens_of(await read(quick)) == TOKENS
    with pytest.raises(SlowReader):
        await read(slow)


async def test_unread_tokens_are_bounded_in_bytes_and_the_largest_of_the_greediest_tenant_ends_first(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "UNREAD_BYTES_MAX", 40_000)
    scores = TokenLogprobs(-1.0, [1] * 20, [-1.0] * 20)
    owned = {"modest": ("modest", 8), "small": ("greedy", 4), "large": ("greedy", 12)}  # tenant, tokens that are not read
    streams, ended = {}, {"small": 4, "modest": 8}
    for count, (name, (tenant, tokens)) in enumerate(owned.items(), 1):
        streams[name] = await mesh.owner.open(job(name, tenant=tenant, sampling={"logprobs": 20}))
        request = await assigned(mesh.first, count)
        for index in range(tokens):
            finish = "length" if index + 1 == ended.get(name) else None  # a complete answer is held by its caller, too
            await mesh.first.emit(request, index, [TOKENS[0]], finish, logprobs=[scores])
        await eventually(lambda stream=streams[name], count=tokens: len(stream.tokens) >= count or stream.error is not None)
    await cancelled(mesh.first, "large")
    assert tokens_of(await read(streams["modest"])) == TOKENS[:1] * 8
    assert tokens_of(await read(streams["small"])) == TOKENS[:1] * 4
    with pytest.raises(SlowReader):
        await read(streams["large"])


async def test_log_probabilities_count_in_the_bytes_of_one_unread_stream(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_states, "STREAM_BYTES_MAX", 20_000)
    plain, scored = await mesh.owner.open(job("plain")), await mesh.owner.open(job("scored", sampling={"logprobs": 20}))
    requests = await assigned(mesh.first), await assigned(mesh.first, 2)
    for index in range(12):
        for request, scores in zip(requests, (None, [TokenLogprobs(-1.0, [1] * 20, [-1.0] * 20)]), strict=True):
            await mesh.first.emit(request, index, [TOKENS[0]], logprobs=scores)
    await cancelled(mesh.first, "scored")
    with pytest.raises(SlowReader):
        await read(scored)
    await mesh.first.emit(requests[0], 12, [TOKENS[0]], "length")
    assert tokens_of(await read(plain)) == TOKENS[:1] * 13


@pytest.mark.parametrize("mesh", [1], indirect=True)
async def test_beyond_its_limit_the_owner_refuses_at_once(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job("a"))
    with pytest.raises(Overloaded) as refused:
        await mesh.owner.open(job("b"))
    assert refused.value.retry_after_s
    stream.cancel()
    (await mesh.owner.open(job("b"))).cancel()


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=3.0), BadRequest("too big", param="max_tokens")])
async def test_what_the_scheduler_refuses_a_new_request_for_reaches_the_caller(mesh: Mesh, error: MotetError) -> None:
    mesh.scheduler.refuse = error
    with pytest.raises(type(error), match=error.message):
        await mesh.owner.open(job())
    assert mesh.owner.inflight == 0


async def test_a_refusal_is_repeated_without_the_scheduler_and_the_next_ask_tells_how_often(mesh: Mesh) -> None:
    mesh.scheduler.refuse = Overloaded("too late", retry_after_s=8.0)
    for name in "abcd":
        with pytest.raises(Overloaded, match="too late") as refused:
            await mesh.owner.open(job(name))
        assert 7.0 < (refused.value.retry_after_s or 0.0) <= 8.0
    assert [request.request_id for request in mesh.scheduler.submitted] == ["a"]
    mesh.scheduler.refuse = None
    (await mesh.owner.open(job("shorter", prompt=pack_tokens([5])))).cancel()
    assert [request.repeated for request in mesh.scheduler.submitted] == [0, 3]


async def test_a_scheduler_that_is_away_for_a_moment_is_waited_for(mesh: Mesh) -> None:
    mesh.scheduler.refuse = Unavailable("no worker yet")
    opening = asyncio.ensure_future(mesh.owner.open(job()))
    await eventually(lambda: len(mesh.scheduler.submitted) >= 2)
    mesh.scheduler.refuse = None
    await speak(mesh.first, await assigned(mesh.first))
    assert tokens_of(await read(await opening)) == TOKENS


async def test_a_drain_refuses_new_requests_and_waits_for_the_running(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    draining = asyncio.ensure_future(mesh.owner.drain())
    await eventually(lambda: mesh.owner.draining)
    with pytest.raises(Unavailable):
        await mesh.owner.open(job("late"))
    assert not draining.done()
    await speak(mesh.first, await assigned(mesh.first))
    await read(stream)
    await asyncio.wait_for(draining, 5.0)


async def test_finished_requests_are_reported_to_the_predictors_and_cancelled_ones_are_not(mesh: Mesh) -> None:
    outcomes: list[Outcome] = []
    await mesh.bus.subscribe(subjects.OUTCOME, Outcome, outcomes.append)
    (await mesh.owner.open(job("gone"))).cancel()
    stream = await mesh.owner.open(job("done"))
    await speak(mesh.first, await assigned(mesh.first, 2))
    await read(stream)
    await eventually(lambda: outcomes)
    assert [(o.adapter_digest, o.prompt_tokens, o.output_tokens) for o in outcomes] == [("", 3, len(TOKENS))]


# ---- moves


async def ask_to_move(mesh: Mesh, request_id: str, epoch: int, to: str) -> None:
    await mesh.bus.publish(subjects.MOVE, Move(request_id=request_id, epoch=epoch, to=to))


async def test_a_moved_request_continues_at_the_named_worker_without_a_token_lost_or_repeated(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    await speak(mesh.first, await assigned(mesh.first), until=4)
    await eventually(lambda: len(stream.tokens) == 4)
    await ask_to_move(mesh, "r1", 0, "w2")
    moved = await assigned(mesh.second)
    assert (moved.epoch, unpack_tokens(moved.output)) == (1, TOKENS[:4])
    assert (await cancelled(mesh.first, "r1")).epoch == 0
    await mesh.first.emit(mesh.first.assigned[0], 4, [99])  # what was under way when it was told to stop
    await speak(mesh.second, moved)
    assert tokens_of(await read(stream)) == TOKENS


async def test_a_move_with_blocks_tells_the_old_worker_and_the_new_one_the_same_token(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    await speak(mesh.first, await assigned(mesh.first), until=4)
    await eventually(lambda: len(stream.tokens) == 4)
    await mesh.bus.publish(subjects.MOVE, Move(request_id="r1", epoch=0, to="w2", kv=True))
    moved, told = await assigned(mesh.second), await cancelled(mesh.first, "r1")
    assert moved.kv is not None and moved.kv.worker_id == "w1" and len(moved.kv.token) >= 16 and moved.kv.token == told.kv_token
    await mesh.second.die()
    await speak(mesh.first, await assigned(mesh.first, 2))
    assert tokens_of(await read(stream)) == TOKENS
    assert mesh.first.assigned[1].kv is None, "the token was for one move"


async def test_a_move_is_no_loss_and_the_worker_may_get_the_request_again(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    for epoch in range(2 * LOSSES_MAX):
        await eventually(lambda: stream.worker_id is not None)
        await ask_to_move(mesh, "r1", epoch, "w2" if stream.worker_id == "w1" else "w1")
        await eventually(lambda wanted=epoch + 1: stream.epoch == wanted and stream.worker_id is not None)
    assert not stream.losses and not stream.excluded
    assert len(mesh.first.assigned) == LOSSES_MAX + 1 and len(mesh.second.assigned) == LOSSES_MAX
    await speak(mesh.first, mesh.first.assigned[-1])
    assert text_of(await read(stream)) == TEXT


@pytest.mark.parametrize(("request_id", "epoch", "to"), [("r1", 1, "w2"), ("r1", 0, "w1"), ("unknown", 0, "w2")])
async def test_a_move_that_is_late_or_in_vain_changes_nothing(mesh: Mesh, request_id: str, epoch: int, to: str) -> None:
    stream = await mesh.owner.open(job())
    await ask_to_move(mesh, request_id, epoch, to)
    await speak(mesh.first, await assigned(mesh.first))
    assert text_of(await read(stream)) == TEXT
    assert not mesh.second.assigned and stream.epoch == 0


async def test_a_moved_request_whose_new_worker_refuses_goes_to_another_one(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    await speak(mesh.first, await assigned(mesh.first), until=3)
    await eventually(lambda: len(stream.tokens) == 3)
    mesh.scheduler.refuse = Unavailable("no worker")
    await ask_to_move(mesh, "r1", 0, "w2")
    await eventually(lambda: len(mesh.scheduler.submitted) >= 3)
    mesh.scheduler.refuse = None
    again = await assigned(mesh.first, 2)
    assert [one.move_to for one in mesh.scheduler.submitted[1:3]] == ["w2", ""], "the named worker is tried once"
    await speak(mesh.first, again)
    assert text_of(await read(stream)) == TEXT


async def test_a_worker_that_is_lost_during_a_move_loses_nothing(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    await speak(mesh.first, await assigned(mesh.first), until=4)
    await eventually(lambda: len(stream.tokens) == 4)
    await ask_to_move(mesh, "r1", 0, "w2")
    await speak(mesh.second, await assigned(mesh.second), until=6)
    await eventually(lambda: len(stream.tokens) == 6)
    await mesh.second.goodbye()
    resumed = await assigned(mesh.first, 2)
    assert (resumed.epoch, unpack_tokens(resumed.output), resumed.exclude_workers) == (2, TOKENS[:6], ("w2",))
    await speak(mesh.first, resumed)
    assert tokens_of(await read(stream)) == TOKENS


async def test_an_output_that_is_constrained_to_a_grammar_does_not_move_once_it_has_begun(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job(sampling={"structured": StructuredOutput(kind="json_object")}))
    await speak(mesh.first, await assigned(mesh.first), until=4)
    await eventually(lambda: len(stream.tokens) == 4)
    await ask_to_move(mesh, "r1", 0, "w2")
    await speak(mesh.first, msgspec.structs.replace(mesh.first.assigned[0], output=pack_tokens(TOKENS[:4])))
    assert text_of(await read(stream)) == TEXT
    assert not mesh.second.assigned
