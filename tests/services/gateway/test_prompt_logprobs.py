"""Promise: log-probabilities of a prompt come from a worker that has them, in vLLM's and OpenAI's forms, also after a loss."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from motet.shared.errors import WorkerLost
from motet.shared.wire.request import unpack_tokens
from motet.shared.wire.stream import TokenLogprobs
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import assigned
from tests.support import eventually

Client = openai.AsyncOpenAI
PROMPT = [40, 41, 42]
SCORES = [None, TokenLogprobs(-1.0, [7, 41], [-0.5, -1.0]), TokenLogprobs(-2.0, [8, 9], [-0.25, -0.5])]
DRAWN = [TokenLogprobs(-3.0, [50, 51], [-3.0, -4.0])]


async def test_vllms_field_tells_each_token_of_the_prompt(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(client.completions.create(model="demo", prompt=PROMPT, extra_body={"prompt_logprobs": 1}))
    request = await assigned(mesh.first)
    assert (request.sampling.prompt_logprobs, request.needs) == (1, {"prompt_logprobs": "prompt_logprobs"})
    await mesh.first.emit(request, 0, [50], "length", prompt_logprobs=SCORES)
    [choice] = (await asking).choices
    first, second, third = choice.prompt_logprobs  # type: ignore[attr-defined]
    assert first is None
    assert {token: (one["logprob"], one["rank"]) for token, one in second.items()} == {"41": (-1.0, 2), "7": (-0.5, 1)}
    assert {token: (one["logprob"], one["rank"]) for token, one in third.items()} == {"42": (-2.0, None), "8": (-0.25, 1)}
    assert second["41"]["decoded_token"] == mesh.gateway.owner.detokenizer.token_text(41)


async def test_a_chat_has_prompt_logprobs_beside_its_choices(mesh: Mesh, client: Client) -> None:
    user: Any = [{"role": "user", "content": "hello"}]
    asking = asyncio.ensure_future(
        client.chat.completions.create(model="demo", messages=user, n=2, extra_body={"prompt_logprobs": 0})
    )
    for count in (1, 2):
        request = await assigned(mesh.first, count)
        scores = [None, *[TokenLogprobs(-1.0, [], [])] * (len(unpack_tokens(request.prompt)) - 1)]
        await mesh.first.emit(request, 0, [50], "length", prompt_logprobs=scores)
    told = (await asking).prompt_logprobs  # type: ignore[attr-defined]
    assert told[0] is None
    assert len(told) == len(unpack_tokens(request.prompt))
    assert all(len(one) == 1 for one in told[1:])


async def test_echo_with_logprobs_scores_the_prompt_before_the_new_text(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(client.completions.create(model="demo", prompt=PROMPT, echo=True, logprobs=1))
    request = await assigned(mesh.first)
    assert (request.sampling.prompt_logprobs, request.needs) == (1, {"prompt_logprobs": "echo"})
    await mesh.first.emit(request, 0, [50], "length", prompt_logprobs=SCORES, logprobs=DRAWN)
    [choice] = (await asking).choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0, -3.0]
    assert choice.logprobs.top_logprobs is not None and choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.tokens == [mesh.gateway.owner.detokenizer.token_text(token) for token in [*PROMPT, 50]]
    assert len(choice.logprobs.text_offset or []) == 4


async def test_echo_without_new_tokens_scores_the_prompt_alone(mesh: Mesh, client: Client) -> None:
    creating = client.completions.create(model="demo", prompt=PROMPT, echo=True, max_tokens=0, logprobs=1)
    asking = asyncio.ensure_future(creating)
    request = await assigned(mesh.first)
    assert (request.sampling.max_tokens, request.sampling.prompt_logprobs) == (1, 1)
    await mesh.first.emit(request, 0, [50], "stop", prompt_logprobs=SCORES, logprobs=DRAWN)
    [choice] = (await asking).choices
    assert choice.logprobs is not None and choice.finish_reason == "length"
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0]
    assert choice.text == mesh.gateway.prompts.tokenizer.decode(PROMPT)


async def test_a_resumed_request_does_not_ask_again_for_known_prompt_logprobs(mesh: Mesh, client: Client) -> None:
    asking = asyncio.ensure_future(client.completions.create(model="demo", prompt=PROMPT, extra_body={"prompt_logprobs": 1}))
    request = await assigned(mesh.first)
    await mesh.first.emit(request, 0, [50], prompt_logprobs=SCORES)
    streams = mesh.gateway.owner._active  # private: a whole answer shows no token before its end
    await eventually(lambda: any(stream.tokens for stream in streams.values()))
    await mesh.first.emit(request, 99, [], "error", error=WorkerLost("gone").info())
    again = await assigned(mesh.second)
    assert (again.sampling.prompt_logprobs, again.needs, unpack_tokens(again.output)) == (None, {}, [50])
    await mesh.second.emit(again, 1, [51], "length")
    assert len((await asking).choices[0].prompt_logprobs) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ],
)
async def test_prompt_logprobs_are_not_streamed(mesh: Mesh, client: Client, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="demo", prompt=PROMPT, extra_body=more)
    assert refused.value.param == param


async def test_more_than_fit_in_a_message_are_refused(mesh: Mesh, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet.services.gateway.openai.prepare.SCORES_MAX", 5)
    with pytest.raises(openai.BadRequestError, match="more than the 5") as refused:
        await client.completions.create(model="demo", prompt=PROMPT, extra_body={"prompt_logprobs": 1})
    assert refused.value.param == "prompt_logprobs"
