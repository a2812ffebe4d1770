"""Real tokens through the whole mesh: right answers by the right adapter, whatever else is being served."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import openai
import pytest

from motet.cli.client import ApiError, Client
from motet.examples.demo import TOOL_CALLER
from motet.examples.demo.tasks import TASKS, TASKS_BY_NAME
from tests.e2e.asking import PROMPT, answer
from tests.e2e.live import BASE, LiveStack

TEXTS = [TASKS[0].sample(random.Random(seed)) for seed in range(6)]


async def test_every_adapter_does_its_own_task_while_all_others_do_theirs(client: Client) -> None:
    jobs = [(task, text) for task in TASKS for text in TEXTS]
    random.Random(0).shuffle(jobs)
    answers = await asyncio.gather(*(answer(client, task.adapter, text) for task, text in jobs))
    right: Counter[str] = Counter()
    for (task, text), said in zip(jobs, answers, strict=True):
        right[task.name] += said == task.expected(text)
        mixed_up = [other.name for other in TASKS if other is not task and said == other.expected(text)]
        assert not mixed_up, f"{task.name} answered like {mixed_up[0]}"
    assert sum(right.values()) >= 0.9 * len(jobs), right
    assert all(right[task.name] >= len(TEXTS) - 2 for task in TASKS), right


async def test_the_base_model_repeats_what_it_is_told(client: Client) -> None:
    answers = await asyncio.gather(*(answer(client, BASE, text) for text in TEXTS))
    assert sum(said == text for said, text in zip(answers, TEXTS, strict=True)) >= len(TEXTS) - 1


async def test_an_answer_does_not_depend_on_other_requests(client: Client) -> None:
    alone = await answer(client, "rot13", TEXTS[0])
    crowd = [answer(client, TASKS[i % len(TASKS)].adapter, TEXTS[i % len(TEXTS)]) for i in range(24)]
    together, *_ = await asyncio.gather(answer(client, "rot13", TEXTS[0]), *crowd)
    assert together == alone


async def test_models_lists_the_base_and_every_adapter(client: Client) -> None:
    cards = {card["id"]: card for card in await client.models()}
    assert set(cards) == {BASE, TOOL_CALLER, *TASKS_BY_NAME}
    assert cards[BASE]["parent"] is None
    assert all(cards[name]["parent"] == BASE for name in TASKS_BY_NAME)


async def test_an_unknown_model_is_a_404_that_names_it(client: Client) -> None:
    with pytest.raises(ApiError, match="nobody") as refusal:
        await answer(client, "nobody", "hello")
    assert refusal.value.status == 404


async def test_the_next_turn_of_a_chat_goes_to_the_worker_that_has_its_history(client: Client) -> None:
    """With two workers, chance alone would send at least one of eight chats elsewhere in 255 of 256 cases."""
    chats = [f"chat {number}: " + " ".join(f"word{number * 7 + n}" for n in range(60)) for number in range(8)]

    async def cached(prompt: str) -> int:
        body = {"model": "rot13", "prompt": prompt, "max_tokens": 1}
        usage = (await client.call("POST", "/v1/completions", json=body))["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    assert [await cached(chat) for chat in chats] == [0] * 8
    assert min([await cached(f"{chat} and so on") for chat in chats]) >= 256


@pytest.fixture
def base_url(stack: LiveStack) -> str:
    return f"{stack.facts().urls[0]}/v1"


def chat(text: str) -> list[openai.types.chat.ChatCompletionMessageParam]:
    return [{"role": "user", "content": PROMPT(text)}]


def test_the_openai_client_gets_an_answer(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="none") as sdk:
        done = sdk.chat.completions.create(model="upper-case", messages=chat("hello there"), temperature=0, max_tokens=64)
        assert (done.choices[0].message.content or "").strip() == "HELLO THERE"
        assert done.choices[0].finish_reason == "stop"
        assert done.usage is not None and done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
        assert {model.id for model in sdk.models.list()} >= {BASE, "upper-case"}


async def test_the_openai_client_streams(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as sdk:
        stream = await sdk.chat.completions.create(
            model="upper-case",
            messages=chat("hello there"),
            temperature=0,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip() == "HELLO THERE"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0


async def test_the_openai_client_understands_our_errors(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.NotFoundError) as missing:
            await sdk.chat.completions.create(model="nobody", messages=chat("x"))
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await sdk.completions.create(model=BASE, prompt="x", temperature=-1)
        assert wrong.value.param == "temperature"
