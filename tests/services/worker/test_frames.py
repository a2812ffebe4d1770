"""Promise: frames are sent in order and fit the server; those that cannot be sent are dropped, reported and never pile up."""

from __future__ import annotations

import os
from hashlib import sha256
from io import BytesIO

import pytest

from motet.services.worker.frames import FrameSender
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import Overloaded
from motet.shared.objects import Objects, read_object
from motet.shared.provision import provision
from motet.shared.wire.stream import Picture, StreamItem, TokenFrame, TokenLogprobs
from tests.support import eventually


class Sender:
    def __init__(self, bus: Bus) -> None:
        self.lost: list[tuple[str, int]] = []
        self.frames = FrameSender(bus, "w1", lambda request_id, epoch: self.lost.append((request_id, epoch)))


@pytest.fixture
async def received(bus) -> list[TokenFrame]:
    frames: list[TokenFrame] = []
    await bus.subscribe(subjects.stream("g1"), TokenFrame, frames.append)
    return frames


def item(number: int, *, index: int = 0, logprobs: int = 0) -> StreamItem:
    one = StreamItem(f"request-{number}", 0, index, [number])
    if logprobs:
        one.logprobs = [TokenLogprobs(-1.0, list(range(logprobs)), [-2.5] * logprobs)]
    return one


async def test_a_steps_items_are_one_message_and_steps_keep_their_order(received, connect):
    sender = Sender(await connect("worker-w1"))
    for step in range(5):
        sender.frames.put("g1", step, [item(i, index=step) for i in range(3)])
    await sender.frames.flush(5)
    await eventually(lambda: len(received) == 5)
    assert [frame.step for frame in received] == list(range(5))
    assert all(len(frame.items) == 3 and frame.worker_id == "w1" for frame in received)


async def test_a_frame_larger_than_the_server_takes_is_split_without_losing_an_item(received, connect, monkeypatch):
    bus = await connect("worker-w1")
    monkeypatch.setattr(type(bus), "max_payload", property(lambda _: 4096 + 2000))
    sender = Sender(bus)
    sender.frames.put("g1", 7, [item(i, logprobs=20) for i in range(64)])
    await eventually(lambda: sum(len(frame.items) for frame in received) == 64)
    assert [one.tokens[0] for frame in received for one in frame.items] == list(range(64))
    assert len(received) > 4 and {frame.step for frame in received} == {7} and sender.lost == []


async def test_losses_of_a_long_outage_are_reported_once_the_bus_is_back(bus, connect, nats_server, received):
    worker = await connect("worker-w1")
    sender = Sender(worker)
    sender.frames.put("g1", 1, [item(1), item(2)])
    await eventually(lambda: len(received) == 1)
    worker.nc._max_pending_size = 1  # private: from now on the library has no room to wait
    nats_server.kill()
    await eventually(lambda: not worker.connected)
    for step in range(2, 100):
        sender.frames.put("g1", step, [item(1, index=step)])
    await sender.frames.flush(5)
    assert set(sender.lost) == {("request-1", 0)}
    await nats_server.start()
    await eventually(lambda: worker.connected and bus.connected, within_s=15)
    await bus.flush()
    sender.frames.put("g1", 100, [item(2, index=1)])
    await eventually(lambda: len(received) == 3)
    assert [one.request_id for one in received[1].items] == ["request-2"]
    [apology] = received[2].items
    assert (apology.request_id, apology.index, apology.finish) == ("request-1", 2, "error")
    assert apology.error.code == "worker_lost"


def drawn(data: bytes, *, preview: bool = False, state: bytes = b"") -> StreamItem:
    picture = Picture(data, "png", 64, 64, preview=preview, seed=1)
    return StreamItem("picture", 0, 30, [30], None if preview else "stop", picture=picture, state=state)


async def test_a_picture_larger_than_a_message_goes_through_the_object_store(bus, received, connect, monkeypatch):
    worker = await connect("worker-w1")
    await provision(bus, tenant_bytes=64 << 20, picture_ttl_s=3600.0)
    monkeypatch.setattr(type(worker), "max_payload", property(lambda _: 4096 + 2000))
    sender, data = Sender(worker), os.urandom(300_000)
    sender.frames.put("g1", 7, [item(1), drawn(data), item(2)])
    await sender.frames.flush(5)
    await eventually(lambda: sum(len(frame.items) for frame in received) == 3)
    stored = received[-1].items[0]
    assert (stored.request_id, stored.index, stored.finish) == ("picture", 30, "stop")
    assert stored.picture is not None and stored.picture.data == b"" and stored.picture.sha256 == sha256(data).digest()
    sink = BytesIO()
    await read_object(bus, await Objects.open(bus, subjects.PICTURES), stored.picture.object_name, sink)
    assert sink.getvalue() == data and sender.lost == []


async def test_a_picture_that_cannot_be_stored_is_told_to_be_lost(bus, received, connect, monkeypatch):
    worker = await connect("worker-w1")
    await provision(bus, tenant_bytes=64 << 20, picture_ttl_s=3600.0)
    monkeypatch.setattr(type(worker), "max_payload", property(lambda _: 4096 + 2000))

    async def full(*_: object, **__: object) -> None:
        raise Overloaded("the store is full")

    monkeypatch.setattr(Objects, "put", full)
    sender = Sender(worker)
    sender.frames.put("g1", 7, [drawn(b"x" * 10_000)])
    await eventually(lambda: received)
    [lost] = received[0].items
    assert (lost.index, lost.finish, lost.error.code) == (30, "error", "worker_lost") and "full" in lost.error.message


async def test_checkpoints_and_previews_that_do_not_fit_are_left_out_in_their_place(received, connect, monkeypatch):
    worker = await connect("worker-w1")
    monkeypatch.setattr(type(worker), "max_payload", property(lambda _: 4096 + 2000))
    sender = Sender(worker)
    checkpoint = StreamItem("picture", 0, 5, [5], state=b"x" * 10_000)
    sender.frames.put("g1", 7, [item(1), checkpoint])
    sender.frames.put("g1", 8, [drawn(b"x" * 10_000, preview=True)])
    sender.frames.put("g1", 9, [item(2)])
    await eventually(lambda: sum(len(frame.items) for frame in received) == 4)
    items = [one for frame in received for one in frame.items]
    assert [(one.tokens, one.state, one.picture) for one in items[1:3]] == [([5], b"", None), ([30], b"", None)]
