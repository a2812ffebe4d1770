"""The Owner keeps a request whole: no token twice, none lost, whatever workers, schedulers and frames do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motet.services.gateway.detokenize import Detokenizer
from motet.services.gateway.fleet import Fleet
from motet.services.gateway.owner import LOSSES_MAX, Owner
from motet.services.gateway.stream import Delta, Job, SlowReader, Stream
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import BadRequest, DeadlineExceeded, MotetError, Overloaded, Unavailable, WorkerLost
from motet.shared.messages import GenerateRequest, Outcome, StreamItem, TokenFrame, unpack_tokens
from motet.shared.model import SamplingParams
from tests.services.gateway.support import Connect, FakeScheduler, assigned, cancelled, start_workers
from tests.services.gateway.support_tokenizers import byte_level
from tests.support import eventually
from tests.support_worker import FakeWorker

TOKENIZER = byte_level()
TEXT = "hello world, größere 🎉 hello"
TOKENS = TOKENIZER.encode(TEXT).ids


def job(request_id: str = "r1", **changed: Any) -> Job:
    sampling = SamplingParams(max_tokens=changed.pop("max_tokens", 200), **changed.pop("sampling", {}))
    return Job(**({"request_id": request_id, "model": "demo", "prompt": [5, 6, 7], "sampling": sampling} | changed))


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
async def mesh(connect: Connect, bus: Bus) -> AsyncIterator[Mesh]:
    workers = await start_workers(connect, "w1", "w2")
    scheduler = FakeScheduler(await connect("scheduler"), ["w1", "w2"])
    await scheduler.start()
    gateway_bus = await connect("g1")
    fleet = Fleet(gateway_bus, "demo")
    await fleet.start()
    owner = Owner(
        gateway_bus, fleet, Detokenizer(TOKENIZER), gateway_id="g1", base_model="demo", max_inflight=64, stream_buffer_tokens=64
    )
    await owner.start()
    await eventually(lambda: len(fleet.workers()) == 2 and owner._leases.alive("w1") and owner._leases.alive("w2"))
    yield Mesh(owner, scheduler, workers, bus)
    await owner.stop()


async def read(stream: Stream) -> list[Delta]:
    return [delta async for delta in stream]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


async def speak(worker: FakeWorker, request: GenerateRequest, *, until: int | None = None) -> None:
    """Emit TOKENS one by one from where the request stands, to the end or up to index `until`."""
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


async def test_a_worker_that_vanishes_without_a_word_is_noticed_by_its_lease(mesh: Mesh) -> None:
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


async def test_frames_of_an_older_epoch_or_another_worker_are_not_believed_and_stopped(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job())
    request = await assigned(mesh.first)
    await speak(mesh.first, request, until=2)
    await eventually(lambda: len(stream.tokens) == 2)
    await mesh.second.emit(request, 2, [0])
    await cancelled(mesh.second, "r1", epoch=0)
    mesh.owner._resume(stream, "test")
    resumed = await assigned(mesh.first, 2)
    await mesh.first.emit(request, 2, [0])
    await cancelled(mesh.first, "r1", epoch=0)
    await speak(mesh.first, resumed)
    assert tokens_of(await read(stream)) == TOKENS


async def test_frames_for_a_request_nobody_owns_are_answered_with_a_cancel_at_most_once_a_second(mesh: Mesh) -> None:
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


async def test_a_request_whose_last_word_was_lost_is_finished_here(mesh: Mesh) -> None:
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


async def test_a_part_that_is_away_for_a_while_is_waited_for(mesh: Mesh) -> None:
    """A worker that cannot fetch an adapter now is no lost worker: accepted requests outlive the object store's absence."""
    mesh.scheduler.workers = ["w1"]
    stream = await mesh.owner.open(job())
    for count in range(1, LOSSES_MAX + 3):
        request = await assigned(mesh.first, count)
        mesh.scheduler.workers = ["w1"]
        await mesh.first.emit(request, 0, [], "error", error=Unavailable("the object store is away").info())
    await speak(mesh.first, await assigned(mesh.first, LOSSES_MAX + 3))
    assert tokens_of(await read(stream)) == TOKENS


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


async def test_the_token_that_ended_it_is_counted_and_not_shown(mesh: Mesh) -> None:
    stream = await mesh.owner.open(job(sampling={"stop_token_ids": (99,)}))
    await mesh.first.emit(await assigned(mesh.first), 0, [*TOKENS[:2], 99], "stop", stop_token=99)
    deltas = await read(stream)
    assert (tokens_of(deltas), deltas[-1].stop_reason) == (TOKENS[:2], 99)
    assert len(stream.tokens) == 3


async def test_a_caller_that_does_not_read_loses_its_request_and_nobody_elses(mesh: Mesh) -> None:
    slow, quick = await mesh.owner.open(job("slow")), await mesh.owner.open(job("quick"))
    for_slow, for_quick = await assigned(mesh.first), await assigned(mesh.first, 2)
    for index in range(70):  # the buffer holds 64
        await mesh.first.emit(for_slow, index, [TOKENS[0]])
    await cancelled(mesh.first, "slow")
    await speak(mesh.first, for_quick)
    assert tokens_of(await read(quick)) == TOKENS
    with pytest.raises(SlowReader):
        await read(slow)


async def test_beyond_its_limit_the_owner_refuses_at_once(mesh: Mesh) -> None:
    mesh.owner._max_inflight = 1
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
    (await mesh.owner.open(job("shorter", prompt=[5]))).cancel()
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
