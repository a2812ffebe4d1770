"""Promise: a stream that waits for its first token is not silent, and clients do not notice."""

from __future__ import annotations

import aiohttp
import openai
import pytest

from motet.services.gateway.edge import sse
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import assigned


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)


async def test_a_waiting_stream_gets_comments_and_then_its_tokens(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "stream": True}
    async with http.post(f"{mesh.url}/v1/completions", json=body) as answer:
        comments = [await answer.content.readuntil(b"\n\n") for _ in range(3)]
        request = await assigned(mesh.first)
        await mesh.first.emit(request, 0, mesh.gateway.prompts.tokenizer.encode("hello").ids[:1], finish="length")
        rest = await answer.read()
    assert comments == [sse.KEEP_ALIVE] * 3
    assert rest.endswith(sse.DONE) and b'"text":"hello"' in rest.replace(b'": "', b'":"')


async def test_an_openai_client_skips_the_comments(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="demo", prompt="x", max_tokens=1, stream=True)
    request = await assigned(mesh.first)
    await mesh.first.emit(request, 0, mesh.gateway.prompts.tokenizer.encode("hello").ids[:1], finish="length")
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello"
