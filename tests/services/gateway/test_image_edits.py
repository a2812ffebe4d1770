"""Promise: an edit's source picture and mask reach the worker at the drawn size, and an unusable one is a 4xx that names it."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from PIL import Image

from motet.shared.bus import Bus
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, assigned
from tests.services.gateway.support_pictures import NATIVE_PX, drawing_mesh, file_of, hole, image_of, paint
from tests.support_worker import FakeWorker

Client = openai.AsyncOpenAI
PROMPT = "a blue square on sand"


def _palette() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (NATIVE_PX, NATIVE_PX), (10, 200, 10)).quantize(4).save(file, "PNG")
    return file.getvalue()


PALETTE = _palette()


@pytest.fixture
async def mesh(connect: Connect, bus: Bus, nats_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    async with drawing_mesh(connect, bus, nats_url, tmp_path) as mesh:
        yield mesh


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


async def painted(worker: FakeWorker, count: int = 1) -> Any:
    request = await assigned(worker, count)
    await paint(worker, request)
    return request


async def refusal(http: aiohttp.ClientSession, mesh: Mesh, files: dict[str, bytes], **fields: str) -> tuple[int, str, str]:
    form = aiohttp.FormData()
    for name, value in ({"prompt": PROMPT} | fields).items():
        form.add_field(name, value)
    for name, data in files.items():
        form.add_field(name, io.BytesIO(data), filename=f"{name}.png", content_type="image/png")
    async with http.post(f"{mesh.url}/v1/images/edits", data=form) as answer:
        told = (await answer.json())["error"]
        return answer.status, told["param"], told["message"]


async def test_openais_client_edits_a_picture(mesh: Mesh, client: Client) -> None:
    source = ("a.png", file_of(size=(100, 60), colour=(200, 10, 10)), "image/png")
    weights = {"frame": 0.5, "sepia": -1.0}
    adapters = [{"name": name, "weight": weight} for name, weight in weights.items()]
    more = {"strength": 0.5, "num_inference_steps": 10, "seed": 5, "adapters": adapters}
    asking = asyncio.ensure_future(
        client.images.edit(image=source, prompt=PROMPT, n=2, output_format="jpeg", size="auto", extra_body=more)
    )
    await assigned(mesh.first, 2)
    request = mesh.first.assigned[0]
    asked = image_of(request)
    assert (asked.kind, asked.strength, asked.steps, asked.steps_run) == ("image", 0.5, 10, 5)
    assert (asked.width, asked.height, asked.format, request.sampling.max_tokens) == (96, 64, "jpeg", 7)
    assert [(one.ref.name, one.weight) for one in request.adapters] == list(weights.items())
    [image] = request.images
    shown = opened(image.data)
    assert (image.param, shown.format, shown.mode, shown.size) == ("image", "PNG", "RGB", (96, 64))
    assert shown.getpixel((50, 30)) == (200, 10, 10)
    for one in mesh.first.assigned:
        await paint(mesh.first, one)
    told = await asking
    assert [base64.b64decode(one.b64_json or "") for one in told.data or []] == [b"picture 5", b"picture 6"]
    assert told.usage is not None and told.usage.input_tokens_details.image_tokens == 2
    assert told.usage.output_tokens == 2 * 5 * 2  # pictures, steps, 96 x 64 pixels


async def test_transparent_pixels_of_a_mask_are_what_is_drawn_anew(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(
        client.images.edit(image=("a.png", file_of()), mask=("m.png", hole()), prompt=PROMPT, size="64x64")
    )
    request = await painted(mesh.first)
    asked = image_of(request)
    assert (asked.kind, asked.strength) == ("inpaint", 1.0)
    image, mask = request.images
    assert (image.param, mask.param, opened(image.data).size) == ("image", "mask", (64, 64))
    gray = opened(mask.data)
    assert (gray.mode, gray.size, gray.getpixel((5, 32)), gray.getpixel((60, 32))) == ("L", (64, 64), 255, 0)
    assert {gray.getpixel((x, 9)) for x in range(64)} == {0, 255}
    await asking


async def test_json_with_data_urls_is_the_same_as_a_form(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    body = {"prompt": PROMPT, "image": url_of(file_of()), "mask": url_of(hole()), "seed": 2}
    asking = asyncio.ensure_future(http.post(f"{mesh.url}/v1/images/edits", json=body))
    request = await painted(mesh.first)
    assert (image_of(request).kind, [image.param for image in request.images]) == ("inpaint", ["image", "mask"])
    answer = await asking
    assert answer.status == 200 and (await answer.json())["data"][0]["seed"] == 2


@pytest.mark.parametrize(
    ("file", "colour"),
    [
        (file_of("JPEG", colour=(10, 200, 10), quality=95), (10, 200, 10)),
        (file_of("JPEG", "L", colour=90, progressive=True), (90, 90, 90)),
        (file_of("WEBP", colour=(10, 200, 10), lossless=True), (10, 200, 10)),
        (file_of("PNG", "1", colour=1), (255, 255, 255)),
        (PALETTE, (10, 200, 10)),
        (file_of("PNG", "LA", colour=(90, 255)), (90, 90, 90)),
        (file_of("PNG", "RGBA", colour=(10, 20, 30, 0)), (255, 255, 255)),
    ],
    ids=["jpeg", "gray", "webp", "bits", "palette", "alpha", "transparent"],
)
async def test_pictures_of_every_served_kind_are_read(mesh: Mesh, client: Client, file: bytes, colour: Any) -> None:
    asking = asyncio.ensure_future(client.images.edit(image=("a", file), prompt=PROMPT))
    request = await painted(mesh.first)
    found = opened(request.images[0].data).getpixel((16, 16))
    assert isinstance(found, tuple)
    assert max(abs(a - b) for a, b in zip(found, colour, strict=True)) <= 4
    await asking


async def test_a_photo_is_turned_upright(mesh: Mesh, client: Client) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    photo = file_of("JPEG", size=(64, 32), exif=exif.tobytes())
    asking = asyncio.ensure_future(client.images.edit(image=("a.jpg", photo), prompt=PROMPT))
    assert opened((await painted(mesh.first)).images[0].data).size == (32, 64)
    await asking


@pytest.mark.parametrize(
    ("files", "fields", "status", "param", "words"),
    [
        ({"image": b"hello"}, {}, 400, "image", "no PNG"),
        ({"image": b""}, {}, 400, "image", "no PNG"),
        ({"image": file_of("GIF", "P")}, {}, 400, "image", "no PNG"),
        ({"image": file_of("JPEG", "CMYK")}, {}, 400, "image", "CMYK"),
        ({"image": file_of("PNG", "I;16")}, {}, 400, "image", "16 bits"),
        ({"image": file_of()[:60]}, {}, 400, "image", "cannot be decoded"),
        ({"image": file_of(), "mask": file_of()}, {}, 400, "mask", "no transparency"),
        ({"image": file_of(), "mask": file_of("PNG", "RGBA", colour=(0, 0, 0, 255))}, {}, 400, "mask", "no pixel"),
        ({"image": file_of(), "mask": hole((16, 16))}, {}, 400, "mask", "16x16"),
        ({"mask": hole()}, {}, 400, "image", "missing"),
        ({"image": file_of(), "picture": file_of()}, {}, 400, "picture", "no such file"),
        ({"image": file_of()}, {"strength": "0.01"}, 400, "strength", "none"),
        ({"image": file_of()}, {"strength": "2"}, 400, "strength", ""),
        ({"image": file_of()}, {"input_fidelity": "high"}, 400, "input_fidelity", "strength"),
        ({"image": file_of()}, {"n": "many"}, 400, "n", ""),
        ({"image": file_of()}, {"adapters": "sepia"}, 400, "adapters", ""),
        ({"image": file_of()}, {"size": "33x33"}, 400, "size", "32x32"),
    ],
    ids=str,
)
async def test_what_cannot_be_edited_is_refused_by_name(
    mesh: Mesh,
    http: aiohttp.ClientSession,
    files: dict[str, bytes],
    fields: dict[str, str],
    status: int,
    param: str,
    words: str,
) -> None:
    found, named, said = await refusal(http, mesh, files, **fields)
    assert (found, named) == (status, param), said
    assert words in said and not mesh.scheduler.submitted


async def test_pictures_beyond_the_limits_are_a_413_that_names_the_option(
    connect: Connect, bus: Bus, nats_url: str, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    options = {"image_source_max_bytes": 20_000, "image_source_max_pixels": 4096}
    noise = io.BytesIO()
    Image.effect_noise((60, 60), 90).convert("RGB").save(noise, "PNG")
    large, many = noise.getvalue(), file_of(size=(65, 64))
    async with drawing_mesh(connect, bus, nats_url, tmp_path, **options) as mesh:
        status, param, said = await refusal(http, mesh, {"image": large * 6})
        assert (status, param) == (413, "image") and "--image-source-max-bytes" in said
        status, param, said = await refusal(http, mesh, {"image": many})
        assert (status, param) == (413, "image") and "--image-source-max-pixels" in said
        status, _, said = await refusal(http, mesh, {"image": bytes(2 << 20)})
        assert status == 413 and "the limit is" in said
        assert not mesh.scheduler.submitted


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
async def test_an_animation_is_refused(mesh: Mesh, http: aiohttp.ClientSession, kind: str) -> None:
    film = file_of(kind, save_all=True, append_images=[Image.new("RGB", (NATIVE_PX, NATIVE_PX), "red")])
    status, param, said = await refusal(http, mesh, {"image": film})
    assert (status, param) == (400, "image") and "animated" in said


async def test_two_source_pictures_are_refused(mesh: Mesh, client: Client) -> None:
    with pytest.raises(openai.BadRequestError, match="one source picture") as refused:
        await client.images.edit(image=[("a.png", file_of()), ("b.png", file_of())], prompt=PROMPT)
    assert refused.value.param == "image"


async def test_a_form_that_cannot_be_read_is_a_400_and_no_line_of_the_log(
    mesh: Mesh, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    headers = {"content-type": "multipart/form-data; boundary=other"}
    async with http.post(f"{mesh.url}/v1/images/edits", data=b"--one\r\n", headers=headers) as answer:
        assert answer.status == 400 and "the form cannot be read" in (await answer.json())["error"]["message"]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("url", ["https://x.example/a.png", "data:image/png;base64,%%%", "data:text/plain;base64,aaaa"])
async def test_only_pictures_in_the_request_itself_are_read(mesh: Mesh, http: aiohttp.ClientSession, url: str) -> None:
    async with http.post(f"{mesh.url}/v1/images/edits", json={"prompt": PROMPT, "image": url}) as answer:
        told = await answer.json()
    assert (answer.status, told["error"]["param"]) == (400, "image")


async def test_an_edit_that_is_sent_again_with_its_key_gets_the_same_answer(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async def send(prompt: str = PROMPT) -> tuple[int, str | None, Any]:
        form = aiohttp.FormData()  # each has a boundary of its own
        form.add_field("prompt", prompt)
        form.add_field("image", file_of(), filename="a.png")
        async with http.post(f"{mesh.url}/v1/images/edits", data=form, headers={"Idempotency-Key": "one"}) as answer:
            return answer.status, answer.headers.get("idempotent-replayed"), await answer.json()

    first = asyncio.ensure_future(send())
    await painted(mesh.first)
    status, replayed, told = await send()
    assert (status, replayed, told) == (200, "true", (await first)[2])
    assert (await send("another"))[0] == 422
    assert len(mesh.scheduler.submitted) == 1
