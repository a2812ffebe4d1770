"""The load of a chaos run: streams over HTTP and durable requests over NATS, whose answers are known beforehand.

Every detail of a request is fixed, so its answer is, too. A quiet run records the answers; afterwards every answer is compared
with the recorded one.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson
from nats import errors as nats_errors
from nats.aio.client import Client as NatsClient
from nats.js import JetStreamContext
from nats.js import errors as js_errors

from motet.examples.demo.tasks import TASKS
from motet.shared import subjects
from motet.shared.clock import now_s

ASK_S = 180.0  # no answer of a chaos run takes longer
BEGINS_S = 0.5  # tokens that were on their way when a fault happened have come by then
PAUSE_S = 0.2  # before a refused request is sent again

Outcome = Literal["done", "refused", "broken", "lost"]


@dataclass(frozen=True)
class Ask:
    """One request and its content."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """The parts of an answer that must not change."""

    text: str
    tokens: int
    finish: str
    logprobs: tuple[tuple[str, float], ...] = ()

    def same(self, other: Answer) -> bool:
        """Whether two answers agree.

        Log-probabilities may differ in the last digits: a batch of another shape adds up in another order.
        """
        if (self.text, self.tokens, self.finish) != (other.text, other.tokens, other.finish):
            return False
        pairs = zip(self.logprobs, other.logprobs, strict=True) if len(self.logprobs) == len(other.logprobs) else None
        return pairs is not None and all(a[0] == b[0] and abs(a[1] - b[1]) < 1e-2 for a, b in pairs)


def make_asks(count: int, adapters: list[str], base: str, *, max_tokens: int, seed: int) -> list[Ask]:
    """Requests over all adapters and the base: greedy, seeded, penalised, with log-probabilities, with stop strings."""
    draw = random.Random(seed)
    asks = []
    for i in range(count):
        body: dict[str, Any] = {
            "model": [*adapters, base][i % (len(adapters) + 1)],
            "max_tokens": max_tokens // 2 + draw.randrange(max_tokens // 2 + 1),
            "ignore_eos": True,
            "temperature": 0,
        }
        kind = i % 6
        if kind in (1, 2, 4, 5):
            body |= {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + i}
        if kind == 2:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
        if kind == 5:
            body |= {"stop": ["zzq", "xqx", "  "]}
        text = TASKS[0].prompt(" ".join(TASKS[0].sample(draw) for _ in range(3)))
        if i % 2:
            body |= {"messages": [{"role": "user", "content": text}]}
            body |= {"logprobs": True, "top_logprobs": 2} if kind == 3 else {}
        else:
            body |= {"prompt": text}
            body |= {"logprobs": 2} if kind in (0, 4) else {}
        asks.append(Ask("/v1/chat/completions" if i % 2 else "/v1/completions", body))
    return asks


@dataclass
class Attempt:
    """One request to one gateway, and everything that came back, with times."""

    ask: int
    gateway: int
    began_s: float
    request_id: str = ""
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    ended_s: float = 0.0
    outcome: Outcome | None = None
    reason: str = ""

    def in_flight(self, at_s: float) -> bool:
        """Whether the request was accepted and had not ended at this moment."""
        return bool(self.request_id) and self.began_s < at_s and not (0 < self.ended_s <= at_s)

    def ran(self, since_s: float, until_s: float) -> bool:
        """Whether the request was accepted before `until_s` and had not ended at `since_s`."""
        return bool(self.request_id) and self.began_s < until_s and not (0 < self.ended_s <= since_s)

    def pause_s(self, since_s: float, until_s: float, lasts_s: float = 0.0) -> float | None:
        """The longest time without a token that began with the fault, or while it lasted: a restart comes to one process after
        the other. None for a stream without a token before or after it.
        """
        times = [t for t, data in self.chunks if t <= until_s and data]
        begins_s = since_s + max(BEGINS_S, lasts_s)
        gaps = [b - max(a, since_s) for a, b in itertools.pairwise(times) if b > since_s and a < begins_s]
        return max(gaps) if gaps and times[0] < since_s + lasts_s else None

    def answer(self) -> Answer:
        """The complete answer. Raises ValueError if it is not complete."""
        texts, logprobs, tokens, finish = [], [], 0, ""
        lines = b"".join(data for _, data in self.chunks).split(b"\n\n")
        for line in lines:
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"]))
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                texts.append(text_of(choice))
                logprobs += logprobs_of(choice)
                finish = choice["finish_reason"] or finish
        if b"data: [DONE]" not in lines:
            raise ValueError("the stream ended without [DONE]")
        return Answer("".join(texts), tokens, finish, tuple(logprobs))


async def burst_s(urls: list[str], models: list[str], count: int, tokens: int) -> list[float]:
    """Times to first token of `count` requests with prompts of `tokens` tokens, all sent at once."""
    draw = random.Random(count)
    prompts = [[draw.randrange(65, 91) for _ in range(tokens)] for _ in range(count)]
    common = {"max_tokens": 2, "ignore_eos": True, "temperature": 0}
    bodies = [common | {"model": models[i % len(models)], "prompt": prompt} for i, prompt in enumerate(prompts)]
    streams = Streams(urls, [Ask("/v1/completions", body) for body in bodies], 0, seed=0)
    await streams.once(count)
    return [attempt.chunks[0][0] - attempt.began_s for attempt in streams.attempts]


def text_of(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message")
    return (part.get("content") or "") if part is not None else choice.get("text") or ""


def logprobs_of(choice: dict[str, Any]) -> list[tuple[str, float]]:
    given = choice.get("logprobs")
    if not given:
        return []
    if "content" in given:
        return [(one["token"], one["logprob"]) for one in given["content"] or []]
    return list(zip(given["tokens"], given["token_logprobs"], strict=True))


class Streams:
    """`count` clients that send one request after another over HTTP, each to the next gateway."""

    def __init__(self, urls: list[str], asks: list[Ask], count: int, *, seed: int) -> None:
        self._urls, self._asks, self._count, self._seed = urls, asks, count, seed
        self.attempts: list[Attempt] = []
        self._open: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        self._connect()
        self._open = {asyncio.create_task(self._client(i)) for i in range(self._count)}

    async def once(self, limit: int) -> None:
        """Send every request once, `limit` at a time."""
        self._connect()
        room = asyncio.Semaphore(limit)

        async def one(i: int) -> None:
            async with room:
                await self.ask(i, i % len(self._urls))

        await asyncio.gather(*(one(i) for i in range(len(self._asks))))
        await self._session.close()

    def _connect(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=ASK_S)
        )

    async def stop(self) -> None:
        """Send nothing new and wait for what runs."""
        self._stopping = True
        await asyncio.gather(*self._open)
        await self._session.close()

    def flowing(self) -> int:
        """Streams that have tokens and are not at their end."""
        return sum(1 for a in self.attempts[-4 * self._count :] if a.outcome is None and len(a.chunks) > 3)

    async def _client(self, number: int) -> None:
        draw = random.Random(self._seed * 1000 + number)
        turn = number
        while not self._stopping:
            attempt = await self.ask(draw.randrange(len(self._asks)), turn % len(self._urls))
            turn += 1
            if attempt.outcome != "done":
                await asyncio.sleep(PAUSE_S)  # time: a pause after an error

    async def ask(self, i: int, gateway: int) -> Attempt:
        """One request, followed to its end."""
        attempt = Attempt(i, gateway, now_s())
        self.attempts.append(attempt)
        ask = self._asks[i]
        body = ask.body | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._session.post(self._urls[gateway] + ask.path, json=body) as answer:
                if answer.status != 200:
                    attempt.outcome, attempt.reason = "refused", f"{answer.status}: {(await answer.text())[:200]}"
                    return attempt
                attempt.request_id = answer.headers["x-request-id"]
                async for data in answer.content.iter_any():
                    attempt.chunks.append((now_s(), data))
            try:
                attempt.answer()
                attempt.outcome = "done"
            except ValueError as error:
                attempt.outcome, attempt.reason = "lost", str(error)
        except aiohttp.ClientError as error:
            attempt.outcome, attempt.reason = ("broken", repr(error)) if attempt.request_id else ("refused", "no connection")
        except TimeoutError:
            attempt.outcome, attempt.reason = "lost", f"no end within {ASK_S:g} s"
        finally:
            attempt.ended_s = now_s()
        return attempt


@dataclass
class Durable:
    """One durable request and its result."""

    ask: int
    tenant: str
    request_id: str
    result: dict[str, Any] | None = None


class DurableLoad:
    """Publishes requests of several tenants, `each` at a time per tenant, and waits for their results."""

    def __init__(self, nats: NatsClient, asks: list[Ask], tenants: tuple[str, ...], each: int, *, seed: int) -> None:
        self._nats, self._asks, self._tenants, self._each, self._seed = nats, asks, tenants, each, seed
        self._js: JetStreamContext = nats.jetstream(timeout=2.0)
        self.sent: list[Durable] = []
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._publisher(t, i)) for t in self._tenants for i in range(self._each)]

    async def stop(self) -> None:
        """Publish nothing new and wait for every result."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _publisher(self, tenant: str, number: int) -> None:
        draw = random.Random(f"{self._seed}-{tenant}-{number}")
        turn = 0
        while not self._stopping:
            await self.ask(draw.randrange(len(self._asks)), tenant, f"job-{number}-{turn}")
            turn += 1

    async def ask(self, i: int, tenant: str, request_id: str) -> Durable:
        """Publish one request and wait for its result, for `ASK_S` at most."""
        one = Durable(i, tenant, request_id)
        self.sent.append(one)
        headers = {"Nats-Msg-Id": f"{tenant}-{request_id}"}
        body = orjson.dumps(self._asks[i].body | {"request_id": request_id})
        await self._insist(lambda: self._js.publish(subjects.requests(tenant), body, headers=headers))
        deadline = now_s() + ASK_S
        while one.result is None and now_s() < deadline:
            await asyncio.sleep(0.3)  # time: between two looks
            one.result = await self._look(tenant, request_id)
        return one

    async def _look(self, tenant: str, request_id: str) -> dict[str, Any] | None:
        for stream in (subjects.results_stream(tenant), subjects.STREAM_RESULTS):  # the second: where older versions keep them
            try:
                found = await self._js.get_last_msg(stream, subjects.results(tenant, request_id), direct=True)
            except (js_errors.Error, nats_errors.Error, TimeoutError):
                continue
            return orjson.loads(found.data or b"null")
        return None

    async def _insist(self, call: Any) -> None:
        deadline = now_s() + ASK_S
        while True:
            try:
                await call()
                return
            except (js_errors.Error, nats_errors.Error, TimeoutError):
                if now_s() > deadline:
                    raise
                await asyncio.sleep(0.2)  # time: a pause before it is sent again

    async def results(self) -> dict[tuple[str, str], int]:
        """How many results each request has in the stream."""
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for stream in {subjects.STREAM_RESULTS, *map(subjects.results_stream, self._tenants)}:
            info = await self._js.stream_info(stream, subjects_filter=">")
            for subject, count in (info.state.subjects or {}).items():
                tenant, request_id = subject.rsplit(".", 2)[1:]
                counts[tenant, request_id] += count
        return counts


def answer_of(result: dict[str, Any]) -> Answer:
    """The answer in a durable result. Raises ValueError for an error."""
    if result.get("status") != "ok":
        raise ValueError(str(result.get("error")))
    response = result["response"]
    choice = response["choices"][0]
    return Answer(text_of(choice), response["usage"]["completion_tokens"], choice["finish_reason"], tuple(logprobs_of(choice)))
