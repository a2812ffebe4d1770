"""Unmodified openai-python against a real gateway: whole and streamed answers, both endpoints."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest

from motet.cli.nats_server import NatsServer
from motet.shared.errors import MotetError
from motet.shared.wire.request import unpack_tokens
from motet.shared.wire.stream import TokenLogprobs
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import assigned, cancelled
from tests.support import eventually

Client = openai.AsyncOpenAI
USER = [{"role": "user", "content": "hello"}]
TEXT = "größere 🎉 hello world"


async def test_a_chat_completion_comes_whole(mesh: Mesh, client: Client) -> None:
    mesh.say(TEXT)
    answer = await client.chat.completions.create(model="demo", messages=USER)
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("chat.completion", "demo", "length")
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", TEXT)
    request = await assigned(mesh.first)
    tokens = len(mesh.gateway.prompts.tokenizer.encode(TEXT).ids)
    prompt = len(unpack_tokens(request.prompt))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, tokens)
    assert request.sampling.max_tokens == 256 - prompt  # a chat may fill the rest of the context
    assert request.adapter is None


async def test_a_chat_completion_streams_role_text_finish_and_usage(mesh: Mesh, client: Client) -> None:
    mesh.say(TEXT)
    stream = await client.chat.completions.create(
        model="demo", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(mesh.gateway.prompts.tokenizer.encode(TEXT).ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_usage_can_be_told_with_every_chunk(mesh: Mesh, client: Client) -> None:
    mesh.say("hello world")
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(model="demo", prompt="x", stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == len(mesh.gateway.prompts.tokenizer.encode("hello world").ids)


async def test_a_synchronous_client_streams(mesh: Mesh) -> None:
    mesh.say(TEXT)

    def talk() -> str:
        with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="any", max_retries=0) as sync:
            stream = sync.completions.create(model="demo", prompt="say", stream=True)
            return "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(talk) == TEXT


async def test_completions_take_several_prompts_and_choices_in_order(mesh: Mesh, client: Client) -> None:
    for worker in mesh.workers:
        worker.speak = lambda request: [*unpack_tokens(request.prompt), *unpack_tokens(request.prompt)]
    answer = await client.completions.create(model="demo", prompt=["hello", "world"], n=2, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["hellohello", "hellohello", "worldworld", "worldworld"]
    seeds = {request.sampling.seed for request in mesh.first.assigned}
    assert len(seeds) == 4
    assert 5 in seeds
    prompt_tokens = sum(len(mesh.gateway.prompts.tokenizer.encode(p).ids) for p in ("hello", "world"))
    assert answer.usage.prompt_tokens == prompt_tokens


async def test_the_same_seed_gives_the_same_choice_seeds(mesh: Mesh, client: Client) -> None:
    mesh.say("x")
    for _ in range(2):
        await client.completions.create(model="demo", prompt="a", n=3, seed=-17)
    seeds = sorted(request.sampling.seed for request in mesh.first.assigned)
    assert seeds[0::2] == seeds[1::2]


async def test_streamed_choices_are_told_apart_by_their_index(mesh: Mesh, client: Client) -> None:
    mesh.say(TEXT)
    stream = await client.chat.completions.create(model="demo", messages=USER, n=3, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [TEXT] * 3


async def test_prompts_may_be_token_ids(mesh: Mesh, client: Client) -> None:
    mesh.say("x")
    await client.completions.create(model="demo", prompt=[[7, 8, 9], [10, 11]])
    await client.completions.create(model="demo", prompt=[12, 13])
    prompts = sorted(unpack_tokens(request.prompt) for request in mesh.first.assigned)
    assert prompts == [[7, 8, 9], [10, 11], [12, 13]]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_shows_the_prompt_first(mesh: Mesh, client: Client, stream: bool) -> None:
    mesh.say(" world")
    answer: Any = await client.completions.create(model="demo", prompt="hello", echo=True, stream=stream)
    text = "".join([c.choices[0].text async for c in answer]) if stream else answer.choices[0].text
    assert text == "hello world"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_new_tokens_shows_the_prompt_alone(mesh: Mesh, client: Client, stream: bool) -> None:
    mesh.say("world")
    more: Any = {"stream_options": {"include_usage": True}} if stream else {}
    asking = client.completions.create(
        model="demo", prompt="hello", echo=True, max_tokens=0, n=2, stream=stream, extra_body={"return_token_ids": True}, **more
    )
    answer: Any = await asking
    chunks = [chunk async for chunk in answer] if stream else [answer]
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.text for choice in choices) == "hello"
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
        assert not any(token for choice in choices for token in getattr(choice, "token_ids", None) or [])
    usage = chunks[-1].usage
    assert (usage.completion_tokens, usage.total_tokens) == (0, usage.prompt_tokens)
    assert {request.sampling.max_tokens for request in mesh.first.assigned} == {1}


async def test_no_tokens_without_echo_are_refused(mesh: Mesh, client: Client) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="demo", prompt="hello", max_tokens=0)
    assert refused.value.param == "max_tokens"


async def test_an_adapter_is_named_alone_or_behind_its_base(mesh: Mesh, client: Client) -> None:
    mesh.say("X")
    for name in ("upper", "demo:upper"):
        answer = await client.completions.create(model=name, prompt="x")
        assert answer.model == name
    adapters = [request.adapter for request in mesh.first.assigned]
    assert [(a.name, a.digest, a.rank) for a in adapters] == [("upper", "digest-of-upper", 8)] * 2


async def test_sampling_fields_reach_the_worker(mesh: Mesh, client: Client) -> None:
    mesh.say("x")
    await client.chat.completions.create(
        model="demo",
        messages=USER,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias={"5": -100},
        seed=1,
        user="me",
        extra_body={
            "top_k": 7,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "allowed_token_ids": [9, 5, 5],
            "bad_words": ["hello", "a"],
            "cache_salt": "pepper",
            "priority": 3,
        },
        extra_headers={"x-slo-class": "interactive", "x-slo-ttft-ms": "123", "x-slo-e2e-ms": "4567"},
    )
    request = await assigned(mesh.first)
    s = request.sampling
    assert (s.max_tokens, s.temperature, s.top_p, s.top_k, s.min_p) == (9, 0.5, 0.9, 7, 0.1)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1.0, -1.0, 1.2)
    assert (s.min_tokens, s.ignore_eos, s.stop_token_ids, s.logit_bias, s.seed) == (2, True, (3,), {5: -100.0}, 1)
    hello = tuple(mesh.gateway.prompts.tokenizer.encode("hello", add_special_tokens=False).ids)
    assert s.allowed_token_ids == (5, 9)
    assert hello in s.bad_words
    assert (request.cache_salt, request.priority) == ("pepper", 3)
    slo = request.slo
    assert (slo.slo_class, slo.ttft_slo_ms, slo.tpot_slo_ms, slo.e2e_slo_ms) == ("interactive", 123.0, 50.0, 4567.0)


async def test_stop_strings_end_the_text_and_never_leak(mesh: Mesh, client: Client) -> None:
    mesh.say("hello world <END> secret")
    for stream in (False, True):
        answer: Any = await client.completions.create(
            model="demo", prompt="x", stop=["<END>", "never"], max_tokens=50, stream=stream
        )
        chunks = [c async for c in answer] if stream else [answer]
        assert "".join(c.choices[0].text for c in chunks) == "hello world "
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].choices[0].stop_reason == "<END>"
    answer = await client.completions.create(
        model="demo", prompt="x", stop="<END>", extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == "hello world <END>"


async def emit_with_logprobs(mesh: Mesh, text: str) -> None:
    """Answer the first request with `text`. Each token has itself and one impossible token as alternatives."""
    request, tokens = await assigned(mesh.first), mesh.gateway.prompts.tokenizer.encode(text).ids
    for i, token in enumerate(tokens):
        logprobs = [TokenLogprobs(-0.5, [token, 5], [-0.5, -math.inf])]
        await mesh.first.emit(request, i, [token], "length" if i == len(tokens) - 1 else None, logprobs=logprobs)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_name_each_token_and_its_rivals(mesh: Mesh, client: Client, stream: bool) -> None:
    asking = asyncio.ensure_future(
        client.chat.completions.create(model="demo", messages=USER, logprobs=True, top_logprobs=2, stream=stream)
    )
    await emit_with_logprobs(mesh, "hello é")
    answer: Any = await asking
    parts = [c.choices[0].logprobs async for c in answer] if stream else [answer.choices[0].logprobs]
    content = [token for part in parts if part for token in part.content]
    assert b"".join(bytes(token.bytes) for token in content).decode() == "hello é"
    assert all((t.logprob, len(t.top_logprobs), t.top_logprobs[1].logprob) == (-0.5, 2, -9999.0) for t in content)
    assert mesh.first.assigned[0].sampling.logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_have_offsets_into_the_text(mesh: Mesh, client: Client, stream: bool) -> None:
    asking = asyncio.ensure_future(client.completions.create(model="demo", prompt="x", logprobs=1, stream=stream))
    await emit_with_logprobs(mesh, "hello world")
    answer: Any = await asking
    parts = [c.choices[0].logprobs async for c in answer] if stream else [answer.choices[0].logprobs]
    tokens = [t for p in parts if p for t in p.tokens]
    offsets = [o for p in parts if p for o in p.text_offset]
    assert "".join(tokens) == "hello world"
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert all(top[token] == -0.5 for p in parts if p for token, top in zip(p.tokens, p.top_logprobs, strict=True))


async def test_models_are_listed_with_their_roots_and_parents(mesh: Mesh, client: Client) -> None:
    base, upper = [model async for model in client.models.list()]
    assert (base.id, base.parent, base.max_model_len) == ("demo", None, 256)
    assert (upper.id, upper.parent, upper.root) == ("upper", "demo", "upper")
    assert (await client.models.retrieve("upper")).id == "upper"
    assert (await client.models.retrieve("demo")).id == "demo"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_is_cancelled_at_the_worker(mesh: Mesh, client: Client, stream: bool) -> None:
    asking = asyncio.ensure_future(client.chat.completions.create(model="demo", messages=USER, stream=stream))
    request = await assigned(mesh.first)
    if stream:
        await mesh.first.emit(request, 0, [40])
        await (await asking).close()
    else:
        asking.cancel()
    await cancelled(mesh.first, request.request_id)
    await eventually(lambda: mesh.gateway.owner.inflight == 0)


async def test_a_worker_lost_in_mid_stream_goes_unnoticed_by_the_client(mesh: Mesh, client: Client) -> None:
    tokens = mesh.gateway.prompts.tokenizer.encode(TEXT).ids
    stream = await client.chat.completions.create(model="demo", messages=USER, stream=True)
    request = await assigned(mesh.first)
    for i in range(5):
        await mesh.first.emit(request, i, [tokens[i]])
    mesh.second.speak = lambda _: tokens
    await mesh.first.goodbye()
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == TEXT


async def test_a_failure_in_mid_stream_is_raised_by_the_client(mesh: Mesh, client: Client) -> None:
    stream = await client.chat.completions.create(model="demo", messages=USER, stream=True)
    request = await assigned(mesh.first)
    await mesh.first.emit(request, 0, [], "error", error=MotetError("engine broke").info())
    with pytest.raises(openai.APIError, match="engine broke"):
        async for _ in stream:
            pass


async def test_a_restart_of_the_broker_in_mid_stream_goes_unnoticed_by_the_client(
    mesh: Mesh, client: Client, nats_server: NatsServer
) -> None:
    tokens = mesh.gateway.prompts.tokenizer.encode(TEXT).ids
    stream = await client.chat.completions.create(model="demo", messages=USER, stream=True)
    request = await assigned(mesh.first)
    await mesh.first.emit(request, 0, tokens[:3])
    chunks = stream.__aiter__()
    text = ""
    while not text:
        text += (await anext(chunks)).choices[0].delta.content or ""
    nats_server.kill()
    await eventually(lambda: not mesh.gateway.bus.connected)
    await nats_server.start()
    await eventually(lambda: mesh.gateway.bus.connected and mesh.first.bus.connected and mesh.scheduler.bus.connected)
    await mesh.first.emit(request, 5, tokens[5:7])  # what came between was lost
    resumed = await assigned(mesh.first, 2)
    assert unpack_tokens(resumed.output) == tokens[:3]
    for i in range(3, len(tokens)):
        await mesh.first.emit(resumed, i, [tokens[i]], "length" if i == len(tokens) - 1 else None)
    assert text + "".join([c.choices[0].delta.content or "" async for c in chunks]) == TEXT


async def test_a_gateway_that_stops_tells_its_streams(mesh: Mesh, client: Client) -> None:
    stream = await client.chat.completions.create(model="demo", messages=USER, stream=True)
    request = await assigned(mesh.first)
    stopping = asyncio.ensure_future(mesh.gateway.stop())
    with pytest.raises(openai.APIError, match="shutting down"):
        async for _ in stream:
            pass
    await cancelled(mesh.first, request.request_id)
    await stopping
