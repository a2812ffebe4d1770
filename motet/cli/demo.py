"""`motet demo`: starts a mesh on free ports, uses every feature once, checks every answer, prints a table, and cleans up."""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from motet.cli import credentials
from motet.cli.adapters import upload
from motet.cli.client import ApiError, Client
from motet.cli.nats_server import NatsStartError
from motet.cli.progress import Progress
from motet.cli.stack import Stack, StackOptions
from motet.cli.supervisor import StartFailed
from motet.cli.terminal import terminal
from motet.examples.demo import BASE, DEMO, PARSER, TOOL_CALLER
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.config import BusConfig, ConfigError

INPUTS = 3  # per adapter; the adapters are trained, so one of three may be a near miss
ANSWER_TOKENS = 96
SETTLE_S = 5.0


class Streamed(msgspec.Struct, frozen=True):
    """A streamed answer and its times."""

    text: str
    tokens: int
    ttft_ms: float
    decode_s: float  # from the first token to the end

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, without the first token."""
        return (self.tokens - 1) / self.decode_s if self.decode_s else 0.0


class Tour:
    """The steps of the demo against a running stack. Failures are collected, not raised."""

    def __init__(self, client: Client, stack: Stack, console: Console) -> None:
        self._client, self._stack, self._console = client, stack, console
        self.problems: list[str] = []
        self._answered: tuple[str, str, str] | None = None  # adapter, text and right answer of a stream

    async def run(self) -> None:
        """Run all steps in order. A failed step is recorded and the next one runs."""
        steps: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("adapters are listed", self.listing),
            ("all adapters and the base stream at once", self.streams),
            ("an adapter calls tools and uses their results", self.tools),
            ("an adapter is added while everything runs", self.add),
            ("it is removed again and unknown from then on", self.remove),
            ("a durable request over NATS", self.durable),
        ]
        for title, step in steps:
            try:
                told = await step()
                self._console.print(f"[green]✓[/] {title}: {escape(told)}")
            except (ApiError, AssertionError, TimeoutError, KeyError) as error:
                self.problems.append(f"{title}: {error or type(error).__name__}")
                self._console.print(f"[red]✗[/] {title}: {escape(str(error) or type(error).__name__)}")

    async def listing(self) -> str:
        from motet.examples.demo.tasks import TASKS

        names = {card["id"] for card in await self._client.models() if card.get("parent")}
        missing = {TOOL_CALLER, *(task.adapter for task in TASKS)} - names
        _check(not missing, f"not registered: {', '.join(sorted(missing))}")
        return f"{len(names)} adapters on {BASE}"

    async def streams(self) -> str:
        """All adapters and the base model answer at the same time; a wrong adapter would answer another task."""
        from motet.examples.demo.tasks import TASKS

        rng = random.Random(2)
        texts = [TASKS[0].sample(rng) for _ in range(INPUTS)]
        expected: dict[str, Callable[[str], str]] = {task.adapter: task.expected for task in TASKS} | {BASE: str}
        jobs = [(name, text) for name in expected for text in texts]
        began = now_s()
        answers = await asyncio.gather(*(self._stream(name, TASKS[0].prompt(text)) for name, text in jobs))
        took_s = now_s() - began
        table = Table(box=None, header_style="bold", pad_edge=False)
        for title in ("adapter", "TTFT ms", "tokens/s", "right", "", "asked", "answered"):
            table.add_column(title, justify="right" if title in ("TTFT ms", "tokens/s", "right") else "left", no_wrap=True)
        wrong = []
        for i, name in enumerate(expected):
            rows = list(zip(texts, answers[i * INPUTS : (i + 1) * INPUTS], strict=True))
            right, problem = _judge(name, expected, rows)
            if problem:
                wrong.append(problem)
            for text, answer in rows:
                if answer.text.strip() == expected[name](text) and name != BASE:
                    self._answered = (name, text, answer.text.strip())
            text, answer = rows[0]
            ttft_ms = statistics.median(answer.ttft_ms for _, answer in rows)
            rate = sum(answer.tokens_per_s for _, answer in rows) / INPUTS
            mark = "[red]✗[/]" if problem else "[green]✓[/]"
            table.add_row(name, f"{ttft_ms:.0f}", f"{rate:.0f}", f"{right}/{INPUTS}", mark, text, escape(answer.text.strip()))
        self._console.print(table)
        _check(not wrong, f"wrong answers: {'; '.join(wrong)}")
        tokens = sum(answer.tokens for answer in answers)
        return f"{len(jobs)} streams, {tokens} tokens in {took_s:.1f} s, {tokens / took_s:.0f} tokens/s together"

    async def tools(self) -> str:
        """As an agent does it: ask with tools, run the call, send its result back."""
        from motet.examples.demo.tool_tasks import city_calls, run_tool

        told, right = "", 0
        for exchange in city_calls():
            messages = [{"role": "user", "content": exchange.question}]
            asked = await self._chat(exchange.declared(), messages)
            for call in asked.get("tool_calls") or ():
                result = run_tool(exchange, call["function"]["name"], orjson.loads(call["function"]["arguments"]))
                done = {"role": "tool", "tool_call_id": call["id"], "content": result}
                text = (await self._chat(exchange.declared(), [*messages, asked, done]))["content"]
                if text == exchange.reply:
                    right += 1
                    told = f"{exchange.question!r} -> {call['function']['name']}({call['function']['arguments']}) -> {text!r}"
        _check(right > INPUTS // 2, f"{right} of {INPUTS} questions were answered with their tool")
        return told

    async def _chat(self, tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The assistant's message."""
        body = {"model": TOOL_CALLER, "tools": tools, "messages": messages, "temperature": 0, "max_tokens": 2 * ANSWER_TOKENS}
        answer = await self._client.call("POST", "/v1/chat/completions", json=body)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def add(self) -> str:
        from motet.examples.demo.tasks import TASKS

        task = TASKS[0]
        card = await upload(self._client, "demo-added", DEMO / "adapters" / task.adapter)
        text = task.sample(random.Random(3))
        answer = await _settled(lambda: self._stream("demo-added", task.prompt(text)))
        _check(answer.text.strip() == task.expected(text), f"{text!r} became {answer.text!r}")
        return f"rank {card['rank']}, version {card['version']}, {card['digest'][:12]}: {text!r} -> {answer.text.strip()!r}"

    async def remove(self) -> str:
        await self._client.call("DELETE", "/v1/adapters/demo-added")
        deadline = now_s() + SETTLE_S
        while True:
            try:
                await self._stream("demo-added", "hello")
            except ApiError as error:
                _check(error.status == 404, f"status {error.status} instead of 404")
                return f"404 {error}"
            _check(now_s() < deadline, f"still answers {SETTLE_S:g} s after its removal")

    async def durable(self) -> str:
        """Publish a request twice with the upstream's credentials, as a retry would; one result comes."""
        from motet.examples.demo.tasks import TASKS

        if self._answered is None:
            raise AssertionError("no stream was right, so there is nothing to compare with")
        adapter, text, expected = self._answered
        user = credentials.upstream_user(credentials.DEFAULT_TENANT)
        secret = credentials.password_file(self._stack.credentials_dir, user)
        config = BusConfig(nats_url=self._stack.nats_url, nats_user=user, nats_password_file=str(secret))
        body = {"model": adapter, "messages": [{"role": "user", "content": TASKS[0].prompt(text)}], "temperature": 0}
        bus = await Bus.connect(config, "demo", inbox=user)
        try:
            results = await bus.nc.subscribe(subjects.results(credentials.DEFAULT_TENANT, "demo-1"))
            acks = [
                await bus.js.publish(
                    subjects.requests(credentials.DEFAULT_TENANT),
                    orjson.dumps(body | {"max_tokens": ANSWER_TOKENS}),
                    headers={"Nats-Msg-Id": "demo-1"},
                )
                for _ in range(2)
            ]
            _check(bool(acks[1].duplicate), "the same message id was stored twice")
            result = orjson.loads((await results.next_msg(timeout=30.0)).data)
        finally:
            await bus.close()
        _check(result["status"] == "ok", f"{result.get('error')}")
        answer = result["response"]["choices"][0]["message"]["content"].strip()
        _check(answer == expected, f"{text!r} became {answer!r}")
        return f"{adapter}: {text!r} -> {answer!r}, {result['response']['usage']['total_tokens']} tokens"

    async def _stream(self, model: str, prompt: str) -> Streamed:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "stream_options": {"include_usage": True},
        }
        began, first_at, pieces, tokens = now_s(), 0.0, [], 0
        async for event in self._client.events("/v1/chat/completions", body):
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first_at = first_at or now_s()
                    pieces.append(piece)
        ended = now_s()
        first_at = first_at or ended
        return Streamed("".join(pieces), tokens, 1000 * (first_at - began), ended - first_at)


