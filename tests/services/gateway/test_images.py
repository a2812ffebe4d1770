"""Promise: images in a chat reach a worker that reads them, and an unusable image is a 4xx that names it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from motet.services.gateway.openai import conversation
from motet.services.gateway.openai.prompt import Prompts
from motet.services.gateway.openai.texts import REQUEST_BYTES
from motet.services.gateway.service import GatewayService
from motet.shared.errors import BadRequest, WorkerLost
from motet.shared.model import IMAGES_MAX
from motet.shared.wire.request import Image, unpack_tokens
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, FakeScheduler, assigned, running_gateway, start_workers
from tests.services.gateway.support_tokenizers import write_model_dir
from tests.support import eventually

PNG = b"\x89PNG\r\n\x1a\n and more"
JPEG = b"\xff\xd8\xff and more"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WHERE = "messages[0].content[1]"


def image(data: bytes = PNG, kind: str = "image/png", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"} | more}


def asking(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "what is "}, *parts]
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 4} | fields


@pytest.fixture
async def seeing(connect: Connect, nats_url: str, tmp_path: Path) -> AsyncIterator[GatewayService]:
    """The gateway of a model whose chat template has a place for images, before the workers `w1` and `w2`."""
    model = write_model_dir(tmp_path / "demo", chat_template=TEMPLATE)
    async with running_gateway(nats_url, tmp_path, model=str(model)) as gateway:
        yield gateway


@pytest.fixture
async def eyes(connect: Connect, bus: Any, seeing: GatewayService) -> Mesh:
    workers = await start_workers(connect, "w1", "w2")
    scheduler = FakeScheduler(await connect("scheduler"), ["w1", "w2"])
    await scheduler.start()
    await eventually(lambda: not seeing.not_ready())
    return Mesh(seeing, scheduler, workers, bus)


async def refused(mesh: Mesh, body: dict[str, Any]) -> tuple[int, str, str]:
    """The status, the named field, and the text of the refusal."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{mesh.url}/v1/chat/completions", json=body) as answer,
    ):
        error = (await answer.json())["error"]
        return answer.status, error["param"], error["message"]


async def test_an_image_goes_to_a_worker_with_its_place_in_the_prompt(eyes: Mesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{eyes.url}/v1", api_key="any", max_retries=0) as client:
        body = asking(image(), {"type": "text", "text": " and "}, image(JPEG, "image/jpeg", detail="low"))
        wanted = asyncio.ensure_future(client.chat.completions.create(**body))
        request = await assigned(eyes.first)
        assert request.needs == {"images": WHERE}
        assert request.images == [Image(data=PNG, param=WHERE), Image(data=JPEG, param="messages[0].content[3]")]
        text = eyes.gateway.prompts.tokenizer.decode(unpack_tokens(request.prompt), skip_special_tokens=False)
        assert "what is <image> and <image>" in text
        await eyes.first.emit(request, 0, [40], "stop", prompt_tokens=700)
        usage = (await wanted).usage
        assert usage is not None and (usage.prompt_tokens, usage.total_tokens) == (700, 701)


async def test_a_request_that_lost_its_worker_takes_its_images_along(eyes: Mesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{eyes.url}/v1", api_key="any", max_retries=0) as client:
        wanted = asyncio.ensure_future(client.chat.completions.create(**asking(image())))
        request = await assigned(eyes.first)
        await eyes.first.emit(request, 0, [40], prompt_tokens=700)
        await eyes.first.emit(request, 1, [], "error", error=WorkerLost("gone").info())
        again = await assigned(eyes.second)
        assert (again.epoch, again.images, unpack_tokens(again.output)) == (1, request.images, [40])
        await eyes.second.emit(again, 1, [41], "stop", prompt_tokens=700)
        usage = (await wanted).usage
        assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (700, 2)


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}, ".image_url.url", "not fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, ".image_url.url", "base64"),
        (image(b"<svg/>", "image/svg+xml"), ".image_url.url", "no PNG"),
        (image(fidelity=3), ".image_url.fidelity", "no such field"),
        (image(detail="huge"), ".image_url.detail", "auto"),
        ({"type": "image_url"}, ".image_url", "url"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "", "input_audio"),
    ],
    ids=["remote", "base64", "format", "unknown", "detail", "missing", "audio"],
)
async def test_what_is_no_image_is_refused_by_name(eyes: Mesh, part: dict[str, Any], param: str, words: str) -> None:
    status, named, said = await refused(eyes, asking(part))
    assert (status, named) == (400, WHERE + param)
    assert words in said and not eyes.scheduler.submitted


