"""Promise: a streamed picture comes as OpenAI's events, its steps as comments, and a client that leaves cancels it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import openai
import pytest

from motet.shared.bus import Bus
from motet.shared.errors import BadRequest
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, assigned, cancelled
from tests.services.gateway.support_pictures import NATIVE_PX, drawing_mesh, file_of, image_of, paint, picture
from tests.support import eventually

Client = openai.AsyncOpenAI
PROMPT = "a red circle on sky"
SIZE = f"{NATIVE_PX}x{NATIVE_PX}"


@pytest.fixture
async def mesh(connect: Connect, bus: Bus, nats_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    async with drawing_mesh(connect, bus, nats_url, tmp_path) as mesh:
        yield mesh


async def test_openais_client_sees_previews_and_then_the_picture(mesh: Mesh, client: Client) -> None:
    more = {"seed": 3, "num_inference_steps": 2}
    events = await _streaming(mesh, client.images.generate(prompt=PROMPT, stream=True, partial_images=2, extra_body=more))
    request = mesh.first.assigned[0]
    assert image_of(request).previews == 2
    for step in range(2):
        await mesh.first.emit(request, step, [step], picture=picture(request, preview=True))
    await mesh.first.emit(request, 2, [2], "stop", picture=picture(request))
    seen = [event async for event in events]
    assert [event.type for event in seen] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in seen[:2]] == [0, 1]
    assert [base64.b64decode(event.b64_json) for event in seen] == [b"preview 3", b"preview 3", b"picture 3"]
    last = seen[-1]
    assert (last.output_format, last.size, last.usage.output_tokens, last.usage.input_tokens) == ("png", SIZE, 2, 5)


async def test_events_of_an_edit_are_named_after_it(mesh: Mesh, client: Client) -> None:
    file = ("a.png", file_of(), "image/png")
    events = await _streaming(mesh, client.images.edit(image=file, prompt=PROMPT, stream=True))
    await paint(mesh.first, mesh.first.assigned[0])
    assert [event.type async for event in events] == ["image_edit.completed"]


async def test_steps_are_comments_for_those_who_ask(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    for asked, n in ((True, 1), (True, 2), (False, 1)):
        count = len(mesh.first.assigned)
        headers = {"x-motet-progress": "1"} if asked else {}
        body = {"prompt": PROMPT, "stream": True, "num_inference_steps": 3, "n": n}
        async with http.post(f"{mesh.url}/v1/images/generations", json=body, headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            await assigned(mesh.first, count + n)
            for request in mesh.first.assigned[count:]:
                await paint(mesh.first, request)
            lines = (await answer.text()).split("\n\n")
        steps = [line for line in lines if line.startswith(": step")]
        if not asked:
            assert steps == []
        elif n == 1:
            assert steps[-1] == ": step 3/3" and set(steps) <= {f": step {i}/3" for i in range(1, 4)}
        else:
            assert {": step 3/3 of picture 0", ": step 3/3 of picture 1"} <= set(steps)


async def test_every_event_is_what_the_description_says(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{mesh.url}/openapi.json") as described:
        document = await described.json()
    schema = {"$ref": "#/components/schemas/ImageEvent", "components": document["components"]}
    body = {"prompt": PROMPT, "stream": True, "partial_images": 1, "num_inference_steps": 1}
    async with http.post(f"{mesh.url}/v1/images/generations", json=body) as answer:
        request = await assigned(mesh.first)
        await mesh.first.emit(request, 0, [0], picture=picture(request, preview=True))
        await mesh.first.emit(request, 1, [1], "stop", picture=picture(request))
        text = await answer.text()
    events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert len(events) == 3 and events[-1] == "[DONE]"
    for event in events[:-1]:
        jsonschema.Draft202012Validator(schema).validate(json.loads(event))


async def test_a_picture_that_fails_on_the_way_ends_the_stream_with_its_error(mesh: Mesh, client: Client) -> None:
    events = await _streaming(mesh, client.images.generate(prompt=PROMPT, stream=True))
    request = mesh.first.assigned[0]
    refusal = BadRequest("the latents are no numbers", param="adapters")
    await mesh.first.emit(request, 0, [], "error", error=refusal.info())
    with pytest.raises(openai.APIError, match="no numbers"):
        async for _ in events:
            pass


async def test_a_client_that_leaves_cancels_all_pictures(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    body = {"prompt": PROMPT, "stream": True, "n": 2}
    answer = await http.post(f"{mesh.url}/v1/images/generations", json=body)
    await assigned(mesh.first, 2)
    answer.close()
    for request in mesh.first.assigned:
        await cancelled(mesh.first, request.request_id)
    await eventually(lambda: not mesh.gateway.owner.inflight)


async def _streaming(mesh: Mesh, asking: Any) -> Any:
    """The stream, once the worker has the request."""
    task = asyncio.ensure_future(asking)
    await assigned(mesh.first)
    return await task