async def _settled(ask: Callable[[], Awaitable[Streamed]]) -> Streamed:
    """The answer of a new adapter, retried until the gateway's watch has seen the registration."""
    deadline = now_s() + SETTLE_S
    while True:
        try:
            return await ask()
        except ApiError as error:
            if error.status != 404 or now_s() > deadline:
                raise
        await asyncio.sleep(0.05)


def _judge(name: str, expected: dict[str, Callable[[str], str]], rows: list[tuple[str, Streamed]]) -> tuple[int, str]:
    """How many texts an adapter answered right, and what is wrong with its answers; "" if nothing is."""
    right = sum(answer.text.strip() == expected[name](text) for text, answer in rows)
    mixed_up = [
        other
        for other, does in expected.items()
        for text, answer in rows
        if other != name and answer.text.strip() == does(text)
    ]
    if right > INPUTS // 2 and not mixed_up:
        return right, ""
    return right, f"{name} ({right} of {INPUTS}{', answers like ' + mixed_up[0] if mixed_up else ''})"


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


@click.command()
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 16), help="Number of workers.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON: {ok, problems, seconds}.")
def demo(workers: int, as_json: bool) -> None:
    """Start a mesh on free ports, try every feature, print a table, stop.

    Lists the demo's adapters, streams from all of them and the base model at once and checks every answer, adds and removes an
    adapter while requests run, and publishes a durable request over NATS. Exits 0, or names what failed.
    """
    sys.exit(asyncio.run(run(workers, as_json)))


