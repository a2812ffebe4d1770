"""Promise: vLLM under a worker reads the images of prompts as transformers does, with adapters, and continues after a death."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from motet.cli.client import ApiError, Client
from motet.services.registry.peft import convert
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.vllm_engine.core import VllmOptions
from motet.services.worker.vllm_engine.engine import VLLM, VllmEngine
from motet.services.worker.vllm_engine.peft_files import PeftAdapter, peft_adapter
from motet.shared.base_shapes import read_shapes
from motet.shared.errors import from_info
from motet.shared.wire.request import Image
from tests.engines.conftest import Driven
from tests.engines.support_mesh import core_of, vllm_stack, workers
from tests.services.worker.support_engine import request as plain_request
from tests.support import eventually

pytestmark = [
    pytest.mark.skipif(not os.environ.get("MOTET_TEST_VLLM"), reason="needs vLLM: make test-vllm"),
    pytest.mark.asyncio(loop_scope="module"),
]
LENGTH = 24
PROMPT = "user: what is <image> and?\nassistant: "


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engines import support_idefics

    return support_idefics.make_model(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def peft_folder(seeing_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engines import support_idefics

    return support_idefics.make_adapter(seeing_model, tmp_path_factory.mktemp("seeing-adapters") / "drawn")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(seeing_model: Path) -> AsyncIterator[Driven]:
    reports: list[Any] = []
    options = VllmOptions(
        model_dir=seeing_model,
        max_running=4,
        max_step_tokens=256,
        max_loras=2,
        max_lora_rank=16,
        max_model_len=256,
        dtype="float32",
        kv_bytes=16 << 20,
    )
    engine = VllmEngine(options, reports.append)
    await engine.start()
    yield Driven(engine, reports, [], resumes_sampled=False)
    await engine.stop()


@pytest.fixture(scope="module")
def adapter(seeing: Driven, seeing_model: Path, peft_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PeftAdapter:
    """The folder that the worker makes of the registry's blob."""
    assert isinstance(seeing.engine, VllmEngine)
    config, file = (peft_folder / "adapter_config.json").read_bytes(), peft_folder / "adapter_model.safetensors"
    with file.open("rb") as weights:
        converted = convert(config, weights, file.stat().st_size, read_shapes(seeing_model), max_rank=16, max_bytes=1 << 24)
    blobs = tmp_path_factory.mktemp("seeing-blobs")
    (blobs / "blob").write_bytes(converted.blob)
    return peft_adapter(blobs / "blob", blobs, converted.digest, seeing.engine.core.adapter_prefix)


def asks(seeing_model: Path, name: str, *images: bytes, prompt: str = PROMPT, **given: Any) -> EngineRequest:
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(seeing_model / "tokenizer.json")).encode(prompt).ids
    request = plain_request(name, tokens, max_tokens=LENGTH, **given)
    shown = [Image(data=data, param=f"messages[0].content[{at}]") for at, data in enumerate(images)]
    return replace(request, images=shown)


def expected(seeing_model: Path, *images: bytes, prompt: str = PROMPT, adapter: Path | None = None) -> tuple[list[int], int]:
    from tests.engines import support_idefics

    return support_idefics.said_by_transformers(seeing_model, prompt, list(images), LENGTH, adapter)


def picture(seed: int, **given: Any) -> bytes:
    from tests.engines import support_idefics

    return support_idefics.picture(seed, **given)


async def test_the_model_sees_the_image(seeing: Driven, seeing_model: Path) -> None:
    assert seeing.engine.serves == VLLM | {"images"}
    images = [picture(1), picture(2, kind="JPEG"), picture(3, mode="RGBA")]
    for number, data in enumerate(images):
        seeing.engine.add(asks(seeing_model, f"one-{number}", data))
    both = "user: <image> and <image>\nassistant: "
    seeing.engine.add(asks(seeing_model, "both", *images[:2], prompt=both))
    for number, data in enumerate(images[:2]):
        tokens, size = expected(seeing_model, data)
        assert await seeing.tokens(asks(seeing_model, f"one-{number}")) == tokens
        assert seeing.items(f"one-{number}")[0].prompt_tokens == size
    tokens, size = expected(seeing_model, *images[:2], prompt=both)
    assert await seeing.tokens(asks(seeing_model, "both")) == tokens
    assert seeing.items("both")[0].prompt_tokens == size
    assert (await seeing.ended(asks(seeing_model, "one-2"))).finish == "length"  # on white, which transformers does not add


async def test_the_prefix_cache_distinguishes_images(seeing: Driven, seeing_model: Path) -> None:
    long = "user: " + "a b c d " * 10 + "<image> and?\nassistant: "
    for turn in range(2):
        for seed in (4, 5):
            one = asks(seeing_model, f"turn-{turn}-{seed}", picture(seed), prompt=long)
            seeing.engine.add(one)
            assert await seeing.tokens(one) == expected(seeing_model, picture(seed), prompt=long)[0]