async def test_images_are_bounded_in_number_and_bytes(eyes: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    status, named, _ = await refused(eyes, asking(*[image()] * (IMAGES_MAX + 1)))
    assert (status, named) == (400, f"messages[0].content[{IMAGES_MAX + 1}]")
    monkeypatch.setattr(type(eyes.bus), "max_payload", property(lambda _: REQUEST_BYTES + 2000))
    status, named, said = await refused(eyes, asking(image(PNG + b"x" * 2000)))
    assert (status, named) == (413, WHERE)
    assert f"{len(PNG) + 2000} bytes" in said and "may have 2000" in said
    assert not eyes.scheduler.submitted


async def test_a_gateway_holds_no_more_bytes_of_images_than_it_may(eyes: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet.services.gateway.owner.owner.IMAGE_BYTES_MAX", 2 * len(PNG))
    async with openai.AsyncOpenAI(base_url=f"{eyes.url}/v1", api_key="any", max_retries=0) as client:
        first = asyncio.ensure_future(client.chat.completions.create(**asking(image(), image())))
        request = await assigned(eyes.first)
        status, _, said = await refused(eyes, asking(image()))
        assert status == 429 and "images" in said
        await eyes.first.emit(request, 0, [40], "stop")
        await first
        await eventually(lambda: not eyes.gateway.owner.inflight)
        eyes.say("done")
        await client.chat.completions.create(**asking(image()))


@pytest.mark.parametrize(("field", "value"), [("prompt_logprobs", 1), ("truncate_prompt_tokens", 5)])
async def test_what_does_not_go_with_images_is_refused_by_name(eyes: Mesh, field: str, value: int) -> None:
    status, named, said = await refused(eyes, asking(image(), **{field: value}))
    assert (status, named) == (400, field) and "images" in said


async def test_a_model_without_a_place_for_images_says_so(mesh: Mesh) -> None:
    status, named, said = await refused(mesh, asking(image()))
    assert (status, named) == (400, WHERE) and "no place for images" in said


async def test_tokenize_does_not_count_images(eyes: Mesh) -> None:
    async with aiohttp.ClientSession() as http:
        body = {"messages": asking(image())["messages"]}
        async with http.post(f"{eyes.url}/tokenize", json=body) as answer:
            assert answer.status == 400 and (await answer.json())["error"]["param"] == WHERE


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        (TEMPLATE, True),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", False),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}", False),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] | tojson }}\n{% endfor %}", False),
        ("{% for m in messages %}{{ m['content'].strip() }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}", False),
    ],
    ids=["parts", "printed", "trimmed", "as JSON", "text method", "texts alone"],
)
def test_the_chat_template_tells_whether_there_is_a_place_for_images(tmp_path: Path, template: str, takes: bool) -> None:
    assert Prompts(write_model_dir(tmp_path, chat_template=template)).templates.chosen().takes_images is takes


def test_texts_of_a_template_with_images_become_parts() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, *asking(image())["messages"]]
    told = conversation.parts(messages)
    assert [one["content"] for one in told] == [
        [{"type": "text", "text": "a"}],
        None,
        [{"type": "text", "text": "what is "}, {"type": "image"}],
    ]
    assert conversation.texts(messages)[2]["content"] == "what is "
    with pytest.raises(BadRequest, match=r"messages\[0\].content"):
        conversation.parts([{"role": "user", "content": None}])
