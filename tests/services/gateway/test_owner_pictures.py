"""Promise: steps, previews and the picture come once and in order, and another worker goes on from the last checkpoint."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from motet.services.gateway import metrics
from motet.services.gateway.owner import owner
from motet.services.gateway.owner.stream import Job, Stream
from motet.shared import subjects
from motet.shared.clock import now_s
from motet.shared.errors import MotetError
from motet.shared.model import AdapterRef, ImageParams, SamplingParams, Weighted
from motet.shared.objects import Objects
from motet.shared.provision import provision
from motet.shared.wire.request import GenerateRequest, pack_tokens, unpack_tokens
from motet.shared.wire.stream import Picture, StreamItem, TokenFrame
from tests.services.gateway.support import assigned
from tests.services.gateway.test_owner import Mesh, mesh, read, tokens_of  # noqa: F401  # the fixture
from tests.support import eventually, reading
from tests.support_worker import FakeWorker

STEPS = 5
IMAGE = ImageParams(width=64, height=64, steps=STEPS, previews=1)
STYLE = AdapterRef(name="sepia", digest="d1", rank=8, size_bytes=100)


def job(**changed: Any) -> Job:
    sampling = SamplingParams(max_tokens=STEPS + 2, seed=3)
    facts = {"image": IMAGE, "needs": {"draws": "model"}, "adapters": (Weighted(STYLE, 0.8),)} | changed
    return Job(request_id="r1", model="demo", prompt=pack_tokens([5, 6]), sampling=sampling, **facts)


def picture(data: bytes = b"png", *, preview: bool = False, **more: Any) -> Picture:
    return Picture(data, "png", 64, 64, preview=preview, seed=3, **more)


async def tell(worker: FakeWorker, request: GenerateRequest, index: int, **more: Any) -> None:
    """One step of the request, or its picture."""
    item = StreamItem(request.request_id, request.epoch, index, [index], **more)
    await worker.bus.publish(subjects.stream(request.gateway_id), TokenFrame(worker.worker_id, index, [item]))


async def draw(worker: FakeWorker, request: GenerateRequest, until: int = STEPS) -> None:
    for index in range(request.output_tokens, until):
        await tell(worker, request, index)


async def test_steps_previews_and_the_picture_come_in_their_order(mesh: Mesh) -> None:  # noqa: F811
    stream = await mesh.owner.open(job())
    request = await assigned(mesh.first)
    await tell(mesh.first, request, 0)
    await tell(mesh.first, request, 1, picture=picture(b"early", preview=True))
    await tell(mesh.first, request, 2, picture=picture(b"one too many", preview=True))
    await eventually(lambda: len(stream.tokens) == 3)
    assert [one.data for one in stream.previews] == [b"early"] and stream.picture is None
    await tell(mesh.first, request, 3)
    await tell(mesh.first, request, 4)
    await tell(mesh.first, request, STEPS, finish="stop", picture=picture())
    deltas = await read(stream)
    assert tokens_of(deltas) == list(range(STEPS + 1)) and "".join(delta.text for delta in deltas) == ""
    assert (stream.finish, stream.picture) == ("stop", picture())


def parts() -> dict[str, tuple[float, float]]:
    """(how many, seconds) of each part of pictures."""
    samples = [one for family in metrics.IMAGE_S.collect() for one in family.samples]
    of = {(one.name.rpartition("_")[2], one.labels["part"]): one.value for one in samples if "le" not in one.labels}
    return {part: (of.get(("count", part), 0), of.get(("sum", part), 0)) for part in ("queue", "denoise", "decode")}


async def test_ended_pictures_are_counted_and_the_time_of_drawn_ones_is_told_by_part(mesh: Mesh) -> None:  # noqa: F811
    before, outcomes = parts(), [metrics.PICTURES.labels("text", outcome) for outcome in ("stop", "cancelled")]
    counts = [reading(one) for one in outcomes]
    stream = await mesh.owner.open(job())
    request = await assigned(mesh.first)
    await tell(mesh.first, request, 0)
    await asyncio.sleep(0.05)  # time: of the denoising steps
    for index in range(1, STEPS):
        await tell(mesh.first, request, index)
    await tell(mesh.first, request, STEPS, finish="stop", picture=picture())
    await read(stream)
    times = {part: (number - before[part][0], seconds - before[part][1]) for part, (number, seconds) in parts().items()}
    assert {number for number, _ in times.values()} == {1} and all(seconds >= 0 for _, seconds in times.values())
    assert times["denoise"][1] > 0.04 and sum(seconds for _, seconds in times.values()) <= now_s() - stream.begun_s
    cancelled = await mesh.owner.open(job())
    await tell(mesh.first, await assigned(mesh.first), 0)
    cancelled.cancel()
    await eventually(lambda: [reading(one) for one in outcomes] == [count + 1 for count in counts])
    assert parts()["queue"][0] == before["queue"][0] + 1, "a cancelled picture tells no times"


async def test_a_caller_that_waits_for_the_end_is_not_slow(mesh: Mesh) -> None:  # noqa: F811
    long = msgspec.structs.replace(IMAGE, steps=200)
    stream = await mesh.owner.open(job(image=long))
    request = await assigned(mesh.first)
    await draw(mesh.first, request, 200)
    await tell(mesh.first, request, 200, finish="stop", picture=picture(b"x" * 5000))
    await eventually(lambda: stream.finish is not None)
    assert stream.unread_bytes > 5000
    (delta,) = stream.take()
    assert delta.tokens == list(range(201)) and stream.unread_bytes == 0


async def test_another_worker_goes_on_from_the_last_checkpoint(mesh: Mesh) -> None:  # noqa: F811
    stream = await mesh.owner.open(job())
    request = await assigned(mesh.first)
    assert request.image == IMAGE and request.weighted == (Weighted(STYLE, 0.8),)
    await tell(mesh.first, request, 0)
    await tell(mesh.first, request, 1, state=b"after two")
    await tell(mesh.first, request, 2)
    await eventually(lambda: len(stream.tokens) == 3)
    await mesh.first.goodbye()
    resumed = await assigned(mesh.second)
    assert resumed.image == msgspec.structs.replace(IMAGE, state=b"after two", state_step=2)
    assert unpack_tokens(resumed.output) == [0, 1, 2]
    await draw(mesh.second, resumed)
    await tell(mesh.second, resumed, STEPS, finish="stop", picture=picture())
    assert tokens_of(await read(stream)) == list(range(STEPS + 1)) and stream.picture == picture()


async def test_a_picture_whose_last_item_was_lost_is_drawn_again(mesh: Mesh) -> None:  # noqa: F811
    stream = await mesh.owner.open(job())
    await draw(mesh.first, await assigned(mesh.first))
    await eventually(lambda: len(stream.tokens) == STEPS)
    await mesh.first.goodbye()
    resumed = await assigned(mesh.second)
    await tell(mesh.second, resumed, STEPS, finish="stop", picture=picture())
    await read(stream)
    assert stream.picture == picture()


async def test_a_checkpoint_for_which_a_message_has_no_room_is_left_out(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(owner, "ROOM_BYTES", mesh.bus.max_payload - 5)
    stream = await mesh.owner.open(job())
    await tell(mesh.first, await assigned(mesh.first), 0, state=b"x" * 6)
    await eventually(lambda: stream.tokens)
    await mesh.first.goodbye()
    assert (await assigned(mesh.second)).image == IMAGE


async def test_checkpoints_of_all_pictures_are_bounded(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(owner, "STATE_BYTES_MAX", 10)
    stream = await mesh.owner.open(job())
    await tell(mesh.first, await assigned(mesh.first), 0, state=b"x" * 11)
    await eventually(lambda: stream.tokens and stream.drawing is not None and not stream.drawing.state)


async def pictures_of(mesh: Mesh) -> Objects:  # noqa: F811
    await provision(mesh.bus, tenant_bytes=64 << 20, picture_ttl_s=3600.0)
    return await Objects.open(mesh.bus, subjects.PICTURES)


async def stored(mesh: Mesh, data: bytes, claimed: bytes | None = None) -> Picture:  # noqa: F811
    store = await pictures_of(mesh)
    await store.put("name", data)
    return picture(b"", object_name="name", sha256=sha256(data if claimed is None else claimed).digest())


async def test_a_large_picture_is_read_from_the_object_store_and_deleted_there(mesh: Mesh) -> None:  # noqa: F811
    stream, data = await mesh.owner.open(job()), b"x" * 400_000
    request = await assigned(mesh.first)
    await draw(mesh.first, request)
    await tell(mesh.first, request, STEPS, finish="stop", picture=await stored(mesh, data))
    await read(stream)
    assert stream.picture == picture(data)
    store = await pictures_of(mesh)

    async def gone() -> bool:
        return await store.info("name") is None

    await eventually(gone)


@pytest.mark.parametrize("trouble", ["missing", "wrong"])
async def test_a_large_picture_that_cannot_be_read_is_drawn_again_elsewhere(mesh: Mesh, trouble: str) -> None:  # noqa: F811
    stream = await mesh.owner.open(job())
    request = await assigned(mesh.first)
    await draw(mesh.first, request)
    lost = await stored(mesh, b"x" * 1000, b"y")
    if trouble == "missing":
        lost = msgspec.structs.replace(lost, object_name="other")
    await tell(mesh.first, request, STEPS, finish="stop", picture=lost)
    await eventually(lambda: mesh.second.assigned, within_s=10)
    await tell(mesh.second, mesh.second.assigned[0], STEPS, finish="stop", picture=picture())
    await read(stream)
    assert stream.picture == picture()


async def test_a_worker_that_ends_without_a_picture_is_an_error(mesh: Mesh) -> None:  # noqa: F811
    stream: Stream = await mesh.owner.open(job())
    request = await assigned(mesh.first)
    await draw(mesh.first, request)
    await tell(mesh.first, request, STEPS, finish="stop")
    with pytest.raises(MotetError, match="without a picture"):
        await read(stream)