async def test_a_resumed_request_continues_as_it_would_have(seeing: Driven, seeing_model: Path) -> None:
    seeing.engine.add(whole := asks(seeing_model, "whole", picture(1)))
    tokens = await seeing.tokens(whole)
    resumed = asks(seeing_model, "resumed", picture(1), output=tokens[:9], epoch=1)
    seeing.engine.add(resumed)
    assert await seeing.tokens(resumed) == tokens[9:]


async def test_an_adapter_of_the_language_model_is_used(
    seeing: Driven, seeing_model: Path, adapter: PeftAdapter, peft_folder: Path
) -> None:
    seeing.engine.add(without := asks(seeing_model, "without", picture(1)))
    seeing.engine.add(one := asks(seeing_model, "adapted", picture(1), adapter=adapter))
    wanted, _ = expected(seeing_model, picture(1), adapter=peft_folder)
    assert await seeing.tokens(one) == wanted != await seeing.tokens(without)


async def test_what_cannot_be_read_ends_its_request_alone(
    seeing: Driven, seeing_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from motet.services.worker.vllm_engine import images

    monkeypatch.setattr(images, "PIXELS_MAX", 80 * 60)
    wrong = {
        "broken": asks(seeing_model, "broken", b"\x89PNG\r\n\x1a\n and nothing"),
        "cut": asks(seeing_model, "cut", picture(1)[:200]),
        "large": asks(seeing_model, "large", picture(1, size=(81, 60))),
        "one more": asks(seeing_model, "one more", picture(1), picture(2)),
    }
    right = asks(seeing_model, "right", picture(1))
    stray = asks(seeing_model, "stray", picture(1), prompt="user: <image> <image>\nassistant: ")  # the text has one of its own
    for one in (*wrong.values(), stray, right):
        seeing.engine.add(one)
    for name, one in wrong.items():
        error = (await seeing.ended(one)).error
        assert error is not None, name
        assert (from_info(error).status, error.param) == (400, "messages[0].content[0]"), (name, error)
    assert [(await seeing.ended(one)).finish for one in (stray, right)] == ["length"] * 2


async def test_a_prompt_that_its_images_make_too_long_is_refused(seeing: Driven, seeing_model: Path) -> None:
    prompt = "user: " + "abc" * 50 + "<image>" * 16
    one = asks(seeing_model, "long", *[picture(1)] * 16, prompt=prompt)
    assert one.prompt_tokens < 256, "without its images it would fit"
    seeing.engine.add(one)
    error = (await seeing.ended(one)).error
    assert error is not None and error.param == "messages[0].content[0]" and "256" in error.message


async def test_a_mesh_takes_images_from_data_urls_and_keeps_them_through_a_death(
    seeing_model: Path, peft_folder: Path, tmp_path: Path
) -> None:
    url = f"data:image/png;base64,{base64.b64encode(picture(1)).decode()}"

    def body(url: str, **more: Any) -> dict[str, Any]:
        content = [{"type": "text", "text": "what is "}, {"type": "image_url", "image_url": {"url": url}}]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": " and?"}]}]
        return {"messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": 200} | more

    with vllm_stack(tmp_path, seeing_model, "", adapters=peft_folder.parent) as stack:
        async with Client(stack.facts().urls[0], timeout_s=240.0) as client:
            [worker] = await workers(client)
            assert "images" in worker["capabilities"]
            calm = await client.call("POST", "/v1/chat/completions", json=body(url, return_token_ids=True))
            tokens, size = expected(seeing_model, picture(1))
            assert calm["choices"][0]["token_ids"][:LENGTH] == tokens
            assert calm["usage"]["prompt_tokens"] == size
            adapted = body(url, return_token_ids=True, model=peft_folder.name)
            told = await client.call("POST", "/v1/chat/completions", json=adapted)
            assert told["choices"][0]["token_ids"][:LENGTH] == expected(seeing_model, picture(1), adapter=peft_folder)[0]

            seen: list[int] = []
            async for event in client.events("/v1/chat/completions", body(url, return_token_ids=True)):
                for choice in event["choices"]:
                    before, seen = len(seen), seen + (choice.get("token_ids") or [])
                    if before < 20 <= len(seen):
                        [core] = core_of(stack.pid("worker-1"))
                        os.kill(core, signal.SIGKILL)
            assert seen == calm["choices"][0]["token_ids"]

            with pytest.raises(ApiError, match="not fetched") as refused:
                await client.call("POST", "/v1/chat/completions", json=body("https://x.example/a.png"))
            assert refused.value.status == 400
            broken = f"data:image/png;base64,{base64.b64encode(picture(1)[:200]).decode()}"
            with pytest.raises(ApiError, match=r"messages\[0\].content\[1\]") as refused:
                await client.call("POST", "/v1/chat/completions", json=body(broken))
            assert refused.value.status == 400
            assert await eventually(lambda: workers(client), within_s=60)
