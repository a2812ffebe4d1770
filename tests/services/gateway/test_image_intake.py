"""Promise: a durable request for pictures gets one result, which names stored files and has no picture in it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from motet.shared.bus import Bus
from motet.shared.errors import WorkerLost
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, assigned, running_gateway
from tests.services.gateway.support_pictures import drawing_mesh, file_of, hole, image_of, paint
from tests.services.gateway.test_intake import SCHEMAS, publish, queue_is_empty, result
from tests.support import eventually

DATA = bytes(range(256)) * 2000
TENANTS = ("acme",)


@pytest.fixture
async def mesh(connect: Connect, bus: Bus, nats_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    async with drawing_mesh(connect, bus, nats_url, tmp_path) as mesh:
        yield mesh


def drawing(**fields: Any) -> dict[str, Any]:
    body = {"kind": "image", "model": "sepia", "prompt": "a red circle on sky", "num_inference_steps": 2} | fields
    jsonschema.validate(body, json.loads((SCHEMAS / "request.schema.json").read_text()))
    return body


async def test_a_result_names_files_that_are_served_over_http(mesh: Mesh, bus: Bus, http: aiohttp.ClientSession) -> None:
    await publish(bus, drawing(n=2, seed=8, output_format="jpeg"), message_id="one", tenant="default")
    await assigned(mesh.first, 2)
    for request in mesh.first.assigned:
        await paint(mesh.first, request, data=DATA + bytes([request.sampling.seed]))
    told = await result(bus, "one", tenant="default")
    assert told["status"] == "ok" and told["made_by"]["adapter"].startswith("sepia@1:")
    response = told["response"]
    assert (response["output_format"], response["size"]) == ("jpeg", "32x32")
    assert [one["seed"] for one in response["data"]] == [8, 9]
    for one in response["data"]:
        data = DATA + bytes([one["seed"]])
        assert (one["bytes"], one["sha256"], one["type"]) == (len(data), hashlib.sha256(data).hexdigest(), "image/jpeg")
        assert one["object"] == f"default.{one['path'].rsplit('/', 1)[1]}"
        async with http.get(mesh.url + one["path"]) as got:
            assert (got.status, got.headers["content-type"], await got.read()) == (200, "image/jpeg", data)
    await queue_is_empty(bus, tenant="default")


async def test_an_edit_comes_with_its_pictures_as_data_urls(mesh: Mesh, bus: Bus) -> None:
    urls = {
        name: "data:image/png;base64," + base64.b64encode(data).decode()
        for name, data in (("image", file_of()), ("mask", hole()))
    }
    await publish(bus, drawing(**urls), message_id="edit", tenant="default")
    request = await assigned(mesh.first)
    assert (image_of(request).kind, len(request.images)) == ("inpaint", 2)
    await paint(mesh.first, request)
    assert (await result(bus, "edit", tenant="default"))["status"] == "ok"


async def test_a_request_published_twice_is_drawn_once_and_survives_a_lost_worker(mesh: Mesh, bus: Bus) -> None:
    for _ in range(2):
        await publish(bus, drawing(request_id="same"), message_id="", tenant="default")
    request = await assigned(mesh.first)
    await mesh.first.emit(request, 0, [0])
    await mesh.first.emit(request, 1, [], "error", error=WorkerLost("gone").info())
    again = await assigned(mesh.second)
    await paint(mesh.second, again, begun=1)
    assert (await result(bus, "same", tenant="default"))["status"] == "ok"
    for worker in mesh.workers:  # the second delivery may have begun before the result was there
        for other in worker.assigned:
            if other.request_id not in (request.request_id, again.request_id):
                await paint(worker, other)
    await queue_is_empty(bus, tenant="default")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kind": "video"}, "kind"),
        ({"stream": True}, "stream"),
        ({"response_format": "b64_json"}, "response_format"),
        ({"size": "33x33"}, "size"),
        ({"adapters": [{"name": "sepia"}]}, "adapters[0].name"),
        ({"kind": None}, "num_inference_steps"),
        ({"kind": "text", "num_inference_steps": None, "max_tokens": 5}, "num_inference_steps"),
    ],
    ids=str,
)
async def test_what_cannot_be_drawn_is_an_error_result_that_names_the_field(
    mesh: Mesh, bus: Bus, fields: dict[str, Any], param: str
) -> None:
    await publish(bus, drawing() | fields, message_id="bad", tenant="default")
    told = await result(bus, "bad", tenant="default")
    assert (told["status"], told["error"]["param"]) == ("error", param)
    assert not mesh.scheduler.submitted


async def test_a_text_mesh_draws_nothing(bus: Bus, nats_url: str, tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running_gateway(nats_url, tmp_path) as gateway:
        url = f"http://127.0.0.1:{gateway.port}/v1/images"
        for path in ("generations", "edits"):
            async with http.post(f"{url}/{path}", json={"prompt": "x"}) as answer:
                told = (await answer.json())["error"]
            assert (answer.status, told["param"]) == (400, "model") and "docs/images.md" in told["message"]
        async with http.get(f"{url}/files/url-{'0' * 32}.png") as got:
            assert got.status == 400
        await publish(bus, drawing(model="demo"), message_id="drawn", tenant="default")
        assert (await result(bus, "drawn", tenant="default"))["error"]["param"] == "model"


async def test_a_text_published_to_a_mesh_that_draws_is_told_so(mesh: Mesh, bus: Bus) -> None:
    await publish(bus, {"model": "demo", "prompt": "once"}, message_id="text", tenant="default")
    assert "draws images" in (await result(bus, "text", tenant="default"))["error"]["message"]
    await eventually(lambda: not mesh.gateway.owner.inflight)