async def run(workers: int, as_json: bool) -> int:
    """The whole demo; returns the exit status."""
    began = now_s()
    console = terminal()
    logging.getLogger("motet").setLevel(logging.ERROR)  # a bus that closes is no news here
    with tempfile.TemporaryDirectory(prefix="motet-demo-") as directory:
        problems = await _in(Path(directory), workers, console)
    if as_json:
        console.print_json(data={"ok": not problems, "problems": problems, "seconds": round(now_s() - began, 1)}, indent=None)
    elif problems:
        console.print(f"\n[red]{len(problems)} of the steps failed[/]")
    else:
        console.print(f"\n[green]everything works[/] ({now_s() - began:.1f} s, nothing left running)")
    return 1 if problems else 0


async def _in(directory: Path, workers: int, console: Console) -> list[str]:
    options = StackOptions(
        model=str(DEMO / "model"),
        served_model_name=BASE,
        adapters_dir=str(DEMO / "adapters"),
        data_dir=directory,
        workers=workers,
        port=0,
        drain_s=5.0,
        given={"tool_call_parser": PARSER},
    )
    progress = Progress()
    stack = Stack(options, progress)
    try:
        async with progress:
            progress.expect(stack.names())
            await stack.start()
        async with Client(stack.urls[0], timeout_s=120.0) as client:
            tour = Tour(client, stack, console)
            await tour.run()
        return tour.problems
    except (ConfigError, NatsStartError, StartFailed) as error:
        console.print(f"[red]✗[/] the mesh did not start: {escape(str(error))}")
        return [str(error)]
    finally:
        await stack.stop()
